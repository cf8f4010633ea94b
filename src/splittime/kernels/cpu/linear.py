"""Matrix products with weights laid out once, when they are loaded.

Three layouts, chosen by the machine, the dtype and the size, never by trial at run time:

* *packed*: oneDNN's blocked layout (`_reorder_linear_weight`, then `_linear_pointwise`, which also adds the residual).
  On a Zen 3 (AVX2), 3072 x 2048 in float32, two threads: 1.7x `F.linear` at one row, 2.5x at 4, 2.0x at 8, 1.4x at 32;
  level at 128. bfloat16 needs AVX-512 or AVX-NE-CONVERT; where the CPU lacks them oneDNN refuses to pack.
* *transposed*: `mm` with the weight stored [in, out]. A packed call has 30 to 45 us of its own, so a tiny weight is
  always faster this way (256 x 256, one thread: 7 us against 29 at one row, level from 64 rows on), and a small one is
  at one row (4096 x 256: 87 against 128; but at 4 rows 378 against 230).
* *dense*: `F.linear`, where packing is not possible.

So a tiny weight is kept transposed, a small one both ways, a large one packed only.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from splittime.kernels import reads
from splittime.kernels.layer_weights import PackedWeight

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
    """Whether oneDNN has a packed product for `dtype` on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(_onednn._is_mkldnn_bf16_supported()))


def pack(weight: Tensor, bias: Tensor | None) -> CpuWeight:
    """Lay out `weight` [out, in] for `apply`."""
    if not can_pack(weight.dtype):
        return CpuWeight(None, None, weight.contiguous(), bias)
    is_wide = weight.dtype == torch.float32
    transposed = weight.t().contiguous() if is_wide and weight.numel() <= SMALL_WEIGHT_ELEMENTS else None
    if transposed is not None and weight.numel() <= TINY_WEIGHT_ELEMENTS:
        return CpuWeight(None, transposed, None, bias)
    packed = _onednn._reorder_linear_weight(weight.contiguous(), PACKING_ROWS_HINT)
    return CpuWeight(packed, transposed, None, bias)


def apply(x: Tensor, linear: CpuWeight, residual: Tensor | None = None) -> Tensor:
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
    reads.count_weight(str(weight.dtype).removeprefix("torch."), weight)


def _apply_transposed(x: Tensor, transposed: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    if residual is not None:
        y = torch.addmm(residual, x, transposed)
        return y if bias is None else y.add_(bias)
    return torch.mm(x, transposed) if bias is None else torch.addmm(bias, x, transposed)
