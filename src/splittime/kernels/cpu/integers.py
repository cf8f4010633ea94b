"""int8 weights with a scale a row. Activations are rounded to int8 with a scale a token, as in the native kernels.

Where the processor has instructions for it, oneDNN multiplies bytes by bytes: the products are exact, and both scales
are applied to their sums. Without VNNI or AMX it would add up pairs of products in 16 bits, which may saturate: there
the weight is rebuilt for each product (`kernels.reference.rounding`), and the rounded activations with it, so that a
checkpoint's answers are the same kind of answers on every processor.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from splittime.kernels import plain
from splittime.kernels.api import WeightScheme
from splittime.kernels.layer import PackedWeight
from splittime.kernels.reference import rounding
from splittime.kernels.reference.rounding import RebuiltWeight

PACKING_ROWS_HINT = 16
ZERO = 128
LEAST = 1e-30  # a token of smaller activations is rounded to zeros

_onednn = torch.ops.onednn


@dataclass(frozen=True)
class ByteWeight(PackedWeight):
    """packed: opaque oneDNN tensor; scales: float32 [out]; zeros: int32 [out], all 0; bias: [out] or None; columns: as
    in `Ops.pack_rounded`."""

    packed: Tensor
    scales: Tensor
    zeros: Tensor
    bias: Tensor | None
    columns: Tensor | None


def rounds(scheme: WeightScheme) -> bool:
    """Whether activations are rounded beside weights of this scheme."""
    return scheme.name == "int8" and not scheme.group


@cache
def has_byte_products() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.cpu._is_vnni_supported())


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, in] -> float32 integers -127..127 [T, in], and what they are multiplied with to be x, [T, 1]."""
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True)
    return (wide * torch.where(most < LEAST, 0.0, 127 / most)).round_(), most / 127


def lay_out(weight: RebuiltWeight) -> ByteWeight:
    packed = _onednn.qlinear_prepack(weight.values, [PACKING_ROWS_HINT, weight.in_features])
    zeros = torch.zeros(len(weight.scales), dtype=torch.int32)
    return ByteWeight(packed, weight.scales.flatten(), zeros, weight.bias, weight.columns)


def product(x: Tensor, weight: ByteWeight, residual: Tensor | None = None) -> Tensor:
    """x [T, in] -> [T, out], see `kernels.api.Ops.linear`."""
    integers, scales = rounded(x if weight.columns is None else x.index_select(1, weight.columns))
    bytes_ = (integers + ZERO).to(torch.uint8)  # the layout is made for unsigned activations
    kept = (weight.packed, weight.scales, weight.zeros)
    y = _onednn.qlinear_pointwise(bytes_, 1.0, ZERO, *kept, None, 1.0, 0, torch.float32, "none", [], "")
    if len(x):
        plain.count_weight("int8", weight.packed, weight.scales)
    y = (y * scales).to(x.dtype)
    if weight.bias is not None:
        y += weight.bias
    return y if residual is None else y.add_(residual)


def rebuilt_product(x: Tensor, weight: RebuiltWeight, residual: Tensor | None = None) -> Tensor:
    """As `product`, for weights in any scheme."""
    if not rounds(weight.scheme):
        return rounding.product(x, weight, residual)
    integers, scales = rounded(x if weight.columns is None else x.index_select(1, weight.columns))
    return rounding.product((integers * scales).to(x.dtype), replace(weight, columns=None), residual)
