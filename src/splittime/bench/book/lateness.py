"""By how much a client's own lateness may have lengthened what it measured, and whether a verdict survives that.

A client that shares its cores with the server is late now and then: it sends after the intended start, and comes late
to what it reads. Both only lengthen times. So each time can be off by as much as the client was late, and no more, and
is never too short; whoever decides by a figure asks whether the decision would be the same without it. The lateness is
taken at the percentile of the figure, and at the 90th for a median: a late moment may hit any request.
"""

from collections.abc import Sequence

from splittime.bench.book.metrics import Metric
from splittime.bench.book.records import Outcome, Run, RunCheck
from splittime.bench.book.requests import output_tokens
from splittime.ledger import derive

CHECKS = ("loop_lag", "start_lag")
READ = {"chunk_gap", "token_gap", "max_stall", "service_ttft", "service_e2e"}
SENT_AND_READ = {"ttft", "e2e"}
PERCENT = {"p50": 90, "p90": 90, "p95": 95, "p99": 99}


def start_lag_ns(outcome: Outcome) -> int | None:
    """Returns how late the client itself sent: not what a cap, a session or connecting took."""
    if outcome.sent_ns is None:
        return None
    return max(0, outcome.sent_ns - outcome.intended_ns - outcome.held_ns - (outcome.connect_ns or 0))


def failed_by_lateness(run: Run) -> list[RunCheck]:
    return [check for check in run.checks if check.name in CHECKS and not check.ok]


def void_for_more(run: Run) -> list[RunCheck]:
    """Returns what voids the run and is not lateness, which can be reckoned with."""
    return [check for check in run.checks if check.voids and not check.ok and check.name not in CHECKS]


def off_ns(run: Run, arm: int, metric: Metric) -> float:
    """By how much this figure may be too long; 0 for what is no time."""
    if metric.series in SENT_AND_READ:
        return _late_sending_ns(run.measured(arm), metric) + late_reading_ns(run, metric.statistic)
    if metric.series in READ:
        return late_reading_ns(run, metric.statistic)
    if metric.series == "tpot":
        tokens = [n for outcome in run.measured(arm) if (n := output_tokens(outcome)) is not None]
        return late_reading_ns(run, metric.statistic) / max(1.0, (derive.percentile(tokens, 50) or 2) - 1)
    return 0.0


def late_reading_ns(run: Run, statistic: str) -> float:
    """Runs of before keep only the 99th percentile, in the check."""
    known = run.loop_lag_ns.get(statistic)
    if known is not None:
        return known
    return max((1e6 * (check.value or 0.0) for check in run.checks if check.name == "loop_lag"), default=0.0)


def _late_sending_ns(outcomes: Sequence[Outcome], metric: Metric) -> float:
    lags = [lag for outcome in outcomes if (lag := start_lag_ns(outcome)) is not None]
    if metric.statistic == "mean":
        return sum(lags) / max(1, len(lags))
    return derive.percentile(lags, PERCENT[metric.statistic]) or 0.0


def lags_by_statistic(lags_ns: Sequence[int]) -> dict[str, float]:
    """Returns each statistic of the lags of one process' event loop, as `Run.loop_lag_ns` keeps them."""
    if not lags_ns:
        return {}
    found = {name: float(derive.percentile(lags_ns, percent) or 0.0) for name, percent in PERCENT.items()}
    return {**found, "mean": sum(lags_ns) / len(lags_ns)}
