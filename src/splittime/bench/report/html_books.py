"""Both books as bars: where the mean request's time went, by prompt length, until its first token and until its end.

A bar's pieces are durations in the order of a request's life, laid end to end: first the client's, then the network's
(up and down are one piece, since clocks of two hosts are never subtracted), then the account's stages as the server
kept them, then what is left. What is too short for a bar stands in the table of parts.

A piece's key is a stage and a cause, or a part of the client's side. Colours are classes of the dashboard's own file,
so that a stage looks the same here and there; short parts that share a colour share a name in a legend.

`slowest` shows the slowest requests one by one, each as one bar from its intended start to its end, with the account's
stages in the order in which they came. Ticks beneath a bar are the chunks, by the client's clock alone. Without an
account a bar shows what can be seen from outside.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from splittime.bench import join
from splittime.bench.book.figures import prompt_tokens
from splittime.bench.book.records import Outcome, Run
from splittime.bench.book.requests import response_ns
from splittime.bench.book.series import complete
from splittime.bench.join_view import MEANING
from splittime.bench.own_book import by_request
from splittime.bench.report.text import digits, listed, ms, percent
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import CAUSE_MEANING, Cause, Stage
from splittime.present.scale import HEIGHT, WIDTH, duration, from_zero

SLOWEST = 12
SLOTS = 600  # a bar shows no piece narrower than one of so many; of those within one, the longest is shown
MIN_SHARE = 0.0005  # of a bar; less is not drawn
BEFORE_ENGINE = (Stage.RECEIVE, Stage.TOKENIZE, Stage.ADMIT, Stage.HANDOFF)
FIRST, STREAM = "until the first chunk", "from the first chunk to the end"

Timed = tuple[join.Key, int]  # and its duration in ns


class BarPiece(NamedTuple):
    """left, width: % of the row's room."""

    key: join.Key
    classes: str
    words: str
    left: float
    width: float


class Bar(NamedTuple):
    name: str
    detail: str
    total: str
    pieces: list[BarPiece]
    ticks: str = ""  # an SVG path


class BarLine(NamedTuple):
    classes: str
    name: str
    meaning: str
    cells: tuple[str, ...]


class Bars(NamedTuple):
    """Rows on one axis. lines: what the pieces are, those that are seen."""

    title: str
    axis: list[tuple[float, str]]
    bars: list[Bar]
    lines: list[BarLine]
    verdict: str = ""


def key_classes(key: join.Key) -> str:
    stage, cause = key
    if stage in join.CLIENT_BEFORE:
        return "ink client"
    if stage in (FIRST, STREAM):
        return "ink " + ("first" if stage == FIRST else "stage-decode")
    return f"ink stage-{stage}" + (f" cause-{cause}" if cause else "")


def place(key: join.Key) -> tuple[int, int]:
    """Returns where a key stands in a list: in the order of a request's life."""
    stage, cause = key
    return (*join.CLIENT_BEFORE, FIRST, STREAM, *join.LINE_ORDER).index(stage), join.CAUSE_ORDER.index(cause)


def group_name(key: join.Key) -> str:
    """Short parts that share a colour share a name."""
    stage = key[0]
    if stage in join.CLIENT_BEFORE:
        return "client"
    return "before the engine" if stage in BEFORE_ENGINE else key_name(key)


def key_name(key: join.Key) -> str:
    stage, cause = (word and word.replace("_", " ") for word in key)
    return f"{stage}: {cause}" if cause else str(stage)


def key_meaning(key: join.Key) -> str:
    """A whole sentence."""
    stage, cause = key
    text = MEANING.get(stage, stage) if cause is None else CAUSE_MEANING[Cause(cause)]
    return f"{text[:1].upper()}{text[1:]}."


def seen(bars: Iterable[Bar]) -> list[BarLine]:
    """A line for each name and colour that is drawn."""
    keys = sorted({piece.key for bar in bars for piece in bar.pieces}, key=place)
    named = {group_name(key): key for key in reversed(keys)}
    return [BarLine(key_classes(key), name, key_meaning(key), ()) for name, key in reversed(named.items())]


def pieces(timed: Iterable[Timed], high_ns: float) -> list[BarPiece]:
    """Neighbours of one kind are one piece. What a bar of `SLOTS` cannot tell apart goes to the longest there."""
    made, left = [], 0.0
    for key, ns in _merged(_in_slots(timed, high_ns / SLOTS)):
        width = 100 * ns / high_ns
        if width >= 100 * MIN_SHARE:
            made.append(BarPiece(key, key_classes(key), f"{key_name(key)}, {duration_words(ns)}", left, width))
        left += width
    return made


def _merged(timed: Iterable[Timed]) -> list[Timed]:
    return [(key, sum(ns for _, ns in group)) for key, group in groupby(timed, key=lambda item: item[0])]


def _in_slots(timed: Iterable[Timed], slot_ns: float) -> Iterable[Timed]:
    """Runs of pieces that are each shorter than a slot become one piece, once they fill it, of whichever kind had most
    of it. Durations are kept: the pieces sum to what they did."""
    waiting: dict[join.Key, int] = {}
    for key, ns in _merged((key, ns) for key, ns in timed if ns > 0):
        waiting[key] = waiting.get(key, 0) + ns
        if sum(waiting.values()) >= slot_ns:
            yield max(waiting, key=lambda k: waiting[k]), sum(waiting.values())
            waiting = {}
    if waiting:
        yield max(waiting, key=lambda k: waiting[k]), sum(waiting.values())


def axis(high_ns: float) -> list[tuple[float, str]]:
    scale = from_zero([high_ns], 1.0)
    return [(100 * float(scale.share(tick)), duration(tick)) for tick in scale.ticks()]


def duration_words(ns: float) -> str:
    return f"{digits(ns / 1e9)} s" if abs(ns) >= 1e9 else f"{ms(ns)} ms"


def time_went(joined: join.JoinedBooks) -> list[Bars]:
    titles = {join.TTFT: "Until the first token", join.E2E: "Until the end"}
    return [_book_bars(joined, figure, title) for figure, title in titles.items() if joined.book(figure)]


def _book_bars(joined: join.JoinedBooks, figure: str, title: str) -> Bars:
    found = [book for book in joined.books if book.figure == figure]
    shown = found if len(found) > 2 else found[:1]
    high_ns = from_zero([book.mean_ns for book in shown], 1.0).high
    bars = [_book_bar(book, high_ns) for book in shown]
    return Bars(title, axis(high_ns), bars, seen(bars), _verdict(found[0]))


def _book_bar(book: join.Book, high_ns: float) -> Bar:
    timed = [((line.stage, line.cause), round(line.mean_ns)) for line in book.lines]
    name = "all" if book.bucket == join.ALL else book.bucket
    return Bar(name, f"{book.count:,}", duration_words(book.mean_ns), pieces(timed, high_ns))


def _verdict(book: join.Book) -> str:
    held = "within" if book.is_within_goal else "OVER"
    return (
        f"The two books differ by {ms(book.residual_abs_mean_ns)} ms in the mean of its absolute value (p99 "
        f"{ms(book.residual_abs_p99_ns)} ms), {held} the goal of 1 ms or 1 %."
    )


def part_lines(joined: join.JoinedBooks) -> list[BarLine]:
    """Every part of TTFT and of E2E in figures, mean, p99 and share of each; the sums last."""
    books = [joined.book(figure) for figure in (join.TTFT, join.E2E)]
    lines = [{(line.stage, line.cause): line for line in book.lines} if book else {} for book in books]
    keys = sorted(set().union(*lines), key=place)
    rows = [(key, [its.get(key) for its in lines]) for key in keys]
    made = [
        BarLine(key_classes(key), key_name(key), key_meaning(key), (*_cells(found[0]), *_cells(found[1])))
        for key, found in rows
        if key[0] in (join.NETWORK, join.RESIDUAL) or any(line is not None and line.share for line in found)
    ]
    sums = [cell for book in books for cell in ((ms(book.mean_ns), ms(book.p99_ns), "100 %") if book else ("",) * 3)]
    return [*made, BarLine("", "sum", "", tuple(sums))]


def _cells(line: join.BookLine | None) -> tuple[str, str, str]:
    return ("", "", "") if line is None else (ms(line.mean_ns), ms(line.p99_ns), percent(line.share))


def largest_part(joined: join.JoinedBooks) -> str:
    """A sentence on what the mean request waited for most, until its first token."""
    whole = joined.book(join.TTFT)
    if whole is None or not whole.mean_ns:
        return ""
    line = max(whole.lines, key=lambda found: found.share)
    key = (line.stage, line.cause)
    part = f"{percent(line.share)} of the mean {duration_words(whole.mean_ns)} until the first token"
    name = f"{line.stage} ({line.cause.replace('_', ' ')})" if line.cause else key_name(key)
    return f"{part} was {name}: {key_meaning(key)[:1].lower()}{key_meaning(key)[1:]}"


def left_out(joined: join.JoinedBooks) -> str:
    """Returns who is in the client's book alone, and why; empty if nobody."""
    reasons = joined.left_out.get(join.E2E, {})
    counts = [f"{count:,} {reason}" for reason, count in reasons.items()]
    return f"Of {joined.intended:,} measured requests, not in both books: {listed(counts)}." if counts else ""


def slowest(run: Run, arm: int, joined: join.JoinedBooks) -> Bars | None:
    """None if no request was complete."""
    whole = [o for o in complete(run.measured(arm)) if o.sent_ns is not None and (response_ns(o) or 0) > 0]
    worst = sorted(whole, key=lambda o: -(response_ns(o) or 0))[:SLOWEST]
    if not worst:
        return None
    accounts = by_request(run.arms[arm].accounts)
    splits = {request.request_id: request.e2e for request in joined.requests}
    high_ns = max(response_ns(outcome) or 0 for outcome in worst)
    bars = []
    for outcome in worst:
        split = splits.get(outcome.request_id)
        choices = accounts.get(outcome.request_id, ())
        timed = _from_both(choices, split.lines) if split else _from_outside(outcome)
        bars.append(_request_bar(outcome, timed, high_ns))
    return Bars("", axis(high_ns), bars, seen(bars))


def _request_bar(outcome: Outcome, timed: Sequence[Timed], high_ns: float) -> Bar:
    tokens = [f"{n:,}" if n is not None else "?" for n in (prompt_tokens(outcome), outcome.output_tokens)]
    places = sorted({round((ns - outcome.intended_ns) / high_ns * WIDTH, -1) for ns in outcome.chunk_ns})
    ticks = "".join(f"M{place:.0f} 0V{HEIGHT}" for place in places)
    total = duration_words(response_ns(outcome) or 0)
    return Bar(f"#{outcome.index}", " → ".join(tokens), total, pieces(timed, high_ns), ticks)


def _from_both(choices: Sequence[ClosedAccount], lines: Iterable[tuple[str, str | None, int]]) -> list[Timed]:
    """The split's lines, the account's stages among them in the order in which they came."""
    durations = {(stage, cause): ns for stage, cause, ns in lines}
    last = max(choices, key=lambda account: account.end_ns)
    middle = [((i.stage.value, i.cause.value if i.cause else None), i.duration_ns) for i in last.intervals]
    before = [
        ((name, None), durations.get((name, None), 0)) for name in (*join.CLIENT_BEFORE, join.NETWORK, join.UNSEEN)
    ]
    return [*before, *middle, ((join.RESIDUAL, None), durations.get((join.RESIDUAL, None), 0))]


def _from_outside(outcome: Outcome) -> list[Timed]:
    assert outcome.sent_ns is not None
    assert outcome.end_ns is not None
    first_ns = outcome.chunk_ns[0] if outcome.chunk_ns else outcome.end_ns
    return [
        *join.client_lines(outcome, outcome.sent_ns).items(),
        ((FIRST, None), first_ns - outcome.sent_ns),
        ((STREAM, None), outcome.end_ns - first_ns),
    ]
