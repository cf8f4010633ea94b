"""Random weights of a config's shapes, made where they are used: to measure the speed of a model that is not here.

Drawn with a standard deviation of half of one over the square root of the columns, so that activations neither vanish
nor overflow; norms are 1, biases 0. A tensor depends on its name alone: every start, and every rank, has the same.
"""

from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from splittime.models.weights.source import PLAIN, StoredWeight


class DummySource:
    """A `source.Source`. dtype, device: of what is handed out."""

    format, recipe = PLAIN, "dummy"

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.files: list[Path] = []
        self.content_of: dict[str, Path] = {}
        self._dtype, self._device = dtype, device
        self._sizes: dict[str, int] = {}

    @property
    def num_parameters(self) -> int:
        return sum(self._sizes.values())

    def take(self, name: str, *shape: int) -> Tensor:
        if len(shape) > 1:
            return self._drawn(name, shape)
        self._sizes[name] = shape[0]
        make = torch.zeros if name.endswith(".bias") else torch.ones
        return make(shape, dtype=self._dtype, device=self._device)

    def take_linear(self, module: str, out_features: int, in_features: int) -> Tensor:
        return self._drawn(f"{module}.weight", (out_features, in_features))

    def take_table(self, module: str, num_rows: int, width: int) -> Tensor:
        return self._drawn(f"{module}.weight", (num_rows, width))

    def rows_are_paired(self, module: str) -> bool:
        return True

    def release(self, read: Tensor | StoredWeight) -> None:
        """Its memory goes with its last reference."""

    def skip(self, name: str) -> None:
        """There is nothing that was not asked for."""

    def not_taken(self) -> list[str]:
        return []

    def _drawn(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._sizes[name] = tensor.numel()
        source = torch.Generator(self._device).manual_seed(crc32(name.encode()))
        return tensor.normal_(0.0, 0.5 * shape[-1] ** -0.5, generator=source)
