"""The names by which a run's figures are asked for, in an SLO and in a comparison: `ttft_p99`, `throughput`, `goodput`.

A time has a statistic at its end (`_p50 _p90 _p95 _p99 _mean`); shares and rates stand alone. `ttft` and `e2e` are
response times, from the intended start; `service_ttft` and `service_e2e` are from the actual send.
"""

import difflib
import math
from typing import NamedTuple

from splittime.bench.book.figures import Summary
from splittime.bench.book.series import SERIES
from splittime.core.errors import ConfigError

TIMES = (*SERIES, "itl")
STATISTICS = ("p50", "p90", "p95", "p99", "mean")
SHARES = ("goodput", "error_rate")
RATES = ("throughput", "request_rate")
HIGHER_IS_BETTER = {"goodput", "throughput", "request_rate"}
NS_PER_UNIT = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "min": 60e9}


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
