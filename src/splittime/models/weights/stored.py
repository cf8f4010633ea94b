"""What a quantised checkpoint hands to the packer: integers and what they stand for, some rows at a time.

Published formats differ in how they lay integers out (AWQ and GPTQ along columns of 32-bit words, GGUF in blocks of 32
or 256, compressed-tensors along rows) and agree on what they mean (`kernels.api.RoundedRows`). A reader of a format is
a `StoredWeight`: it turns its own layout into `RoundedRows` when rows are asked for, so that no more than a piece of a
large weight is in memory in this form. The packer lays the integers out for the kernels; no value passes through 16
bits on its way where scheme and arithmetic allow that.
"""

from typing import Protocol

from torch import Tensor

from splittime.kernels.api import RoundedRows, WeightScheme


class StoredWeight(Protocol):
    """One linear weight [out_features, in_features] of a quantised checkpoint.

    columns: int64 [in], for a weight whose groups are not neighbouring columns (GPTQ's act-order): column j of what
    `rows` gives multiplies x[columns[j]]; None: as they stand.
    """

    out_features: int
    in_features: int
    scheme: WeightScheme
    columns: Tensor | None

    def rows(self, begin: int, end: int) -> RoundedRows:
        """Rows [begin, end), their columns in the order of `columns`."""
