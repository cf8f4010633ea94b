"""Attention of rows of several query tokens: prompts, chunks of them from any position, drafts to verify.

FlashAttention-2's loop over a paged store. A tile of queries is some consecutive tokens of one row with all the query
heads of one KV head; it walks the keys from the first that any of its tokens sees to the last. Only where the causal
edge or the window's edge crosses a tile of keys are there masks; the tiles between have none, not even for loading.

Query lengths are known when a step is planned, so which tile is whose is a table made on the host
(`attention_plan.tile_table`), the tiles with the longest contexts first: they start first, and the short ones fill the
end. A few short chunks of long rows do not fill the card; then the keys are split, as for decode rows, and
`attention_tile.SoftmaxParts` puts them together.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from splittime.kernels.api import KvShape, LayerKv
from splittime.kernels.triton.attention_plan import PagedPlan
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
class PrefillTiles:
    """How the kernel is launched. lines: query tokens * heads of a tile; tokens: keys a tile. programs_per_processor:
    how many run at once on one multiprocessor. min_part_tokens: no part is cut shorter. num_splits: None, as many as
    fill the card."""

    lines: int = 128
    tokens: int = 64
    num_warps: int = 8
    num_stages: int = 3
    programs_per_processor: int = 1
    min_part_tokens: int = 512
    num_splits: int | None = None


def choose_tiles(shape: KvShape, group: int, longest: int, q_bytes: int) -> PrefillTiles:
    """128 lines on two warp groups, and 64 keys: what fits in registers beside the result (compiled for sm_90 at 128
    columns, 182 registers and no spills). Fewer lines where the longest row has no more; 32 keys with 256 columns, when
    half the registers are the result. float32 has no tensor cores to go to, and its operands lie in registers too."""
    columns = columns_of(shape.head_dim)
    least = max(16, triton.next_power_of_2(group))
    needed = triton.next_power_of_2(longest * group)
    if q_bytes == 4:
        lines, tokens = max(least, min(needed, 4096 // max(columns, 128))), 32
        return PrefillTiles(lines, max(tokens, shape.block_size), num_warps=8, num_stages=2)
    lines, tokens = max(least, min(needed, 128)), 64 if columns <= 128 else 32
    return PrefillTiles(lines, max(tokens, shape.block_size), num_warps=8 if lines >= 128 else 4)


def lines(shape: KvShape, group: int, q_bytes: int) -> list[int]:
    """Numbers of tokens that compile all that rows will need: the first of each line of `choose_tiles`."""
    firsts: dict[PrefillTiles, int] = {}
    for tokens in range(1, 129):
        firsts.setdefault(choose_tiles(shape, group, tokens, q_bytes), tokens)
    return list(firsts.values())


def choose_splits(programs: int, slots: int, longest_context: int, min_part_tokens: int) -> int:
    """As many parts as there are free places for, and 1 if the card is half full."""
    return max(1, min(slots // programs, -(-longest_context // min_part_tokens)))


# In one piece: the state of a row's softmax passes from loop to loop, and a device function for each loop would take
# and return all of it. The three loops differ in what they mask: the window's edge, nothing, and the end.
@triton.jit(do_not_specialize=["begin_token", "num_splits", "table_stride"])
def _prefill(
    q, token_stride, out, part_sums, data, scales, block_tables, table_stride, query_begins, context_lens, tile_table,
    begin_token, scale, num_splits, min_part_tokens,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, DOT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(1)
    row = tl.load(tile_table + 2 * tile)
    skipped = tl.load(tile_table + 2 * tile + 1)
    begin = tl.load(query_begins + row) + skipped
    num_tokens = tl.minimum(tl.load(query_begins + row + 1) - begin, LINES // GROUP)
    context = tl.load(context_lens + row)
    lowest = context - (tl.load(query_begins + row + 1) - begin)  # position of the tile's first query token
    highest = lowest + num_tokens - 1

    lines = tl.arange(0, LINES)
    is_line = lines < num_tokens * GROUP
    tokens = tl.minimum(lines // GROUP, num_tokens - 1)
    heads = kv_head * GROUP + lines % GROUP
    positions = lowest + tokens
    places = (begin + tokens).to(tl.int64)

    # Keys [first, stop), of which every token of the tile sees [inner_begin, inner_end), in whole tiles from `first`.
    first = lowest * 0
    seen_from = lowest * 0
    inner_begin = first
    if WINDOW > 0:
        seen_from = tl.maximum(lowest - WINDOW + 1, 0)
        first = seen_from // BLOCK_SIZE * BLOCK_SIZE
        inner_begin = first + tl.cdiv(tl.maximum(highest - WINDOW + 1, seen_from) - first, TOKENS) * TOKENS
    stop = highest + 1
    inner_end = tl.maximum(first + (lowest + 1 - first) // TOKENS * TOKENS, inner_begin)
    if not IS_WHOLE:  # this part of them
        part_tokens = tl.cdiv(tl.maximum(tl.cdiv(stop - first, num_splits), min_part_tokens), TOKENS) * TOKENS
        first += split * part_tokens
        stop = tl.minimum(first + part_tokens, stop)

    columns = tl.arange(0, COLUMNS)
    sources = q + places[:, None] * token_stride + heads[:, None] * HEAD_DIM + columns[None, :]
    is_query = is_line[:, None] & (columns < HEAD_DIM)[None, :]
    queries, line_scales = load_queries(sources, is_query, scale, DOT)
    table = block_tables + row.to(tl.int64) * table_stride
    weighted = tl.zeros([LINES, COLUMNS], tl.float32)
    sums = tl.zeros([LINES], tl.float32)
    largest = tl.full([LINES], float("-inf"), tl.float32)
    unit = first_unit(scales)
    if WINDOW > 0:
        for start in range(first, tl.minimum(inner_begin, stop), TOKENS):
            keys = start + tl.arange(0, TOKENS)
            is_loaded = (keys >= seen_from) & (keys < stop)
            is_seen = (keys[None, :] <= positions[:, None]) & (keys[None, :] > positions[:, None] - WINDOW)
            blocks = load_blocks(table, start, is_loaded, BLOCK_SIZE, TOKENS)
            weighted, sums, largest, unit = step(
                queries, weighted, sums, largest, unit, data, scales, blocks, kv_head, is_loaded, is_seen, line_scales,
                NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, COLUMNS, DOT,
            )  # fmt: skip
    # Here nothing is masked, and blocks are looked up one tile ahead: what waits for them is not the loads of the keys.
    inner_begin = tl.maximum(first, inner_begin)
    keys = inner_begin + tl.arange(0, TOKENS)
    blocks = load_blocks(table, inner_begin, keys < stop, BLOCK_SIZE, TOKENS)
    for start in range(inner_begin, tl.minimum(inner_end, stop), TOKENS):
        keys = start + TOKENS + tl.arange(0, TOKENS)
        next_blocks = load_blocks(table, start + TOKENS, keys < stop, BLOCK_SIZE, TOKENS)
        weighted, sums, largest, unit = step(
            queries, weighted, sums, largest, unit, data, scales, blocks, kv_head, None, None, line_scales,
            NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, COLUMNS, DOT,
        )  # fmt: skip
        blocks = next_blocks
    for start in range(tl.maximum(first, inner_end), stop, TOKENS):
        keys = start + tl.arange(0, TOKENS)
        is_loaded = (keys >= seen_from) & (keys < stop)
        is_seen = keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            is_seen &= keys[None, :] > positions[:, None] - WINDOW
        blocks = load_blocks(table, start, is_loaded, BLOCK_SIZE, TOKENS)
        weighted, sums, largest, unit = step(
            queries, weighted, sums, largest, unit, data, scales, blocks, kv_head, is_loaded, is_seen, line_scales,
            NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, COLUMNS, DOT,
        )  # fmt: skip
    targets = (places - begin_token) * (NUM_KV_HEADS * GROUP) + heads
    store_lines(
        weighted, sums, largest, unit, out, part_sums, targets, is_line, split, num_splits, HEAD_DIM, COLUMNS, IS_WHOLE
    )


def attend_prefill(
    q: Tensor,
    store: LayerKv,
    out: Tensor,
    plan: PagedPlan,
    scale: float,
    processors: int,
    tiles: PrefillTiles | None = None,
) -> None:
    """The tokens of q [T, Hq, D] after those of the decode rows -> their lines of out [T, Hq * D]."""
    rows, shape = plan.prefill, plan.shape
    assert rows is not None
    group = q.shape[1] // shape.num_kv_heads
    tiles = tiles or choose_tiles(shape, group, rows.longest, q.element_size())
    assert tiles.tokens % shape.block_size == 0, "a tile is whole blocks"
    table = rows.table(tiles.lines // group, q.device)
    programs = len(table) * shape.num_kv_heads
    splits = tiles.num_splits or choose_splits(
        programs, processors * tiles.programs_per_processor, rows.longest_context, tiles.min_part_tokens
    )
    parts = SoftmaxParts(out[plan.num_decode_rows :], shape.head_dim, splits)
    _prefill[(programs, splits)](
        q, q.stride(0), parts.target, parts.sums, store.data, store.scales, plan.block_tables,
        plan.block_tables.stride(0), plan.query_begins, plan.context_lens, table, plan.num_decode_rows,
        scale * LOG2_E, splits, tiles.min_part_tokens,
        NUM_KV_HEADS=shape.num_kv_heads, GROUP=group, BLOCK_SIZE=shape.block_size, HEAD_DIM=shape.head_dim,
        WINDOW=plan.window_tokens or 0, LINES=tiles.lines, COLUMNS=columns_of(shape.head_dim), TOKENS=tiles.tokens,
        DOT=dot_of(q, store), IS_WHOLE=splits == 1, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    parts.merge()
