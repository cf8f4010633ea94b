"""Matrix products with weights laid out once, when they are loaded.

Three routes, chosen by the machine, the dtype and the size, never by trial at run time:

* *packed*: oneDNN's blocked layout (`_reorder_linear_weight`, then `_linear_pointwise`). On a Zen 3 (AVX2), 3072 x 2048
  in float32: 1.7x `F.linear` at one row, 2.5x at 4, 2.0x at 8, 1.4x at 32; level at 128. bfloat16 needs AVX-512 or
  AVX-NE-CONVERT; where the CPU lacks them oneDNN refuses to pack and the dense route serves.
* *transposed*: `mm` with the weight stored [in, out]; a packed call costs 45 us here whatever its size, so a single row
  against a small weight is faster this way (256 x 256: 7 us against 45; 4096 x 256: 180 against 250).
* *dense*: `F.linear`.

Small weights keep both the packed and the transposed form (they are small), large ones only the packed one.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SMALL_WEIGHT_ELEMENTS = 1 << 21
PACKING_ROWS_HINT = 16  # oneDNN picks a layout for about this many rows; 16 was at least as fast as the true number

_onednn = torch.ops.mkldnn
_linear_pointwise = _onednn._linear_pointwise.default
_linear_pointwise_add = _onednn._linear_pointwise.binary


@dataclass(frozen=True)
class PackedLinear:
    """At least one of the three forms of a weight [out, in] is there."""

    packed: Tensor | None  # opaque oneDNN tensor
    transposed: Tensor | None  # [in, out]
    dense: Tensor | None  # [out, in]
    bias: Tensor | None  # [out]


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has a packed product for `dtype` on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(_onednn._is_mkldnn_bf16_supported()))


def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Lay out `weight` [out, in] for `apply`."""
    if not can_pack(weight.dtype):
        return PackedLinear(None, None, weight.contiguous(), bias)
    packed = _onednn._reorder_linear_weight(weight.contiguous(), PACKING_ROWS_HINT)
    is_small = weight.dtype == torch.float32 and weight.numel() <= SMALL_WEIGHT_ELEMENTS
    return PackedLinear(packed, weight.t().contiguous() if is_small else None, None, bias)


def apply(x: Tensor, linear: PackedLinear, residual: Tensor | None = None) -> Tensor:
    """x [T, in] -> [T, out], see `kernels.api.Ops.linear`."""
    if linear.packed is None:
        y = F.linear(x, linear.dense, linear.bias)  # type: ignore[arg-type]
        return y if residual is None else y.add_(residual)
    if linear.transposed is not None and x.shape[0] == 1:
        return _apply_transposed(x, linear.transposed, linear.bias, residual)
    if residual is None:
        return _linear_pointwise(x, linear.packed, linear.bias, "none", [], "")
    return _linear_pointwise_add(x, residual, linear.packed, linear.bias, "add")


def _apply_transposed(x: Tensor, transposed: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    if residual is not None:
        y = torch.addmm(residual, x, transposed)
        return y if bias is None else y.add_(bias)
    return torch.mm(x, transposed) if bias is None else torch.addmm(bias, x, transposed)
