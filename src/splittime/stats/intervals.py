"""How sure a figure is: an interval for a mean, a percentile, and a ratio of two, or the answer that nobody can tell.

`Precision` knows a sample: values of requests in time order, any number of them to each request. How alike neighbours
are says how many independent requests it is worth (`client_dependence`), and so the standard error e of each figure.
With t of Student at `effective / 4` degrees of freedom, or at as many as lie beyond a percentile, since the dependence
itself is estimated:

    mean         mean * exp(-t' e / mean) to mean + w t e, or to mean * exp(t e / mean) if that is more
    percentile   the value at the share p - t' e, to q + w (the value at p + t e, less q), where q is the percentile and
                 e is of the share that lies below: no end if such a share is below 0 or above 1
    ratio        exp(log ratio -+ v t e), where e is of the mean of what each request adds to the logarithm: of two
                 samples of the same requests, of its difference, so that what both sides share cancels

A run that by luck met no long queue also looks independent, and is then too low, never too high: its reach upward is

    w = 1 + `DOUBT` * (1 / effective - 1 / requests)

times as far. That is 1 for requests that have nothing to do with each other, which hide no queue. t leaves out 2.5 % on
each side; t', as little is left out above, 5 - 2.5 / w %. An upper end of over
`MOST_ABOVE` times the figure is none, and below `MIN_INDEPENDENT` independent requests there is none either; below
`MIN_FOR_LOW` there is no interval: it would be about this run, not about the server. The constants were chosen on
queues whose truth is known, for 95 % to cover at least 92 % wherever more than a twentieth of the runs have an
interval: `python -m benchmarks.scenarios.interval_coverage` has the table, tests/stats/test_coverage.py a short form.

Requests that follow each other share a queue. A mean of n of them varies as much as one of n / `times` independent
ones, and at nine tenths of a server's capacity `times` is in the hundreds: 400 requests then tell no more than one or
two.

    times = (R(0) + 2 sum R(k)) / R(0)          R: the autocovariance of a series in time order

The sum goes on while the sums of neighbouring pairs, R(2k) + R(2k+1), are positive, each taken for no more than the one
before (Geyer 1992, "initial monotone sequence"). It is divided by 1 - lags / n, since every R(k) is too small by what
the series' own mean has taken away.
"""

from collections.abc import Sequence
from functools import cached_property
from math import ceil, exp, log, sqrt
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
MIN_INDEPENDENT = 20
MIN_FOR_LOW = 12
DOUBT = 300.0  # independent requests, with which the reach upward is twice as far as it would be without a queue
MOST_ABOVE = 5.0  # times the figure: a mean that one request in hundreds made has no upper end
DOUBT_OF_RATIO, MAX_WIDENING = 30.0, 5.0
MIN_FREEDOM = 4.0
KNOWN_BY = 0.25
MOSTLY_SEEN = 2.0  # w up to which at least half the way to an upper end is within the sample
INNER = (10, 90)  # percents; beyond, too few lie beyond to show how alike they are
Array = NDArray[np.float64]

MIN_REQUESTS = 8  # below that nothing can be said of neighbours
LEAST_KEPT = 0.2  # of a series whose neighbours are alike to its end, `times` is as if four fifths of it were


def times(series: Array) -> float:
    """Returns the variance of the mean over what it would be for independent values; at least 1."""
    size = len(series)
    covariance = _autocovariance(series)
    if size < MIN_REQUESTS or covariance[0] <= 1e-12 * float(np.square(series).mean()):
        return 1.0
    half = size // 2
    pairs = np.minimum.accumulate(covariance[0 : 2 * half : 2] + covariance[1 : 2 * half : 2])
    positive = pairs > 0
    kept = half if positive.all() else int(np.argmin(positive))
    found = 2 * pairs[:kept].sum() / covariance[0] - 1
    return max(1.0, float(found) / max(LEAST_KEPT, 1 - 2 * kept / size))


def ranks(series: Array) -> Array:
    """Returns ranks; equal values share their mean rank. By ranks, one outlier does not hide a dependence."""
    _, group, counts = np.unique(series, return_inverse=True, return_counts=True)
    shared: Array = (np.cumsum(counts) - (counts - 1) / 2.0)[group]
    return shared


def without_trend(series: Array) -> Array:
    """Returns what is left beside a straight line: a trend does not count as dependence where it is what is looked
    for."""
    at = np.arange(len(series)) - (len(series) - 1) / 2
    slope = float(at @ series) / max(1.0, float(at @ at))
    left: Array = series - slope * at
    return left


def _autocovariance(series: Array) -> Array:
    size = len(series)
    if size == 0:
        return np.zeros(1)
    spectrum = np.fft.rfft(series - series.mean(), 1 << (2 * size - 1).bit_length())
    covariance: Array = np.fft.irfft(spectrum * np.conj(spectrum))[:size] / size
    return covariance


class Interval(msgspec.Struct, frozen=True):
    """None at an end: so few requests cannot bound it there."""

    low: float | None
    high: float | None

    def exp(self) -> "Interval":
        """Returns the interval of the ratio, if this is of its logarithm."""
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
        """Returns how far the truth may be from the figure, either way."""
        freedom = max(MIN_FREEDOM, self.effective * self.known_by)
        return t_quantile((1 + confidence) / 2, freedom) * self.error

    def widening(self) -> float:
        """Returns v, by which the interval of a ratio is widened."""
        return 1 + min(MAX_WIDENING - 1, DOUBT_OF_RATIO / self.effective)


class Precision:
    """How precise the figures of one sample are. For a ratio it tells what each request adds to their logarithms."""

    def __init__(self, pooled: Pooled) -> None:
        self._pooled = pooled
        self._counts = np.bincount(pooled.request, minlength=pooled.num_requests)
        self._per_request = len(pooled.values) / max(1, pooled.num_requests)

    @cached_property
    def effective(self) -> float:
        """Returns how many independent requests would say as much, by the most dependent of the views of them."""
        marks = [self._marks(value) for value in nearest_rank(self._pooled.values, (50, 90))]
        views = (self._of_mean, *marks)
        return self._pooled.num_requests / max(self._times_of_ranks, *(times(view) for view in views))

    def mean(self, confidence: float = CONFIDENCE) -> Interval | None:
        """Returns the mean's interval: below, in proportion to it for positive values."""
        middle, spread = float(self._pooled.values.mean()), self.spread_of_mean
        if self._tells_nothing:
            return None
        below, up = spread.reach(self._below(confidence)), spread.reach(confidence)
        if middle <= 0 or self._pooled.values.min() < 0:
            return self._bounded(middle - below, middle + self._wide * up)
        times_up = max(1 + self._wide * up / middle, exp(up / middle))
        return self._bounded(middle * exp(-below / middle), middle * times_up if times_up <= MOST_ABOVE else None)

    def percentiles(self, percents: Sequence[float], confidence: float = CONFIDENCE) -> list[Interval | None]:
        if self._tells_nothing:
            return [None] * len(percents)
        spreads = [self._spread_of_share(percent) for percent in percents]
        low = [p / 100 - spread.reach(self._below(confidence)) for p, spread in zip(percents, spreads, strict=True)]
        high = [p / 100 + spread.reach(confidence) for p, spread in zip(percents, spreads, strict=True)]
        inside = [100 * min(1.0, max(0.0, share)) for share in (*low, *high)]
        found = np.array(nearest_rank(self._pooled.values, [*inside, *percents])).reshape(3, -1)
        return [
            self._bounded(at_low if below > 0 else None, self._upper(at, at_high) if above < 1 else None)
            for below, above, (at_low, at_high, at) in zip(low, high, found.T.tolist(), strict=True)
        ]

    @cached_property
    def spread_of_mean(self) -> Spread:
        return spread_of(self._of_mean, self._times_of_ranks)

    # ---- for a ratio: the logarithm of a figure, as the mean of what each request adds to it

    def log_mean(self) -> Array:
        added: Array = self._of_mean / float(self._pooled.values.mean())
        return added

    def log_percentile(self, percent: float, confidence: float) -> Array | None:
        """Returns None if the percentile lies so far out that its neighbourhood is not within the data."""
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

    @cached_property
    def _wide(self) -> float:
        """Returns w, by which a reach upward is lengthened."""
        return upward(self.effective, self._pooled.num_requests)

    def _below(self, confidence: float) -> float:
        """Returns the confidence of the reach downward, so that both ends together leave out as much as `confidence`
        says."""
        return 1 - (1 - confidence) * (2 - 1 / self._wide)

    def _upper(self, figure: float, seen: float) -> float | None:
        """Returns a percentile's upper end, from the value up to which it reaches by the sample alone. A great one that
        is mostly seen is no doubt: the gaps of tokens that come in chunks are long or none."""
        end = figure + self._wide * (seen - figure)
        return end if end <= MOST_ABOVE * figure or self._wide <= MOSTLY_SEEN else None

    @property
    def _tells_nothing(self) -> bool:
        return self._pooled.num_requests < MIN_REQUESTS or self.effective < MIN_FOR_LOW

    def _bounded(self, low: float | None, high: float | None) -> Interval:
        return Interval(low, high if self.effective >= MIN_INDEPENDENT else None)

    def _spread_of_share(self, percent: float) -> Spread:
        """Returns the spread of the share of values below a percentile; far out, by the ranks of all requests too.
        It is at least that of independent values: the greatest of few is no sure p99 because all lie below it."""
        least = self._times_of_ranks if not INNER[0] <= percent <= INNER[1] else 1.0
        share, tail = percent / 100, min(percent, 100 - percent) / 100
        found = spread_of(self._marks_of(percent), least)
        error = max(found.error, sqrt(share * (1 - share) / len(self._pooled.values)))
        return found._replace(error=error, known_by=min(KNOWN_BY, tail))

    @cached_property
    def _of_mean(self) -> Array:
        sums = np.bincount(self._pooled.request, self._pooled.values, minlength=self._pooled.num_requests)
        added: Array = (sums - self._counts * self._pooled.values.mean()) / self._per_request
        return added

    def _marks_of(self, percent: float) -> Array:
        return self._marks(nearest_rank(self._pooled.values, [percent])[0])

    def _marks(self, value: float) -> Array:
        """Returns what each request adds to the share of values that are at most this one."""
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
    """Returns the same where a trend is what is looked for."""
    left = without_trend(influence)
    return Spread(sqrt(float(influence.var()) * times(left) / max(1, len(left))), len(left) / times(left))


def upward(effective: float, num_requests: int) -> float:
    """Returns w: how many times as far an interval of requests that share a queue has to reach upward."""
    return 1 + DOUBT * max(0.0, 1 / effective - 1 / max(1, num_requests))


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


def welch(a: Array, b: Array, level: float) -> tuple[float, float]:
    """Returns the interval of mean(b) - mean(a), variances not taken for equal (Welch 1947)."""
    from scipy import stats

    if a.var() + b.var() == 0:
        difference = float(b.mean() - a.mean())
        return difference, difference
    found = stats.ttest_ind(b, a, equal_var=False).confidence_interval(level)
    return float(found.low), float(found.high)
