"""What a server tells of a run, beside what the client measured from outside, and what it cannot tell.

    tokenize, queue, prefill, decode, inference, ttft, itl, tpot, e2e    means, in seconds
    prefill_busy, decode_slots                                           totals, in seconds
    requests, prompt_tokens, output_tokens, prefix_hit_tokens, preemptions, preempted, refused, steps,
    prefix_hits
    waiting, deferred, running, kv_usage                                 means of what was sampled during the load

Means are compared with means, over every request that was sent (the scrapes do not know of a warm-up), and from the
actual send, since no server knows when a request was meant to come. The client's figures are longer by the network, by
what the server's own clock leaves out, and by nothing else: `ServerComparison.trap` says what that is.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from splittime.bench.book import requests
from splittime.bench.book.figures import share_of
from splittime.bench.book.records import Ending, Outcome, Run
from splittime.wire.dialects import DIALECTS, Notation, Quantity, read


class ServerComparison(msgspec.Struct, frozen=True, kw_only=True):
    """told: by the server. seen: the same from outside. None where the one or the other cannot know."""

    name: str
    unit: str
    told: float | None
    seen: float | None
    metric: str = ""
    trap: str = ""


class ServerView(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    version: str | None
    rows: tuple[ServerComparison, ...]
    cannot: tuple[str, ...]
    notes: tuple[str, ...]


def server_view(run: Run, arm: int = 0) -> ServerView:
    """Returns what the server says of itself: nothing, if its kind has no dialect. `Arm.notes` are not repeated in
    it."""
    about = run.arms[arm]
    dialect = DIALECTS.get(about.kind)
    if dialect is None:
        return ServerView(kind=about.kind, version=about.version, rows=(), cannot=(), notes=())
    reading = read(dialect, about.metrics_before, about.metrics_after)
    sent = [outcome for outcome in run.outcomes if outcome.arm == arm and outcome.sent_ns is not None]
    rows = [_row(known.quantity, known.value, known.metric, SEEN[known.quantity.name](sent)) for known in reading.told]
    for quantity in dialect.quantities:
        values = _sampled(run, arm, quantity.name) if quantity.form is Notation.STATE else []
        if values:
            rows.append(_row(quantity, sum(values) / len(values), quantity.metric, _seen_state(run, arm, quantity)))
    untold = [name for name in FELT if name not in {row.name for row in rows}]
    rows += [ServerComparison(name=name, unit="s", told=None, seen=SEEN[name](sent)) for name in untold]
    notes = (*dialect.beware, *reading.notes)
    return ServerView(kind=about.kind, version=about.version, rows=tuple(rows), cannot=dialect.cannot, notes=notes)


def _row(quantity: Quantity, known: float | None, metric: str, seen: float | None) -> ServerComparison:
    return ServerComparison(
        name=quantity.name, unit=quantity.unit, told=known, seen=seen, metric=metric, trap=quantity.trap
    )


def _sampled(run: Run, arm: int, name: str) -> list[float]:
    values = (getattr(sample, name) for sample in run.samples if sample.arm == arm)
    return [value for value in values if value is not None]


def _seen_state(run: Run, arm: int, quantity: Quantity) -> float | None:
    """Returns the requests in flight by the client's count, beside `running`: those that wait or run together."""
    in_flight = [sample.in_flight for sample in run.samples if sample.arm == arm]
    return sum(in_flight) / len(in_flight) if in_flight and quantity.name == "running" else None


# ---- from outside, over the requests that were sent


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _mean_s(of: Callable[[Outcome], float | None]) -> Callable[[Sequence[Outcome]], float | None]:
    """Returns the mean in seconds of a figure that is in ns, over the requests that have it."""
    return lambda sent: _mean([ns / 1e9 for outcome in sent if (ns := of(outcome)) is not None])


def _e2e_ns(outcome: Outcome) -> int | None:
    return requests.service_ns(outcome) if outcome.ending is Ending.COMPLETE else None


def _later_tokens(outcome: Outcome) -> int:
    """Tokens after the first chunk, 0 if not known."""
    first = outcome.chunk_tokens[0] if outcome.chunk_tokens else 1
    return max(0, (outcome.output_tokens or 0) - first)


def _decode_s(outcome: Outcome) -> float:
    return (outcome.chunk_ns[-1] - outcome.chunk_ns[0]) / 1e9


def _tpot_s(sent: Sequence[Outcome]) -> float | None:
    return _mean([_decode_s(o) / _later_tokens(o) for o in sent if o.chunk_ns and _later_tokens(o)])


def _itl_s(sent: Sequence[Outcome]) -> float | None:
    streamed = [o for o in sent if o.chunk_ns and _later_tokens(o)]
    tokens = sum(_later_tokens(o) for o in streamed)
    return sum(_decode_s(o) for o in streamed) / tokens if tokens else None


def _sum_of(field: str) -> Callable[[Sequence[Outcome]], float | None]:
    def summed(sent: Sequence[Outcome]) -> float | None:
        values = [value for o in sent if (value := getattr(o, field)) is not None]
        return sum(values) if values else None

    return summed


SEEN: dict[str, Callable[[Sequence[Outcome]], float | None]] = {
    "ttft": _mean_s(requests.service_ttft_ns),
    "e2e": _mean_s(_e2e_ns),
    "decode": lambda sent: _mean([_decode_s(o) for o in sent if o.chunk_ns]),
    "tpot": _tpot_s,
    "itl": _itl_s,
    "requests": lambda sent: float(len(sent)),
    "prompt_tokens": _sum_of("prompt_tokens"),
    "output_tokens": _sum_of("output_tokens"),
    "prefix_hit_tokens": _sum_of("cached_tokens"),
    "prefix_hits": lambda sent: share_of(sent, "cached_tokens", "prompt_tokens"),
    # what no client can see: the server's queue, phases and steps
    **dict.fromkeys(("tokenize", "queue", "prefill", "inference", "prefill_busy", "decode_slots"), lambda sent: None),
    **dict.fromkeys(("preemptions", "preempted", "steps"), lambda sent: None),
    "refused": lambda sent: float(sum(o.status in (429, 503) for o in sent)),
}

FELT = ("ttft", "tpot", "e2e")  # what a user feels, shown whether the server tells it or not


def render_server_view(run: Run, arm: int = 0) -> RenderableType:
    """A table of what it tells, then what to mind in it, then what it cannot tell."""
    view = server_view(run, arm)
    name = f"{view.kind} {view.version}" if view.version else view.kind
    notes = [Text(note, style="yellow") for note in view.notes]
    if not view.rows:
        return Group(Text(f"{name} tells nothing of itself that is understood here."), *notes)
    table = Table(title=f"What {name} tells of itself, and what the client saw from outside", box=SIMPLE_HEAD)
    for title in ("mean or total", "told", "seen", ""):
        justify: Literal["left", "right"] = "right" if title in ("told", "seen") else "left"
        table.add_column(title, justify=justify, no_wrap=bool(title), overflow="fold")
    for row in view.rows:
        table.add_row(row.name, _shown(row.told, row.unit), _shown(row.seen, row.unit), row.metric)
    mind = [Text(f"Mind {row.name}: {row.trap}", style="dim") for row in view.rows if row.trap]
    cannot = [Text(f"It cannot tell: {sentence}.") for sentence in view.cannot]
    return Group(table, *mind, *cannot, *notes)


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "s":
        return f"{value * 1e3:,.3f} ms"
    return f"{100 * value:.1f} %" if unit == "share" else f"{value:,.4g}"
