"""The latencies of a run as tables: of all requests, and by prompt lengths.

Where there is no room for all side by side, the two ends of an interval stand one below the other; then `LEAST_MISSED`
go, and the table says so. tests/loadgen/test_narrow.py checks that nothing is lost without a word.
"""

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from splittime.core.fitted import Fitted
from splittime.ledger.client_figures import Figure, Summary
from splittime.loadgen.report.text import UNKNOWN, ends, listed, ms

STATISTICS = ("p50", "p90", "p95", "p99")
LEAST_MISSED = ("p90", "p95")
ROWS = (
    ("ttft", "TTFT, response"),
    ("service_ttft", "TTFT, service"),
    ("e2e", "E2E, response"),
    ("service_e2e", "E2E, service"),
    ("tpot", "TPOT"),
    ("itl", "ITL, server's"),
    ("chunk_gap", "chunk gap"),
    ("token_gap", "token gap"),
    ("max_stall", "max stall"),
    ("schedule_lag", "schedule lag"),
)


def latencies(found: Summary) -> Fitted:
    """The whole table; the same with intervals on two lines; the same without what is missed least."""
    fewer = tuple(name for name in STATISTICS if name not in LEAST_MISSED)
    narrow = _latency_table(found, fewer, "-\n")
    narrow.caption = f"{listed(LEAST_MISSED)} have no room here: a wider terminal, --json or --html shows them."
    return Fitted(_latency_table(found, STATISTICS, "-"), _latency_table(found, STATISTICS, "-\n"), narrow)


def _latency_table(found: Summary, statistics: Sequence[str], between: str) -> Table:
    """A row for the estimates, one beneath for their intervals."""
    table = _table()
    table.add_column(f"ms, {found.confidence:.0%} beneath", overflow="fold")
    for name in ("mean", *statistics, "max"):
        table.add_column(name, justify="right", overflow="fold")
    for name, title in ROWS:
        if name in found.figures and not _says_nothing_new(found, name):
            figure = found.figures[name]
            table.add_row(Text(title), *_values(figure, statistics))
            table.add_row(Text(f"  {_count(figure)}", "dim"), *_intervals(figure, statistics, between))
    return table


def _table() -> Table:
    return Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), expand=True, show_edge=False, pad_edge=False, caption_justify="left"
    )


def _says_nothing_new(found: Summary, name: str) -> bool:
    """Token gaps are the chunk gaps where every chunk is a token."""
    return name == "token_gap" and found.figures[name] == found.figures.get("chunk_gap")


def _count(figure: Figure) -> str:
    return f"{figure.count:,}" if figure.count == figure.num_requests else f"{figure.count:,} gaps"


def _values(figure: Figure, statistics: Sequence[str]) -> Iterator[str]:
    for estimate_of in (figure.mean, *(figure.percentiles[name] for name in statistics)):
        yield ms(estimate_of.value)
    yield ms(figure.max)


def _intervals(figure: Figure, statistics: Sequence[str], between: str) -> Iterator[Text]:
    for estimate_of in (figure.mean, *(figure.percentiles[name] for name in statistics)):
        yield Text(ends(estimate_of.interval, 1e-6, between), "dim")
    yield Text("")


def buckets(found: Summary) -> Fitted:
    return Fitted(_bucket_table(found, " "), _bucket_table(found, "\n"))


def _bucket_table(found: Summary, between: str) -> Table:
    """between: the words of a heading."""
    table = _table()
    table.add_column(f"prompt{between}tokens", overflow="fold")
    table.add_column("requests", justify="right", overflow="fold")
    shown = (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "E2E"))
    for _, title in shown:
        for statistic in ("p50", "p99"):
            table.add_column(f"{title}{between}{statistic}", justify="right", overflow="fold")
    for bucket, figures in found.buckets.items():
        cells = [
            ms(figures[name].percentiles[statistic].value) if name in figures else UNKNOWN
            for name, _ in shown
            for statistic in ("p50", "p99")
        ]
        table.add_row(bucket, f"{figures['e2e'].count:,}" if "e2e" in figures else UNKNOWN, *cells)
    return table
