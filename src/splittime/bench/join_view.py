"""What a server tells of a run, for people, beside what the client measured from outside, and what it cannot tell.

Of a splittime server both books are shown (`render_books`): a table for TTFT and one for E2E, then the buckets, then
what could not be joined. Of any server, what its metrics say (`server_view`):

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
from rich.box import SIMPLE_HEAD as HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from splittime.bench import join
from splittime.bench.book import requests
from splittime.bench.book.figures import share_of
from splittime.bench.book.records import Ending, Outcome, Run
from splittime.core.errors import NotFound
from splittime.ledger.stages import CAUSE_MEANING, STAGE_MEANING, Cause, Stage
from splittime.present.tables import FittingTable, Sentence
from splittime.wire.dialects import DIALECTS, Notation, Quantity, read

BAR_COLUMNS = 12
NAMES = {join.TTFT: "TTFT", join.E2E: "E2E"}
OWNERS = {"client": "cyan", join.NETWORK: "yellow", "waits": "red", "works": "green", join.RESIDUAL: "yellow"}
WAITS = {"queue", "prefill_stall", "decode_stall", "preempted"}
MEANING = {
    join.HELD: "held back on purpose (a cap, or its session's turn before)",
    join.CLIENT_LAG: "the client turned to it later than intended",
    join.CONNECT: "making the connection",
    join.SEND: "waiting for a connection, and writing the request",
    join.UNSEEN: "in the server's socket while its event loop was busy",
    join.NETWORK: "up and down, as far as the probed round trip explains",
    join.RESIDUAL: "what neither book explains",
    **{stage.value: meaning.rstrip(".").lower() for stage, meaning in STAGE_MEANING.items()},
    Stage.QUEUE.value: "the engine has it, and the next step takes it",
    Stage.DELIVER.value: "the tokens are ready; their chunk is on its way to the socket",
}


def render_books(joined: join.JoinedBooks) -> RenderableType:
    """All of it, or one sentence if nothing could be joined."""
    if not joined.books:
        return Text(f"No request could be found in both books. {_left_out(joined)}")
    parts: list[RenderableType] = []
    for figure in (join.TTFT, join.E2E):
        whole = joined.book(figure)
        if whole is not None:
            parts += [FittingTable(_table(whole), _table(whole, with_bar=False)), _verdict(whole), Text()]
            buckets = [book for book in joined.books if book.figure == figure and book.bucket != join.ALL]
            parts += [FittingTable(_buckets(buckets), _buckets(buckets, 0)), Text()] if len(buckets) > 1 else []
    lines = {_name(line): _meaning(line) for book in joined.books if book.bucket == join.ALL for line in _shown(book)}
    words = [Sentence(f"{name:<23}{meaning}", "dim", indent=23) for name, meaning in lines.items()]
    return Group(*parts, *words, Text(_footnote(joined), style="dim"))


def render_request(request: join.JoinedRequest) -> RenderableType:
    """One request's TTFT and E2E by lines."""
    about = f"{request.request_id}: {request.prompt_tokens} prompt tokens, {request.output_tokens} output tokens"
    table = Table(title=about, box=HEAD)
    for title in ("ms", "TTFT", "E2E"):
        table.add_column(title, justify="left" if title == "ms" else "right", no_wrap=True)
    splits = (request.ttft, request.e2e)
    books = [join.book_of(join.ALL, join.ALL, [split]) if split is not None else None for split in splits]
    lines = {_name(line): line for one in reversed(books) if one is not None for line in _shown(one)}
    for name, line in lines.items():
        cells = (_ms_of(one, name) for one in books)
        table.add_row(name, *cells, style=_style(line))
    table.add_section()
    table.add_row("sum", *("-" if split is None else _ms(split.total_ns) for split in splits))
    return table


def _ms_of(one: join.Book | None, name: str) -> str:
    found = [line.mean_ns for line in one.lines if _name(line) == name] if one is not None else []
    return _ms(found[0]) if found else ""


def _table(book: join.Book, *, with_bar: bool = True) -> Table:
    """Without its bar it says the same in fewer columns."""
    many = f"{book.count} request{'s' if book.count > 1 else ''}"
    table = Table(title=f"{NAMES[book.figure]} from the intended start, {many} in both books", box=HEAD)
    table.add_column("ms a request", overflow="fold")
    for name in ("mean", "p50", "p99", "share"):
        table.add_column(name, justify="right", overflow="fold")
    if with_bar:
        table.add_column("", width=BAR_COLUMNS)
    for line in _shown(book):
        share, bar = f"{100 * line.share:.1f} %", ["█" * round(BAR_COLUMNS * max(0.0, min(1.0, line.share)))]
        cells = (_ms(line.mean_ns), _ms(line.p50_ns), _ms(line.p99_ns), share, *(bar if with_bar else ()))
        table.add_row(_name(line), *cells, style=_style(line))
    table.add_section()
    table.add_row("sum", _ms(book.mean_ns), _ms(book.p50_ns), _ms(book.p99_ns), "100.0 %")
    return table


def _shown(book: join.Book) -> list[join.BookLine]:
    """Lines of nothing are left out, but for the two that belong to neither book."""
    return [line for line in book.lines if line.share != 0 or line.stage in (join.NETWORK, join.RESIDUAL)]


def _name(line: join.BookLine) -> str:
    return f"{line.stage}: {line.cause}" if line.cause is not None else line.stage


def _meaning(line: join.BookLine) -> str:
    return MEANING[line.stage] if line.cause is None else CAUSE_MEANING[Cause(line.cause)]


def _style(line: join.BookLine) -> str:
    return OWNERS[_owner(line)]


def _owner(line: join.BookLine) -> str:
    if line.stage in (join.NETWORK, join.RESIDUAL):
        return line.stage
    if line.stage in join.CLIENT_BEFORE:
        return "client"
    return "waits" if line.stage in WAITS else "works"


def _verdict(book: join.Book) -> Text:
    """The goal is about the mean of the residual's absolute value, whatever its p99 is."""
    text = Text(f"Residual: the mean of its absolute value is {_ms(book.residual_abs_mean_ns)} ms, ")
    text.append("within the goal" if book.is_within_goal else "OVER the goal", style=_goal_style(book))
    text.append(f" for that mean: at most {join.GOAL_NS / 1e6:g} ms or {100 * join.GOAL_SHARE:g} % of the mean ")
    text.append(f"{NAMES[book.figure]}, whichever is more. Its p99, for which there is no goal, is ")
    text.append(f"{_ms(book.residual_abs_p99_ns)} ms; ")
    return text.append(f"{100 * book.share_within_goal:.1f} % of requests are within such a limit one by one.")


def _goal_style(book: join.Book) -> str:
    return "green" if book.is_within_goal else "bold red"


def _buckets(books: list[join.Book], padding: int = 1) -> Table:
    """One row a bucket: who had the time. Waits and works are the server's."""
    title = f"{NAMES[books[0].figure]} by prompt tokens: mean ms, and whose they were"
    table = Table(title=title, box=HEAD, padding=(0, padding))
    table.add_column("prompt", overflow="fold")
    for name in ("count", *OWNERS, "sum"):
        table.add_column(name, justify="right", overflow="fold")
    for book in books:
        sums = dict.fromkeys(OWNERS, 0.0)
        for line in book.lines:
            sums[_owner(line)] += line.mean_ns
        table.add_row(book.bucket, str(book.count), *(_ms(ns) for ns in sums.values()), _ms(book.mean_ns))
    return table


def _footnote(joined: join.JoinedBooks) -> str:
    probed = "not probed" if joined.round_trip_ns is None else f"{_ms(joined.round_trip_ns)} ms in the median"
    return f"Clocks of two hosts are never subtracted. Probed round trip: {probed}. {_left_out(joined)}".rstrip()


def _left_out(joined: join.JoinedBooks) -> str:
    """A clause for each figure that lacks requests."""
    clauses = [
        f"{NAMES[figure]}: " + ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        for figure, reasons in joined.left_out.items()
        if reasons
    ]
    return f"Of {joined.intended} requests, left out of {'; of '.join(clauses)}." if clauses else ""


def _ms(duration_ns: float) -> str:
    return f"{duration_ns / 1e6:.3f}" if abs(duration_ns) < 1e9 else f"{duration_ns / 1e6:.1f}"


def find_request(books_of_arms: Sequence[join.JoinedBooks], wanted: str) -> join.JoinedRequest:
    """Returns the request of this id or number. Raises `NotFound`, also for one that is in one book only."""
    for joined in books_of_arms:
        for request in joined.requests:
            if wanted in (request.request_id, str(request.index)):
                return request
    hint = "It may not have been sent, not counted, or the server has no account of it."
    raise NotFound(f"no request {wanted!r} in both books", param="request", value=wanted, hint=hint)


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
        table.add_row(row.name, _with_unit(row.told, row.unit), _with_unit(row.seen, row.unit), row.metric)
    mind = [Text(f"Mind {row.name}: {row.trap}", style="dim") for row in view.rows if row.trap]
    cannot = [Text(f"It cannot tell: {sentence}.") for sentence in view.cannot]
    return Group(table, *mind, *cannot, *notes)


def _with_unit(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "s":
        return f"{value * 1e3:,.3f} ms"
    return f"{100 * value:.1f} %" if unit == "share" else f"{value:,.4g}"
