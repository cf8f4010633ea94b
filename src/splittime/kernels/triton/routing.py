"""Which tokens each expert works on, worked out on the device: no value leaves it, and sizes depend on shapes alone.

A *pair* is p = t k + c, token t's choice c of k. Pairs are grouped by expert, in their order, and each expert's are cut
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
