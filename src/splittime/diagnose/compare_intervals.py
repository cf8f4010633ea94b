"""How sure a difference is: of a ratio or a share by the spread of one pair of runs, of several runs by Welch's t."""

from math import ceil, log

import numpy as np

from splittime.diagnose.compare_sample import Contrast
from splittime.ledger.client_intervals import Interval, Spread, t_quantile
from splittime.ledger.client_metrics import Metric


def ratio_interval(a: float, b: float, spread: Spread, level: float) -> Interval:
    """Returns the interval of b / a."""
    return about(log(b / a), spread, level).exp()


def about(middle: float, spread: Spread, level: float) -> Interval:
    reach = spread.widening() * spread.reach(level)
    return Interval(middle - reach, middle + reach)


def out_of_reach(metric: Metric, found: Contrast, level: float) -> bool:
    """Whether more than chance may lie beyond the least or greatest value of so few."""
    if metric.percent is None or found.spread is None:
        return False
    share = max(metric.percent, 100 - metric.percent) / 100
    return share**found.spread.effective > (1 - level) / 2


def too_few(metric: Metric, found: Contrast, level: float) -> str:
    assert metric.percent is not None
    independent = log((1 - level) / 2) / log(max(metric.percent, 100 - metric.percent) / 100)
    times = found.num_requests / found.spread.effective if found.spread is not None else 1.0
    needed = max(2 * found.num_requests, ceil(independent * times / 10) * 10)
    return f"{found.num_requests} requests do not bound its p{metric.percent:g}; about {needed} would."


def share_interval(found: Contrast, level: float) -> Interval:
    """Returns the interval of the difference. A share of exactly 0 or 1 has no spread in the data, but -ln(tail)/n is
    still possible."""
    assert found.spread is not None
    middle = about(found.b - found.a, found.spread, level)
    possible = -log((1 - level) / 2) / found.spread.effective
    up = possible * ((found.b == 0) + (found.a == 1))
    down = possible * ((found.b == 1) + (found.a == 0))
    return Interval((middle.low or 0.0) - down, (middle.high or 0.0) + up)


def welch(a: np.ndarray, b: np.ndarray, level: float) -> tuple[float, float]:
    """The interval of mean(b) - mean(a), variances not taken for equal (Welch 1947)."""
    parts = [float(side.var(ddof=1)) / len(side) for side in (a, b)]
    difference, variance = float(b.mean() - a.mean()), sum(parts)
    if variance == 0:
        return difference, difference
    freedom = variance**2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (a, b), strict=True))
    reach = t_quantile((1 + level) / 2, freedom) * variance**0.5
    return difference - reach, difference + reach
