"""The kernels of `grouped`: a tile of pairs times one expert's weights, and the sum of a token's experts.

`route` works out which tokens each expert works on: no value leaves the device, and sizes depend on shapes alone. A
*pair* is p = t k + c, token t's choice c of k. Pairs are grouped by expert, in their order, and each expert's are cut
into tiles of so many pairs as a product takes at once:

    pairs [P]        every pair that has an expert, grouped by expert
    tiles [N, 3]     (expert, begin, end): a tile's pairs are pairs[begin:end]; expert -1 where there is no such tile

N is the most there can be: an expert's last tile may be short, so P / size + E, and no more than P. Each expert has a
program of its own, which counts by reading all choices (a few KiB from the cache) and writes in their order: there are
no atomics and the same choices always give the same tables.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from splittime.kernels.triton import integers_kernels, w8a8

CHOICES = 1024  # read at a time


@dataclass(frozen=True)
class Routes:
    """pairs int32 [P], tiles int32 [N, 3], as above. size: pairs of a tile."""

    pairs: Tensor
    tiles: Tensor
    size: int


def capacity(num_pairs: int, num_experts: int, size: int) -> int:
    """The most tiles that any choices can need."""
    return min(num_pairs, num_pairs // size + min(num_experts, num_pairs))


@triton.jit(do_not_specialize=["num_pairs"])
def _count(chosen_ptr, counts_ptr, num_pairs, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    seen = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        chosen = tl.load(chosen_ptr + begin + lanes, mask=begin + lanes < num_pairs, other=-1)
        seen += (chosen == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(seen, 0))


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _place(
    chosen_ptr, counts_ptr, pairs_ptr, tiles_ptr, run_ptr, num_pairs, num_experts, num_tiles,
    SIZE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    all_experts, lanes = tl.arange(0, EXPERTS), tl.arange(0, BLOCK)
    counts = tl.load(counts_ptr + all_experts, mask=all_experts < num_experts, other=0)
    tiles = (counts + SIZE - 1) // SIZE
    is_before = all_experts < expert
    begin = tl.sum(tl.where(is_before, counts, 0), 0)
    first = tl.sum(tl.where(is_before, tiles, 0), 0)
    mine = tl.sum(tl.where(all_experts == expert, counts, 0), 0)
    at = begin
    for start in range(0, num_pairs, BLOCK):
        chosen = tl.load(chosen_ptr + start + lanes, mask=start + lanes < num_pairs, other=-1)
        is_mine = (chosen == expert).to(tl.int32)
        tl.store(pairs_ptr + at + tl.cumsum(is_mine, 0) - 1, start + lanes, mask=is_mine > 0)
        at += tl.sum(is_mine, 0)
    for start in range(0, mine, SIZE * BLOCK):
        here = start + lanes * SIZE
        place = tiles_ptr + (first + here // SIZE) * 3
        tl.store(place, tl.zeros([BLOCK], tl.int32) + expert, mask=here < mine)
        tl.store(place + 1, begin + here, mask=here < mine)
        tl.store(place + 2, begin + tl.minimum(here + SIZE, mine), mask=here < mine)
    if expert == num_experts - 1:
        for start in range(tl.sum(tiles, 0), num_tiles, BLOCK):
            none = tl.full([BLOCK], -1, tl.int32)
            tl.store(tiles_ptr + (start + lanes) * 3, none, mask=start + lanes < num_tiles)
        tl.store(run_ptr, tl.load(run_ptr) + tl.sum((counts > 0).to(tl.int64), 0))


def route(chosen: Tensor, num_experts: int, size: int, run: Tensor) -> Routes:
    """chosen: integers [T, k], contiguous, below 0 for no expert, which is in no tile. run: int64 [1], to which the
    number of experts that were chosen is added."""
    num_pairs, device = chosen.numel(), chosen.device
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=device)
    tiles = torch.empty(capacity(num_pairs, num_experts, size), 3, dtype=torch.int32, device=device)
    _count[(num_experts,)](chosen, counts, num_pairs, CHOICES)
    _place[(num_experts,)](
        chosen, counts, pairs, tiles, run, num_pairs, num_experts, len(tiles), size,
        triton.next_power_of_2(num_experts), CHOICES,
    )  # fmt: skip
    return Routes(pairs, tiles, size)


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
        num_scales = groups // (width // w8a8.TILE)
        return w8a8.product_with_floats(
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
