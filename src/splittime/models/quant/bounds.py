"""How far a quantised product may be from the true one: a bound for each element, worked out from x and W.

Let y = x W^T, and y' the product with the rounded weight W' = W + E. Then

    |y'_i - y_i| = |sum_j x_j E_ij| <= sum_j |x_j| e_ij        with |E_ij| <= e_ij

* int8, s_i = max_j |W_ij| / 127: no |W_ij| / s_i exceeds 127, so nothing is clamped and rounding errs by half a step at
  most: e_ij = s_i / 2.
* int4, s_g = float16(m / -8): in steps of s_g, values lie in [-8, 8] (-8 is m; 8 would be -m), and 8 is clamped to 7.
  So where W_ij has the sign of m, or is smaller than 7.5 steps, it errs by half a step, else by one step at most. The
  scale's own rounding to float16 moves 8 steps by 8 * 2^-11 = 2^-8 of a step, and scales that are subnormal in float16
  are off by 2^-25, 8 steps of them by 2^-22: e_ij = (1 + 2^-8) |s_g| + 2^-22.

The native kernels round x too, x' = x + d, with t = max |x_j| / 127 over a token (int8) or a token and group (int4) and
so |d_j| <= t / 2, which adds at most sum_j |d_j| |W'_ij| <= sum_g t_g / 2 sum_{j in g} |W'_ij|.

Accumulating in float32 adds K units of 2^-24 times sum |x_j W'_ij|, for K columns. All of it is far above what is seen:
errors of different columns have different signs, and the typical one is about sqrt(K) rather than K times one column's.
"""

import torch.nn.functional as F
from torch import Tensor

from splittime.kernels.api import WeightScheme
from splittime.kernels.reference import rounding


def weight_error(weight: Tensor, scheme: WeightScheme) -> Tensor:
    """e_ij of above for weight [out, in]: float32 [out, in]."""
    _, scales = rounding.quantize(weight, scheme)
    step = scales.abs().repeat_interleave(_width(weight, scheme), dim=1)[:, : weight.shape[1]]
    if scheme.name == "int8":
        return step / 2 * (1 + 2**-15)  # w / s and q * s are themselves float32: 127 * 2^-23 steps
    return step * (1 + 2**-8) + 2**-22


def product_error(x: Tensor, weight: Tensor, scheme: WeightScheme, rounds_activations: bool) -> Tensor:
    """The largest |y' - y| there may be: x [T, in], weight [out, in] -> float32 [T, out]."""
    kept = rounding.dequantize(*rounding.quantize(weight, scheme), scheme).abs()
    bound = x.abs() @ weight_error(weight, scheme).T + weight.shape[1] * 2**-24 * (x.abs() @ kept.T)
    if not rounds_activations:
        return bound
    width = _width(weight, scheme)
    tops = _grouped(x.abs(), width).amax(-1) / 127  # t, [T, groups]
    return bound + tops / 2 * (1 + 2**-15) @ _grouped(kept, width).sum(-1).T


def _width(weight: Tensor, scheme: WeightScheme) -> int:
    return scheme.group or weight.shape[1]


def _grouped(values: Tensor, width: int) -> Tensor:
    return F.pad(values, (0, -values.shape[1] % width)).unflatten(1, (-1, width))
