"""int8 weights with a scale a row. Activations are rounded to int8 with a scale a token, as in the native kernels.

Where the processor has instructions for it, oneDNN multiplies bytes by bytes: the products are exact, up to
`MOST_COLUMNS`, and both scales are applied to their sums. Without VNNI or AMX, or where ONEDNN_MAX_CPU_ISA forbids
them, it adds up pairs of products in 16 bits, which may saturate; a product of the largest bytes tells, before the
first weight is laid out. There the weight is rebuilt for each product (`kernels.reference.rounding`), and the rounded
activations with it, so that a checkpoint's answers are the same kind of answers on every processor.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from splittime.kernels import plain
from splittime.kernels.api import WeightScheme
from splittime.kernels.layer import PackedWeight
from splittime.kernels.reference import rounding
from splittime.kernels.reference.products import round_rows
from splittime.kernels.reference.rounding import RebuiltWeight

PACKING_ROWS_HINT = 16
ZERO = 128
MOST_COLUMNS = 2**31 // 127**2  # sums of products stay within 32 bits

_onednn = torch.ops.onednn


@dataclass(frozen=True)
class ByteWeight(PackedWeight):
    """packed: opaque oneDNN tensor; scales: float32 [out]; zeros: int32 [out], all 0; bias: [out] or None; columns,
    is_turned: as in `Ops.pack_rounded` and `WeightScheme`."""

    packed: Tensor
    scales: Tensor
    zeros: Tensor
    bias: Tensor | None
    columns: Tensor | None
    is_turned: bool = False


def rounds(scheme: WeightScheme) -> bool:
    """Returns whether activations are rounded beside weights of this scheme."""
    return scheme.name == "int8" and not scheme.group


def multiplies(weight: RebuiltWeight) -> bool:
    """Returns whether oneDNN's products with this weight are those of its bytes."""
    return rounds(weight.scheme) and weight.values.shape[1] <= MOST_COLUMNS and has_byte_products()


@cache
def has_byte_products() -> bool:
    """Returns whether oneDNN adds up products of bytes without saturation, by trying."""
    if not torch.backends.mkldnn.is_available():
        return False
    values = torch.full((PACKING_ROWS_HINT, 64), 127, dtype=torch.int8)
    weight = _packed(values, torch.ones(PACKING_ROWS_HINT))
    for tokens in (1, 2 * PACKING_ROWS_HINT):
        sums = _sums(torch.full((tokens, 64), 127 + ZERO, dtype=torch.uint8), weight)
        if not bool((sums == 127 * 127 * 64).all()):
            return False
    return True


def lay_out(weight: RebuiltWeight) -> ByteWeight:
    kept = _packed(weight.values, weight.scales.flatten())
    return replace(kept, bias=weight.bias, columns=weight.columns, is_turned=weight.scheme.is_turned)


def _packed(values: Tensor, scales: Tensor) -> ByteWeight:
    packed = _onednn.qlinear_prepack(values, [PACKING_ROWS_HINT, values.shape[1]])
    return ByteWeight(packed, scales, torch.zeros(len(scales), dtype=torch.int32), None, None)


def _sums(bytes_: Tensor, weight: ByteWeight) -> Tensor:
    """uint8 [T, in], less `ZERO`, times the weight -> float32 [T, out]."""
    kept = (weight.packed, weight.scales, weight.zeros)
    return _onednn.qlinear_pointwise(bytes_, 1.0, ZERO, *kept, None, 1.0, 0, torch.float32, "none", [], "")


def product(x: Tensor, weight: ByteWeight, residual: Tensor | None = None) -> Tensor:
    """x [T, in] -> [T, out], see `kernels.api.Ops.linear`."""
    integers, scales = round_rows(rounding.inputs(x, weight.columns, weight.is_turned), torch.int8)
    bytes_ = (integers.short() + ZERO).to(torch.uint8)  # the layout is made for unsigned activations
    y = _sums(bytes_, weight)
    if len(x):
        plain.count_weight("int8", weight.packed, weight.scales)
    y = (y * scales[:, None]).to(x.dtype)
    if weight.bias is not None:
        y += weight.bias
    return y if residual is None else y.add_(residual)


def rebuilt_product(x: Tensor, weight: RebuiltWeight, residual: Tensor | None = None) -> Tensor:
    """As `product`, for weights in any scheme."""
    if not rounds(weight.scheme):
        return rounding.product(x, weight, residual)
    integers, scales = round_rows(rounding.inputs(x, weight.columns, weight.scheme.is_turned), torch.int8)
    return rounding.product_of((integers * scales[:, None]).to(x.dtype), weight, residual)
