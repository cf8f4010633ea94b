"""What a server tells of a run, beside what the client measured from outside, and what it cannot tell.

    tokenize, queue, prefill, decode, inference, ttft, itl, tpot, e2e    means, in seconds
    prefill_busy, decode_slots                                           totals, in seconds
    requests, prompt_tokens, output_tokens, prefix_hit_tokens, preemptions, preempted, refused, steps,
    prefix_hits
    waiting, deferred, running, kv_usage                                 means of what was sampled during the load

Means are compared with means, over every request that was sent (the scrapes do not know of a warm-up), and from the
actual send, since no server knows when a request was meant to come. The client's figures are longer by the network, by
what the server's own clock leaves out, and by nothing else: `Compared.trap` says what that is.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from splittime.ledger.client_book import Ending, Outcome, Run
from splittime.loadgen.dialects import DIALECTS
from splittime.loadgen.dialects.dialect import Form, Quantity
from splittime.loadgen.dialects.reading import read


class Compared(msgspec.Struct, frozen=True, kw_only=True):
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
    rows: tuple[Compared, ...]
    cannot: tuple[str, ...]
    notes: tuple[str, ...]


def server_view(run: Run, arm: int = 0) -> ServerView:
    """Of a kind without a dialect the view is empty. `Arm.notes` are not repeated in it."""
    about = run.arms[arm]
    dialect = DIALECTS.get(about.kind)
    if dialect is None:
        return ServerView(kind=about.kind, version=about.version, rows=(), cannot=(), notes=())
    reading = read(dialect, about.metrics_before, about.metrics_after)
    sent = [outcome for outcome in run.outcomes if outcome.arm == arm and outcome.sent_ns is not None]
    rows = [_row(told.quantity, told.value, told.metric, SEEN[told.quantity.name](sent)) for told in reading.told]
    for quantity in dialect.quantities:
        values = _sampled(run, arm, quantity.name) if quantity.form is Form.STATE else []
        if values:
            rows.append(_row(quantity, sum(values) / len(values), quantity.metric, _seen_state(run, arm, quantity)))
    untold = [name for name in FELT if name not in {row.name for row in rows}]
    rows += [Compared(name=name, unit="s", told=None, seen=SEEN[name](sent)) for name in untold]
    notes = (*dialect.beware, *reading.notes)
    return ServerView(kind=about.kind, version=about.version, rows=tuple(rows), cannot=dialect.cannot, notes=notes)


def _row(quantity: Quantity, told: float | None, metric: str, seen: float | None) -> Compared:
    return Compared(name=quantity.name, unit=quantity.unit, told=told, seen=seen, metric=metric, trap=quantity.trap)


def _sampled(run: Run, arm: int, name: str) -> list[float]:
    values = (getattr(sample, name) for sample in run.samples if sample.arm == arm)
    return [value for value in values if value is not None]


def _seen_state(run: Run, arm: int, quantity: Quantity) -> float | None:
    """What is waiting or running together is in flight, which the client knows; it is put beside `running`."""
    in_flight = [sample.in_flight for sample in run.samples if sample.arm == arm]
    return sum(in_flight) / len(in_flight) if in_flight and quantity.name == "running" else None


# ---- from outside, over the requests that were sent


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ttft_s(sent: Sequence[Outcome]) -> float | None:
    return _mean([(o.chunk_ns[0] - o.sent_ns) / 1e9 for o in sent if o.chunk_ns and o.sent_ns is not None])


def _e2e_s(sent: Sequence[Outcome]) -> float | None:
    done = (o for o in sent if o.ending is Ending.COMPLETE and o.end_ns is not None)
    return _mean([(o.end_ns - o.sent_ns) / 1e9 for o in done if o.end_ns is not None and o.sent_ns is not None])


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


def _decode_mean_s(sent: Sequence[Outcome]) -> float | None:
    return _mean([_decode_s(o) for o in sent if o.chunk_ns])


def _sum_of(field: str) -> Callable[[Sequence[Outcome]], float | None]:
    def summed(sent: Sequence[Outcome]) -> float | None:
        values = [value for o in sent if (value := getattr(o, field)) is not None]
        return sum(values) if values else None

    return summed


def _hit_share(sent: Sequence[Outcome]) -> float | None:
    told = [o for o in sent if o.cached_tokens is not None and o.prompt_tokens]
    prompt_tokens = sum(o.prompt_tokens or 0 for o in told)
    return sum(o.cached_tokens or 0 for o in told) / prompt_tokens if prompt_tokens else None


def _unseen(sent: Sequence[Outcome]) -> None:
    return None


SEEN: dict[str, Callable[[Sequence[Outcome]], float | None]] = {
    "ttft": _ttft_s,
    "e2e": _e2e_s,
    "decode": _decode_mean_s,
    "tpot": _tpot_s,
    "itl": _itl_s,
    "requests": lambda sent: float(len(sent)),
    "prompt_tokens": _sum_of("prompt_tokens"),
    "output_tokens": _sum_of("output_tokens"),
    "prefix_hit_tokens": _sum_of("cached_tokens"),
    "prefix_hits": _hit_share,
    **dict.fromkeys(
        ("tokenize", "queue", "prefill", "inference", "prefill_busy", "decode_slots", "preemptions", "preempted"),
        _unseen,
    ),
    "steps": _unseen,
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
    for title, justify in _COLUMNS:
        table.add_column(title, justify=justify, no_wrap=bool(title), overflow="fold")
    for row in view.rows:
        table.add_row(row.name, _shown(row.told, row.unit), _shown(row.seen, row.unit), row.metric)
    mind = [Text(f"Mind {row.name}: {row.trap}", style="dim") for row in view.rows if row.trap]
    cannot = [Text(f"It cannot tell: {sentence}.") for sentence in view.cannot]
    return Group(table, *mind, *cannot, *notes)


_COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("mean or total", "left"),
    ("told", "right"),
    ("seen", "right"),
    ("", "left"),
)


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "s":
        return f"{value * 1e3:,.3f} ms"
    return f"{100 * value:.1f} %" if unit == "share" else f"{value:,.4g}"
