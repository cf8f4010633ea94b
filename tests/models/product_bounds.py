"""How far a quantised product may be from the true one: a bound for each element, worked out from x and W.

Let y = x W^T, and y' the product with the rounded weight W' = W + E. Then

    |y'_i - y_i| = |sum_j x_j E_ij| <= sum_j |x_j| e_ij        with |E_ij| <= e_ij

* int8, s_i = max_j |W_ij| / 127: no |W_ij| / s_i exceeds 127, so nothing is clamped and rounding errs by half a step at
  most: e_ij = s_i / 2. In groups the scale is rounded to float16, so that a value may be 127 * 2^-11 steps beyond the
  last integer, far less than half a step; where it is subnormal, off by 2^-25, 127 * 2^-25 < 2^-18 beyond: + 2^-18.
* int4, s_g = float16(m / -8): in steps of s_g, values lie in [-8, 8] (-8 is m; 8 would be -m), and 8 is clamped to 7.
  So where W_ij has the sign of m, or is smaller than 7.5 steps, it errs by half a step, else by one step at most. The
  scale's own rounding to float16 moves 8 steps by 8 * 2^-11 = 2^-8 of a step, and scales that are subnormal in float16
  are off by 2^-25, 8 steps of them by 2^-22: e_ij = (1 + 2^-8) |s_g| + 2^-22.

A weight that comes as integers, w = s (q - z) - m, is not rounded again, but scales and minima of groups are kept as
float16, each off by 2^-11 of itself or by 2^-25: e_ij = 2^-11 (|s_g (q - z)| + |m_g|) + 2^-25 (|q - z| + 1). AWQ, GPTQ
and GGUF's Q4_0 and Q8_0 have float16 scales, for which it is 0. GGUF's Q4_K, Q5_K and Q6_K multiply a float16 by 6 or 8
bits: the native kernels keep both, and it is 0 too; torch keeps the product. Measured on down_proj of two small Llamas,
of the size of y: float16 moves a product by 0.0002 (Q4_K, Q6_K) and 0.0006 (Q5_K), rounding x to int8 by 0.005, and the
quantisation itself by 0.08 (Q4_K), 0.04 (Q5_K), 0.02 (Q6_K).

The native kernels round x too, x' = x + d, with t = max |x_j| / 127 over a token (int8) or a token and group and so
|d_j| <= t / 2, which adds at most sum_j |d_j| |W'_ij| <= sum_g t_g / 2 sum_{j in g} |W'_ij|.

A turned weight is W H, and its product that of x H, H being orthogonal: all of this holds for the turned ones. Turning
adds up in float32, once for each doubling of a block, and so moves a row by at most 11 * 2^-24 of its length.

Accumulating in float32 adds K units of 2^-24 times sum |x_j| times the sizes of what is added (|W'_ij|, or for integers
|s (q - z)| + |m|, which are added up apart), for K columns. All of it is far above what is seen: errors of different
columns have different signs, and the typical one is about sqrt(K) rather than K times one column's.
"""

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from splittime.kernels import rounded
from splittime.kernels.api import RoundedRows, WeightScheme
from splittime.kernels.reference import rounding


def weight_error(weight: Tensor, scheme: WeightScheme) -> Tensor:
    """e_ij of above for weight [out, in] of floats (of the turned one, if it is): float32 [out, in]."""
    _, scales = rounding.quantize(weight, scheme)
    step = _spread(scales.abs(), weight.shape[1], scheme)
    if scheme.name == "int8":
        error = step / 2 * (1 + 2**-15)  # w / s and q * s are themselves float32: 127 * 2^-23 steps
        return error + 2**-18 if scheme.group else error
    return step * (1 + 2**-8) + 2**-22


def product_error(x: Tensor, weight: Tensor, scheme: WeightScheme, rounds_activations: bool) -> Tensor:
    """The largest |y' - y| there may be: x [T, in], weight [out, in] -> float32 [T, out]."""
    if scheme.is_turned:
        lengths = x.norm(dim=1)[:, None] * weight.norm(dim=1)
        inner = product_error(*map(rounding.turned, (x, weight)), replace(scheme, is_turned=False), rounds_activations)
        return inner + 22 * 2**-24 * lengths
    kept = rounding.dequantize(*rounding.quantize(weight, scheme), scheme).abs()
    bound = x.abs() @ weight_error(weight, scheme).T + _summing_error(x, kept)
    return bound + _activation_error(x, kept, scheme) if rounds_activations else bound


def kept_error(rows: RoundedRows, scheme: WeightScheme) -> Tensor:
    """e_ij of above for a weight that comes as integers: float32 [out, in]."""
    if not scheme.group:
        return rows.scales.new_zeros(rows.integers.shape)
    kept = rounded.as_packed(rows, scheme)
    steps = _steps(kept, scheme).abs()
    sizes = _sizes(kept, scheme)
    return sizes * 2**-11 * (1 + 2**-10) + (steps + 1) * 2**-25


def rounded_product_error(x: Tensor, rows: RoundedRows, scheme: WeightScheme, rounds_activations: bool) -> Tensor:
    """The largest |y' - y| there may be for integers: x [T, in] in the order of the weight's columns -> [T, out]."""
    error, kept = kept_error(rows, scheme), rounded.as_packed(rows, scheme)
    sizes = _sizes(kept, scheme) + error
    bound = x.abs() @ error.T + _summing_error(x, sizes)
    if not rounds_activations:
        return bound
    dense = rounding.dequantize(rows.integers, rows.scales, scheme, rows.zeros, rows.minima).abs() + error
    return bound + _activation_error(x, dense, scheme)


def _steps(kept: RoundedRows, scheme: WeightScheme) -> Tensor:
    """q - z, float32 [out, in]."""
    ones, zeros = kept.scales.new_ones(kept.scales.shape), kept.zeros
    return rounding.dequantize(kept.integers, ones, scheme, zeros)


def _sizes(kept: RoundedRows, scheme: WeightScheme) -> Tensor:
    """|s (q - z)| + |m|, float32 [out, in]."""
    columns = kept.integers.shape[1]
    sizes = _steps(kept, scheme).abs() * _spread(kept.scales.abs(), columns, scheme)
    return sizes if kept.minima is None else sizes + _spread(kept.minima.abs(), columns, scheme)


def _summing_error(x: Tensor, sizes: Tensor) -> Tensor:
    return sizes.shape[1] * 2**-24 * (x.abs() @ sizes.T)


def _activation_error(x: Tensor, kept: Tensor, scheme: WeightScheme) -> Tensor:
    width = scheme.group or kept.shape[1]
    tops = _grouped(x.abs(), width).amax(-1) / 127  # t, [T, groups]
    return tops / 2 * (1 + 2**-15) @ _grouped(kept, width).sum(-1).T


def _spread(values: Tensor, columns: int, scheme: WeightScheme) -> Tensor:
    """One of each group -> one of each column."""
    return values.repeat_interleave(scheme.group or columns, dim=1)[:, :columns]


def _grouped(values: Tensor, width: int) -> Tensor:
    return F.pad(values, (0, -values.shape[1] % width)).unflatten(1, (-1, width))
