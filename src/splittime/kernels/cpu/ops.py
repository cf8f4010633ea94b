"""The torch backend, for a CPU without the native kernels; attention and int8 products (`integers`) have files of their
own. All other integer weights are rebuilt for each product (`kernels.reference.rounding`): small, and slow.

The small operations count: a model of width 256 spends most of a decode step in call overhead, so each is written for
the fewest torch calls. Measured at [1, 256]: `torch.rms_norm` 14 us, norm-hypot-multiply-divide 10; rotate-half with
cat 28 us, one complex product 10.

Matrix products have weights laid out once, when they are loaded. Three layouts, chosen by the machine, the dtype and
the size, never by trial at run time:

* *packed*: oneDNN's blocked layout (`_reorder_linear_weight`, then `_linear_pointwise`, which also adds the residual).
  On a Zen 3 (AVX2), 3072 x 2048 in float32, two threads: 1.7x `F.linear` at one row, 2.5x at 4, 2.0x at 8, 1.4x at 32;
  level at 128. bfloat16 needs AVX-512 or AVX-NE-CONVERT; where the CPU lacks them oneDNN refuses to pack.
* *transposed*: `mm` with the weight stored [in, out]. A packed call has 30 to 45 us of its own, so a tiny weight is
  always faster this way (256 x 256, one thread: 7 us against 29 at one row, level from 64 rows on), and a small one is
  at one row (4096 x 256: 87 against 128; but at 4 rows 378 against 230).
* *dense*: `F.linear`, where packing is not possible.

So a tiny weight is kept transposed, a small one both ways, a large one packed only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from splittime.kernels import plain
from splittime.kernels.api import (
    AttentionBatch,
    AttentionPlan,
    KvShape,
    LayerKv,
    LinearShape,
    RoundedRows,
    WeightScheme,
    own,
)
from splittime.kernels.cpu import attention, integers
from splittime.kernels.layer import PackedNorm, PackedWeight, Weighing
from splittime.kernels.plain import HostOps, Stack
from splittime.kernels.reference import rounding

TINY_WEIGHT_ELEMENTS = 1 << 18
SMALL_WEIGHT_ELEMENTS = 1 << 21
PACKING_ROWS_HINT = 16  # oneDNN picks a layout for about this many rows; 16 was at least as fast as the true number

_onednn = torch.ops.mkldnn
_linear_pointwise = _onednn._linear_pointwise.default
_linear_pointwise_add = _onednn._linear_pointwise.binary


@dataclass(frozen=True)
class CpuWeight(PackedWeight):
    """A weight [out, in] in at least one of three layouts."""

    packed: Tensor | None  # opaque oneDNN tensor
    transposed: Tensor | None  # [in, out]
    dense: Tensor | None  # [out, in]
    bias: Tensor | None  # [out]


def can_pack(dtype: torch.dtype) -> bool:
    """Returns whether oneDNN has a packed product for `dtype` on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(_onednn._is_mkldnn_bf16_supported()))


def lay_out(weight: Tensor, bias: Tensor | None) -> CpuWeight:
    """Lay out `weight` [out, in] for `product`."""
    if not can_pack(weight.dtype):
        return CpuWeight(None, None, weight.contiguous(), bias)
    is_wide = weight.dtype == torch.float32
    transposed = weight.t().contiguous() if is_wide and weight.numel() <= SMALL_WEIGHT_ELEMENTS else None
    if transposed is not None and weight.numel() <= TINY_WEIGHT_ELEMENTS:
        return CpuWeight(None, transposed, None, bias)
    packed = _onednn._reorder_linear_weight(weight.contiguous(), PACKING_ROWS_HINT)
    return CpuWeight(packed, transposed, None, bias)


def product(x: Tensor, linear: CpuWeight, residual: Tensor | None = None) -> Tensor:
    """x [T, in] -> [T, out], see `kernels.api.Ops.linear`."""
    if len(x):
        _count(linear)
    if linear.transposed is not None and (x.shape[0] == 1 or linear.packed is None):
        return _apply_transposed(x, linear.transposed, linear.bias, residual)
    if linear.packed is None:
        y = F.linear(x, linear.dense, linear.bias)  # type: ignore[arg-type]
        return y if residual is None else y.add_(residual)
    if residual is None:
        return _linear_pointwise(x, linear.packed, linear.bias, "none", [], "")
    return _linear_pointwise_add(x, residual, linear.packed, linear.bias, "add")


def _count(linear: CpuWeight) -> None:
    weight = next(one for one in (linear.packed, linear.transposed, linear.dense) if one is not None)
    plain.count_weight(str(weight.dtype).removeprefix("torch."), weight)


def _apply_transposed(x: Tensor, transposed: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    if residual is not None:
        y = torch.addmm(residual, x, transposed)
        return y if bias is None else y.add_(bias)
    return torch.mm(x, transposed) if bias is None else torch.addmm(bias, x, transposed)


def _laid_out(weight: rounding.RebuiltWeight) -> PackedWeight:
    return integers.lay_out(weight) if integers.multiplies(weight) else weight


@dataclass(frozen=True)
class CpuNorm(PackedNorm):
    """scaled: weight * sqrt(D). floor: sqrt(D * eps), so that the divisor is hypot(|x|, floor)."""

    weight: Tensor
    scaled: Tensor
    floor: Tensor
    eps: float


class CpuOps(HostOps):
    name = "torch"
    attention_name = "torch flash over gathered tiles"

    def __init__(self, dtype: torch.dtype) -> None:
        self.linear_name = "onednn-packed" if can_pack(dtype) else "torch-dense"
        self.activation_dtype = dtype

    def product_dtype(self, scheme: WeightScheme) -> str:
        return "int8" if integers.rounds(scheme) else super().product_dtype(scheme)

    def pack_linear(self, parts: Sequence[Tensor], bias: Tensor | None, scheme: WeightScheme) -> PackedWeight:
        bias = None if bias is None else bias.to(self.activation_dtype)
        if scheme.name in rounding.INTEGER_SCHEMES:
            return _laid_out(rounding.pack(parts, bias, scheme))
        return lay_out(torch.cat([part.to(self.activation_dtype) for part in parts]), bias)

    def pack_rounded(self, parts: Iterable[RoundedRows], shape: LinearShape) -> PackedWeight:
        bias = None if shape.bias is None else shape.bias.to(self.activation_dtype)
        return _laid_out(rounding.pack_rounded(parts, replace(shape, bias=bias)))

    def linear(self, x: Tensor, packed: PackedWeight, residual: Tensor | None = None) -> Tensor:
        if isinstance(packed, Stack):
            return packed.product(self.linear, x, residual)
        if isinstance(packed, integers.ByteWeight):
            return integers.product(x, packed, residual)
        if isinstance(packed, rounding.RebuiltWeight):
            return integers.rebuilt_product(x, packed, residual)
        return product(x, own(packed, CpuWeight), residual)

    def pack_norm(self, weight: Tensor, eps: float) -> CpuNorm:
        width = weight.shape[-1]
        return CpuNorm(weight, weight * width**0.5, torch.tensor((width * eps) ** 0.5), eps)

    def rms_norm(self, x: Tensor, packed: PackedNorm) -> Tensor:
        """x / sqrt(mean(x^2) + eps) = x sqrt(D) / hypot(|x|, sqrt(D eps))."""
        norm = own(packed, CpuNorm)
        if x.dtype != torch.float32:
            return torch.rms_norm(x.float(), x.shape[-1:], None, norm.eps).to(x.dtype) * norm.weight
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * norm.scaled).div_(torch.hypot(length, norm.floor))

    def rotate(self, x: Tensor, turns: Tensor) -> None:
        pairs = x.unflatten(-1, (-1, 2))
        if x.dtype == torch.float32:
            torch.view_as_complex(pairs).mul_(turns.unsqueeze(1))
        else:
            pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(turns.unsqueeze(1))))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def plan_attention(self, batch: AttentionBatch, shape: KvShape, window_tokens: int | None) -> attention.GatherPlan:
        return attention.plan(batch, shape, window_tokens, self.activation_dtype)

    def write_kv(self, kv: Tensor, store: LayerKv, plan: AttentionPlan) -> None:
        attention.write_kv(kv, store, own(plan, attention.GatherPlan))

    def attention(self, q: Tensor, kv: LayerKv, plan: AttentionPlan, weighing: Weighing) -> Tensor:
        return attention.attend(q, kv, own(plan, attention.GatherPlan), weighing)
