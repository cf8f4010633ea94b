"""Attention over a paged KV store in plain torch: gather whole tiles by the block table, then one product a group.

`plan` runs once a step (for each sliding window) and makes what all layers share: where tokens are written, which tiles
each group of rows gathers, the masks. A layer then makes two calls for all its decode rows: `index_select`, attention.

* Decode rows (one query token) are batched in groups of similar length, padded to the longest of the group: a row joins
  while its blocks are at most twice (or 8 more than) the group's shortest. The query heads that share a KV head are
  folded into the query length, [R, Hkv, G, D]: `enable_gqa` at query length 1 runs 8 to 15 times slower.
* A prefill row is on its own, causal. Its queries are cut in pieces of `MAX_PIECE_TOKENS`, so that the mask of a chunk
  that follows earlier tokens stays small; a piece that starts the context needs no mask. Sharing heads are expanded
  with stride 0, [Hkv, G, ...], which copies nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from splittime.kernels import plain
from splittime.kernels.api import AttentionBatch, AttentionPlan, KvShape, LayerKv
from splittime.kernels.layer import Weighing
from splittime.kernels.reference import rounding

MAX_PIECE_TOKENS = 512

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True)
class DecodeGroup:
    """Rows [begin, end). tiles: int64 [rows * 2 * Hkv * blocks], read in that order.

    mask: [rows, 1, 1, tokens] of 0 and -inf, or None when every row sees exactly the first `tokens` gathered.
    """

    begin: int
    end: int
    tiles: Tensor
    tokens: int
    mask: Tensor | None


@dataclass(frozen=True)
class QueryPiece:
    """Query tokens [begin, end) of the batch against gathered keys [key_begin, key_end).

    mask: [queries, keys], or None when both start the context (then causal from the top left).
    """

    begin: int
    end: int
    key_begin: int
    key_end: int
    mask: Tensor | None


@dataclass(frozen=True)
class PrefillGather:
    tiles: Tensor  # int64 [2 * Hkv * blocks]
    pieces: tuple[QueryPiece, ...]


@dataclass(frozen=True)
class GatherPlan(AttentionPlan):
    shape: KvShape
    write_rows: Tensor  # int64 [T, 2 * Hkv], rows of the store seen as [-1, head_dim], and of its scales
    groups: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillGather, ...]


def plan(batch: AttentionBatch, shape: KvShape, window_tokens: int | None, dtype: torch.dtype) -> GatherPlan:
    heads = torch.arange(2 * shape.num_kv_heads)  # tiles of a block: K heads, then V heads
    write_tiles = batch.token_blocks[:, None] * len(heads) + heads
    write_rows = write_tiles * shape.block_size + batch.token_offsets[:, None]
    groups = tuple(
        _decode_group(batch, shape, heads, window_tokens, dtype, begin, end)
        for begin, end in _group_bounds(batch, shape, window_tokens)
    )
    rows = range(batch.num_decode_rows, len(batch.context_lens))
    prefills = tuple(_prefill_row(batch, shape, heads, window_tokens, dtype, row) for row in rows)
    return GatherPlan(shape, write_rows, groups, prefills)


def _group_bounds(batch: AttentionBatch, shape: KvShape, window_tokens: int | None) -> list[tuple[int, int]]:
    """Cut the decode rows, which come sorted by length, into groups that are worth padding to one length."""
    bounds: list[tuple[int, int]] = []
    begin = 0
    shortest = None
    for row in range(batch.num_decode_rows):
        context = batch.context_lens[row]
        seen = context if window_tokens is None else min(context, window_tokens)
        blocks = -(-seen // shape.block_size)
        if shortest is not None and not shortest // 2 <= blocks <= max(2 * shortest, shortest + 8):
            bounds.append((begin, row))
            begin, shortest = row, blocks
        shortest = blocks if shortest is None else shortest
    if batch.num_decode_rows:
        bounds.append((begin, batch.num_decode_rows))
    return bounds


def _decode_group(
    batch: AttentionBatch,
    shape: KvShape,
    heads: Tensor,
    window_tokens: int | None,
    dtype: torch.dtype,
    begin: int,
    end: int,
) -> DecodeGroup:
    contexts = torch.tensor(batch.context_lens[begin:end])  # [rows]
    firsts = torch.zeros_like(contexts) if window_tokens is None else (contexts - window_tokens).clamp_(min=0)
    first_blocks = firsts // shape.block_size
    num_blocks = int((-(-contexts // shape.block_size) - first_blocks).max())
    columns = first_blocks[:, None] + torch.arange(num_blocks)  # [rows, blocks]
    tables = batch.block_tables[begin:end]
    blocks = tables.gather(1, columns.clamp_(max=tables.shape[1] - 1))
    tiles = (blocks[:, None] * len(heads) + heads[None, :, None]).flatten()  # [rows, 2 Hkv, blocks] flat
    if window_tokens is None and int(contexts.min()) == int(contexts.max()):
        return DecodeGroup(begin, end, tiles, int(contexts[0]), None)
    num_tokens = num_blocks * shape.block_size
    positions = first_blocks[:, None] * shape.block_size + torch.arange(num_tokens)  # [rows, tokens]
    hidden = (positions >= contexts[:, None]) | (positions < firsts[:, None])
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return DecodeGroup(begin, end, tiles, num_tokens, mask[:, None, None])


def _prefill_row(
    batch: AttentionBatch, shape: KvShape, heads: Tensor, window_tokens: int | None, dtype: torch.dtype, row: int
) -> PrefillGather:
    begin, end = batch.query_begins[row], batch.query_begins[row + 1]
    context = batch.context_lens[row]
    start = context - (end - begin)  # position of the first query token
    first = 0 if window_tokens is None else max(0, start - window_tokens + 1)
    first_block = first // shape.block_size
    blocks = batch.block_tables[row, first_block : -(-context // shape.block_size)]
    tiles = (blocks * len(heads) + heads[:, None]).flatten()  # [2 Hkv, blocks] flat
    pieces = []
    for offset in range(0, end - begin, MAX_PIECE_TOKENS):
        stop = min(offset + MAX_PIECE_TOKENS, end - begin)
        pieces.append(
            _piece(begin + offset, begin + stop, start + offset, first_block * shape.block_size, window_tokens, dtype)
        )
    return PrefillGather(tiles, tuple(pieces))


def _piece(
    begin: int, end: int, start: int, gathered_from: int, window_tokens: int | None, dtype: torch.dtype
) -> QueryPiece:
    """Queries at positions [start, start + end - begin) of a row whose gathered keys begin at `gathered_from`."""
    stop = start + end - begin
    is_windowed = window_tokens is not None and stop > window_tokens
    if start == 0 and not is_windowed:
        return QueryPiece(begin, end, 0, stop, None)
    key_from = gathered_from
    if window_tokens is not None:
        key_from = max(gathered_from, start - window_tokens + 1)
    queries, keys = torch.arange(start, stop)[:, None], torch.arange(key_from, stop)
    hidden = keys > queries
    if window_tokens is not None:
        hidden |= keys <= queries - window_tokens
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return QueryPiece(begin, end, key_from - gathered_from, stop - gathered_from, mask)


def write_kv(kv: Tensor, store: LayerKv, plan: GatherPlan) -> None:
    rows = store.data.view(-1, plan.shape.head_dim)
    if store.scales is None:
        rows.index_put_((plan.write_rows,), kv.to(rows.dtype))
    else:
        values, scales = rounding.quantize_kv(kv)
        rows.index_put_((plan.write_rows,), values)
        store.scales.view(-1).index_put_((plan.write_rows,), scales)


def attend(q: Tensor, store: LayerKv, plan: GatherPlan, weighing: Weighing) -> Tensor:
    """q [T, Hq, D] -> [T, Hq * D]; see `kernels.api.Ops.attention`."""
    sinks = None if weighing.sinks is None else weighing.sinks.view(plan.shape.num_kv_heads, -1)
    folded = weighing._replace(sinks=sinks)
    if len(plan.groups) == 1 and not plan.prefills:
        return _attend_group(q, store, plan.shape, plan.groups[0], folded).reshape(q.shape[0], -1)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in plan.groups:
        got = _attend_group(q, store, plan.shape, group, folded)
        out[group.begin : group.end] = got.reshape(-1, *q.shape[1:])
    for prefill in plan.prefills:
        _attend_prefill(q, store, plan.shape, prefill, folded, out)
    return out.flatten(1)


def _lowered(got: tuple[Tensor, Tensor], sinks: Tensor | None) -> Tensor:
    """got: results [.., D] and the logarithms of what they were divided by -> the results with the sinks' share taken
    off. sinks: as the latter, or to be spread to it."""
    results, sums = got
    return results if sinks is None else results * (sums - sinks).sigmoid().unsqueeze(-1).to(results.dtype)


def _gather(store: LayerKv, shape: KvShape, tiles: Tensor, dtype: torch.dtype) -> Tensor:
    """[len(tiles), block_size, head_dim] of `dtype`."""
    gathered = store.data.view(-1, shape.block_size * shape.head_dim).index_select(0, tiles)
    gathered = gathered.view(-1, shape.block_size, shape.head_dim)
    scales = None if store.scales is None else store.scales.view(-1, shape.block_size).index_select(0, tiles)
    plain.count_kv(gathered, scales)
    if scales is not None:
        gathered = rounding.dequantize_kv(gathered, scales)
    return gathered.to(dtype)


def _attend_group(q: Tensor, store: LayerKv, shape: KvShape, group: DecodeGroup, weighing: Weighing) -> Tensor:
    """weighing: with sinks of [Hkv, G] -> [rows, Hkv, G, D]."""
    rows = group.end - group.begin
    kv = _gather(store, shape, group.tiles, q.dtype).view(rows, 2, shape.num_kv_heads, -1, shape.head_dim)
    keys, values = kv[:, 0, :, : group.tokens], kv[:, 1, :, : group.tokens]  # [rows, Hkv, tokens, D]
    folded = q[group.begin : group.end].view(rows, shape.num_kv_heads, -1, shape.head_dim)
    if weighing.cap:
        return _capped(folded, keys, values, group.mask, weighing)
    return _lowered(_flash(folded, keys, values, attn_mask=group.mask, scale=weighing.scale), weighing.sinks)


def _attend_prefill(
    q: Tensor, store: LayerKv, shape: KvShape, prefill: PrefillGather, weighing: Weighing, out: Tensor
) -> None:
    """Write rows of `out` [T, Hq, D]. weighing: with sinks of [Hkv, G]."""
    heads, dim = shape.num_kv_heads, shape.head_dim
    kv = _gather(store, shape, prefill.tiles, q.dtype).view(2, heads, 1, -1, dim)
    num_sharing = q.shape[1] // heads
    for piece in prefill.pieces:
        keys, values = kv[..., piece.key_begin : piece.key_end, :].expand(2, heads, num_sharing, -1, dim)
        queries = q[piece.begin : piece.end].view(-1, heads, num_sharing, dim).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
        if weighing.cap:
            mask = _causal(queries) if piece.mask is None else piece.mask
            got = _capped(queries, keys, values, mask, weighing)
        else:
            both = _flash(
                queries, keys, values, is_causal=piece.mask is None, attn_mask=piece.mask, scale=weighing.scale
            )
            got = _lowered(both, None if weighing.sinks is None else weighing.sinks.unsqueeze(-1))
        out[piece.begin : piece.end].view(-1, heads, num_sharing, dim).copy_(got.permute(2, 0, 1, 3))


def _causal(queries: Tensor) -> Tensor:
    return torch.full((queries.shape[-2],) * 2, -torch.inf, dtype=queries.dtype).triu(1)


def _capped(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, weighing: Weighing) -> Tensor:
    """Attention with scores that never exceed the cap, which torch has none of."""
    assert weighing.sinks is None, "no model has both"
    found = torch.tanh(q @ keys.transpose(-1, -2) * (weighing.scale / weighing.cap)) * weighing.cap
    return (found if mask is None else found + mask).softmax(-1, dtype=torch.float32).to(q.dtype) @ values
