"""What a comparison is made from: a metric of two sides, drawn many times over.

A side is one arm of one run. `draw` gives the metric of both sides and its replicates: of the same requests where they
are paired, of each side on its own where not.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from splittime.ledger.client_book import Ending, Outcome, Run
from splittime.ledger.client_intervals import (
    MIN_REQUESTS,
    Array,
    Bootstrap,
    Pooled,
    bootstrap,
    mean_replicates,
    nearest_rank,
    one_each,
    percentile_replicates,
)
from splittime.ledger.client_metrics import RATES, Metric
from splittime.ledger.client_rates import rate_parts, rate_window, request_ends
from splittime.ledger.client_request import PER_REQUEST_LIMITS, is_good
from splittime.ledger.client_series import complete, in_time_order, per_request, series, token_arrivals

POOLED = ("chunk_gap", "token_gap")


class Side(NamedTuple):
    run: Run
    arm: int

    @property
    def measured(self) -> list[Outcome]:
        return in_time_order(self.run.measured(self.arm))


Pairs = Sequence[tuple[Outcome, Outcome]]


def pair(a: Side, b: Side) -> list[tuple[Outcome, Outcome]] | None:
    """The measured requests of both sides by their place in the schedule; None if they are not of one schedule."""
    is_one_run = a.run is b.run
    if not is_one_run and (not a.run.schedule_digest or a.run.schedule_digest != b.run.schedule_digest):
        return None
    of_b = {outcome.index: outcome for outcome in b.measured}
    pairs = [(outcome, of_b[outcome.index]) for outcome in a.measured if outcome.index in of_b]
    return pairs if len(pairs) >= MIN_REQUESTS else None


class Drawn(NamedTuple):
    """num_requests, effective_requests: of the side with fewer; and how many independent ones would tell as much."""

    a: float
    b: float
    replicates_a: Array
    replicates_b: Array
    num_blocks: float
    num_requests: int
    effective_requests: float
    widen: float


def draw(
    metric: Metric, a: Side, b: Side, pairs: Pairs | None, limits: Mapping[str, float], seed: int, replicates: int
) -> Drawn | None:
    """None if either side has not enough that could tell the metric."""
    if pairs is not None and metric.name not in RATES:
        samples = _paired(metric, pairs, limits)
        is_joint = True
    else:
        samples = sample(metric, a, limits), sample(metric, b, limits)
        is_joint = pairs is not None
    if min(pooled.num_requests for pooled in samples) < MIN_REQUESTS or not all(len(s.values) for s in samples):
        return None
    drawn = _bootstraps(samples, is_joint, seed, replicates)
    values = [value(metric, pooled) for pooled in samples]
    drawn_values = [_replicates(metric, pooled, its) for pooled, its in zip(samples, drawn, strict=True)]
    return Drawn(
        a=values[0],
        b=values[1],
        replicates_a=drawn_values[0],
        replicates_b=drawn_values[1],
        num_blocks=min(its.num_blocks for its in drawn),
        num_requests=min(its.num_requests for its in drawn),
        effective_requests=min(its.effective_requests for its in drawn),
        widen=max(its.dependence.widen for its in drawn),
    )


def _bootstraps(
    samples: tuple[Pooled, Pooled], is_joint: bool, seed: int, replicates: int
) -> tuple[Bootstrap, Bootstrap]:
    if is_joint:
        both = bootstrap(*samples, seed=seed, replicates=replicates)
        return both, both
    first, second = (bootstrap(s, seed=seed + i, replicates=replicates) for i, s in enumerate(samples))
    return first, second


def value(metric: Metric, pooled: Pooled) -> float:
    if metric.percent is None:
        return float(pooled.values.mean())
    return nearest_rank(pooled.values, [metric.percent])[0]


def _replicates(metric: Metric, pooled: Pooled, drawn: Bootstrap) -> Array:
    if metric.percent is None:
        return mean_replicates(pooled, drawn)
    return percentile_replicates(pooled, drawn, [metric.percent])[:, 0]


def sample(metric: Metric, side: Side, limits: Mapping[str, float]) -> Pooled:
    """One side's values, in time order."""
    if metric.name in RATES:
        return _rate_sample(metric, side)
    measured = side.measured
    if metric.is_share:
        return one_each(_marks(metric, _counted(measured), limits))
    return series(complete(measured), metric.series)


def _rate_sample(metric: Metric, side: Side) -> Pooled:
    window = rate_window(side.run, side.arm)
    mine = [outcome for outcome in side.run.outcomes if outcome.arm == side.arm]
    events = token_arrivals(mine) if metric.name == "throughput" else request_ends(mine)
    return one_each(rate_parts(*events, window))


def _counted(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.ending is not Ending.CANCELLED]


def _marks(metric: Metric, outcomes: Sequence[Outcome], limits: Mapping[str, float]) -> list[float]:
    if metric.name == "error_rate":
        return [float(outcome.ending is not Ending.COMPLETE) for outcome in outcomes]
    mine = {name: limit for name, limit in limits.items() if name in PER_REQUEST_LIMITS}
    return [float(is_good(outcome, mine)) for outcome in outcomes]


def _paired(metric: Metric, pairs: Pairs, limits: Mapping[str, float]) -> tuple[Pooled, Pooled]:
    """Of the pairs in which both sides can tell."""
    if metric.is_share:
        counted = [pair for pair in pairs if len(_counted(pair)) == 2]
        first, second = (_marks(metric, [pair[i] for pair in counted], limits) for i in (0, 1))
        return one_each(first), one_each(second)
    whole = [pair for pair in pairs if len(complete(pair)) == 2 and _tells(metric, pair)]
    sides = [[pair[i] for pair in whole] for i in (0, 1)]
    if metric.series in POOLED:
        return series(sides[0], metric.series), series(sides[1], metric.series)
    a, b = (per_request(side, metric.series) for side in sides)
    both = ~(np.isnan(a) | np.isnan(b))
    return one_each(a[both]), one_each(b[both])


def _tells(metric: Metric, pair: tuple[Outcome, Outcome]) -> bool:
    return metric.series != "token_gap" or all(len(o.chunk_tokens or ()) == len(o.chunk_ns) for o in pair)
