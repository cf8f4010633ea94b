"""What a comparison is made from: a metric of two sides, and how far the one is off the other.

A side is one arm of one run. `contrast` gives the metric of both sides and the spread of what lies between them: of the
same requests where they are paired, of each side on its own where not.

How sure a difference is comes from the spread of one pair of runs, and of several runs from Welch's t.

What a reader must know beside the figures, why they may say nothing and what else differs, is `reasons_to_doubt` and
`notes_of`.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, log
from typing import NamedTuple

import numpy as np

from splittime.bench.book.metrics import RATES, Metric, failed_by_lateness, void_for_more
from splittime.bench.book.rates import Trend, drift, rate_parts, rate_window, request_ends
from splittime.bench.book.records import Ending, Outcome, Run
from splittime.bench.book.requests import PER_REQUEST_LIMITS, is_good, output_tokens
from splittime.bench.book.series import complete, in_time_order, per_request, series, token_arrivals
from splittime.stats import intervals

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
    return pairs if len(pairs) >= intervals.MIN_REQUESTS else None


class Contrast(NamedTuple):
    """How far B is from A. spread: that of the logarithm of b / a, or for a share of b - a; None if it is out of reach.
    num_requests: of the side with fewer."""

    a: float
    b: float
    spread: intervals.Spread | None
    num_requests: int


def contrast(
    metric: Metric, a: Side, b: Side, pairs: Pairs | None, limits: Mapping[str, float], level: float
) -> Contrast | None:
    """None if either side has not enough that could tell the metric."""
    are_paired = pairs is not None and metric.name not in RATES
    samples = _paired(metric, pairs or (), limits) if are_paired else _apart(metric, a, b, limits)
    num_requests = min(pooled.num_requests for pooled in samples)
    if num_requests < intervals.MIN_REQUESTS or not all(len(one.values) for one in samples):
        return None
    first, second = (value(metric, pooled) for pooled in samples)
    if not metric.is_share and min(first, second) <= 0:
        return Contrast(first, second, None, num_requests)
    added = [_added(metric, pooled, level) for pooled in samples]
    return Contrast(first, second, _spread(*added, is_joint=pairs is not None), num_requests)


def _spread(a: intervals.Array | None, b: intervals.Array | None, *, is_joint: bool) -> intervals.Spread | None:
    if a is None or b is None:
        return None
    return (
        intervals.spread_of(b - a) if is_joint else intervals.together(intervals.spread_of(a), intervals.spread_of(b))
    )


def _added(metric: Metric, pooled: intervals.Pooled, level: float) -> intervals.Array | None:
    """What each request adds to the metric: to its logarithm, or to a share itself."""
    if metric.is_share:
        added: intervals.Array = pooled.values - pooled.values.mean()
        return added
    precision = intervals.Precision(pooled)
    return precision.log_mean() if metric.percent is None else precision.log_percentile(metric.percent, level)


def value(metric: Metric, pooled: intervals.Pooled) -> float:
    if metric.percent is None:
        return float(pooled.values.mean())
    return intervals.nearest_rank(pooled.values, [metric.percent])[0]


def _apart(metric: Metric, a: Side, b: Side, limits: Mapping[str, float]) -> tuple[intervals.Pooled, intervals.Pooled]:
    return sample(metric, a, limits), sample(metric, b, limits)


def sample(metric: Metric, side: Side, limits: Mapping[str, float]) -> intervals.Pooled:
    """One side's values, in time order."""
    if metric.name in RATES:
        return _rate_sample(metric, side)
    measured = side.measured
    if metric.is_share:
        return intervals.one_each(_marks(metric, _counted(measured), limits))
    return series(complete(measured), metric.series)


def _rate_sample(metric: Metric, side: Side) -> intervals.Pooled:
    window = rate_window(side.run, side.arm)
    mine = [outcome for outcome in side.run.outcomes if outcome.arm == side.arm]
    events = token_arrivals(mine) if metric.name == "throughput" else request_ends(mine)
    return intervals.one_each(rate_parts(*events, window))


def _counted(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.ending is not Ending.CANCELLED]


def _marks(metric: Metric, outcomes: Sequence[Outcome], limits: Mapping[str, float]) -> list[float]:
    if metric.name == "error_rate":
        return [float(outcome.ending is not Ending.COMPLETE) for outcome in outcomes]
    mine = {name: limit for name, limit in limits.items() if name in PER_REQUEST_LIMITS}
    return [float(is_good(outcome, mine)) for outcome in outcomes]


def _paired(metric: Metric, pairs: Pairs, limits: Mapping[str, float]) -> tuple[intervals.Pooled, intervals.Pooled]:
    """Returns both samples, from the pairs in which both sides have a value."""
    if metric.is_share:
        counted = [pair for pair in pairs if len(_counted(pair)) == 2]
        first, second = (_marks(metric, [pair[i] for pair in counted], limits) for i in (0, 1))
        return intervals.one_each(first), intervals.one_each(second)
    whole = [pair for pair in pairs if len(complete(pair)) == 2 and _tells(metric, pair)]
    sides = [[pair[i] for pair in whole] for i in (0, 1)]
    if metric.series in POOLED:
        return series(sides[0], metric.series), series(sides[1], metric.series)
    a, b = (per_request(side, metric.series) for side in sides)
    both = ~(np.isnan(a) | np.isnan(b))
    return intervals.one_each(a[both]), intervals.one_each(b[both])


def _tells(metric: Metric, pair: tuple[Outcome, Outcome]) -> bool:
    return metric.series != "token_gap" or all(len(o.chunk_tokens or ()) == len(o.chunk_ns) for o in pair)


def ratio_interval(a: float, b: float, spread: intervals.Spread, level: float) -> intervals.Interval:
    """Returns the interval of b / a."""
    return about(log(b / a), spread, level).exp()


def about(middle: float, spread: intervals.Spread, level: float) -> intervals.Interval:
    reach = spread.widening() * spread.reach(level)
    return intervals.Interval(middle - reach, middle + reach)


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


def share_interval(found: Contrast, level: float) -> intervals.Interval:
    """Returns the interval of the difference. A share of exactly 0 or 1 has no spread in the data, but -ln(tail)/n is
    still possible."""
    assert found.spread is not None
    middle = about(found.b - found.a, found.spread, level)
    possible = -log((1 - level) / 2) / found.spread.effective
    up = possible * ((found.b == 0) + (found.a == 1))
    down = possible * ((found.b == 1) + (found.a == 0))
    return intervals.Interval((middle.low or 0.0) - down, (middle.high or 0.0) + up)


NOTED_DIFFERENCE = 0.01


def reasons_to_doubt(a: Sequence[Side], b: Sequence[Side]) -> list[str]:
    """Says which runs are void, since their figures are about the client. Each verdict reckons with lateness itself."""
    return [
        f"{name} is void: {'; '.join(check.sentence for check in void_for_more(run))}"
        for name, sides in (("A", a), ("B", b))
        for run, _ in sides
        if void_for_more(run)
    ]


def notes_of(a: Sequence[Side], b: Sequence[Side], *, is_paired: bool) -> Iterator[str]:
    if len(a) == 1 and a[0].run is not b[0].run:
        yield "One run a side: what changes from one start of a server to the next is not in the intervals."
    if not is_paired and len({run.schedule_digest for run, _ in (*a, *b)}) > 1:
        yield "The runs did not send the same requests: differences of the load are in the figures."
    for name, sides in (("A", a), ("B", b)):
        yield from _notes_of_side(name, sides)
    for what, means in (("prompt", _mean_prompts(a, b)), ("output", _mean_outputs(a, b))):
        if None not in means and abs(means[1] / means[0] - 1) > NOTED_DIFFERENCE:  # type: ignore[operator]
            yield f"Mean {what} tokens differ: {means[0]:.1f} in A, {means[1]:.1f} in B."


def _notes_of_side(name: str, sides: Sequence[Side]) -> Iterator[str]:
    for side in sides:
        for check in failed_by_lateness(side.run):
            yield f"{name}'s client was late: {check.sentence}. Verdicts hold even if {name} were better by all of it."
        if side.run.stopped:
            yield f"{name} was stopped: {side.run.stopped}"
        trend = drift(series(complete(side.measured), "ttft").values).trend
        if trend in (Trend.RISING, Trend.FALLING):
            yield f"TTFT was {trend.value} during {name}: it was not in a steady state."
        counted = [outcome for outcome in side.measured if outcome.ending is not Ending.CANCELLED]
        if missing := len(counted) - len(complete(counted)):
            yield f"{missing} of {len(counted)} requests of {name} were not answered: they are in no latency."


Means = tuple[float | None, float | None]


def _mean_prompts(a: Sequence[Side], b: Sequence[Side]) -> Means:
    return _mean([o.prompt_tokens for s in a for o in s.measured]), _mean(
        [o.prompt_tokens for s in b for o in s.measured]
    )


def _mean_outputs(a: Sequence[Side], b: Sequence[Side]) -> Means:
    first, second = ([output_tokens(o) for s in sides for o in complete(s.measured)] for sides in (a, b))
    return _mean(first), _mean(second)


def _mean(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value]
    return float(np.mean(known)) if known else None
