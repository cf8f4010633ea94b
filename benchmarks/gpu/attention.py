"""Attention on the card: decode beside the copy bandwidth, prefill beside the bf16 matrix rate, both of the same run.

    python -m benchmarks.gpu.attention                     decode at 1k to 32k and batch 1 to 256, prefill of 2k and 8k
    python -m benchmarks.gpu.attention --kv float8_e4m3fn --contexts 8192 --batches 1 64 --tiles
    python -m benchmarks.gpu.attention --peers --json      beside torch SDPA, FlexAttention and FlashInfer, if there

Heads of Llama-3.1-8B: 32 over 8 of keys and values, 128 wide; blocks of 16 tokens in random order. Each run is captured
in a CUDA graph. Decode launches go round stores of at least 256 MB together, so that nothing is in the L2 cache (50 MB)
from the launch before. Bytes are those of the positions looked at, with their scales; operations are those of the
positions seen, 4 a head and column. What is computed is first compared with SDPA. Peers get keys and values in one
piece, except FlashInfer, which reads the same paged store. `--tiles` tries launch parameters beside those chosen.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu import attention_peers as peers
from benchmarks.gpu.card import (
    CARD,
    Found,
    copy_bytes_per_s,
    matrix_operations_per_s,
    median_us,
    parse,
    parser,
    place,
    scale,
    some,
    telling,
)
from splittime.kernels.api import AttentionBatch, KvShape, LayerKv
from splittime.kernels.triton import attention
from splittime.kernels.triton.attention import DecodeTiles, PrefillTiles

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = (32, 8, 128, 16) if scale() is CARD else (4, 1, 32, 16)
SCALE = HEAD_DIM**-0.5
CHECKED = (([1, 1, 1], [1, 777, 5000]), ([300, 77], [300, 1500]))  # lengths and contexts
CHECKED_TINY = (([1, 1], [1, 77]), ([9], [30]))
CONTEXTS, BATCHES, PROMPTS = (1024, 8192, 32768), (1, 4, 16, 64, 256), (2048, 8192)
KV_DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


def a_store(num_blocks: int, dtype: torch.dtype) -> LayerKv:
    sizes = (num_blocks + 1, 2, KV_HEADS, BLOCK_SIZE)
    data = torch.empty((*sizes[:3], BLOCK_SIZE * HEAD_DIM), dtype=dtype, device=place())
    if dtype == torch.bfloat16:
        return LayerKv(data.normal_(), None)
    data.view(torch.uint8).random_(0, 256 if dtype == torch.int8 else 0x78)  # floats up to 256, none that is a NaN
    return LayerKv(data, torch.rand(sizes, device=place()) * 0.01)


def a_batch(lengths: list[int], contexts: list[int]) -> tuple[AttentionBatch, KvShape]:
    blocks = [-(-context // BLOCK_SIZE) for context in contexts]
    order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0)).split(blocks)
    tables = torch.full((len(blocks), max(blocks)), sum(blocks))
    for row, ids in zip(tables, order, strict=True):
        row[: len(ids)] = ids
    begins = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    nowhere = torch.zeros(begins[-1], dtype=torch.int64)
    decode = sum(length == 1 for length in lengths)
    shape = KvShape(sum(blocks), BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    return AttentionBatch(begins, contexts, tables, nowhere, nowhere, decode), shape


def queries(tokens: int) -> Tensor:
    return torch.randn(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=place())


def worst_difference() -> float:
    """Of what is computed from SDPA's, over decode rows and prompts: outputs are of the size of 1."""
    worst = 0.0
    for lengths, contexts in CHECKED if scale() is CARD else CHECKED_TINY:
        batch, shape = a_batch(lengths, contexts)
        store, q = a_store(shape.num_blocks, torch.bfloat16), queries(sum(lengths))
        got = attention.attend(q, store, a_plan(batch, shape), SCALE).view(q.shape)
        for row, length in enumerate(lengths):
            begin, end = batch.query_begins[row : row + 2]
            keys, values = peers.row_of(store, shape, batch.block_tables[row], contexts[row])
            seen = torch.ones(length, contexts[row], dtype=torch.bool, device=place()).tril(contexts[row] - length)
            want = scaled_dot_product_attention(
                q[begin:end].transpose(0, 1)[None], keys[None], values[None], seen, scale=SCALE, enable_gqa=True
            )
            worst = max(worst, float((want[0].transpose(0, 1) - got[begin:end]).abs().max()))
    return worst


def a_plan(batch: AttentionBatch, shape: KvShape) -> attention.PagedPlan:
    return attention.plan(batch, shape, None, torch.bfloat16, place())


def timed(runs: dict[str, Callable[[], Any]]) -> dict[str, float | None]:
    """Microseconds of each; None, and the reason on stderr, of what does not run here."""
    found: dict[str, float | None] = {}
    for name, run in runs.items():
        try:
            found[name] = median_us(run)
        except Exception as error:  # a peer's, of any kind: it must not end the comparison
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
            found[name] = None
    return found


def decode_variants() -> dict[str, DecodeTiles]:
    found = {}
    for tokens, warps, stages in (
        (32, 4, 4),
        (64, 2, 3),
        (64, 4, 2),
        (64, 4, 4),
        (128, 4, 2),
        (128, 4, 3),
        (128, 8, 3),
    ):
        for programs in (1, 2, 3):
            found[f"{tokens} tokens, {warps} warps, {stages} stages, {programs} programs"] = DecodeTiles(
                tokens, warps, stages, programs
            )
    chosen = attention.choose_tiles(KvShape(0, BLOCK_SIZE, KV_HEADS, HEAD_DIM), 2)
    return found | {f"{splits} parts": replace(chosen, num_splits=splits) for splits in (1, 2, 4, 8, 16, 32)}


def prefill_variants() -> dict[str, PrefillTiles]:
    sizes = ((128, 64, 8, 2), (128, 64, 8, 4), (128, 128, 8, 2), (128, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3),
             (64, 128, 4, 2))  # fmt: skip
    return {
        f"{lines} lines, {tokens} tokens, {warps} warps, {stages} stages": PrefillTiles(lines, tokens, warps, stages)
        for lines, tokens, warps, stages in sizes
    }


def decode(context: int, rows: int, dtype: torch.dtype, options: argparse.Namespace, rate: float) -> dict[str, Any]:
    batch, shape = a_batch([1] * rows, [context] * rows)
    plan, q = a_plan(batch, shape), queries(rows)
    first = a_store(shape.num_blocks, dtype)
    read_bytes = attention.kv_bytes(plan, first)
    stores = cycle(
        [
            first,
            *(
                a_store(shape.num_blocks, dtype)
                for _ in range(min(scale().buffers - 1, scale().cold_bytes // read_bytes))
            ),
        ]
    )
    runs: dict[str, Callable[[], Any]] = {"chosen": lambda: attention.attend(q, next(stores), plan, SCALE)}
    if options.tiles:
        for name, tiles in some(decode_variants().items()):
            runs[name] = lambda tiles=tiles: attention.attend(q, next(stores), plan, SCALE, tiles)
    if options.peers and dtype == torch.bfloat16:
        runs |= peers.of_decode(q, [next(stores) for _ in range(scale().buffers)], batch, shape, context, SCALE)
    times = timed(runs)
    shares = {name: read_bytes / (us * 1e-6) / rate for name, us in times.items() if us}
    return {"kind": "decode", "context": context, "rows": rows, "bytes": read_bytes, "us": times, "share": shares}


def prefill(tokens: int, dtype: torch.dtype, options: argparse.Namespace, rate: float) -> dict[str, Any]:
    batch, shape = a_batch([tokens], [tokens])
    plan, q, store = a_plan(batch, shape), queries(tokens), a_store(shape.num_blocks, dtype)
    runs: dict[str, Callable[[], Any]] = {"chosen": lambda: attention.attend(q, store, plan, SCALE)}
    if options.tiles:
        for name, tiles in some(prefill_variants().items()):
            runs[name] = lambda tiles=tiles: attention.attend(q, store, plan, SCALE, None, tiles)
    if options.peers and dtype == torch.bfloat16:
        runs |= peers.of_prefill(q, store, batch, shape, SCALE)
    times = timed(runs)
    operations = 4 * HEADS * HEAD_DIM * tokens * (tokens + 1) // 2
    shares = {name: operations / (us * 1e-6) / rate for name, us in times.items() if us}
    return {"kind": "prefill", "context": tokens, "rows": 1, "operations": operations, "us": times, "share": shares}


def table_of(found: Found) -> Table:
    table = Table("what", "context", "rows", "how", "us", "share of ceiling")
    for result in found.get("results", ()):
        for name, us in result["us"].items():
            what = (result["kind"], str(result["context"]), str(result["rows"]), name)
            table.add_row(*what, *((f"{us:.1f}", f"{result['share'][name]:.1%}") if us else ("-", "-")))
    return table


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--contexts", type=int, nargs="*", default=CONTEXTS)
    made.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    made.add_argument("--prompts", type=int, nargs="*", default=PROMPTS)
    made.add_argument("--kv", choices=KV_DTYPES, default="bfloat16", help="what keys and values are kept as")
    made.add_argument("--tiles", action="store_true", help="try other launch parameters too")
    made.add_argument("--peers", action="store_true", help="SDPA, FlexAttention and FlashInfer too")
    options = parse(made, argv, contexts=[40], batches=[2], prompts=[20])
    dtype = KV_DTYPES[options.kv]
    with telling(options, table_of) as found:
        copy, matrix = copy_bytes_per_s(), matrix_operations_per_s()
        found |= {"kv": options.kv, "copy_bytes_per_s": copy, "matrix_operations_per_s": matrix}
        found["worst_difference"] = worst_difference()
        results = found["results"] = []
        for tokens in options.prompts:
            results.append(prefill(tokens, dtype, options, matrix))
        for context in options.contexts:
            for rows in options.batches:
                results.append(decode(context, rows, dtype, options, copy))


if __name__ == "__main__":
    main()
