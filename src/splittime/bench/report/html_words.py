"""What the page says in words: verdict, headline figures, remarks, and its tables as rows of plain text.

The figures are those of `bench.book.figures`, formatted as in the terminal's tables. The template escapes them.
"""

import datetime
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from splittime.bench.book.figures import Figure, Summary
from splittime.bench.book.rates import Trend
from splittime.bench.book.records import Ending, Outcome, Run, RunCheck
from splittime.bench.report.latencies import STATISTICS, bucket_cells, estimates, gaps_counted, latency
from splittime.bench.report.text import OUT_OF_REACH, UNKNOWN, digits, ends, listed, ms, percent
from splittime.bench.server_view import ServerComparison
from splittime.present.scale import number
from splittime.stats.intervals import Estimate, Interval

CLOCKS_DIFFER = 0.05
LONG_NS = 10e9  # from which on headlines are in seconds


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
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
