"""Integer weights in plain torch: how a weight is rounded, what its integers stand for, and the product.

The rules are those of `st_pack` (kernels/native/csrc/splittime.h), to the last bit; ties go to even.

    int8   a scale for each row:              s = max |w| / 127,             q = round(w / s) in -127..127,    w ~ q s
    int4   a scale for each group of columns: s = float16(m / -8), m being the value of largest magnitude (the first of
           equals), q = round(w / s) + 8 in 0..15, w ~ (q - 8) s

A last group that the columns do not fill is a group all the same. Where s is 0 every integer is the one that means 0.

The product rebuilds a chunk of rows at a time in the activations' dtype, so that the weight stays integers in memory.
It serves the torch backend and is the reference for the kernels. Those also round the activations, this does not:
`models.quant.bounds` says how far either may be from the unrounded product.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from splittime.kernels.api import WeightScheme

CHUNK_ELEMENTS = 1 << 22  # rebuilt at a time: 16 MiB of float32
INTEGER_SCHEMES = ("int8", "int4")
INT4_ZERO = 8


@dataclass(frozen=True)
class IntegerLinear:
    """values: int8 [out, in], or for int4 uint8 [out, in / 2 rounded up], the even column in the lower half.
    scales: [out, groups], float32, of int4 float16; bias: [out] or None."""

    values: Tensor
    scales: Tensor
    in_features: int
    scheme: WeightScheme
    bias: Tensor | None

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of the weight that the integers stand for, float32 [end - begin, in]."""
        values = self.values[begin:end]
        if self.scheme.name == "int4":
            values = torch.stack((values & 15, values >> 4), dim=-1).flatten(1)[:, : self.in_features]
        return dequantize(values, self.scales[begin:end], self.scheme)


def quantize(weight: Tensor, scheme: WeightScheme) -> tuple[Tensor, Tensor]:
    """weight [out, in] of any float dtype -> int8 [out, in] (of int4: 0..15) and scales, float32 [out, groups]."""
    grouped = _groups(weight.float(), scheme)
    if scheme.name == "int8":
        scales = grouped.abs().amax(-1) / 127
        low, high, zero = -127, 127, 0
    else:
        place = grouped.abs().argmax(-1, keepdim=True)
        scales = (grouped.gather(-1, place).squeeze(-1) / -8).half().float()
        low, high, zero = 0, 15, INT4_ZERO
    steps = (grouped / scales.unsqueeze(-1)).round_().add_(zero).clamp_(low, high)
    integers = torch.where(scales.unsqueeze(-1) == 0, zero, steps).to(torch.int8)
    return integers.flatten(1)[:, : weight.shape[1]], scales


def dequantize(values: Tensor, scales: Tensor, scheme: WeightScheme) -> Tensor:
    """What `quantize` made -> float32 [out, in]."""
    zero = INT4_ZERO if scheme.name == "int4" else 0
    grouped = _groups((values.to(torch.int16) - zero).float(), scheme)
    return (grouped * scales.float().unsqueeze(-1)).flatten(1)[:, : values.shape[1]]


def pack(parts: Sequence[Tensor], bias: Tensor | None, scheme: WeightScheme) -> IntegerLinear:
    """The weight of these parts [out_i, in], one below the other; at most a chunk of it is unpacked at a time."""
    in_features = parts[0].shape[1]
    chunks = [_pack_chunk(chunk, scheme) for part in parts for chunk in part.split(_chunk_rows(in_features))]
    values, scales = (torch.cat(pieces) for pieces in zip(*chunks, strict=True))
    return IntegerLinear(values, scales, in_features, scheme, bias)


def product(x: Tensor, linear: IntegerLinear, residual: Tensor | None = None) -> Tensor:
    """x [T, in] -> [T, out], see `kernels.api.Ops.linear`."""
    y = x.new_empty(x.shape[0], len(linear.scales))
    for begin, end in _chunks(len(linear.scales), linear.in_features):
        torch.mm(x, linear.rows(begin, end).to(x.dtype).t(), out=y[:, begin:end])
    if linear.bias is not None:
        y += linear.bias
    return y if residual is None else y.add_(residual)


def _groups(values: Tensor, scheme: WeightScheme) -> Tensor:
    """[out, in] -> [out, groups, group], filled up with zeros."""
    width = values.shape[1] if scheme.name == "int8" else scheme.group
    return F.pad(values, (0, -values.shape[1] % width)).unflatten(1, (-1, width))


def _pack_chunk(weight: Tensor, scheme: WeightScheme) -> tuple[Tensor, Tensor]:
    values, scales = quantize(weight, scheme)
    if scheme.name == "int8":
        return values.contiguous(), scales
    pairs = F.pad(values, (0, values.shape[1] % 2), value=INT4_ZERO).view(torch.uint8).unflatten(1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, scales.half()


def _chunk_rows(in_features: int) -> int:
    return max(1, CHUNK_ELEMENTS // in_features)


def _chunks(out_features: int, in_features: int) -> Iterator[tuple[int, int]]:
    step = _chunk_rows(in_features)
    return ((begin, min(begin + step, out_features)) for begin in range(0, out_features, step))
