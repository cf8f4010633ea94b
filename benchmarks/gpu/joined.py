"""What one launch saves against several, on the card: each kernel that joins small ones, beside what it replaced.

    python -m benchmarks.gpu.joined            decode steps, shapes of Llama-3.1-8B and Qwen3-30B-A3B, bfloat16
    python -m benchmarks.gpu.joined --json

    choice       softmax, the best k and their shares          torch: softmax, topk, sum, division, two casts
    parts+norm   sums of 4 programs, residual, norm            `add_parts`, then `rms_norm`
    residual     a product added to the residual in place      `addmm` to a new tensor, which copies it first

Medians of CUDA events over captured launches: what the host takes for a launch is not in them, what the card takes to
begin one is. All of it is latency, so there is no share of a ceiling; the copy's bandwidth is told beside it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.gpu.card import CARD, Found, copy_bytes_per_s, median_us, parse, parser, place, scale, telling
from splittime.kernels.triton import elementwise
from splittime.kernels.triton.mixture import choose_experts
from splittime.kernels.triton.tiles import add_parts

HIDDEN, EXPERTS, CHOSEN, SPLITS = (4096, 128, 8, 4) if scale() is CARD else (64, 8, 2, 2)
TOKENS = (1, 2, 16, 64, 256)
BFLOAT16 = torch.bfloat16
Run = Callable[[], Any]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=place()).to(BFLOAT16)


def choice(tokens: int) -> tuple[Run, Run]:
    logits, blocks = randn(tokens, EXPERTS), torch.zeros(tokens, dtype=torch.int32, device=place())

    def several() -> tuple[Tensor, Tensor]:
        shares, chosen = logits.float().softmax(-1).topk(CHOSEN, dim=-1)
        return chosen, (shares / shares.sum(-1, keepdim=True)).to(BFLOAT16)

    return lambda: choose_experts(logits, CHOSEN, True, BFLOAT16, blocks), several


def parts_and_norm(tokens: int) -> tuple[Run, Run]:
    parts = torch.randn(SPLITS, tokens, HIDDEN, device=place())
    residual, total, packed = randn(tokens, HIDDEN), randn(tokens, HIDDEN), elementwise.pack(randn(HIDDEN), 1e-5)

    def several() -> Tensor:
        add_parts(parts, None, residual, total)
        return elementwise.rms_norm(total, packed)

    return lambda: elementwise.add_parts_rms_norm(parts, None, residual, packed, total), several


def residual(tokens: int) -> tuple[Run, Run]:
    """Halved each time, so that it stays finite."""
    x, stream, weight = randn(tokens, HIDDEN), randn(tokens, HIDDEN), randn(HIDDEN, HIDDEN).t()
    return lambda: stream.addmm_(x, weight, beta=0.5), lambda: torch.addmm(stream, x, weight, beta=0.5)


CASES = {"choice": choice, "parts+norm": parts_and_norm, "residual": residual}


def measured(tokens: int) -> Iterator[dict[str, Any]]:
    for name, make in CASES.items():
        joined, several = make(tokens)
        yield {"tokens": tokens, "kernel": name, "us": median_us(joined), "several_us": median_us(several)}


def table_of(found: Found) -> Table:
    table = Table(title=f"joined kernels, bfloat16; copy {found.get('copy_bytes_per_s', 0) / 1e9:.0f} GB/s")
    for column in ("tokens", "kernel", "us", "one after the other, us", "saved, us"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for one in found.get("results", ()):
        times = (one["us"], one["several_us"], one["several_us"] - one["us"])
        table.add_row(str(one["tokens"]), one["kernel"], *(f"{us:.1f}" for us in times))
    return table


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    options = parse(made, argv, tokens=[2])
    with telling(options, table_of) as found:
        found["copy_bytes_per_s"] = copy_bytes_per_s()
        results = found["results"] = []
        for tokens in options.tokens:
            results += measured(tokens)


if __name__ == "__main__":
    main()
