"""Weights of the Triton backend: which kernel keeps a weight of each scheme, and their products.

    float32, float16, bfloat16     cuBLAS through torch, which is at the limit already
    int4, int8 (weights only)      `integers`: activations as they are
    int8 with rounds_activations   `w8a8`: integers with integers
    fp8, also in groups of 128     `w8a8`: e4m3 with e4m3

A weight is moved to the device a few rows at a time and rounded there, by the rules of `kernels.reference.rounding`;
no weight of fewer bits is ever 16 bits wide in memory. Activation order (`columns`) is one gather of x beforehand.

Bytes are counted on the host once a call, from shapes. A captured CUDA graph that is replayed runs no Python: who
replays it adds what was counted while it was captured (`kernels.plain`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.kernels import plain, rounded
from splittime.kernels.api import LinearShape, RoundedRows, WeightScheme
from splittime.kernels.layer import PackedWeight
from splittime.kernels.plain import Stack
from splittime.kernels.reference import products, rounding
from splittime.kernels.triton import elementwise, integers, w8a8
from splittime.kernels.triton.tiles import End, add_parts

DENSE = ("float32", "float16", "bfloat16")
SCHEMES = (*DENSE, "int8", "int4", "fp8")


@dataclass(frozen=True)
class DenseWeight(PackedWeight):
    """weight [out, in], bias [out] or None, of the activations' dtype."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.weight.shape[-2]


@dataclass(frozen=True)
class Reordered(PackedWeight):
    """A weight whose product is with x[:, columns]."""

    weight: integers.IntegerWeight | w8a8.EightBitWeight
    columns: Tensor

    @property
    def out_features(self) -> int:
        return self.weight.out_features


Own = DenseWeight | integers.IntegerWeight | w8a8.EightBitWeight


def pack_linear(
    parts: Sequence[Tensor], bias: Tensor | None, scheme: WeightScheme, dtype: torch.dtype, device: torch.device
) -> PackedWeight:
    """See `kernels.api.Ops.pack_linear`. dtype: of activations, and of the bias."""
    _check(scheme)
    scheme = replace(scheme, is_turned=False)
    bias = None if bias is None else bias.to(device, dtype)
    out_features, in_features = sum(len(part) for part in parts), parts[0].shape[1]
    if scheme.name in DENSE:
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        for begin, rows in _chunks(parts, device):
            weight[begin : begin + len(rows)] = rows
        return DenseWeight(weight, bias)
    if scheme.name == "fp8":
        kept = w8a8.empty(out_features, in_features, torch.float8_e4m3fn, device)
        for begin, rows in _chunks(parts, device):
            w8a8.put(kept, begin, *products.quantize_fp8(rows))
        return replace(kept, bias=bias)
    weights = (RoundedRows(*rounding.quantize(rows, scheme)) for _, rows in _chunks(parts, device))
    return _pack(weights, LinearShape(out_features, in_features, bias, scheme), device)


def pack_rounded(
    parts: Iterable[RoundedRows], shape: LinearShape, dtype: torch.dtype, device: torch.device
) -> PackedWeight:
    """See `kernels.api.Ops.pack_rounded`."""
    _check(shape.scheme)
    rounded.check_columns(shape.columns, shape.in_features)
    bias = None if shape.bias is None else shape.bias.to(device, dtype)
    packed = _pack(rounded.checked(parts, shape), replace(shape, bias=bias), device)
    return packed if shape.columns is None else Reordered(packed, shape.columns.to(device))


def own(packed: PackedWeight) -> Own:
    assert isinstance(packed, Own), "a weight of another backend"
    return packed


def linear(x: Tensor, packed: PackedWeight, residual: Tensor | None = None, end: End = add_parts) -> Tensor:
    """x [T, in] -> x W^T + bias (+ residual [T, out], which may be overwritten) [T, out]; float32 sums, rounded once at
    the end."""
    if isinstance(packed, Stack):
        return packed.product(linear, x, residual)
    if isinstance(packed, Reordered):
        return linear(x.index_select(1, packed.columns), packed.weight, residual, end)
    weight = own(packed)
    if not len(x):
        return x.new_empty(0, weight.out_features)
    _count(weight)
    if isinstance(weight, DenseWeight):
        return _dense(x, weight, residual)
    x = x if x.stride(1) == 1 else x.contiguous()
    residual = None if residual is None else residual.contiguous()
    if isinstance(weight, integers.IntegerWeight):
        if integers.is_better_wide(len(x), weight, x.dtype):
            return _dense(x, DenseWeight(integers.widened(weight, x.dtype), weight.bias), residual)
        return integers.linear(x, weight, residual, end=end)
    return w8a8.linear(x, weight, residual, end=end)


def linear_norm(
    x: Tensor, packed: PackedWeight, residual: Tensor, scale: elementwise.TritonNorm
) -> tuple[Tensor, Tensor]:
    """`linear`, and its `rms_norm`. Sums that several programs shared are added and normed in one kernel; cuBLAS, and a
    product that ends in its own kernel, add the residual there, and the norm is all that is left."""
    made: list[Tensor] = []

    def end(parts: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor) -> None:
        assert residual is not None
        made.append(elementwise.add_parts_rms_norm(parts, bias, residual, scale, y))

    total = linear(x, packed, residual, end)
    return total, made[0] if made else elementwise.rms_norm(total, scale)


def unpacked(packed: PackedWeight) -> Tensor:
    """Returns what a packed weight stands for, float32 [out, in], in the order of x's columns: for tests and for
    saving."""
    if isinstance(packed, Stack):
        return torch.cat([unpacked(part) for part in packed.parts])
    if isinstance(packed, Reordered):
        inner = unpacked(packed.weight)
        return torch.zeros_like(inner).index_add_(1, packed.columns, inner)
    weight = own(packed)
    if isinstance(weight, DenseWeight):
        return weight.weight.float()
    if isinstance(weight, w8a8.EightBitWeight):
        return weight.values[:, : weight.in_features].float() * w8a8.scales_of(weight)
    rows = integers.unpacked(weight)
    scheme = WeightScheme(f"int{weight.bits}", weight.group)
    return rounding.dequantize(rows.integers, rows.scales, scheme, rows.zeros, rows.minima)


def kept(packed: Own) -> tuple[str, list[Tensor]]:
    """The scheme's name, and what of the weight lies in memory (without the bias)."""
    if isinstance(packed, DenseWeight):
        return str(packed.weight.dtype).removeprefix("torch."), [packed.weight]
    if isinstance(packed, integers.IntegerWeight):
        return f"int{packed.bits}", [packed.words, packed.scales]
    return "fp8" if packed.values.dtype == torch.float8_e4m3fn else "int8", [packed.values, packed.scales]


def _dense(x: Tensor, packed: DenseWeight, residual: Tensor | None) -> Tensor:
    if residual is None:
        return F.linear(x, packed.weight, packed.bias)
    y = residual.addmm_(x, packed.weight.t())  # in place: `addmm` copies the residual first, a launch of its own
    return y if packed.bias is None else y.add_(packed.bias)


def _pack(
    parts: Iterable[RoundedRows], shape: LinearShape, device: torch.device
) -> integers.IntegerWeight | w8a8.EightBitWeight:
    scheme, bias, out_features, in_features = shape.scheme, shape.bias, shape.out_features, shape.in_features
    begin = 0
    if scheme.name == "fp8" or scheme.rounds_activations:
        dtype = torch.float8_e4m3fn if scheme.name == "fp8" else torch.int8
        kept = w8a8.empty(out_features, in_features, dtype, device, scheme.group > 0)
        for part in parts:
            w8a8.put(kept, begin, part.integers, part.scales if scheme.group else part.scales[:, 0])
            begin += len(part.integers)
        return replace(w8a8.with_shared_scales(kept), bias=bias)
    weight = integers.empty(out_features, in_features, scheme, device)
    for part in parts:
        integers.put(weight, begin, rounded.as_packed(part, scheme))
        begin += len(part.integers)
    return replace(weight, bias=bias)


def _chunks(parts: Sequence[Tensor], device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Some rows at a time on the device, and where they begin."""
    begin = 0
    for part in parts:
        for rows in part.split(max(1, rounding.CHUNK_ELEMENTS // part.shape[1])):
            yield begin, rows.to(device)
            begin += len(rows)


def _check(scheme: WeightScheme) -> None:
    if scheme.name not in SCHEMES:
        raise ConfigError(
            f"kernels=triton keeps no weights as {scheme.name}; possible: {', '.join(SCHEMES)}",
            param="quantization", value=scheme.name, limit=", ".join(SCHEMES),
        )  # fmt: skip
    if scheme.rounds_activations and scheme.name != "fp8" and (scheme.name != "int8" or scheme.group):
        raise ConfigError(
            f"activations are not rounded beside {scheme.name} in groups of {scheme.group} columns",
            param="quantization", value=scheme.name, limit="int8 with one scale an output, fp8",
        )  # fmt: skip


def _count(packed: Own) -> None:
    name, tensors = kept(packed)
    plain.count_weight(name, *tensors)
