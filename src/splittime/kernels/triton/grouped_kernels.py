"""The kernels of `grouped`: a tile of pairs times one expert's weights, and the sum of a token's experts."""

import triton
import triton.language as tl

from splittime.kernels.triton import integers_kernels, w8a8_kernels

DENSE_COLUMNS = tl.constexpr(64)  # of a step


@triton.jit
def _dense_product(
    x_ptr, rows, is_row, in_features, weight_ptr, outs, out_features,
    DOT: tl.constexpr, OUTS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    is_out = outs < out_features
    places = outs.to(tl.int64) * in_features
    lanes = tl.arange(0, DENSE_COLUMNS)
    sums = tl.zeros([OUTS, TOKENS], tl.float32)
    for begin in tl.range(0, in_features, DENSE_COLUMNS, num_stages=STAGES):
        here = begin + lanes
        is_column = here < in_features
        seen = is_out[:, None] & is_column[None, :]
        weight = tl.load(weight_ptr + places[:, None] + here[None, :], mask=seen, other=0)
        x = tl.load(x_ptr + rows[None, :] + here[:, None], mask=is_column[:, None] & is_row[None, :], other=0)
        sums = tl.dot(weight.to(DOT), x.to(DOT), sums, input_precision="ieee")
    return sums


@triton.jit
def _sums(
    x_ptr, rows, is_row, in_features, weight_ptr, scales_ptr, outs, out_features, width, groups, expert,
    BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, HAS_MINIMA: tl.constexpr, IS_WHOLE: tl.constexpr,
    FLOAT8: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr,
    OUTS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One expert's product, with the kernel of its weights. width: tiles of integers (or columns) of an output.
    groups: of scales of an output; of FLOAT8 all scales of an expert."""
    expert = expert.to(tl.int64)
    if FLOAT8:
        num_scales = groups // (width // w8a8_kernels.TILE)
        return w8a8_kernels.product_with_floats(
            x_ptr, rows, is_row, in_features, weight_ptr + expert * width * out_features, scales_ptr + expert * groups,
            outs, out_features, width, num_scales, UNIT, DOT, OUTS, TOKENS, STAGES,
        )  # fmt: skip
    elif BITS < 16:
        weight_ptr += expert * width * out_features * 32
        scales_ptr += expert * groups * out_features
        return integers_kernels.product(
            x_ptr, rows, is_row, in_features, weight_ptr, scales_ptr, outs, out_features, 0, width,
            BITS, GROUP, UNIT, HAS_MINIMA, IS_WHOLE, DOT, FAST, OUTS, TOKENS, STAGES,
        )  # fmt: skip
    else:
        weight_ptr += expert * width * out_features
        return _dense_product(
            x_ptr, rows, is_row, in_features, weight_ptr, outs, out_features, DOT, OUTS, TOKENS, STAGES
        )


@triton.jit
def products(
    x_ptr, chosen_ptr, pairs_ptr, tiles_ptr, shares_ptr, weight_ptr, scales_ptr, y_ptr,
    in_features, num_outputs, out_features, width, groups, x_stride, num_chosen,
    IS_GATED: tl.constexpr, IS_ALONE: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, HAS_MINIMA: tl.constexpr, IS_WHOLE: tl.constexpr,
    FLOAT8: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr,
    OUTS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """num_outputs: of y; out_features: of the weight, twice as many if IS_GATED."""
    tile = tl.program_id(0)
    if IS_ALONE:
        expert, begin, end = tl.load(chosen_ptr + tile).to(tl.int32), tile, tile + 1
    else:
        expert, begin = tl.load(tiles_ptr + tile * 3), tl.load(tiles_ptr + tile * 3 + 1)
        end = tl.load(tiles_ptr + tile * 3 + 2)
    if expert >= 0:
        here = begin + tl.arange(0, TOKENS)
        is_row = here < end
        pairs = here
        if not IS_ALONE:
            pairs = tl.load(pairs_ptr + here, mask=is_row, other=0)
        rows = (pairs // num_chosen if IS_GATED else pairs).to(tl.int64) * x_stride
        outs = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
        sums = _sums(
            x_ptr, rows, is_row, in_features, weight_ptr, scales_ptr, outs, out_features, width, groups, expert,
            BITS, GROUP, UNIT, HAS_MINIMA, IS_WHOLE, FLOAT8, DOT, FAST, OUTS, TOKENS, STAGES,
        )  # fmt: skip
        if IS_GATED:
            up = _sums(
                x_ptr, rows, is_row, in_features, weight_ptr, scales_ptr, outs + num_outputs, out_features, width,
                groups, expert, BITS, GROUP, UNIT, HAS_MINIMA, IS_WHOLE, FLOAT8, DOT, FAST, OUTS, TOKENS, STAGES,
            )  # fmt: skip
            sums = sums / (1 + tl.exp(-sums)) * up
        else:
            sums *= tl.load(shares_ptr + pairs, mask=is_row, other=0).to(tl.float32)[None, :]
        places = pairs.to(tl.int64)[None, :] * num_outputs + outs[:, None]
        is_there = (outs < num_outputs)[:, None] & is_row[None, :]
        tl.store(y_ptr + places, sums.to(y_ptr.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=["num_pairs"])
def combine(
    y_ptr, residual_ptr, out_ptr, chosen_ptr, run_ptr, width, num_pairs,
    CHOSEN: tl.constexpr, HAS_RESIDUAL: tl.constexpr, COUNTS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, lanes = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = lanes < width
    sums = tl.zeros([BLOCK], tl.float32)
    if HAS_RESIDUAL:
        sums += tl.load(residual_ptr + token * width + lanes, mask=is_there, other=0).to(tl.float32)
    for choice in tl.static_range(CHOSEN):
        pair = token * CHOSEN + choice
        is_made = is_there & (tl.load(chosen_ptr + pair) >= 0)
        sums += tl.load(y_ptr + pair * width + lanes, mask=is_made, other=0).to(tl.float32)
    tl.store(out_ptr + token * width + lanes, sums.to(out_ptr.dtype.element_ty), mask=is_there)
    if COUNTS and tl.program_id(0) + tl.program_id(1) == 0:
        pairs = tl.arange(0, PAIRS)
        mine = tl.load(chosen_ptr + pairs, mask=pairs < num_pairs, other=-1)
        is_again = (mine[:, None] == mine[None, :]) & (pairs[None, :] < pairs[:, None])
        is_first = (tl.sum(is_again.to(tl.int32), 1) == 0) & (mine >= 0)
        tl.store(run_ptr, tl.load(run_ptr) + tl.sum(is_first.to(tl.int64), 0))
