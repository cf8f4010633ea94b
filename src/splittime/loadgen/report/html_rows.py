"""The page's tables, as rows of plain text, with the figures of `ledger.client_figures`. The template escapes them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from splittime.ledger.client_book import Ending, Outcome, Run
from splittime.ledger.client_figures import Summary
from splittime.loadgen.dialects.view import Compared
from splittime.loadgen.report.html_words import range_words
from splittime.loadgen.report.text import UNKNOWN, digits, ms, percent

STATISTICS = ("p50", "p90", "p95", "p99")
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


class Row(NamedTuple):
    name: str
    detail: str
    cells: tuple[Cell, ...]


class Failure(NamedTuple):
    requests: str
    what: str
    error: str
    first: str


def latency_rows(found: Summary) -> list[Row]:
    rows, last = [], ""
    for name, title, clock in LATENCIES:
        last = title or last
        if name in found.figures and not _says_nothing_new(found, name):
            figure = found.figures[name]
            count = "" if figure.count == figure.num_requests else f"{figure.count:,} gaps"
            cells = [
                Cell(ms(e.value), range_words(e.interval, 1e-6))
                for e in (figure.mean, *(figure.percentiles[s] for s in STATISTICS))
            ]
            rows.append(Row(last, clock or count, (*cells, Cell(ms(figure.max)))))
    return rows


def _says_nothing_new(found: Summary, name: str) -> bool:
    """Token gaps are the chunk gaps where every chunk is a token."""
    return name == "token_gap" and found.figures[name] == found.figures.get("chunk_gap")


def bucket_rows(found: Summary) -> list[Row]:
    rows = []
    for bucket, figures in found.buckets.items():
        pairs = [(name, statistic) for name in ("ttft", "tpot", "e2e") for statistic in ("p50", "p99")]
        cells = [Cell(ms(figures[n].percentiles[s].value)) if n in figures else Cell(UNKNOWN) for n, s in pairs]
        count = f"{figures['e2e'].count:,}" if "e2e" in figures else UNKNOWN
        rows.append(Row(bucket, count, tuple(cells)))
    return rows


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


def compared_words(row: Compared) -> tuple[str, str]:
    """What the server told and what was seen, with units."""
    return _with_unit(row.told, row.unit), _with_unit(row.seen, row.unit)


def _with_unit(value: float | None, unit: str) -> str:
    if value is None:
        return UNKNOWN
    if unit == "s":
        return f"{digits(value * 1e3)} ms"
    return percent(value) if unit == "share" else digits(value)


def setting_rows(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was set; nothing stands for a default that is off."""
    return [(name, _setting(value)) for name, value in settings.items() if value not in (None, "", [], {})]


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
