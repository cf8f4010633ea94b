"""The small fused kernels on the card: which share of the copy bandwidth, measured in the same run, each one reaches.

    python -m benchmarks.gpu.elementwise                  shapes of Llama-3.1-8B, 1 to 8192 tokens, bfloat16
    python -m benchmarks.gpu.elementwise --tiles          other launch parameters beside those that are chosen
    python -m benchmarks.gpu.elementwise --json

Bytes are those that must be moved: each input read once, each output written once. Beside each kernel are torch's own
operations for the same. Medians of CUDA events over captured launches that go round several buffers, 128 MiB in all or
64 of them, so that no large input is still in the cache; a launch of few tokens is all latency, and its share says so.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.gpu.card import CARD, Found, copy_bytes_per_s, median_us, parse, parser, place, scale, some, telling
from splittime.kernels.api import KvShape, LayerKv
from splittime.kernels.triton import elementwise, rotary

PLACE = place()
SHAPE = (4096, 14336, 32, 8, 128, 16) if scale() is CARD else (64, 96, 2, 1, 32, 16)
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = SHAPE
TOKENS = (1, 16, 64, 256, 2048, 8192)


@dataclass(frozen=True)
class Case:
    """run: given the number of a buffer. variants: other launch parameters, by name. bytes: moved by one launch."""

    name: str
    moved_bytes: int
    buffer_bytes: int
    run: Callable[[int], Any]
    torch_run: Callable[[int], Any]
    variants: dict[str, Callable[[int], Any]]


def buffers(num: int, *shape: int) -> list[Tensor]:
    return [torch.randn(*shape, dtype=torch.bfloat16, device=PLACE) for _ in range(num)]


def num_buffers(buffer_bytes: int) -> int:
    return max(2, min(scale().buffers, scale().cold_bytes // buffer_bytes))


def norm_cases(tokens: int) -> Iterator[Case]:
    line_bytes = tokens * HIDDEN * 2
    x = buffers(num_buffers(2 * line_bytes), tokens, HIDDEN)
    weight = torch.randn(HIDDEN, dtype=torch.bfloat16, device=PLACE)
    packed = elementwise.pack(weight, 1e-5)
    tiles = {f"warps {warps}": elementwise.NormTiles(1, HIDDEN, warps) for warps in (4, 8, 16)}
    plain = {name: (lambda i, tile=tile: elementwise.rms_norm(x[i], packed, tile)) for name, tile in tiles.items()}
    yield Case(
        "rms_norm", 2 * line_bytes, 2 * line_bytes, lambda i: elementwise.rms_norm(x[i], packed),
        lambda i: torch.rms_norm(x[i], (HIDDEN,), weight, 1e-5), plain,
    )  # fmt: skip


def silu_case(tokens: int) -> Case:
    line_bytes = tokens * INNER * 2
    x = buffers(num_buffers(2 * line_bytes), tokens, 2 * INNER)
    tiles = [elementwise.LineTiles(columns, warps) for columns, warps in ((512, 2), (1024, 4), (2048, 4), (2048, 8))]
    variants = {
        f"{tile.columns}/{tile.num_warps}": (lambda i, tile=tile: elementwise.silu_mul(x[i], tile)) for tile in tiles
    }
    return Case(
        "silu_mul", 3 * line_bytes, 2 * line_bytes, lambda i: elementwise.silu_mul(x[i]),
        lambda i: torch.nn.functional.silu(x[i][:, :INNER]) * x[i][:, INNER:], variants,
    )  # fmt: skip


def rope_case(tokens: int, kv_dtype: torch.dtype) -> Case:
    """The norm of queries and keys too, as in Qwen3. torch: index_put of keys and values as they are, no turning."""
    lines = HEADS + 2 * KV_HEADS
    blocks = tokens // BLOCK_SIZE + 2
    shape = KvShape(blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    qkv_bytes = tokens * lines * HEAD_DIM * 2
    qkv = buffers(num_buffers(qkv_bytes), tokens, lines, HEAD_DIM)
    data = torch.zeros(blocks + 1, 2, KV_HEADS, BLOCK_SIZE * HEAD_DIM, dtype=kv_dtype, device=PLACE)
    has_scales = kv_dtype.itemsize == 1
    scales = torch.zeros(blocks + 1, 2, KV_HEADS, BLOCK_SIZE, device=PLACE) if has_scales else None
    packed = elementwise.pack(torch.ones(HEADS + KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=PLACE), 1e-6)
    table = torch.polar(torch.ones(8192, HEAD_DIM // 2), torch.rand(8192, HEAD_DIM // 2)).to(PLACE)
    positions = torch.arange(tokens, device=PLACE)
    places = positions // BLOCK_SIZE, positions % BLOCK_SIZE
    rows = data.view(-1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)

    def run(i: int, tiles: rotary.RopeTiles | None = None) -> None:
        rotary.rope_write(qkv[i], packed, table, LayerKv(data, scales), shape, *places, positions, tiles)

    def torch_run(i: int) -> None:
        rows[places[0], :, :, places[1]] = qkv[i][:, HEADS:].unflatten(1, (2, KV_HEADS)).to(kv_dtype)

    turned_bytes = tokens * (HEADS + KV_HEADS) * HEAD_DIM * 2
    kept_bytes = tokens * 2 * KV_HEADS * (HEAD_DIM * kv_dtype.itemsize + 4 * has_scales)
    tiles = [rotary.RopeTiles(*one) for one in ((4, 2), (4, 4), (8, 4), (16, 4), (16, 8), (64, 8))]
    variants = {f"{tile.heads}/{tile.num_warps}": (lambda i, tile=tile: run(i, tile)) for tile in tiles}
    name = f"rope_write {str(kv_dtype).removeprefix('torch.')}"
    return Case(name, qkv_bytes + turned_bytes + kept_bytes, qkv_bytes, run, torch_run, variants)


def cases(tokens: int) -> Iterator[Case]:
    yield from norm_cases(tokens)
    yield silu_case(tokens)
    for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int8):
        yield rope_case(tokens, kv_dtype)


def measure(case: Case, ceiling: float, has_tiles: bool) -> dict[str, Any]:
    def median(run: Callable[[int], Any]) -> float:
        turn = cycle(range(num_buffers(case.buffer_bytes)))
        return median_us(lambda: run(next(turn)))

    ours_us = median(case.run)
    found = {"kernel": case.name, "bytes": case.moved_bytes, "us": ours_us, "torch_us": median(case.torch_run)}
    found["share_of_copy"] = case.moved_bytes / (ours_us * 1e-6) / ceiling
    return found | ({"tiles_us": {name: median(run) for name, run in some(case.variants.items())}} if has_tiles else {})


def table_of(found: Found) -> Table:
    table = Table(title=f"elementwise kernels, bfloat16; copy {found.get('copy_bytes_per_s', 0) / 1e9:.0f} GB/s")
    for column in ("tokens", "kernel", "us", "share of copy", "torch, us", "other tiles, us"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for one in found.get("results", ()):
        others = ", ".join(f"{name}: {us:.1f}" for name, us in one.get("tiles_us", {}).items())
        share = f"{one['share_of_copy']:.0%}"
        table.add_row(str(one["tokens"]), one["kernel"], f"{one['us']:.1f}", share, f"{one['torch_us']:.1f}", others)
    return table


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    made.add_argument("--tiles", action="store_true", help="time other launch parameters too")
    options = parse(made, argv, tokens=[2])
    with telling(options, table_of) as found:
        ceiling = found["copy_bytes_per_s"] = copy_bytes_per_s()
        results = found["results"] = []
        for tokens in options.tokens:
            for case in cases(tokens):
                results.append({"tokens": tokens} | measure(case, ceiling, options.tiles))


if __name__ == "__main__":
    main()
