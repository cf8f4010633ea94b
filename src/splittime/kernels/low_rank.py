"""What an adapter (LoRA) adds to the products of a layer: y += (x A^T) B^T, on the rows of the tokens that use it.

    product    qkv             output    gate_up       down         the weights of a layer (`kernels.layer`)
    parts      query, key,     one       gate, up      one          each has a B of its own, with the scale in it
               value

The base product of the whole batch stays as it is, whatever its weights are rounded to, and rows that use no adapter
are not touched. So a row's result does not depend on its neighbours where that of `Ops.linear` does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from splittime.kernels.layer import PackedWeight


@dataclass(frozen=True, eq=False)
class LowRankPart:
    """up: [end - begin, rank], added to the outputs [begin, end) of the product; it reads so many columns of what
    `LowRank.down` gives, behind those that the part before it reads."""

    begin: int
    end: int
    rank: int
    up: PackedWeight


@dataclass(frozen=True, eq=False)
class LowRank:
    """What one adapter adds to one product. down: [sum of the parts' ranks, in]."""

    down: PackedWeight
    parts: tuple[LowRankPart, ...]


@dataclass(frozen=True, eq=False)
class LayerAdapter:
    """What one adapter adds to a layer's products; None: nothing."""

    qkv: LowRank | None = None
    output: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None


@dataclass(frozen=True, eq=False)
class AdapterUse:
    """An adapter and the tokens of a step that use it. layers: one for each of the model's; tokens: int32 [n]."""

    layers: tuple[LayerAdapter, ...]
    tokens: Tensor


# What the adapters in use add, each on its own tokens: to one layer, and to one of its products.
LayerUses = Sequence[tuple[LayerAdapter, Tensor]]
ProductUses = Sequence[tuple[LowRank | None, Tensor]]


def inner_bytes(tokens: int, rank: int) -> int:
    """Returns what the native kernels' inner rows, x A^T, take at most in a step: of queries, keys and values, float32.
    They are part of the one scratch memory of a layer."""
    return tokens * 3 * rank * 4
