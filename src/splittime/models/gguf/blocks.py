"""GGUF's blocks as integers with scales, and as floats. Each row is a run of blocks; n bytes a block:

    Q4_0   32 values: d f16 | 16 B, value j in the low half of byte j, value 16 + j in the high one    w = d (q - 8)
    Q4_1   32 values: d f16, m f16 | 16 B as in Q4_0                                                  w = d q + m
    Q5_0   32 values: d f16 | 4 B, bit i of them the fifth bit of value i | 16 B as in Q4_0           w = d (q - 16)
    Q5_1   32 values: d f16, m f16 | 4 B | 16 B, as in Q5_0                                           w = d q + m
    Q8_0   32 values: d f16 | 32 signed B                                                             w = d q
    MXFP4  32 values: e u8 | 16 B as in Q4_0, of e2m1 (`weights.formats.mxfp4`)             w = 2^(e - 128) twice(q)
    Q4_K  256 values: d f16, m f16 | 12 B | 128 B, 64 values in 32 B as in Q4_0           w = d s_g q - m t_g, g of 32
    Q5_K  256 values: d f16, m f16 | 12 B | 32 B, bit i of byte j the fifth bit of value 32 i + j | 128 B as in Q4_K
    Q6_K  256 values: 128 B low halves | 64 B upper pairs of bits | 16 signed B s | d f16  w = d s_g (q - 32), g of 16

The 12 bytes hold 8 scales s_g and 8 minima t_g of 6 bits: the first four of each in the low 6 bits of bytes 0-3 and
4-7; of the others the low four bits in the halves of bytes 8-11, the upper two in the top bits of bytes 0-3 and 4-7.
(The layouts as llama.cpp defines them in ggml-common.h; the tests compare each with the `gguf` package.)

No value is rounded here: d s_g has 11 + 6 bits or fewer, which a float32 holds. What a backend then keeps in float16 is
its own business: minima of Q4_1 and Q5_1 lose up to 2^-11 of their size there. The native kernels keep the K types as
they are, by d and m, the `RoundedRows.steps`; torch keeps d s_g in float16.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from splittime.kernels.api import RoundedRows, WeightScheme
from splittime.models.gguf.cursor import SERVED
from splittime.models.weights.formats.mxfp4 import BIAS, TWICE

SCHEMES = {
    "Q4_0": WeightScheme("int4", 32),
    "Q4_1": WeightScheme("int4", 32, has_minima=True),
    "Q5_0": WeightScheme("int8", 32),
    "Q5_1": WeightScheme("int8", 32, has_minima=True),
    "Q8_0": WeightScheme("int8", 32),
    "MXFP4": WeightScheme("int8", 32),
    "Q4_K": WeightScheme("int4", 32, has_minima=True, bits=4),
    "Q5_K": WeightScheme("int8", 32, has_minima=True, bits=5),
    "Q6_K": WeightScheme("int8", 16, bits=6),
}
"""What a linear weight of each type becomes."""

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INT4_ZERO = 8
MIDDLES = {"Q4_1": INT4_ZERO, "Q4_K": INT4_ZERO, "Q5_1": 16, "Q5_K": 16}


@dataclass(frozen=True)
class Unpacked:
    """w = scales * (integers - zero) - minima. integers: int8 [rows, in]; scales, minima (or None): float32
    [rows, groups]. steps: d and m of each block, float32 [rows, 1 or 2, blocks], of those types that have them."""

    integers: Tensor
    scales: Tensor
    minima: Tensor | None = None
    zero: int = 0
    steps: Tensor | None = None

    def floats(self) -> Tensor:
        """float32 [rows, in]."""
        width = self.integers.shape[1] // self.scales.shape[1]
        grouped = (self.integers.unflatten(1, (-1, width)) - self.zero).float() * self.scales.unsqueeze(-1)
        return (grouped if self.minima is None else grouped - self.minima.unsqueeze(-1)).flatten(1)


def unpack(rows: Tensor, kind: str) -> Unpacked:
    """rows: uint8 [rows, bytes of a row], of type `kind`."""
    num_rows = rows.shape[0]
    found = _UNPACK[kind](rows.reshape(-1, _TYPES[kind].num_bytes))
    minima = None if found.minima is None else found.minima.reshape(num_rows, -1)
    steps = None if found.steps is None else found.steps.view(num_rows, -1, found.steps.shape[1]).transpose(1, 2)
    scales = found.scales.reshape(num_rows, -1)
    return Unpacked(found.integers.reshape(num_rows, -1), scales, minima, found.zero, steps)


def num_values(row_bytes: int, kind: str) -> int:
    """Returns how many values a row of so many bytes has."""
    return row_bytes // _TYPES[kind].num_bytes * _TYPES[kind].values


def rounded(rows: Tensor, kind: str) -> RoundedRows:
    """The rows in the form of `SCHEMES[kind]`. Where there are minima, integers are counted from the middle of their
    range and the minima take the difference: they come out near zero, since most groups of a trained weight lie about
    evenly on both sides of it, and lose less where a backend keeps them in 16 bits."""
    found = unpack(rows, kind)
    if found.minima is not None:
        middle = MIDDLES[kind]
        integers = found.integers if SCHEMES[kind].name == "int4" else found.integers - middle
        return RoundedRows(integers, found.scales, None, found.minima - middle * found.scales, found.steps)
    if SCHEMES[kind].name == "int4":
        assert found.zero == INT4_ZERO
        return RoundedRows(found.integers, found.scales)
    integers = found.integers - found.zero if found.zero else found.integers
    return RoundedRows(integers, found.scales, steps=found.steps)


def _q5_k(blocks: Tensor) -> Unpacked:
    low = _halves(blocks[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(1)
    fifth = (blocks[:, 16:48].unsqueeze(1) >> shifts) & 1  # [n, 8, 32]
    return _with_minima(low.add_(fifth.view(torch.int8), alpha=16), blocks)


def _q6_k(blocks: Tensor) -> Unpacked:
    low = _halves(blocks[:, :128].unflatten(1, (2, 64))).view(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(1)
    upper = (blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts) & 3  # [n, 2, 4, 32]
    step = _half_floats(blocks[:, 208:])
    scales = blocks[:, 192:208].view(torch.int8).float() * step
    return Unpacked(low.add_(upper.view(torch.int8), alpha=16), scales, zero=32, steps=step)


def _halves(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> int8 [..., 2 n], new: all low halves of the bytes, then all high ones."""
    both = packed.new_empty(*packed.shape[:-1], 2, packed.shape[-1])
    torch.bitwise_and(packed, 15, out=both[..., 0, :])
    torch.bitwise_right_shift(packed, 4, out=both[..., 1, :])
    return both.flatten(-2).view(torch.int8)


def _five_bits(packed: Tensor) -> Tensor:
    """4 bytes of fifth bits, then 16 of lower halves -> int8 [n, 32]."""
    fifth = (packed[:, :4].unsqueeze(2) >> torch.arange(8, dtype=torch.uint8)) & 1  # [n, 4, 8]
    return _halves(packed[:, 4:]).add_(fifth.flatten(1).view(torch.int8), alpha=16)


def _half_floats(packed: Tensor) -> Tensor:
    """Pairs of bytes as float32 [n, 1]."""
    return packed.contiguous().view(torch.float16).float()


def _with_minima(integers: Tensor, blocks: Tensor) -> Unpacked:
    """Returns a Q4_K's or Q5_K's integers with what the first 16 bytes of its blocks say."""
    first, second, mixed = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((first & 63, (mixed & 15) | (first >> 6) << 4), 1)
    minima = torch.cat((second & 63, (mixed >> 4) | (second >> 6) << 4), 1)
    steps = torch.cat((_half_floats(blocks[:, :2]), _half_floats(blocks[:, 2:4])), 1)
    return Unpacked(integers, scales.float() * steps[:, :1], minima.float() * steps[:, 1:], steps=steps)


_UNPACK: dict[str, Callable[[Tensor], Unpacked]] = {
    "Q4_0": lambda b: Unpacked(_halves(b[:, 2:]), _half_floats(b[:, :2]), zero=8),
    "Q4_1": lambda b: Unpacked(_halves(b[:, 4:]), _half_floats(b[:, :2]), -_half_floats(b[:, 2:4])),
    "Q5_0": lambda b: Unpacked(_five_bits(b[:, 2:]), _half_floats(b[:, :2]), zero=16),
    "Q5_1": lambda b: Unpacked(_five_bits(b[:, 4:]), _half_floats(b[:, :2]), -_half_floats(b[:, 2:4])),
    "Q8_0": lambda b: Unpacked(b[:, 2:].view(torch.int8), _half_floats(b[:, :2])),
    "MXFP4": lambda b: Unpacked(TWICE[_halves(b[:, 1:]).long()], torch.exp2(b[:, :1].float() - (BIAS + 1))),
    "Q4_K": lambda b: _with_minima(_halves(b[:, 16:].unflatten(1, (4, 32))), b),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
_TYPES = {kind.name: kind for kind in SERVED.values()}
