"""Products of eight bits with eight bits: weights rounded once, one scale an output, activations as they come, one
scale a token.

    y[t, n] = s[n] * r[t] * sum_k q[n, k] p[t, k],    x[t, k] ~ r[t] p[t, k]

    int8    q, p in -127..127 (weights that come as integers: from -128), r = max |x[t]| / 127, ties to even: the rule
            of the native kernels. Sums are int32, exact: 2^31 / 127^2 is 133,000 columns.
    fp8     q, p in e4m3 (largest: 448; Micikevicius et al., arXiv:2209.05433), s and r = largest / 448. The matrix
            instruction of Hopper keeps about 14 bits of its sums (DeepSeek-V3, arXiv:2412.19437, 3.3.2), so each TILE
            of columns is summed anew and added in float32.
    fp8 in groups   a scale for each TILE of 128 columns, of x too (the same, 3.3.1), met by that TILE's sum in float32:

    y[t, n] = sum_g s[n, g] * r[t, g] * sum_{k in g} q[n, k] p[t, k]

            Neighbouring outputs often share their scales, in files all 128 of a block: of those one is kept, or the
            scales would be 3 % of the weight's bytes.

Beside a weight-only product this halves the bytes of activations and doubles the matrix rate, at the price of rounding
x; `kernels.reference.products` says all in plain torch. Rounding a token is a kernel of its own, `round_rows`, which
every product with the same x could share. One kernel is of e4m3 with activations as they are, for `grouped`.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from splittime.kernels.layer import PackedWeight
from splittime.kernels.triton.device import is_interpreted
from splittime.kernels.triton.tiles import (
    FEW_TOKENS,
    SOME_TOKENS,
    End,
    Tiles,
    add_parts,
    finish,
    splits_for,
    sums_target,
)

TILE = tl.constexpr(128)


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
def round_each(
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


@triton.jit(do_not_specialize=["num_tokens"])
def round_groups(
    x_ptr, values_ptr, scales_ptr, in_features, columns, x_stride, num_tokens,
    LIMIT: tl.constexpr, IS_EXACT: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """A program has GROUPS groups of one token; scales lie as [groups, T]."""
    token = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    here = groups[:, None] * TILE + tl.arange(0, TILE)[None, :]
    x = tl.load(x_ptr + token * x_stride + here, mask=here < in_features, other=0).to(tl.float32)
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)  # as in `round_each`
    is_none = largest < 1e-30
    inverse = tl.where(is_none, 0.0, tl.div_rn(largest * 0 + LIMIT, tl.where(is_none, 1.0, largest)))
    scales = tl.div_rn(largest, largest * 0 + LIMIT)
    tl.store(scales_ptr + groups * num_tokens + token, scales, mask=groups * TILE < columns)
    tl.store(values_ptr + token * columns + here, to_e4m3(x * inverse[:, None], IS_EXACT), mask=here < columns)


@triton.jit(do_not_specialize=["num_tokens"])
def multiply(
    x_ptr, x_scales_ptr, values_ptr, scales_ptr, y_ptr, bias_ptr, residual_ptr,
    num_tokens, out_features, columns, num_scales,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_INTEGER: tl.constexpr, UNIT: tl.constexpr,
    OUTS: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """UNIT: outputs that share a scale in each TILE of columns, of which there are num_scales; 0: a scale an output."""
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
        elif UNIT == 0:
            counts = tl.dot(values, x, counts, max_num_imprecise_acc=TILE)
        else:
            group = begin // TILE
            scales = tl.load(scales_ptr + group * num_scales + outs // UNIT, mask=is_out, other=0)
            x_scales = tl.load(x_scales_ptr + group * num_tokens + tokens, mask=is_row, other=0)
            part = tl.dot(values, x, max_num_imprecise_acc=TILE)
            counts += part * (scales[:, None] * x_scales[None, :])
    sums = counts.to(tl.float32)
    if UNIT == 0:
        scales = tl.load(scales_ptr + outs, mask=is_out, other=0)
        x_scales = tl.load(x_scales_ptr + tokens, mask=is_row, other=0)
        sums = sums * scales[:, None] * x_scales[None, :]
    finish(
        sums, y_ptr, bias_ptr, residual_ptr, tokens, outs, num_tokens, out_features, split,
        HAS_BIAS, HAS_RESIDUAL, SPLITS > 1,
    )  # fmt: skip


@triton.jit
def product_with_floats(
    x_ptr, rows, is_row, in_features, values_ptr, scales_ptr, outs, out_features, columns, num_scales,
    UNIT: tl.constexpr, DOT: tl.constexpr, OUTS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """e4m3 with x as it is: sums, float32 [OUTS, TOKENS]. rows: where each token's x begins, int64 [TOKENS]."""
    is_out = outs < out_features
    lanes = tl.arange(0, TILE)
    places = outs.to(tl.int64) * columns
    sums = tl.zeros([OUTS, TOKENS], tl.float32)
    for begin in tl.range(0, columns, TILE, num_stages=STAGES):
        here = begin + lanes
        values = tl.load(values_ptr + places[:, None] + here[None, :], mask=is_out[:, None])
        x = tl.load(
            x_ptr + rows[None, :] + here[:, None], mask=(here < in_features)[:, None] & is_row[None, :], other=0
        )
        if UNIT == 0:
            sums = tl.dot(values.to(DOT), x.to(DOT), sums, input_precision="ieee")
        else:
            scales = tl.load(scales_ptr + begin // TILE * num_scales + outs // UNIT, mask=is_out, other=0)
            sums += tl.dot(values.to(DOT), x.to(DOT), input_precision="ieee") * scales[:, None]
    if UNIT == 0:
        sums *= tl.load(scales_ptr + outs, mask=is_out, other=0)[:, None]
    return sums


LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
ROUND_COLUMNS = 2048  # at a time: 16 bytes for each of 256 threads
SHARING = (128, 64, 32, 16)  # outputs that may share their scales


@dataclass(frozen=True)
class EightBitWeight(PackedWeight):
    """values: int8 or float8_e4m3fn [out, columns filled up to whole tiles]. scales: float32 [out], or where e4m3 is in
    groups [groups, out / unit, rounded up]; unit: outputs that share them, 0 where there are no groups."""

    values: Tensor
    scales: Tensor
    in_features: int
    bias: Tensor | None = None
    unit: int = 0

    @property
    def out_features(self) -> int:
        return self.values.shape[-2]


def empty(
    out_features: int, in_features: int, dtype: torch.dtype, device: torch.device, in_groups: bool = False
) -> EightBitWeight:
    """A weight to `put` rows in."""
    tiles = -(-in_features // TILE.value)
    values = torch.zeros(out_features, tiles * TILE.value, dtype=torch.int8, device=device).view(dtype)
    sizes = (tiles, out_features) if in_groups else (out_features,)
    return EightBitWeight(values, torch.zeros(sizes, device=device), in_features, unit=int(in_groups))


def put(weight: EightBitWeight, begin: int, values: Tensor, scales: Tensor) -> None:
    """values [rows, in] of the weight's dtype and scales [rows], or [rows, groups], at outputs [begin, ..)."""
    here, bits = slice(begin, begin + len(values)), torch.int8
    weight.values.view(bits)[here, : weight.in_features] = values.view(bits).to(weight.values.device)
    weight.scales[..., here] = scales.t().to(weight.scales.device)


def with_shared_scales(weight: EightBitWeight) -> EightBitWeight:
    """Once all rows are there: of outputs that share their scales one is kept, of as many as possible."""
    scales = weight.scales
    for unit in SHARING if weight.unit else ():
        each = scales[:, ::unit]
        if torch.equal(each.repeat_interleave(unit, 1)[:, : scales.shape[1]], scales):
            return replace(weight, scales=each.contiguous(), unit=unit)
    return weight


def scales_of(weight: EightBitWeight) -> Tensor:
    """Returns the scale of each value: float32, of a shape that broadcasts to [out, in]."""
    if not weight.unit:
        return weight.scales[:, None]
    rows = weight.scales.repeat_interleave(weight.unit, 1)[:, : weight.out_features]
    return rows.t().repeat_interleave(TILE.value, 1)[:, : weight.in_features]


def choose(num_tokens: int, weight: EightBitWeight) -> Tiles:
    """Both operands are read from shared memory as they are and nothing is unpacked: only the shape matters. 64 outputs
    are the fewest of the 8-bit matrix instruction of a warp group; below, float8 would be widened to float16."""
    splits = splits_for(triton.cdiv(weight.out_features, 64), weight.values.shape[1] // TILE.value)
    if num_tokens <= FEW_TOKENS:
        return Tiles(tokens=16, outputs=64, splits=splits, num_warps=4, num_stages=5)
    if num_tokens <= SOME_TOKENS:
        return Tiles(tokens=64, outputs=64, splits=splits, num_warps=4, num_stages=4)
    return Tiles(tokens=128, outputs=128, num_warps=8, num_stages=4)


def round_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [T, in], of contiguous rows -> (of dtype int8 or float8_e4m3fn [T, whole tiles], zeros after the last column;
    float32 [T]). A token that is not finite gets a scale that is not."""
    num_tokens, in_features = x.shape
    columns = -(-in_features // TILE.value) * TILE.value
    values = torch.empty(num_tokens, columns, dtype=dtype, device=x.device)
    scales = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    round_each[(num_tokens,)](
        x, values, scales, in_features, columns, x.stride(0), LARGEST[dtype], dtype == torch.int8, is_interpreted(),
        ROUND_COLUMNS, num_warps=8,
        enable_fp_fusion=False,  # x * inverse is rounded before something is added to it, as everywhere else
    )  # fmt: skip
    return values, scales


def round_row_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `round_rows`, to e4m3, with a scale for each TILE of a token's columns: float32 [tiles, T]."""
    num_tokens, in_features = x.shape
    tiles, each = -(-in_features // TILE.value), ROUND_COLUMNS // TILE.value
    values = torch.empty(num_tokens, tiles * TILE.value, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(tiles, num_tokens, dtype=torch.float32, device=x.device)
    round_groups[(num_tokens, triton.cdiv(tiles, each))](
        x, values, scales, in_features, values.shape[1], x.stride(0), num_tokens,
        LARGEST[values.dtype], is_interpreted(), each, num_warps=8,
    )  # fmt: skip
    return values, scales


def linear(
    x: Tensor, weight: EightBitWeight, residual: Tensor | None = None, tiles: Tiles | None = None, end: End = add_parts
) -> Tensor:
    """x [T, in], of contiguous rows -> x W^T + bias (+ residual) [T, out]. tiles: for benchmarks; else `choose`."""
    values, scales = round_row_groups(x) if weight.unit else round_rows(x, weight.values.dtype)
    return product(values, scales, weight, residual, x.dtype, tiles, end)


def product(
    values: Tensor, scales: Tensor, weight: EightBitWeight, residual: Tensor | None, dtype: torch.dtype,
    tiles: Tiles | None = None, end: End = add_parts,
) -> Tensor:  # fmt: skip
    """The product with what `round_rows` (or `round_row_groups`) made: [T, out] of `dtype`."""
    num_tokens, out_features = len(values), weight.out_features
    tiles = tiles or choose(num_tokens, weight)
    y = torch.empty(num_tokens, out_features, dtype=dtype, device=values.device)
    target, ends = sums_target(y, tiles.splits), tiles.splits == 1
    multiply[tiles.grid(num_tokens, out_features)](
        values, scales, weight.values, weight.scales, target,
        weight.bias if ends else None, residual if ends else None, num_tokens, out_features, weight.values.shape[1],
        weight.scales.shape[-1],
        HAS_BIAS=ends and weight.bias is not None, HAS_RESIDUAL=ends and residual is not None,
        IS_INTEGER=values.dtype == torch.int8, UNIT=weight.unit, OUTS=tiles.outputs, TOKENS=tiles.tokens,
        SPLITS=tiles.splits, STAGES=tiles.num_stages, num_warps=tiles.num_warps,
    )  # fmt: skip
    if not ends:
        end(target, weight.bias, residual, y)
    return y
