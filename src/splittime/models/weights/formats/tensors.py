"""What a layout reads from: the tensors of a checkpoint, by name."""

from typing import Protocol

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Tensors(Protocol):
    def __contains__(self, name: str) -> bool: ...

    def is_int8(self, name: str) -> bool:
        """Whether there is such a tensor, of int8."""

    def is_float8(self, name: str) -> bool:
        """Whether there is such a tensor, of e4m3."""

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """None where there is no such tensor."""

    def take_stored(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> Tensor:
        """The tensor called `name`. Raises `ConfigError` if absent, of another shape, or of none of these dtypes."""
