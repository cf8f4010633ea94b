"""How sure a figure is: an interval for a mean, a percentile, and a ratio of two, or the answer that nobody can tell.

`Precision` knows a sample: values of requests in time order, any number of them to each request. How alike neighbours
are says how many independent requests it is worth (`client_dependence`), and so the standard error e of each figure.
With t of Student at `effective / 4` degrees of freedom, or at as many as lie beyond a percentile, since the dependence
itself is estimated:

    mean         mean * exp(-t e / mean) to mean * exp(+w t e / mean)
    percentile   the values at the shares p - t e and p + w t e, where e is of the share that lies below: no end if that
                 is below 0 or above 1
    ratio        exp(log ratio -+ w t e), where e is of the mean of what each request adds to the logarithm: of two
                 samples of the same requests, of its difference, so that what both sides share cancels

w = 1 + doubt * `MIN_INDEPENDENT` / effective: a short run that was spared the long queues also looks independent, and
then is too low, never too high. Below `MIN_INDEPENDENT` independent requests a figure has no upper end, below
`MIN_FOR_LOW` no interval: it would be about this run, not about the server. The constants are those with which 95 %
covers 92 to 98 % on queues whose truth is known: `python -m benchmarks.scenarios.interval_coverage` has the table, and
tests/ledger/test_coverage.py is its short form.
"""

from collections.abc import Sequence
from functools import cached_property
from math import ceil, exp, log, sqrt
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from splittime.ledger.client_dependence import MIN_REQUESTS, Array, ranks, times, without_trend

CONFIDENCE = 0.95
MIN_INDEPENDENT = 30
MIN_FOR_LOW = 12
DOUBT, DOUBT_OF_MEAN = 1.0, 2.0  # a mean also hangs on the longest waits, which no short run has seen
MOST_ABOVE = 5.0  # times the mean: a mean that a few requests made has no upper end
MAX_WIDENING = 5.0
MIN_FREEDOM = 4.0
KNOWN_BY = 0.25
INNER = (10, 90)  # percents; beyond, too few lie beyond to show how alike they are


class Interval(msgspec.Struct, frozen=True):
    """None at an end: so few requests cannot bound it there."""

    low: float | None
    high: float | None

    def exp(self) -> "Interval":
        """Of the ratio, if this is of its logarithm."""
        return Interval(*(None if end is None else exp(end) for end in (self.low, self.high)))


class Estimate(msgspec.Struct, frozen=True):
    """`interval` is None if nobody can tell from so few independent requests."""

    value: float
    interval: Interval | None = None


class Pooled(NamedTuple):
    """Values, and to which of `num_requests` requests (0 is the earliest) each belongs."""

    values: Array
    request: NDArray[np.int64]
    num_requests: int


def one_each(values: Sequence[float] | Array) -> Pooled:
    array = np.asarray(values, dtype=np.float64)
    return Pooled(array, np.arange(len(array)), len(array))


class Spread(NamedTuple):
    """error: the standard error of a figure. effective: so many independent requests would tell as much. known_by: the
    share of them that tells how much that is."""

    error: float
    effective: float
    known_by: float = KNOWN_BY

    def reach(self, confidence: float) -> float:
        """How far the truth may be from the figure, either way."""
        freedom = max(MIN_FREEDOM, self.effective * self.known_by)
        return t_quantile((1 + confidence) / 2, freedom) * self.error

    def widening(self, doubt: float = DOUBT) -> float:
        return 1 + min(MAX_WIDENING - 1, doubt * MIN_INDEPENDENT / self.effective)


class Precision:
    """How precise the figures of one sample are. For a ratio it tells what each request adds to their logarithms."""

    def __init__(self, pooled: Pooled) -> None:
        self._pooled = pooled
        self._counts = np.bincount(pooled.request, minlength=pooled.num_requests)
        self._per_request = len(pooled.values) / max(1, pooled.num_requests)

    @cached_property
    def effective(self) -> float:
        """So many independent requests would tell as much: by the most dependent of the views of them."""
        marks = [self._marks(value) for value in nearest_rank(self._pooled.values, (50, 90))]
        views = (self._of_mean, *marks)
        return self._pooled.num_requests / max(self._times_of_ranks, *(times(view) for view in views))

    def mean(self, confidence: float = CONFIDENCE) -> Interval | None:
        """Returns the mean's interval: in proportion to it for positive values, as far up as down for others."""
        middle, spread = float(self._pooled.values.mean()), self.spread_of_mean
        if self._tells_nothing:
            return None
        reach, wide = spread.reach(confidence), self._whole.widening(DOUBT_OF_MEAN)
        if middle <= 0 or self._pooled.values.min() < 0:
            return self._bounded(middle - wide * reach, middle + wide * reach)
        up = wide * reach / middle
        return self._bounded(middle * exp(-reach / middle), middle * exp(up) if up <= log(MOST_ABOVE) else None)

    def percentiles(self, percents: Sequence[float], confidence: float = CONFIDENCE) -> list[Interval | None]:
        if self._tells_nothing:
            return [None] * len(percents)
        wide = self._whole.widening()
        reaches = [self._spread_of_share(percent).reach(confidence) for percent in percents]
        low = [percent / 100 - reach for percent, reach in zip(percents, reaches, strict=True)]
        high = [percent / 100 + wide * reach for percent, reach in zip(percents, reaches, strict=True)]
        ends = nearest_rank(self._pooled.values, [100 * min(1.0, max(0.0, share)) for share in (*low, *high)])
        return [
            self._bounded(at_low if below > 0 else None, at_high if above < 1 else None)
            for below, above, at_low, at_high in zip(low, high, ends[: len(low)], ends[len(low) :], strict=True)
        ]

    @cached_property
    def spread_of_mean(self) -> Spread:
        return spread_of(self._of_mean, self._times_of_ranks)

    # ---- for a ratio: the logarithm of a figure, as the mean of what each request adds to it

    def log_mean(self) -> Array:
        added: Array = self._of_mean / float(self._pooled.values.mean())
        return added

    def log_percentile(self, percent: float, confidence: float) -> Array | None:
        """None if the percentile lies so far out that its neighbourhood is not within the data."""
        marks = self._marks_of(percent)
        reach, share = self._spread_of_share(percent).reach(confidence), percent / 100
        if not reach < min(share, 1 - share):
            return None
        low, high = nearest_rank(self._pooled.values, (100 * (share - reach), 100 * (share + reach)))
        if low <= 0:
            return None
        added: Array = -marks * log(high / low) / max(2 * reach, 1e-12)
        return added

    # ---- within

    @property
    def _whole(self) -> Spread:
        return Spread(0.0, self.effective)

    @property
    def _tells_nothing(self) -> bool:
        return self._pooled.num_requests < MIN_REQUESTS or self.effective < MIN_FOR_LOW

    def _bounded(self, low: float | None, high: float | None) -> Interval:
        return Interval(low, high if self.effective >= MIN_INDEPENDENT else None)

    def _spread_of_share(self, percent: float) -> Spread:
        """Returns the spread of the share of values below a percentile; far out, by the ranks of all requests too."""
        least = self._times_of_ranks if not INNER[0] <= percent <= INNER[1] else 1.0
        tail = min(percent, 100 - percent) / 100
        return spread_of(self._marks_of(percent), least)._replace(known_by=min(KNOWN_BY, tail))

    @cached_property
    def _of_mean(self) -> Array:
        sums = np.bincount(self._pooled.request, self._pooled.values, minlength=self._pooled.num_requests)
        added: Array = (sums - self._counts * self._pooled.values.mean()) / self._per_request
        return added

    def _marks_of(self, percent: float) -> Array:
        return self._marks(nearest_rank(self._pooled.values, [percent])[0])

    def _marks(self, value: float) -> Array:
        """What each request adds to the share of values that are at most this one."""
        below = self._pooled.values <= value
        sums = np.bincount(self._pooled.request, below, minlength=self._pooled.num_requests)
        added: Array = (sums - self._counts * below.mean()) / self._per_request
        return added

    @cached_property
    def _times_of_ranks(self) -> float:
        there = self._counts > 0
        sums = np.bincount(self._pooled.request, self._pooled.values, minlength=self._pooled.num_requests)
        return times(ranks(sums[there] / self._counts[there]))


def spread_of(influence: Array, least_times: float | None = None) -> Spread:
    """Returns the spread of the mean of what each request adds, in time order: as dependent at least as its ranks are,
    or as `least_times` says."""
    size = len(influence)
    alike = max(times(influence), times(ranks(influence)) if least_times is None else least_times)
    return Spread(sqrt(float(influence.var()) * alike / max(1, size)), size / alike)


def spread_beside_a_trend(influence: Array) -> Spread:
    """The same where a trend is what is looked for."""
    left = without_trend(influence)
    return Spread(sqrt(float(influence.var()) * times(left) / max(1, len(left))), len(left) / times(left))


def together(a: Spread, b: Spread) -> Spread:
    """Returns the spread of the difference of two figures that have nothing in common."""
    return Spread(sqrt(a.error**2 + b.error**2), min(a.effective, b.effective))


def nearest_rank(values: Array, percents: Sequence[float]) -> list[float]:
    """Does what `derive.percentile` does, for arrays."""
    places = [max(0, ceil(len(values) * percent / 100) - 1) for percent in percents]
    ordered = np.partition(values, places)
    return [float(ordered[place]) for place in places]


def never_negative(found: Interval) -> Interval:
    """Returns the interval of a time or a rate, which is never below 0."""
    return found if found.low is None else Interval(max(0.0, found.low), found.high)


def t_quantile(probability: float, freedom: float) -> float:
    """Returns the quantile of Student's t."""
    from scipy.special import stdtrit  # not for every command that imports this file

    return float(stdtrit(freedom, probability))
