"""Integer weights in plain torch: how a weight is rounded, what its integers stand for, and the product.

The rules are those of `st_pack` (kernels/native/csrc/splittime.h), to the last bit; ties go to even.

    int8             a scale for each row:              s = max |w| / 127,  q = round(w / s) in -127..127,  w ~ q s
    int8 in groups   a scale for each group of columns: s = float16(max |w| / 127),  the same, clamped
    int4             a scale for each group of columns: s = float16(m / -8), m being the value of largest magnitude (the
                     first of equals), q = round(w / s) + 8 in 0..15, w ~ (q - 8) s

Of a scheme that `is_turned`, rows are turned before they are rounded, and so are the activations (`turned`): what one
column had alone is spread over a block of them, and no longer makes the step of all others coarse.

A last group that the columns do not fill is a group all the same. Where s is 0 every integer is the one that means 0.
What comes as integers (`pack_rounded`) may have zero points and minima; its scales and minima of groups are kept as
float16, as in the native kernels. What comes as e4m3 stays e4m3, with float32 scales.

The product rebuilds a chunk of rows at a time in the activations' dtype, so that the weight stays integers in memory.
It serves the torch backend and is the reference for the kernels. Those also round activations; here whoever calls may
have rounded them: tests/models/product_bounds.py says how far either may be from the unrounded product.

How a key or value of one head is kept as int8 or as float8_e4m3fn: one scale, max |x| / 127 or max |x| / 448, so
that the largest becomes the largest that the dtype has, and the nearest of its values, ties to even.

A head that is not finite has a scale that is not, so that it shows when it is read.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from splittime.kernels import plain, rounded
from splittime.kernels.api import LinearShape, RoundedRows, WeightScheme
from splittime.kernels.layer import PackedWeight
from splittime.kernels.rounded import INT4_ZERO

CHUNK_ELEMENTS = 1 << 22  # rebuilt at a time: 16 MiB of float32
INTEGER_SCHEMES = ("int8", "int4")
TURNED = 512  # csrc/turn.inl has the same


@dataclass(frozen=True)
class RebuiltWeight(PackedWeight):
    """values: int8 (or e4m3) [out, in], or for int4 uint8 [out, in / 2 rounded up], the even column in the lower half.
    scales: [out, groups], float32, of groups of integers float16; bias: [out] or None.
    zeros: uint8, minima: float16, both [out, groups] or None; columns: as in `Ops.pack_rounded`."""

    values: Tensor
    scales: Tensor
    in_features: int
    scheme: WeightScheme
    bias: Tensor | None
    zeros: Tensor | None = None
    minima: Tensor | None = None
    columns: Tensor | None = None

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of the weight, turned if it is, that the integers stand for: float32 [end - begin, in]."""
        values = self.values[begin:end]
        if self.scheme.name == "int4":
            values = torch.stack((values & 15, values >> 4), dim=-1).flatten(1)[:, : self.in_features]
        zeros, minima = (None if one is None else one[begin:end] for one in (self.zeros, self.minima))
        return dequantize(values, self.scales[begin:end], self.scheme, zeros, minima)


def divided(x: Tensor, number: float) -> Tensor:
    """Returns x / number, each rounded once. Told a number of the host, torch on a card multiplies by its rounded
    reciprocal instead, and a weight would have other scales there than on a CPU."""
    return x / torch.tensor(number, dtype=x.dtype, device=x.device)


def inputs(x: Tensor, columns: Tensor | None, is_turned: bool) -> Tensor:
    """x [T, in] -> what a weight's integers are multiplied by: in the order of its columns, and turned as they are."""
    ordered = x if columns is None else x.index_select(1, columns)
    return turned(ordered) if is_turned else ordered


def turned(x: Tensor) -> Tensor:
    """x [.., in], of which blocks of columns are multiplied by the Hadamard matrix of their size over its root: of
    `TURNED` columns, or the largest power of two that is left. Of the dtype of x. Twice turned is x."""
    blocks, at, size = [], 0, TURNED
    while at < x.shape[-1]:
        left = x.shape[-1] - at
        size = min(size, 1 << left.bit_length() - 1)
        whole = left // size * size  # all blocks of a size at once
        block, apart = x[..., at : at + whole].float(), 1
        while apart < size:
            first, second = block.unflatten(-1, (-1, 2, apart)).unbind(-2)
            block = torch.stack((first + second, first - second), -2).flatten(-3)
            apart *= 2
        blocks.append(block * (1 / torch.tensor(float(size)).sqrt()))
        at += whole
    return torch.cat(blocks, -1).to(x.dtype) if blocks else x


def quantize(weight: Tensor, scheme: WeightScheme) -> tuple[Tensor, Tensor]:
    """weight [out, in] of any float dtype -> int8 [out, in] (of int4: 0..15) and scales, float32 [out, groups]."""
    if scheme.has_zeros or scheme.has_minima or scheme.bits:
        raise ValueError(f"{scheme} is for weights that come as integers; rounding makes neither zeros nor minima")
    grouped = _groups(turned(weight.float()) if scheme.is_turned else weight.float(), scheme)
    if scheme.name == "int8":
        scales = divided(grouped.abs().amax(-1), 127)
        low, high, zero = -127, 127, 0
    else:
        place = grouped.abs().argmax(-1, keepdim=True)
        scales = grouped.gather(-1, place).squeeze(-1) / -8
        low, high, zero = 0, 15, INT4_ZERO
    if scheme.group:
        scales = scales.half().float()
    steps = (grouped / scales.unsqueeze(-1)).round_().add_(zero).clamp_(low, high)
    integers = torch.where(scales.unsqueeze(-1) == 0, zero, steps).to(torch.int8)
    return integers.flatten(1)[:, : weight.shape[1]], scales


def dequantize(
    values: Tensor, scales: Tensor, scheme: WeightScheme, zeros: Tensor | None = None, minima: Tensor | None = None
) -> Tensor:
    """Returns what `quantize` made, or what `RoundedRows` says -> float32 [out, in]."""
    steps = _groups(values.float() if scheme.name == "fp8" else values, scheme).float()
    if zeros is not None:
        steps -= zeros.unsqueeze(-1).float()
    elif scheme.name == "int4":
        steps -= INT4_ZERO
    steps *= scales.float().unsqueeze(-1)
    if minima is not None:
        steps -= minima.float().unsqueeze(-1)
    return steps.flatten(1)[:, : values.shape[1]]


def pack(parts: Sequence[Tensor], bias: Tensor | None, scheme: WeightScheme) -> RebuiltWeight:
    """The weight of these parts [out_i, in], one below the other; at most a chunk of it is unpacked at a time."""
    in_features = parts[0].shape[1]
    chunks = (quantize(chunk, scheme) for part in parts for chunk in part.split(_chunk_rows(in_features)))
    shape = LinearShape(sum(len(part) for part in parts), in_features, bias, scheme)
    return _packed((RoundedRows(*chunk) for chunk in chunks), shape)


def pack_rounded(parts: Iterable[RoundedRows], shape: LinearShape) -> RebuiltWeight:
    """See `kernels.api.Ops.pack_rounded`."""
    rounded.check_columns(shape.columns, shape.in_features)
    return _packed(rounded.checked(parts, shape), shape)


def product(x: Tensor, linear: RebuiltWeight, residual: Tensor | None = None) -> Tensor:
    """x [T, in] -> [T, out], see `kernels.api.Ops.linear`."""
    return product_of(inputs(x, linear.columns, linear.scheme.is_turned), linear, residual)


def product_of(x: Tensor, linear: RebuiltWeight, residual: Tensor | None = None) -> Tensor:
    """As `product`, of what `inputs` gives."""
    y = x.new_empty(x.shape[0], len(linear.scales))
    for begin, end in _chunks(len(linear.scales), linear.in_features):
        torch.mm(x, linear.rows(begin, end).to(x.dtype).t(), out=y[:, begin:end])
    if len(x):
        plain.count_weight(linear.scheme.name, linear.values, linear.scales, linear.zeros, linear.minima)
    if linear.bias is not None:
        y += linear.bias
    return y if residual is None else y.add_(residual)


def _groups(values: Tensor, scheme: WeightScheme) -> Tensor:
    """[out, in] -> [out, groups, group], filled up with zeros."""
    width = scheme.group or values.shape[1]
    return F.pad(values, (0, -values.shape[1] % width)).unflatten(1, (-1, width))


def _packed(parts: Iterable[RoundedRows], shape: LinearShape) -> RebuiltWeight:
    kept, scheme = rounded.joined([_kept(part, shape.scheme) for part in parts]), shape.scheme
    extras = (kept.zeros, kept.minima, shape.columns)
    return RebuiltWeight(kept.integers, kept.scales, shape.in_features, scheme, shape.bias, *extras)


def _kept(part: RoundedRows, scheme: WeightScheme) -> RoundedRows:
    """In the form of `RebuiltWeight`; a copy, whatever the part is a view of."""
    part = rounded.as_packed(part, scheme)
    values, scales, minima = part.integers.clone(memory_format=torch.contiguous_format), part.scales, part.minima
    if scheme.name == "int4":
        pairs = F.pad(values, (0, values.shape[1] % 2), value=INT4_ZERO).view(torch.uint8).unflatten(1, (-1, 2))
        values = pairs[..., 0] | pairs[..., 1] << 4
    scales = scales.half() if scheme.group and scheme.name != "fp8" else scales.clone()
    return RoundedRows(values, scales, part.zeros, None if minima is None else minima.half())


def _chunk_rows(in_features: int) -> int:
    return max(1, CHUNK_ELEMENTS // in_features)


def _chunks(out_features: int, in_features: int) -> Iterator[tuple[int, int]]:
    step = _chunk_rows(in_features)
    return ((begin, min(begin + step, out_features)) for begin in range(0, out_features, step))


LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}  # of what is kept
LEAST_SCALE = 1e-38  # a head of smaller values is kept as zeros


def quantize_kv(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """x [.., D] -> `dtype` [.., D], float32 [..]."""
    wide = x.float()
    limit = LARGEST[dtype]
    scales = divided(wide.abs().amax(-1), limit)
    is_usable = (scales >= LEAST_SCALE) & scales.isfinite()
    steps = (wide / scales[..., None]).clamp(-limit, limit)
    steps = torch.where(is_usable[..., None], steps, 0.0)
    return (steps.round() if dtype == torch.int8 else steps).to(dtype), scales


def dequantize_kv(values: Tensor, scales: Tensor) -> Tensor:
    """int8 or float8_e4m3fn [.., D], float32 [..] -> float32 [.., D]."""
    return values.float() * scales[..., None]
