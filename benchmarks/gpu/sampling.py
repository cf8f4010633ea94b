"""Choosing tokens on the card: the kernels beside filtering by torch.sort, and beside reading the logits once.

    python -m benchmarks.gpu.sampling                       vocabularies 32,000 to 151,936, 1 to 256 rows
    python -m benchmarks.gpu.sampling --rows 1 64 --vocab 128256 --chunks
    python -m benchmarks.gpu.sampling --json

Logits are as a model's: a few likely tokens over a normal tail ("peaked"), and the normal alone at a high temperature
("flat"), whose nucleus holds tens of thousands of tokens. Each run is captured in a CUDA graph, sort and all. The share
is of the time that one read of the logits takes at the copy bandwidth measured in the same run (a read of so few bytes
may come from the L2 cache, so it can exceed 1). Tokens are checked first: both ways draw the same ones.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from benchmarks.gpu.card import Found, copy_bytes_per_s, median_us, parse, parser, place, some, telling
from splittime.kernels.draw import DRAW
from splittime.kernels.triton import sampling
from splittime.kernels.triton.weights import Draws

PLACE = place()
VOCABULARIES = (32000, 128256, 151936)
ROWS = (1, 4, 16, 64, 128, 256)
SETTINGS: dict[str, dict[str, float]] = {
    "temperature": {"temperature": 0.8},
    "top_p peaked": {"temperature": 0.8, "top_p": 0.95},
    "top_k, top_p peaked": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "min_p peaked": {"temperature": 1.0, "min_p": 0.05},
    "top_p flat": {"temperature": 2.0, "top_p": 0.95},
    "top_k 5000 flat": {"temperature": 2.0, "top_k": 5000},
}
OTHER_CHUNKS = tuple(
    sampling.Chunks(chunk, block, listed, ways, warps)
    for chunk, block, listed, ways, warps in (
        (1024, 1024, 512, 8, 4), (2048, 1024, 512, 16, 4), (4096, 1024, 1024, 8, 8), (8192, 2048, 512, 16, 8),
        (16384, 1024, 256, 16, 4),
    )
)  # fmt: skip


def logits_of(rows: int, vocab: int, name: str) -> Tensor:
    torch.manual_seed(rows)
    logits = torch.randn(rows, vocab, device=PLACE) * (1.0 if "flat" in name else 2.0)
    if "flat" not in name:
        logits[:, :40] += torch.linspace(12.0, 2.0, 40, device=PLACE)
    return logits


def lines_of(rows: int, filters: dict[str, float]) -> np.ndarray:
    lines = np.zeros(rows, dtype=DRAW)
    lines["uniform"], lines["top_p"] = np.random.default_rng(rows).random(rows), 1.0
    for name, value in filters.items():
        lines[name] = value
    return lines


def columns_of(lines: np.ndarray) -> dict[str, Tensor]:
    """The lines as torch's way wants them, on the device."""
    return {name: torch.from_numpy(lines[name].copy()).unsqueeze(1).to(PLACE) for name in DRAW.names or ()}


def by_sort(logits: Tensor, columns: dict[str, Tensor]) -> Tensor:
    """The same by a sort of each row, as most servers did it: all filters on sorted values, one cumulated sum each."""
    values, ids = (logits / columns["temperature"]).sort(dim=-1, descending=True, stable=True)
    weights = (values - values[:, :1]).exp().double()
    rank = torch.arange(logits.shape[1], device=logits.device)
    top_k = torch.where(columns["top_k"] > 0, columns["top_k"], logits.shape[1])
    weights = weights.masked_fill((rank >= top_k) | (weights < columns["min_p"]), 0.0)
    cumulated = weights.cumsum(-1)
    weights = weights.masked_fill(cumulated - weights >= columns["top_p"] * cumulated[:, -1:], 0.0)
    by_id = torch.zeros_like(weights).scatter_(1, ids, weights).cumsum(-1)
    return torch.searchsorted(by_id, columns["uniform"] * by_id[:, -1:], right=True).squeeze(1)


def measure(rows: int, vocab: int, name: str, ceiling: float, has_chunks: bool) -> dict[str, Any]:
    logits, lines = logits_of(rows, vocab, name), lines_of(rows, SETTINGS[name])
    draws, columns = Draws.of(lines, PLACE), columns_of(lines)
    filters = bool((lines["top_k"] > 0).any() or (lines["top_p"] < 1).any())
    same = (sampling.draw(logits, draws, filters) == by_sort(logits, columns)).float().mean().item()
    ours_us = median_us(lambda: sampling.draw(logits, draws, filters))
    found = {"rows": rows, "vocab": vocab, "setting": name, "us": ours_us, "same_tokens": same}
    found["share_of_one_read"] = logits.nbytes / ceiling / (ours_us * 1e-6)
    found["sort_us"] = median_us(lambda: by_sort(logits, columns), launches=3)
    found["argmax_us"] = median_us(lambda: sampling.argmax(logits))
    found["torch_argmax_us"] = median_us(lambda: logits.argmax(-1))
    if has_chunks:
        found["chunks_us"] = {
            f"{cut.chunk}/{cut.block}/{cut.listed}/{cut.ways}/{cut.num_warps}": median_us(
                lambda cut=cut: sampling.draw(logits, draws, filters, cut)  # type: ignore[misc]
            )
            for cut in some(OTHER_CHUNKS)
        }
    return found


def table_of(found: Found) -> Table:
    table = Table(title=f"sampling, float32 logits; copy {found.get('copy_bytes_per_s', 0) / 1e9:.0f} GB/s")
    headings = (
        "rows",
        "vocab",
        "setting",
        "us",
        "share of one read",
        "by sort, us",
        "same",
        "argmax, us",
        "torch's, us",
    )
    for heading in (*headings, "other chunks, us"):
        table.add_column(heading, justify="left" if heading == "setting" else "right")
    for one in found.get("results", ()):
        others = ", ".join(f"{name}: {us:.0f}" for name, us in one.get("chunks_us", {}).items())
        table.add_row(
            str(one["rows"]), str(one["vocab"]), one["setting"], f"{one['us']:.1f}", f"{one['share_of_one_read']:.0%}",
            f"{one['sort_us']:.0f}", f"{one['same_tokens']:.1%}", f"{one['argmax_us']:.1f}",
            f"{one['torch_argmax_us']:.1f}", others,
        )  # fmt: skip
    return table


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--rows", type=int, nargs="+", default=ROWS)
    made.add_argument("--vocab", type=int, nargs="+", default=VOCABULARIES)
    made.add_argument("--chunks", action="store_true", help="time other launch parameters too")
    options = parse(made, argv, rows=[2], vocab=[1100])
    with telling(options, table_of) as found:
        ceiling = found["copy_bytes_per_s"] = copy_bytes_per_s()
        results = found["results"] = []
        for vocab in options.vocab:
            for rows in options.rows:
                for name in some(SETTINGS):
                    results.append(measure(rows, vocab, name, ceiling, options.chunks))


if __name__ == "__main__":
    main()
