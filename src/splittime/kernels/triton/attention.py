"""Attention over the paged KV store: one call for decode rows, one for the others, on one stream without waiting.

`plan` (of `attention_plan`) is made once a step, `attend` called once a layer. Two launches at most, and one more for
each whose contexts were cut into parts. The others are `attention_prefill`'s.

*Decode.* One query token a row, the row's context split over programs (flash-decoding; Dao, Haziza, Massa and Sizov,
2023).

A program does one part of one KV head of one row, for all query heads that share it: they are the lines of one tile,
so that keys and values are read once. Whether there are few rows or many, about as many programs should run as the card
holds at once; `choose_splits` says into how many parts to cut. It depends on shapes and capacities alone: which tokens
a part covers, each program works out from its row's length, so that a captured launch fits whatever lengths come. Parts
that have nothing to do leave at once. More than one part leaves partial softmaxes, and `SoftmaxParts` puts
them together.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from splittime.kernels.api import KvShape, LayerKv
from splittime.kernels.triton.attention_plan import PagedPlan, kv_bytes, plan, positions_read
from splittime.kernels.triton.attention_prefill import PrefillTiles, attend_prefill
from splittime.kernels.triton.attention_tile import (
    LOG2_E,
    SoftmaxParts,
    columns_of,
    dot_of,
    first_unit,
    load_blocks,
    load_queries,
    step,
    store_lines,
)


@dataclass(frozen=True)
class DecodeTiles:
    """How the kernel is launched. tokens: keys a tile. programs_per_processor: how many are meant to run at once on one
    multiprocessor. min_part_tokens: no part is cut shorter. num_splits: None, `choose_splits` says."""

    tokens: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs_per_processor: int = 2
    min_part_tokens: int = 256
    num_splits: int | None = None


def choose_tiles(shape: KvShape, element_bytes: int) -> DecodeTiles:
    """Tiles of about 16 KiB of keys, three deep: with the values that is some 72 KiB of shared memory, so that two
    programs fit on a multiprocessor (228 KiB) and 64 KiB of each are on their way at any time, more than the bandwidth
    times the latency of its memory (some 36 KiB a multiprocessor). Whole blocks."""
    tokens = min(128, max(16, (16 << 10) // (columns_of(shape.head_dim) * element_bytes)))
    return DecodeTiles(tokens=max(tokens, shape.block_size))


def choose_splits(programs: int, slots: int, max_context_tokens: int, min_part_tokens: int) -> int:
    """The fewest parts with which `slots` programs at a time are within a tenth of as busy as with any number.

    programs: with one part each. Few rows are cut so that one wave fills the card; of many waves, the last is on
    average half empty, and finer parts make it shorter.
    """
    most = max(1, min(-(-max_context_tokens // min_part_tokens), 4 * -(-slots // programs)))
    shares = []
    for splits in range(1, most + 1):
        waves = programs * splits / slots
        shares.append(waves / -(-programs * splits // slots))
    return next(splits for splits, share in enumerate(shares, 1) if share >= 0.9 * max(shares))


@triton.jit(do_not_specialize=["table_stride"])
def _decode(
    q, token_stride, out, part_sums, data, scales, block_tables, table_stride, context_lens, scale, min_part_tokens,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, DOT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.num_programs(0) - 1 - tl.program_id(0)  # rows come shortest first: the longest is started first
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    context = tl.load(context_lens + row)
    first = context * 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    base = first // BLOCK_SIZE * BLOCK_SIZE
    part_tokens = tl.maximum(tl.cdiv(context - base, num_splits), min_part_tokens)
    part_tokens = tl.cdiv(part_tokens, TOKENS) * TOKENS
    begin = base + split * part_tokens
    end = tl.minimum(begin + part_tokens, context)

    heads = tl.arange(0, LINES)
    is_head = heads < GROUP
    lines = (row * NUM_KV_HEADS + kv_head).to(tl.int64) * GROUP + heads
    if not IS_WHOLE:  # noqa: SIM102 (the outer is of constants: what it encloses is compiled or not)
        if begin >= context:  # nothing is left for this part
            tl.store(part_sums + lines * num_splits + split, tl.full([LINES], float("-inf"), tl.float32), mask=is_head)
            return
    columns = tl.arange(0, COLUMNS)
    sources = q + row.to(tl.int64) * token_stride + (kv_head * GROUP + heads)[:, None] * HEAD_DIM + columns[None, :]
    is_loaded = is_head[:, None] & (columns < HEAD_DIM)[None, :]
    queries, line_scales = load_queries(sources, is_loaded, scale, DOT)
    table = block_tables + row.to(tl.int64) * table_stride
    weighted = tl.zeros([LINES, COLUMNS], tl.float32)
    sums = tl.zeros([LINES], tl.float32)
    largest = tl.full([LINES], float("-inf"), tl.float32)
    unit = first_unit(scales)
    # Blocks are looked up one tile ahead, so that what waits for them is not the loads of keys and values.
    positions = begin + tl.arange(0, TOKENS)
    blocks = load_blocks(table, begin, (positions >= first) & (positions < end), BLOCK_SIZE, TOKENS)
    for start in range(begin, end, TOKENS):
        positions = start + tl.arange(0, TOKENS)
        is_seen = (positions >= first) & (positions < end)
        next_blocks = load_blocks(table, start + TOKENS, positions + TOKENS < end, BLOCK_SIZE, TOKENS)
        weighted, sums, largest, unit = step(
            queries, weighted, sums, largest, unit, data, scales, blocks, kv_head, is_seen, is_seen[None, :],
            line_scales, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, COLUMNS, DOT,
        )  # fmt: skip
        blocks = next_blocks
    store_lines(
        weighted, sums, largest, unit, out, part_sums, lines, is_head, split, num_splits, HEAD_DIM, COLUMNS, IS_WHOLE
    )  # fmt: skip


def attend_decode(
    q: Tensor,
    store: LayerKv,
    out: Tensor,
    plan: PagedPlan,
    scale: float,
    processors: int,
    tiles: DecodeTiles | None = None,
) -> None:
    """The first tokens of q [T, Hq, D], one a decode row -> their lines of out [T, Hq * D]."""
    rows, shape = plan.num_decode_rows, plan.shape
    group = q.shape[1] // shape.num_kv_heads
    tiles = tiles or choose_tiles(shape, store.data.element_size())
    splits = tiles.num_splits or choose_splits(
        rows * shape.num_kv_heads,
        processors * tiles.programs_per_processor,
        plan.max_seen_tokens,
        tiles.min_part_tokens,
    )
    assert tiles.tokens % shape.block_size == 0, "a tile is whole blocks"
    parts = SoftmaxParts(out[:rows], shape.head_dim, splits)
    _decode[(rows, shape.num_kv_heads, splits)](
        q, q.stride(0), parts.target, parts.sums, store.data, store.scales, plan.block_tables,
        plan.block_tables.stride(0), plan.context_lens, scale * LOG2_E, tiles.min_part_tokens,
        NUM_KV_HEADS=shape.num_kv_heads, GROUP=group, BLOCK_SIZE=shape.block_size, HEAD_DIM=shape.head_dim,
        WINDOW=plan.window_tokens or 0, LINES=max(16, triton.next_power_of_2(group)),
        COLUMNS=columns_of(shape.head_dim), TOKENS=tiles.tokens, DOT=dot_of(q, store), IS_WHOLE=splits == 1,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    parts.merge()


__all__ = ["DecodeTiles", "PagedPlan", "PrefillTiles", "attend", "kv_bytes", "plan", "positions_read"]

NAME = "paged flash-decoding and flash-attention-2"


def attend(
    q: Tensor,
    store: LayerKv,
    plan: PagedPlan,
    scale: float,
    decode_tiles: DecodeTiles | None = None,
    prefill_tiles: PrefillTiles | None = None,
) -> Tensor:
    """q [T, Hq, D], whose heads lie one after the other, -> [T, Hq * D]; see `kernels.api.Ops.attention`. scale > 0.

    decode_tiles, prefill_tiles: None, what the shapes ask for; benchmarks give others.
    """
    assert q.stride()[1:] == (q.shape[2], 1), "heads must be contiguous"
    out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
    processors = processors_of(q.device)
    if plan.num_decode_rows:
        attend_decode(q, store, out, plan, scale, processors, decode_tiles)
    if plan.prefill is not None:
        attend_prefill(q, store, out, plan, scale, processors, prefill_tiles)
    return out


@cache
def processors_of(device: torch.device) -> int:
    """Multiprocessors of the card; of the interpreter, which runs one program after the other, 1."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
