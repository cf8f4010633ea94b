"""What the three layouts share: integers of 4 or 8 bits, a scale and perhaps a zero point for each group of columns.

    w[i, j] = scales[i, g(j)] * (q[i, j] - z[i, g(j)])        q, z unsigned: 0..15 or 0..255

A layout says where q, the scales and z lie (`_integers`, `_scales`, `_zeros`); here they become `RoundedRows`, and no
weight passes through 16 bits on the way: the integers that the kernels multiply are exactly those of the file.

* 4 bits: q and z as they are. Where a z is 16 (`gptq`), which has no place among zero points, q - z as int8.
* 8 bits: q - 128 is int8, and all that there is to a symmetric weight, whose z is 128. What is left of another z is
  taken off whatever the integer is: minima = scale * (z - 128).
* One scale for a whole row in 4 bits: the kernels' groups end sooner, so each of them gets that same scale.
* Act-order (GPTQ): columns are put group by group, and `columns` says which is which.

Of groups the kernels keep scales and minima as float16 (`kernels.rounded`). The scales of AWQ and GPTQ are float16, and
bfloat16 has fewer bits: exact, from 2^-17 up. A float32 scale (compressed-tensors may have them) is rounded by at most
2^-11 of itself. Minima have more bits than float16: of at most 128 steps, they are off by at most 2^-12 of that, 1/32
of a step. A scale for a whole row in 8 bits is float32 throughout.
"""

from typing import NoReturn

import torch
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.kernels.api import RoundedRows, WeightScheme
from splittime.models.weights.formats.recipe import GROUP_UNIT, Recipe

SPREAD_GROUPS = (128, 64, GROUP_UNIT)


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [n, m] -> uint8 [n, m * 32 / bits]: the fields of each word, from its lowest bits up."""
    content = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return content
    return torch.stack((content & 15, content >> 4), dim=-1).flatten(1)


def centred(fields: Tensor, bits: int) -> Tensor:
    """Unsigned fields, uint8, as `RoundedRows.integers`: those of 8 bits move down by 128."""
    return (fields ^ 128 if bits == 8 else fields).view(torch.int8)


def num_words(count: int, bits: int) -> int:
    """Returns how many words hold so many fields."""
    return -(-count * bits // 32)


class GroupedWeight:
    """A `weights.stored.StoredWeight`; name: of the module. tensors: all that it reads, for `Checkpoint.release`."""

    def __init__(
        self,
        name: str,
        recipe: Recipe,
        out_features: int,
        in_features: int,
        tensors: list[Tensor],
        overflows: bool = False,
    ) -> None:
        """overflows: a zero point of 4 bits is 16."""
        self.name = name
        self.recipe = recipe
        self.out_features = out_features
        self.in_features = in_features
        self.tensors = tensors
        self.columns: Tensor | None = None
        self._overflows = overflows
        self.scheme = _scheme(recipe, in_features, overflows)

    def rows(self, begin: int, end: int) -> RoundedRows:
        integers, scales = self._integers(begin, end), self._scales(begin, end).float()
        if not scales.isfinite().all():
            self._refuse("scales that are not finite", "the file is damaged, or its conversion overflowed")
        if self.columns is not None:
            integers = integers[:, self.columns]
        zeros = self._checked_zeros(begin, end)
        if self._overflows and zeros is not None:
            return RoundedRows(self._less(integers, zeros), self._spread(scales))
        if self.recipe.bits == 8:
            minima = None if zeros is None else self._spread(scales * (zeros - 128))
            return RoundedRows(integers, self._spread(scales), None, minima)
        zeros = None if zeros is None else self._spread(zeros.to(torch.uint8))
        return RoundedRows(integers, self._spread(scales), zeros)

    def _integers(self, begin: int, end: int) -> Tensor:
        """int8 [rows, in], as in `RoundedRows`, columns as they stand."""
        raise NotImplementedError

    def _scales(self, begin: int, end: int) -> Tensor:
        """[rows, groups], of any float dtype."""
        raise NotImplementedError

    def _zeros(self, begin: int, end: int) -> Tensor | None:
        """int16 [rows, groups], unsigned as q is; None where the file holds none."""
        raise NotImplementedError

    def _checked_zeros(self, begin: int, end: int) -> Tensor | None:
        """None for those of a symmetric weight, which say nothing."""
        zeros = self._zeros(begin, end)
        if not self.recipe.symmetric:
            return zeros
        middle = 1 << (self.recipe.bits - 1)
        if zeros is not None and (zeros != middle).any():
            self._refuse(f"zero points other than {middle}", "quantization_config says that they are symmetric")
        return None

    def _less(self, integers: Tensor, zeros: Tensor) -> Tensor:
        """q - z of each column's group."""
        width = self.recipe.group_size or self.in_features
        return integers - zeros.to(torch.int8).repeat_interleave(width, dim=1)[:, : self.in_features]

    def _spread(self, values: Tensor) -> Tensor:
        """One value for each of the kernels' groups, [rows, groups]."""
        groups = -(-self.in_features // (self.scheme.group or self.in_features))
        return values.expand(-1, groups).contiguous()

    def _refuse(self, what: str, why: str) -> NoReturn:
        raise ConfigError(f"weights: {self.name} has {what}: {why}", param=self.name)


def num_groups(recipe: Recipe, in_features: int) -> int:
    """In the file."""
    return -(-in_features // (recipe.group_size or in_features))


def act_order(name: str, groups_of: Tensor, group_size: int, groups: int) -> Tensor | None:
    """The columns group by group, from each column's group, int32 [in]; None where they stand so. name: the tensor's.

    Every group but the last must be full: the kernels tell a column's group by its place.
    """
    found = groups_of.long()
    if found.min() < 0 or found.max() >= groups:
        outside = int(found.max() if found.max() >= groups else found.min())
        raise ConfigError(f"weights: {name} has group {outside}, there are {groups}", param=name, value=outside)
    counts = found.bincount(minlength=groups)
    wrong = (counts[:-1] != group_size).nonzero().flatten().tolist()
    if wrong:
        told = f"{int(counts[wrong[0]])} columns in group {wrong[0]}"
        raise ConfigError(f"weights: {name} puts {told}, a group has {group_size}", param=name, limit=group_size)
    columns = found.argsort(stable=True)
    return None if torch.equal(columns, torch.arange(len(columns))) else columns


def _scheme(recipe: Recipe, in_features: int, overflows: bool) -> WeightScheme:
    is_one_group = num_groups(recipe, in_features) == 1
    if recipe.bits == 8 or overflows:
        has_minima = recipe.bits == 8 and not recipe.symmetric
        whole = -(-in_features // GROUP_UNIT) * GROUP_UNIT if has_minima else 0
        group = whole if is_one_group else recipe.group_size
        rounds = recipe.rounds_activations and group == 0
        return WeightScheme("int8", group, has_minima=has_minima, rounds_activations=rounds)
    spread = next((size for size in SPREAD_GROUPS if in_features % size == 0), GROUP_UNIT)
    return WeightScheme("int4", spread if is_one_group else recipe.group_size, has_zeros=not recipe.symmetric)
