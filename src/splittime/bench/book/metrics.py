"""The names by which a run's figures are asked for, in an SLO and in a comparison: `ttft_p99`, `throughput`, `goodput`.

A time has a statistic at its end (`_p50 _p90 _p95 _p99 _mean`); shares and rates stand alone. `ttft` and `e2e` are
response times, from the intended start; `service_ttft` and `service_e2e` are from the actual send.

A client that shares its cores with the server is late now and then: it sends after the intended start, and comes late
to what it reads. Both only lengthen times. So each time can be off by as much as the client was late, and no more, and
is never too short; whoever decides by a figure asks whether the decision would be the same without it. The lateness is
taken at the percentile of the figure, and at the 90th for a median: a late moment may hit any request.
"""

import difflib
import math
from collections.abc import Sequence
from typing import NamedTuple

from splittime.bench.book.figures import Summary
from splittime.bench.book.records import Outcome, Run, RunCheck
from splittime.bench.book.requests import SERIES, output_tokens
from splittime.core.errors import ConfigError
from splittime.ledger import derive

TIMES = (*SERIES, "itl")
STATISTICS = ("p50", "p90", "p95", "p99", "mean")
SHARES = ("goodput", "error_rate")
RATES = ("throughput", "request_rate")
HIGHER_IS_BETTER = {"goodput", "throughput", "request_rate"}
NS_PER_UNIT = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "min": 60e9}
CHECKS = ("loop_lag", "start_lag")
READ = {"chunk_gap", "token_gap", "max_stall", "service_ttft", "service_e2e"}
SENT_AND_READ = {"ttft", "e2e"}
PERCENT = {"p50": 90, "p90": 90, "p95": 95, "p99": 99}


class Metric(NamedTuple):
    """`statistic` is empty for a share or a rate."""

    name: str
    series: str
    statistic: str

    @property
    def percent(self) -> float | None:
        return float(self.statistic[1:]) if self.statistic.startswith("p") else None

    @property
    def is_share(self) -> bool:
        return self.name in SHARES

    @property
    def higher_is_better(self) -> bool:
        return self.name in HIGHER_IS_BETTER


def known_metrics() -> list[str]:
    return [*(f"{name}_{statistic}" for name in TIMES for statistic in STATISTICS), *SHARES, *RATES]


def parse_metric(name: str) -> Metric:
    """Raises `ConfigError` with what is known and what was probably meant."""
    if name in (*SHARES, *RATES):
        return Metric(name, name, "")
    series, _, statistic = name.rpartition("_")
    if series not in TIMES or statistic not in STATISTICS:
        raise unknown_metric(name, "metric")
    return Metric(name, series, statistic)


def unknown_metric(name: str, param: str, also: tuple[str, ...] = ()) -> ConfigError:
    first, _, rest = name.partition("_")
    turned = f"{rest}_{first}"  # p99_ttft
    is_turned = turned in known_metrics()
    close = [turned] if is_turned else difflib.get_close_matches(name, [*also, *known_metrics()], n=1, cutoff=0.5)
    known = f"{', '.join(TIMES)}, each with _{', _'.join(STATISTICS)}; {', '.join((*SHARES, *RATES))}"
    of_each = f"of each request {', '.join(also)}; of the run " if also else ""
    hint = f"did you mean {close[0]!r}? " if close else ""
    return ConfigError(f"unknown {param} {name!r}", param=param, value=name, hint=f"{hint}known: {of_each}{known}")


def value_of(found: Summary, name: str) -> float | None:
    """In ns, as a share, or per second. None if the run cannot tell."""
    metric = parse_metric(name)
    if name == "error_rate":
        return found.error_rate
    if name == "goodput":
        return found.goodput.share.value if found.goodput else None
    if name in RATES:
        return (found.output_token_rate if name == "throughput" else found.request_rate).value
    if metric.series not in found.figures:
        return None
    figure = found.figures[metric.series]
    return figure.mean.value if metric.statistic == "mean" else figure.percentiles[metric.statistic].value


def shown(name: str, value: float) -> str:
    """A value with its unit, as an SLO would be written."""
    if name in SHARES:
        return f"{100 * value:.4g}%"
    return f"{value:.4g}/s" if name in RATES else shown_ns(value)


def shown_ns(duration_ns: float) -> str:
    """Four digits in the unit that suits: `12.35ms`, `1.235s`."""
    if not duration_ns:
        return "0ms"
    unit = "s" if abs(duration_ns) >= 1e9 else "ms" if abs(duration_ns) >= 1e5 else "us"
    amount = duration_ns / NS_PER_UNIT[unit]
    return f"{amount:.{min(3, max(0, 3 - math.floor(math.log10(abs(amount)))))}f}{unit}"


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
