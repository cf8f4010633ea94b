"""Both books as bars: where the mean request's time went, by prompt length, until its first token and until its end.

A bar's pieces are durations in the order of a request's life, laid end to end: first the client's, then the network's
(up and down are one piece, since clocks of two hosts are never subtracted), then the account's stages as the server
kept them, then what is left. What is too short for a bar stands in the table of parts.

A piece's key is a stage and a cause, or a part of the client's side. Colours are classes of the dashboard's own file,
so that a stage looks the same here and there; short parts that share a colour share a name in a legend.

`slowest` shows the slowest requests one by one, each as one bar from its intended start to its end, with the account's
stages in the order in which they came. Ticks beneath a bar are the chunks, by the client's clock alone. Without an
account a bar shows what can be seen from outside.

What the page says in words: verdict, headline figures, remarks, and its tables as rows of plain text.

The figures are those of `bench.book.figures`, formatted as in the terminal's tables. The template escapes them.
"""

import datetime
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from splittime.bench import join
from splittime.bench.book.figures import Figure, Summary, Trend, prompt_tokens
from splittime.bench.book.records import Ending, Outcome, Run, RunCheck
from splittime.bench.book.requests import complete, response_ns
from splittime.bench.join_view import MEANING, ServerComparison
from splittime.bench.report.table import (
    OUT_OF_REACH,
    STATISTICS,
    UNKNOWN,
    bucket_cells,
    digits,
    ends,
    estimates,
    gaps_counted,
    latency,
    listed,
    ms,
    percent,
)
from splittime.bench.servers import by_request
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import CAUSE_MEANING, Cause, Stage
from splittime.present.plot import HEIGHT, WIDTH, duration, from_zero, number
from splittime.stats.intervals import Estimate, Interval

CLOCKS_DIFFER = 0.05
LONG_NS = 10e9  # from which on headlines are in seconds
SLOWEST = 12
SLOTS = 600  # a bar shows no piece narrower than one of so many; of those within one, the longest is shown
MIN_SHARE = 0.0005  # of a bar; less is not drawn
BEFORE_ENGINE = (Stage.RECEIVE, Stage.TOKENIZE, Stage.ADMIT, Stage.HANDOFF)
FIRST, STREAM = "until the first chunk", "from the first chunk to the end"

Timed = tuple[join.Key, int]  # and its duration in ns


class Tile(NamedTuple):
    """name: of the figure; parts: (which, value, interval); under: a clause beneath."""

    name: str
    unit: str
    parts: tuple[tuple[str, str, str], ...]
    under: str = ""


def range_words(interval: Interval | None, scale: float = 1.0) -> str:
    """`335.6-398.4` with an en dash; where one end is not known, the other alone."""
    if interval is None or (interval.low is None and interval.high is None):
        return ""
    if interval.low is None or interval.high is None:
        known = ends(interval, scale).replace(OUT_OF_REACH, "").strip()
        return f"{'≤' if interval.low is None else '≥'} {known}"
    return ends(interval, scale).replace(" ", "\N{EN DASH}", 1)


def began(run: Run) -> str:
    at = datetime.datetime.fromtimestamp(run.begin_unix_ns / 1e9, datetime.UTC)
    return f"{at:%-d %B %Y, %H:%M:%S} UTC"


def server_words(run: Run, arm: int) -> str:
    server = run.arms[arm]
    kind = " ".join(filter(None, (server.kind, server.version)))
    return f"{kind} at {server.url}" + (f", model {server.model}" if server.model else "")


def load_words(run: Run, found: Summary) -> str:
    seconds = (run.measured_until_ns - run.measured_from_ns) / 1e9
    counts = [f"{count:,} {name.replace('_', ' ')}" for name, count in found.endings.items() if count]
    return (
        f"{found.intended:,} requests intended in {digits(seconds)} s ({digits(found.intended_rate)} a second): "
        f"{listed(counts)}."
    )


def check_sentence(check: RunCheck) -> str:
    sentence = check.sentence[:1].upper() + check.sentence[1:]
    if check.ok or check.value is None or check.limit is None:
        return f"{sentence}."
    return f"{sentence}. Allowed: {number(check.limit)} {check.unit}".rstrip() + "."


def tiles(found: Summary) -> list[Tile]:
    made = [_latency_tile(found, *names) for names in (("TTFT", "ttft", "service_ttft"), ("E2E", "e2e", "service_e2e"))]
    made.insert(1, _latency_tile(found, "TPOT", "tpot", None))
    parts = [("tokens/s", *_rate(found.output_token_rate)), ("requests/s", *_rate(found.request_rate))]
    made.append(Tile("Output", "", tuple(parts), f"{digits(found.intended_rate)} requests/s were intended"))
    if found.goodput is not None:
        good = found.goodput
        limits = listed([f"{name} ≤ {ms(limit)} ms" for name, limit in good.limits.items()])
        under = f"{good.good:,} of {good.intended:,} within {limits}"
        made.append(Tile("Goodput", "", (("of intended", percent(good.share.value), _range(good.share, 100)),), under))
    return [tile for tile in made if tile.parts]


def _latency_tile(found: Summary, title: str, name: str, service: str | None) -> Tile:
    figure = found.figures.get(name)
    if figure is None:
        return Tile(title, "ms", ())
    middle, high = (figure.percentiles[statistic] for statistic in ("p50", "p99"))
    unit, scale = ("s", 1e-9) if middle.value >= LONG_NS else ("ms", 1e-6)
    parts = tuple((s, digits(e.value * scale), _range(e, scale)) for s, e in (("p50", middle), ("p99", high)))
    served = found.figures.get(service or "")
    return Tile(title, unit, parts, _service_clause(figure, served, unit, scale) if served else "")


def _service_clause(felt: Figure, served: Figure, unit: str, scale: float) -> str:
    """Figures only where the clocks tell different stories."""
    pairs = [(felt.percentiles[s].value, served.percentiles[s].value) for s in ("p50", "p99")]
    if all(late <= (1 + CLOCKS_DIFFER) * sent for late, sent in pairs):
        return f"the same from the actual send, within {CLOCKS_DIFFER:.0%}"
    return f"from the actual send only {digits(pairs[0][1] * scale)} and {digits(pairs[1][1] * scale)} {unit}"


def _range(found: Estimate, scale: float = 1e-6) -> str:
    return range_words(found.interval, scale)


def _rate(found: Estimate) -> tuple[str, str]:
    return digits(found.value), range_words(found.interval)


def remarks(run: Run, found: Summary) -> list[str]:
    """Sentences beneath the headline figures: what a reader must know to read them."""
    text = []
    if found.errors:
        text.append(f"{percent(found.error_rate)} of the requests failed; latencies are of the others.")
    text.append(
        f"{digits(found.concurrency.mean)} requests were in flight on average, {found.concurrency.peak:,} at most."
    )
    for name, title in (("ttft", "TTFT"), ("tpot", "TPOT")):
        its = found.drift[name]
        if its.ratio is not None and its.trend is not Trend.STEADY:
            between = range_words(its.interval)
            halves = f"the second half's mean was {digits(its.ratio)} times the first's (99 % interval {between})"
            text.append(f"{title} drift is {its.trend.value}: {halves}.")
    if found.cached_share is not None:
        expected = found.expected_cached_share
        of = f"; {percent(expected)} were expected to" if expected is not None else ""
        text.append(f"{percent(found.cached_share)} of the prompt tokens came from the server's prefix cache{of}.")
    if found.tpot_unknown:
        text.append(f"TPOT is unknown for {found.tpot_unknown:,} requests: the server told no tokens per chunk.")
    if run.stopped:
        text.append(f"The run was stopped: {run.stopped}.")
    return text


MOST_ERRORS = 10
ERROR_CHARACTERS = 300
BAD = (Ending.REFUSED, Ending.FAILED, Ending.TIMED_OUT, Ending.UNSENT)

LATENCIES = (
    ("ttft", "TTFT", "response"),
    ("service_ttft", "", "service"),
    ("e2e", "E2E", "response"),
    ("service_e2e", "", "service"),
    ("tpot", "TPOT", ""),
    ("itl", "ITL", "server's clock"),
    ("chunk_gap", "Chunk gap", ""),
    ("token_gap", "Token gap", ""),
    ("max_stall", "Max stall", ""),
    ("schedule_lag", "Schedule lag", "client's own"),
)


class Cell(NamedTuple):
    value: str
    interval: str = ""


class TableRow(NamedTuple):
    name: str
    detail: str
    cells: tuple[Cell, ...]


class Failure(NamedTuple):
    requests: str
    what: str
    error: str
    first: str


def latency_rows(found: Summary) -> list[TableRow]:
    rows, last = [], ""
    for name, title, clock in LATENCIES:
        last = title or last
        if (figure := latency(found, name)) is not None:
            cells = [Cell(ms(e.value), range_words(e.interval, 1e-6)) for e in estimates(figure, STATISTICS)]
            rows.append(TableRow(last, clock or gaps_counted(figure), (*cells, Cell(ms(figure.max)))))
    return rows


def bucket_rows(found: Summary) -> list[TableRow]:
    return [TableRow(name, count, tuple(map(Cell, cells))) for name, count, *cells in bucket_cells(found)]


def failures(run: Run, arm: int) -> list[Failure]:
    """Requests that were not answered whole, by what they were told, the most frequent first."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in run.measured(arm):
        if outcome.ending in BAD:
            status = f" with HTTP {outcome.status}" if outcome.status and outcome.status >= 400 else ""
            what = outcome.ending.value.replace("_", " ") + status
            groups.setdefault((what, (outcome.error or "")[:ERROR_CHARACTERS]), []).append(outcome)
    most = Counter({key: len(its) for key, its in groups.items()}).most_common(MOST_ERRORS)
    return [Failure(f"{count:,}", *key, f"#{groups[key][0].index}") for key, count in most]


def compared_words(row: ServerComparison) -> tuple[str, str]:
    """Returns what the server told and what was seen, with units."""
    return _with_unit(row.told, row.unit), _with_unit(row.seen, row.unit)


def _with_unit(value: float | None, unit: str) -> str:
    if value is None:
        return UNKNOWN
    if unit == "s":
        return f"{digits(value * 1e3)} ms"
    return percent(value) if unit == "share" else digits(value)


def setting_rows(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns what was set; nothing stands for a default that is off."""
    return [(name, _setting(value)) for name, value in settings.items() if value not in (None, "", [], {})]


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


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
