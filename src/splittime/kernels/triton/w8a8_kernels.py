"""The kernels of `w8a8`: tokens (or groups of 128 of their columns) rounded to 8 bits, and a tile of the product; and
one of e4m3 with activations as they are, for `grouped`."""

import triton
import triton.language as tl

from splittime.kernels.triton.tiles import finish

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
