"""Both books for people: a table for TTFT and one for E2E, then the buckets, then what could not be joined."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD as HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from splittime.bench import join
from splittime.core.errors import NotFound
from splittime.ledger.stages import CAUSE_MEANING, STAGE_MEANING, Cause, Stage
from splittime.present.tables import FittingTable, Sentence

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
