"""Products of eight bits with eight bits: weights rounded once, one scale an output, activations as they come, one
scale a token.

    y[t, n] = s[n] * r[t] * sum_k q[n, k] p[t, k],    x[t, k] ~ r[t] p[t, k]

    int8    q, p in -127..127 (weights that come as integers: from -128), r = max |x[t]| / 127, ties to even: the rule
            of the native kernels. Sums are int32, exact: 2^31 / 127^2 is 133,000 columns.
    fp8     q, p in e4m3 (largest: 448; Micikevicius et al., arXiv:2209.05433), s and r = largest / 448. The matrix
            instruction of Hopper keeps about 14 bits of its sums (DeepSeek-V3, arXiv:2412.19437, 3.3.2), so each TILE
            of columns is summed anew and added in float32.

Beside a weight-only product this halves the bytes of activations and doubles the matrix rate, at the price of rounding
x; `kernels.reference.products` says both in plain torch. Rounding a token is a kernel of its own, `round_rows`, which
every product with the same x could share.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from splittime.kernels.triton.device import is_interpreted
from splittime.kernels.triton.tiles import FEW_TOKENS, SOME_TOKENS, Tiles, add_parts, finish, splits_for, sums_target

TILE = tl.constexpr(128)
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
ROUND_COLUMNS = 2048  # at a time: 16 bytes for each of 256 threads


@dataclass(frozen=True)
class RoundedLinear:
    """values: int8 or float8_e4m3fn [out, columns filled up to whole tiles]; scales: float32 [out]."""

    values: Tensor
    scales: Tensor
    in_features: int
    bias: Tensor | None = None

    @property
    def out_features(self) -> int:
        return len(self.values)


def empty(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> RoundedLinear:
    """A weight to `put` rows in."""
    columns = -(-in_features // TILE.value) * TILE.value
    values = torch.zeros(out_features, columns, dtype=torch.int8, device=device).view(dtype)
    return RoundedLinear(values, torch.zeros(out_features, dtype=torch.float32, device=device), in_features)


def put(weight: RoundedLinear, begin: int, values: Tensor, scales: Tensor) -> None:
    """values [rows, in] of the weight's dtype and scales [rows], at outputs [begin, ..)."""
    here, bits = slice(begin, begin + len(values)), torch.int8
    weight.values.view(bits)[here, : weight.in_features] = values.view(bits).to(weight.values.device)
    weight.scales[here] = scales.to(weight.scales.device)


def choose(num_tokens: int, weight: RoundedLinear) -> Tiles:
    """Both operands are read from shared memory as they are and nothing is unpacked: only the shape matters. 64 outputs
    are the fewest of the 8-bit matrix instruction of a warp group; below, float8 would be widened to float16."""
    splits = splits_for(triton.cdiv(weight.out_features, 64), weight.values.shape[1] // TILE.value)
    if num_tokens <= FEW_TOKENS:
        return Tiles(tokens=16, outputs=64, splits=splits, num_warps=4, num_stages=5)
    if num_tokens <= SOME_TOKENS:
        return Tiles(tokens=64, outputs=64, splits=splits, num_warps=4, num_stages=4)
    return Tiles(tokens=128, outputs=128, num_warps=8, num_stages=4)


@triton.jit
def rounded_even(v):
    """float32 of up to 2^22 -> the nearest integer, ties to even: there is no room for a fraction above 1.5 * 2^23."""
    return (v + 12582912.0) - 12582912.0


@triton.jit
def to_e4m3(v, IS_EXACT: tl.constexpr):
    """float32 of up to 448 -> float8e4nv, ties to even. IS_EXACT: rounded in float32 first, for the interpreter, whose
    own conversion cuts: three bits after the leading one, or below 2^-6 multiples of 2^-9."""
    if IS_EXACT:
        bits = v.to(tl.int32, bitcast=True)
        normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        v = tl.where(tl.abs(v) < 0.015625, (v + 24576.0) - 24576.0, normal.to(tl.float32, bitcast=True))
    return v.to(tl.float8e4nv)


@triton.jit
def _round_rows(
    x_ptr, values_ptr, scales_ptr, in_features, columns, x_stride,
    LIMIT: tl.constexpr, IS_INTEGER: tl.constexpr, IS_EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, in_features, BLOCK):
        here = begin + lanes
        x = tl.load(x_ptr + row * x_stride + here, mask=here < in_features, other=0).to(tl.float32)
        most = tl.maximum(most, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)  # sorts like magnitudes, NaN above all
    largest = tl.max(most, 0).to(tl.float32, bitcast=True)
    inverse = tl.where(largest < 1e-30, 0.0, tl.div_rn(largest * 0 + LIMIT, largest))
    tl.store(scales_ptr + row, tl.div_rn(largest, largest * 0 + LIMIT))
    for begin in range(0, columns, BLOCK):
        here = begin + lanes
        x = tl.load(x_ptr + row * x_stride + here, mask=here < in_features, other=0).to(tl.float32)
        values = rounded_even(x * inverse).to(tl.int8) if IS_INTEGER else to_e4m3(x * inverse, IS_EXACT)
        tl.store(values_ptr + row * columns + here, values, mask=here < columns)


def round_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [T, in], of contiguous rows -> (of dtype int8 or float8_e4m3fn [T, whole tiles], zeros after the last column;
    float32 [T]). A token that is not finite gets a scale that is not."""
    num_tokens, in_features = x.shape
    columns = -(-in_features // TILE.value) * TILE.value
    values = torch.empty(num_tokens, columns, dtype=dtype, device=x.device)
    scales = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    _round_rows[(num_tokens,)](
        x, values, scales, in_features, columns, x.stride(0), LARGEST[dtype], dtype == torch.int8, is_interpreted(),
        ROUND_COLUMNS, num_warps=8,
    )  # fmt: skip
    return values, scales


@triton.jit(do_not_specialize=["num_tokens"])
def _linear(
    x_ptr, x_scales_ptr, values_ptr, scales_ptr, y_ptr, bias_ptr, residual_ptr, num_tokens, out_features, columns,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_INTEGER: tl.constexpr,
    OUTS: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    outs = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    is_row, is_out = tokens < num_tokens, outs < out_features
    lanes = tl.arange(0, TILE)
    split = tl.program_id(2)
    share = tl.cdiv(columns // TILE, SPLITS) * TILE
    x_places, places = tokens.to(tl.int64) * columns, outs.to(tl.int64) * columns
    counts = tl.zeros([OUTS, TOKENS], tl.int32 if IS_INTEGER else tl.float32)
    for begin in tl.range(split * share, tl.minimum(split * share + share, columns), TILE, num_stages=STAGES):
        here = begin + lanes
        # Whatever stands for a row or an output that is not there stays in sums that are not stored.
        values = tl.load(values_ptr + places[:, None] + here[None, :], mask=is_out[:, None])
        x = tl.load(x_ptr + x_places[None, :] + here[:, None], mask=is_row[None, :])
        if IS_INTEGER:
            counts = tl.dot(values, x, counts, out_dtype=tl.int32)
        else:
            counts = tl.dot(values, x, counts, max_num_imprecise_acc=TILE)
    scales = tl.load(scales_ptr + outs, mask=is_out, other=0)
    x_scales = tl.load(x_scales_ptr + tokens, mask=is_row, other=0)
    sums = counts.to(tl.float32) * scales[:, None] * x_scales[None, :]
    finish(
        sums, y_ptr, bias_ptr, residual_ptr, tokens, outs, num_tokens, out_features, split,
        HAS_BIAS, HAS_RESIDUAL, SPLITS > 1,
    )  # fmt: skip


def linear(x: Tensor, weight: RoundedLinear, residual: Tensor | None = None, tiles: Tiles | None = None) -> Tensor:
    """x [T, in], of contiguous rows -> x W^T + bias (+ residual) [T, out]. tiles: for benchmarks; else `choose`."""
    values, scales = round_rows(x, weight.values.dtype)
    return product(values, scales, weight, residual, x.dtype, tiles)


def product(
    values: Tensor, scales: Tensor, weight: RoundedLinear, residual: Tensor | None, dtype: torch.dtype,
    tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """The same, of what `round_rows` made: -> [T, out] of `dtype`."""
    num_tokens, out_features = len(values), weight.out_features
    tiles = tiles or choose(num_tokens, weight)
    y = torch.empty(num_tokens, out_features, dtype=dtype, device=values.device)
    target, ends = sums_target(y, tiles.splits), tiles.splits == 1
    _linear[tiles.grid(num_tokens, out_features)](
        values, scales, weight.values, weight.scales, target,
        weight.bias if ends else None, residual if ends else None, num_tokens, out_features, weight.values.shape[1],
        HAS_BIAS=ends and weight.bias is not None, HAS_RESIDUAL=ends and residual is not None,
        IS_INTEGER=values.dtype == torch.int8, OUTS=tiles.outputs, TOKENS=tiles.tokens, SPLITS=tiles.splits,
        STAGES=tiles.num_stages, num_warps=tiles.num_warps,
    )  # fmt: skip
    if not ends:
        add_parts(target, weight.bias, residual, y)
    return y
