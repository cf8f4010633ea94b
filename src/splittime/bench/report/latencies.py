"""The latencies of a run as tables: of all requests, and by prompt lengths.

Where there is no room for all side by side, the two ends of an interval stand one below the other; then `LEAST_MISSED`
go, and the table says so. tests/bench/test_narrow.py checks that nothing is lost without a word.
"""

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from splittime.bench.book.figures import Figure, Summary
from splittime.bench.report.text import UNKNOWN, ends, listed, ms
from splittime.present.tables import FittingTable
from splittime.stats.intervals import Estimate

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


def latencies(found: Summary) -> FittingTable:
    """The whole table; the same with intervals on two lines; the same without what is missed least."""
    fewer = tuple(name for name in STATISTICS if name not in LEAST_MISSED)
    narrow = _latency_table(found, fewer, "-\n")
    narrow.caption = f"{listed(LEAST_MISSED)} have no room here: a wider terminal, --json or --html shows them."
    return FittingTable(_latency_table(found, STATISTICS, "-"), _latency_table(found, STATISTICS, "-\n"), narrow)


def _latency_table(found: Summary, statistics: Sequence[str], between: str) -> Table:
    """A row for the estimates, one beneath for their intervals."""
    table = _table()
    table.add_column(f"ms, {found.confidence:.0%} beneath", overflow="fold")
    for name in ("mean", *statistics, "max"):
        table.add_column(name, justify="right", overflow="fold")
    for name, title in ROWS:
        if (figure := latency(found, name)) is not None:
            shown = estimates(figure, statistics)
            count = gaps_counted(figure) or f"{figure.count:,}"
            table.add_row(Text(title), *(ms(one.value) for one in shown), ms(figure.max))
            intervals = (Text(ends(one.interval, 1e-6, between), "dim") for one in shown)
            table.add_row(Text(f"  {count}", "dim"), *intervals, Text(""))
    return table


def _table() -> Table:
    return Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), expand=True, show_edge=False, pad_edge=False, caption_justify="left"
    )


def latency(found: Summary, name: str) -> Figure | None:
    """Returns a figure that says something new: token gaps are the chunk gaps where every chunk is a token."""
    figure = found.figures.get(name)
    return None if name == "token_gap" and figure == found.figures.get("chunk_gap") else figure


def gaps_counted(figure: Figure) -> str:
    """Empty where every request has one value."""
    return "" if figure.count == figure.num_requests else f"{figure.count:,} gaps"


def estimates(figure: Figure, statistics: Sequence[str]) -> tuple[Estimate, ...]:
    return figure.mean, *(figure.percentiles[name] for name in statistics)


BUCKET_COLUMNS = tuple((name, statistic) for name in ("ttft", "tpot", "e2e") for statistic in ("p50", "p99"))


def bucket_cells(found: Summary) -> Iterator[tuple[str, ...]]:
    """Yields a row for each bucket of prompt lengths: its name, its requests, and `BUCKET_COLUMNS` in ms."""
    for bucket, figures in found.buckets.items():
        cells = [ms(figures[n].percentiles[s].value) if n in figures else UNKNOWN for n, s in BUCKET_COLUMNS]
        yield bucket, f"{figures['e2e'].count:,}" if "e2e" in figures else UNKNOWN, *cells


def buckets(found: Summary) -> FittingTable:
    return FittingTable(_bucket_table(found, " "), _bucket_table(found, "\n"))


def _bucket_table(found: Summary, between: str) -> Table:
    """between: the words of a heading."""
    table = _table()
    table.add_column(f"prompt{between}tokens", overflow="fold")
    table.add_column("requests", justify="right", overflow="fold")
    for name, statistic in BUCKET_COLUMNS:
        table.add_column(f"{name.upper()}{between}{statistic}", justify="right", overflow="fold")
    for cells in bucket_cells(found):
        table.add_row(*cells)
    return table
