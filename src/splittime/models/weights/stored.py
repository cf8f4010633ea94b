"""What a quantised checkpoint hands to the packer: integers and what they stand for, some rows at a time.

Published formats differ in how they lay integers out (AWQ and GPTQ along columns of 32-bit words, GGUF in blocks of 32
or 256, compressed-tensors along rows) and agree on what they mean: for row i, column j and group g(j),

    w[i, j] = scales[i, g] * (integers[i, j] - zeros[i, g]) - minima[i, g]

A reader of a format is a `StoredWeight`: it turns its own layout into `RoundedRows` when rows are asked for, so that
no more than a piece of a large weight is in memory in this form. The packer lays the integers out for the kernels; no
value passes through 16 bits on its way where scheme and arithmetic allow that.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from splittime.kernels.api import WeightScheme


@dataclass(frozen=True)
class RoundedRows:
    """Some rows of a weight, as in the formula above, columns in the order of `StoredWeight.columns`.

    integers: int8 [rows, in]: 0..15 for "int4", -128..127 for "int8". scales: float32 [rows, groups].
    zeros: uint8 [rows, groups], integer zero points of "int4"; None: 8 for "int4", 0 for "int8".
    minima: float32 [rows, groups], what is taken off whatever the integer is; None: nothing.
    """

    integers: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    minima: Tensor | None = None


class StoredWeight(Protocol):
    """One linear weight [out_features, in_features] of a quantised checkpoint.

    scheme: "int4" or "int8" with its group (0: one scale a row). columns: int64 [in], for a weight whose groups are not
    neighbouring columns (GPTQ's act-order): column j of `rows` multiplies x[columns[j]]; None: as they stand.
    """

    out_features: int
    in_features: int
    scheme: WeightScheme
    columns: Tensor | None

    def rows(self, begin: int, end: int) -> RoundedRows:
        """Rows [begin, end)."""
