"""`quant_method: mxfp4`: experts as gpt-oss publishes them, 4 bits a weight and a power of two for each 32 columns.

    ..._blocks   [experts, rows, in / 32, 16]   uint8   two weights a byte, e2m1, the first in its lower half
    ..._scales   [experts, rows, in / 32]       uint8   the exponent of two, plus 127

(OCP Microscaling Formats 1.0, 5.3 and 6.3.) All experts are in one tensor (`architectures.Stacked`). e2m1 has halves
of the whole numbers 0 to 4, 6, 8 and 12, so a weight is an int8 times half of that power of two: exact, in 8.5 bits
where the file has 4.25. Scales of groups are float16 in the kernels, which has powers of two from 2^-24 to 2^15.
"""

from typing import Any

import torch
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.kernels.api import RoundedRows, WeightScheme
from splittime.models.fields import Fields
from splittime.models.weights.formats.recipe import Recipe, Tensors, names, refuse_others

METHOD = "mxfp4"
GROUP = 32
TWICE = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
BIAS, NOT_A_NUMBER = 127, 255


def parse(values: dict[str, Any]) -> Recipe:
    refuse_others(values, METHOD, {"dequantize": (False,), "kv_cache_scheme": ()})
    exceptions = names(Fields(values, "quantization_config."), "modules_to_not_convert")
    return Recipe(method=METHOD, layout="blocks", bits=4, group_size=GROUP, symmetric=True, exceptions=exceptions)


def is_excepted(module: str, recipe: Recipe) -> bool:
    """Returns whether it is none of the experts, which alone are in this format."""
    return ".experts" not in module


def is_stored(module: str, tensors: Tensors) -> bool:
    """module: an expert's linear, or what all experts are below."""
    place = tensors.place_of(module)
    return f"{place.tensor if place else f'{module}.gate_up_proj'}_blocks" in tensors


class Mxfp4Weight:
    """A `weights.stored.StoredWeight`; name: of the module. tensors: all that it reads, for `Checkpoint.release`."""

    columns: Tensor | None = None
    scheme = WeightScheme("int8", GROUP)

    def __init__(self, tensors: Tensors, module: str, recipe: Recipe, out_features: int, in_features: int) -> None:
        place = tensors.place_of(module)
        assert place is not None, "is stored"
        self.name, self.out_features, self.in_features = module, out_features, in_features
        found = tensors.shape_of(f"{place.tensor}_blocks") or (0,)
        if place.number >= found[0]:
            message = f"weights: {place.tensor}_blocks has {found[0]} experts, the config asks for more"
            raise ConfigError(message, param=module, value=found[0], limit=place.number + 1)
        shape = (found[0], out_features * (1 if place.part is None else 2), -(-in_features // GROUP))
        blocks = tensors.take_stored(f"{place.tensor}_blocks", (torch.uint8,), *shape, GROUP // 2)[place.number]
        scales = tensors.take_stored(f"{place.tensor}_scales", (torch.uint8,), *shape)[place.number]
        self.tensors = [blocks, scales]
        self._blocks, self._scales = place.cut(blocks), place.cut(scales)

    def rows(self, begin: int, end: int) -> RoundedRows:
        blocks, exponents = self._blocks[begin:end], self._scales[begin:end]
        if bool((exponents == NOT_A_NUMBER).any()):
            raise ConfigError(f"weights: {self.name} has a scale that is not a number", param=self.name)
        fields = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)[:, : self.in_features]
        scales = torch.exp2(exponents.float() - (BIAS + 1))
        return RoundedRows(TWICE[fields.long()], scales)
