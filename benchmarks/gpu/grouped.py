"""A mixture of experts on the card, from the router's choice to the sum: one layer of Qwen3-30B-A3B.

    python -m benchmarks.gpu.grouped                      128 experts of 768, 8 a token, hidden 2048; 1 to 8192 tokens
    python -m benchmarks.gpu.grouped --tiles              other tiles beside those that are chosen
    python -m benchmarks.gpu.grouped --scheme int4 --tokens 1 8 64 --json

The share is of the roofline: max(bytes / copy bandwidth, operations / matrix rate), both measured in the same run.
Bytes are the weights of the experts that ran (counted on the device), x, the residual and the output; what lies between
the two products is not counted. Launches go round several choices of experts, so that those of one launch are not still
in the cache at the next. Beside it stand torch's products expert by expert (with one wait for the host a layer, not
captured) and, where torch has it, `torch._grouped_mm` over sorted tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from benchmarks.gpu.card import (
    CARD,
    Found,
    copy_bytes_per_s,
    median_event_us,
    median_us,
    parse,
    parser,
    place,
    scale,
    some,
    telling,
)
from benchmarks.gpu.linear import SCHEMES, matrix_rates, random_weight
from splittime.kernels.triton import integers, linear
from splittime.kernels.triton.grouped import Experts, grouped
from splittime.kernels.triton.tiles import Tiles

HIDDEN, INNER, EXPERTS, CHOSEN = (2048, 768, 128, 8) if scale() is CARD else (128, 128, 2, 1)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 2048, 8192)
KINDS = ("bfloat16", "int8", "int4")
CHOICES = 8 if scale() is CARD else 1  # that launches go round
MAX_ERROR = 0.02


@cache
def make_experts(scheme: str) -> Experts:
    """All of a layer, made on the device, once."""
    gate_up, down = (
        _spread(random_weight(SCHEMES[scheme], out, columns)) for out, columns in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    )
    return Experts(gate_up, down, EXPERTS, torch.zeros(1, dtype=torch.int64, device=place()))


def _spread(one: Any) -> Any:
    """EXPERTS weights, each the one's outputs in another order, so that no two are alike."""

    def stacked(tensor: Tensor, axis: int) -> Tensor:
        return torch.stack([tensor.roll(37 * expert, axis) for expert in range(EXPERTS)])

    if isinstance(one, linear.DenseWeight):
        return linear.DenseWeight(stacked(one.weight, 0))
    assert isinstance(one, integers.IntegerWeight)
    return replace(one, words=stacked(one.words, 1), scales=stacked(one.scales, -1))


def dense_of(weights: Any) -> Tensor:
    """bfloat16 [EXPERTS, out, in]."""
    if isinstance(weights, linear.DenseWeight):
        return weights.weight
    alone = (
        replace(weights, words=words, scales=scales) for words, scales in zip(*linear.kept(weights)[1], strict=True)
    )
    return torch.stack([linear.unpacked(one).bfloat16() for one in alone])


def choices(tokens: int) -> list[tuple[Tensor, Tensor]]:
    """As a router that has no favourites chooses."""
    made = []
    for _ in range(CHOICES):
        scores = torch.randn(tokens, EXPERTS, device=place()).softmax(-1)
        weights, chosen = scores.topk(CHOSEN, -1)
        made.append((chosen, weights / weights.sum(-1, keepdim=True)))
    return made


def by_expert(x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """torch's products, one expert after another, as `kernels.compose.mixture` has them."""
    order = chosen.flatten().argsort()
    counts = chosen.flatten().bincount(minlength=EXPERTS).tolist()
    rows, out, begin = order // CHOSEN, torch.zeros_like(x), 0
    for expert, count in enumerate(counts):
        if count:
            mine = rows[begin : begin + count]
            gate, up = F.linear(x[mine], gate_up[expert]).chunk(2, -1)
            part = F.linear(F.silu(gate) * up, down[expert])
            out.index_add_(0, mine, part * shares.flatten()[order[begin : begin + count], None].to(x.dtype))
            begin += count
    return out


def by_grouped_mm(x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """torch's own grouped product, where it is there."""
    sorted_experts, order = chosen.flatten().sort()
    ends = torch.searchsorted(sorted_experts, torch.arange(EXPERTS, device=x.device), right=True).to(torch.int32)
    rows = order // CHOSEN
    gate, up = torch._grouped_mm(x[rows], gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    parts = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    parts = parts * shares.flatten()[order, None].to(x.dtype)
    return torch.empty_like(parts).index_copy_(0, order, parts).view(len(x), CHOSEN, -1).sum(1)


def variants(tokens: int) -> Iterator[tuple[Tiles, Tiles]]:
    """Gate and up, down: of the same number of tokens."""
    each = tokens * CHOSEN / EXPERTS
    for width in (16,) if each <= 8 else (16, 32, 64) if each <= 64 else (32, 64, 128):
        for outputs, warps in ((32, 2), (64, 4), (128, 4), (128, 8)):
            for stages in (2, 3, 5):
                tiles = Tiles(width, outputs, 1, warps, stages)
                yield tiles, tiles


def measure(scheme: str, tokens: int, ceilings: dict[str, float], has_tiles: bool) -> Iterator[dict[str, Any]]:
    experts = make_experts(scheme)
    x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device=place())
    picked = choices(tokens)
    before = sum(experts.bytes_read().values())
    for chosen, shares in picked:
        grouped(x, chosen, shares, experts, x)
    weight_bytes = (sum(experts.bytes_read().values()) - before) / CHOICES
    moved = weight_bytes + 3 * 2 * tokens * HIDDEN
    operations = 6 * tokens * CHOSEN * HIDDEN * INNER
    floor_us = 1e6 * max(moved / ceilings["copy_bytes_per_s"], operations / ceilings["bfloat16"])
    us = _median(lambda one: grouped(x, *one, experts, x), picked)
    found = {"scheme": scheme, "tokens": tokens, "us": us, "share": floor_us / us, "bytes": moved}
    if scheme == "bfloat16":
        found |= _others(x, picked, experts)
    if has_tiles:
        found["tiles_us"] = dict(_tried(x, picked, experts))
    yield found


def _others(x: Tensor, picked: list[tuple[Tensor, Tensor]], experts: Experts) -> dict[str, float]:
    weights = experts.gate_up.weight, experts.down.weight  # type: ignore[union-attr]
    turn = cycle(picked)
    found = {"by_expert_us": median_event_us(lambda: by_expert(x, *next(turn), *weights))}
    if hasattr(torch, "_grouped_mm"):
        found["grouped_mm_us"] = _median(lambda one: by_grouped_mm(x, *one, *weights), picked)  # type: ignore[call-arg]
    return found


def _tried(x: Tensor, picked: list[tuple[Tensor, Tensor]], experts: Experts) -> Iterator[tuple[str, float]]:
    """Fastest first; what does not fit the card is left out."""
    times = []
    for first, second in some(variants(len(x))):
        try:
            us = _median(
                lambda one, first=first, second=second: grouped(
                    x, *one, experts, x, gate_up_tiles=first, down_tiles=second
                ),
                picked,
            )
        except Exception as error:  # Triton has several for too much shared memory or too many registers
            print(f"{first}: {type(error).__name__}")
            continue
        times.append((us, f"{first.tokens}x{first.outputs} warps {first.num_warps} stages {first.num_stages}"))
    yield from ((label, us) for us, label in sorted(times))


def _median(run: Callable[[Any], Tensor], picked: list[Any]) -> float:
    turn = cycle(picked)
    return median_us(lambda: run(next(turn)))


def check(scheme: str) -> float:
    """The largest error of a layer, of its output's size; ends the run if it is too large for bfloat16."""
    experts = make_experts(scheme)
    gate_up, down = dense_of(experts.gate_up), dense_of(experts.down)
    worst = 0.0
    for tokens in (1, 5, 300) if scale() is CARD else (3,):
        x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device=place())
        chosen, shares = choices(tokens)[0]
        true = by_expert(x, chosen, shares, gate_up, down).float()
        worst = max(worst, float((grouped(x, chosen, shares, experts).float() - true).norm() / true.norm()))
    if not worst < MAX_ERROR:
        raise SystemExit(f"{scheme}: a layer is off by {worst:.3f} of its size")
    return worst


def table_of(found: Found) -> Table:
    told = ", ".join(f"{name} {rate / 1e12:.3g} T/s" for name, rate in found.get("ceilings", {}).items())
    table = Table(title=f"experts of Qwen3-30B-A3B; {told}")
    for column in ("tokens", "scheme", "us", "of roofline", "by expert, us", "_grouped_mm, us", "best other tiles, us"):
        table.add_column(column, justify="right")
    for one in found.get("results", ()):
        best = next(iter(one.get("tiles_us", {}).items()), None)
        others = [f"{one[name]:.1f}" if name in one else "" for name in ("by_expert_us", "grouped_mm_us")]
        told = "" if best is None else f"{best[0]}: {best[1]:.1f}"
        table.add_row(str(one["tokens"]), one["scheme"], f"{one['us']:.1f}", f"{one['share']:.0%}", *others, told)
    return table


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    made.add_argument("--scheme", nargs="+", default=KINDS, choices=KINDS)
    made.add_argument("--tiles", action="store_true", help="time other tiles too")
    options = parse(made, argv, tokens=[3])
    with telling(options, table_of) as found:
        found["errors"] = {scheme: check(scheme) for scheme in options.scheme}
        ceilings = found["ceilings"] = {"copy_bytes_per_s": copy_bytes_per_s()} | matrix_rates()
        results = found["results"] = []
        for scheme in options.scheme:
            for tokens in options.tokens:
                results += measure(scheme, tokens, ceilings, options.tiles)


if __name__ == "__main__":
    main()
