"""The kernels of `integers`: a tile of outputs and tokens, from words to float32 sums. The layout is told there."""

import triton
import triton.language as tl

from splittime.kernels.triton.tiles import finish
from splittime.kernels.triton.unpacking import half_of, slab_of, zeros_of

SLAB_COLUMNS = 32  # and words of a tile
SLAB = tl.constexpr(SLAB_COLUMNS)


@triton.jit
def product(
    x_ptr, rows, is_row, in_features, words_ptr, scales_ptr, outs, out_features, begin, end,
    BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, HAS_MINIMA: tl.constexpr, IS_WHOLE: tl.constexpr,
    DOT: tl.constexpr, FAST: tl.constexpr, OUTS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of the tiles [begin, end) -> float32 [OUTS, TOKENS]. rows: where each token's x begins, int64 [TOKENS].

    UNIT: columns that surely have one group. IS_WHOLE: the last tile ends with x's columns."""
    TILE: tl.constexpr = SLAB * 32 // BITS
    is_out = outs < out_features
    lanes = tl.arange(0, SLAB)
    words_at = words_ptr + outs.to(tl.int64)[:, None] * SLAB + lanes[None, :]
    x_at = x_ptr + rows[None, :] + lanes[:, None]
    sums = tl.zeros([OUTS, TOKENS], tl.float32)
    for tile in tl.range(begin, end, num_stages=STAGES):
        words = tl.load(words_at + tile * (out_features * SLAB), mask=is_out[:, None], other=0)
        for unit in tl.static_range(TILE // UNIT):
            if GROUP == 0:
                scales = tl.zeros([OUTS], tl.int32)
            else:
                group = (tile * TILE + unit * UNIT) // GROUP
                scales = tl.load(scales_ptr + group * out_features + outs, mask=is_out, other=0)
            zeros = zeros_of(scales, BITS, HAS_MINIMA, DOT, FAST)
            part = tl.zeros([OUTS, TOKENS], tl.float32)
            total = tl.zeros([TOKENS], tl.float32)
            for slab in tl.static_range(unit * UNIT // SLAB, (unit * UNIT + UNIT + SLAB - 1) // SLAB):
                seen = is_row[None, :]
                if not IS_WHOLE:
                    seen = seen & (lanes + (tile * TILE + slab * SLAB) < in_features)[:, None]
                if UNIT < SLAB:
                    seen = seen & ((lanes + slab * SLAB) // UNIT == unit)[:, None]
                x = tl.load(x_at + tile * TILE + slab * SLAB, mask=seen, other=0).to(DOT)
                weights = slab_of(words, zeros, BITS, slab, DOT, FAST)
                if GROUP == 0:
                    sums = tl.dot(weights, x, sums, input_precision="ieee")
                else:
                    part = tl.dot(weights, x, part, input_precision="ieee")
                if HAS_MINIMA:
                    total += tl.sum(x.to(tl.float32), 0)
            if GROUP != 0:
                sums += half_of(scales)[:, None] * part
            if HAS_MINIMA:
                sums -= half_of(scales >> 16)[:, None] * total[None, :]
    if GROUP == 0:
        sums *= tl.load(scales_ptr + outs, mask=is_out, other=0)[:, None]
    return sums


@triton.jit(do_not_specialize=["num_tokens"])
def multiply(
    x_ptr, words_ptr, scales_ptr, y_ptr, bias_ptr, residual_ptr,
    num_tokens, in_features, out_features, tiles, x_stride,
    BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, HAS_MINIMA: tl.constexpr, IS_WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr,
    OUTS: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    outs = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    split = tl.program_id(2)
    share = tl.cdiv(tiles, SPLITS)
    sums = product(
        x_ptr, tokens.to(tl.int64) * x_stride, tokens < num_tokens, in_features,
        words_ptr, scales_ptr, outs, out_features,
        split * share, tl.minimum(split * share + share, tiles),
        BITS, GROUP, UNIT, HAS_MINIMA, IS_WHOLE, DOT, FAST, OUTS, TOKENS, STAGES,
    )  # fmt: skip
    finish(
        sums, y_ptr, bias_ptr, residual_ptr, tokens, outs, num_tokens, out_features, split,
        HAS_BIAS, HAS_RESIDUAL, SPLITS > 1,
    )  # fmt: skip
