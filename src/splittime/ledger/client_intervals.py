"""How sure a figure is: intervals by a block bootstrap over time, and a test for drift.

Requests that follow each other share a queue, so their latencies are alike, and an interval that takes them for
independent is too narrow. Here whole blocks of neighbours are drawn, around the circle (Politis and Romano 1992). The
block length is chosen from the data (Politis and White 2004, as corrected by Patton, Politis and White 2009), on ranks,
so that one outlier does not hide a dependence; it is at least n^(1/3). Blocks see less of the dependence than there is,
as it ends at their borders: the interval is widened by what they miss. With few blocks it is also widened as Student's
t is against the normal (Hesterberg 2015, "expanded percentile interval").

Values are `Pooled`: any number of them to each request, in time order. Only sums over cells of neighbouring requests
are resampled, at most `MAX_CELLS` of them, so ten million chunk gaps cost about as much as a thousand.
`tests/ledger/test_client_intervals.py` checks the coverage by simulation.
"""

from collections.abc import Sequence
from math import ceil, exp, log10, pi, sqrt
from statistics import NormalDist
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CONFIDENCE = 0.95
REPLICATES = 1000
MAX_CELLS = 1000
MIN_REQUESTS = 8  # below that there is no interval
MAX_WIDENING = 2.0
GRID_RANKS = 128


class Interval(msgspec.Struct, frozen=True):
    """None at an end: so few requests cannot bound it there."""

    low: float | None
    high: float | None

    def exp(self) -> "Interval":
        """Of the ratio, if this is of its logarithm."""
        return Interval(*(None if end is None else exp(end) for end in (self.low, self.high)))


class Estimate(msgspec.Struct, frozen=True):
    """`interval` is None if there were too few requests for one."""

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


class Dependence(NamedTuple):
    """Of neighbours. block: how many requests are drawn together. times: the variance of a mean over what it would be
    for independent requests. widen: by how much blocks of that length fall short of it, as a ratio of deviations."""

    block: int
    times: float
    widen: float


class Bootstrap(NamedTuple):
    """`weights[b, c]`: how often cell c was drawn in replicate b."""

    weights: NDArray[np.float32]
    num_requests: int
    num_blocks: float
    dependence: Dependence

    def cell_of(self, request: NDArray[np.int64]) -> NDArray[np.int64]:
        return request * self.weights.shape[1] // max(1, self.num_requests)

    @property
    def effective_requests(self) -> float:
        """So many independent ones would tell as much."""
        return self.num_requests / self.dependence.times


def each_request(pooled: Pooled) -> Array:
    """The mean of each request's values, in time order: what the dependence of neighbours is judged by."""
    counts = np.bincount(pooled.request, minlength=pooled.num_requests)
    sums = np.bincount(pooled.request, pooled.values, minlength=pooled.num_requests)
    return sums[counts > 0] / counts[counts > 0]


def bootstrap(*samples: Pooled, seed: int = 0, replicates: int = REPLICATES) -> Bootstrap:
    """For all samples at once, which are of the same requests; the most dependent one says how long a block is."""
    num_requests = samples[0].num_requests
    found = max((dependence(each_request(pooled)) for pooled in samples), key=lambda its: (its.block, its.times))
    num_cells = min(num_requests, MAX_CELLS)
    block_cells = max(1, round(found.block * num_cells / num_requests))
    weights = circular_weights(num_cells, block_cells, replicates, np.random.default_rng(seed))
    return Bootstrap(weights, num_requests, num_cells / block_cells, found)


def dependence(series: Array) -> Dependence:
    """Of values in time order. With R the autocovariance of their ranks, M twice the lag from which on it is
    insignificant, and w the flat-top window:

        block = (2 G^2 / D)^(1/3) n^(1/3), at least n^(1/3);  G = sum w(k/M) |k| R(k), D = 4/3 g^2, g = sum w(k/M) R(k)
        times = g / R(0)
        widen = sqrt(g / sum (1 - |k|/block) R(k)), the latter being what blocks of that length see
    """
    size = len(series)
    covariance = _autocovariance(_ranks(series))
    if size < MIN_REQUESTS or covariance[0] <= 0:
        return Dependence(1, 1.0, 1.0)
    shortest, longest = ceil(size ** (1 / 3)), ceil(min(3 * sqrt(size), size / 3))
    window = min(2 * _insignificant_from(covariance / covariance[0], size), size - 1)
    lags = np.arange(1, window + 1)
    flat_top = np.minimum(1.0, 2 * (1 - lags / max(1, window)))
    spectrum = covariance[0] + 2 * np.sum(flat_top * covariance[lags])
    if spectrum <= 0:
        return Dependence(shortest, 1.0, 1.0)
    slope = 2 * np.sum(flat_top * lags * covariance[lags])
    block = (2 * slope**2 / (4 / 3 * spectrum**2)) ** (1 / 3) * size ** (1 / 3)
    length = int(np.clip(ceil(block), shortest, longest))
    return Dependence(length, max(1.0, float(spectrum / covariance[0])), _widen(spectrum, covariance, length))


def _widen(spectrum: float, covariance: Array, length: int) -> float:
    lags = np.arange(1, length)
    seen = covariance[0] + 2 * np.sum((1 - lags / length) * covariance[lags])
    return float(np.clip(sqrt(spectrum / seen), 1.0, MAX_WIDENING)) if seen > 0 else 1.0


def _insignificant_from(correlation: Array, size: int) -> int:
    """The first lag after which several in a row are within chance; the last significant one if there is none."""
    run = max(5, ceil(sqrt(log10(size))))
    highest = min(len(correlation) - 1, ceil(sqrt(size)) + run)
    significant = np.abs(correlation[1 : highest + 1]) > 2 * sqrt(log10(size) / size)
    for lag in range(highest - run + 1):
        if not significant[lag : lag + run].any():
            return lag
    return int(np.flatnonzero(significant)[-1]) + 1 if significant.any() else 0


def _ranks(series: Array) -> Array:
    """Equal values share their mean rank."""
    _, group, counts = np.unique(series, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2.0)[group]


def _autocovariance(series: Array) -> Array:
    size = len(series)
    if size == 0:
        return np.zeros(1)
    spectrum = np.fft.rfft(series - series.mean(), 2 * size)
    return np.fft.irfft(spectrum * np.conj(spectrum))[:size] / size


def circular_weights(cells: int, block: int, replicates: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Each row: blocks of neighbouring cells from random starts until all places are taken, the last block cut."""
    whole, rest = divmod(cells, block)
    weights = _covered(rng.integers(0, cells, (replicates, whole)), cells, block)
    if rest:
        weights += _covered(rng.integers(0, cells, (replicates, 1)), cells, rest)
    return weights


def _covered(starts: NDArray[np.int64], cells: int, block: int) -> NDArray[np.float32]:
    """How many of the blocks that begin at `starts`, on a circle, cover each cell."""
    rows = np.arange(len(starts))[:, None] * cells
    begun = np.bincount((rows + starts).ravel(), minlength=len(starts) * cells).reshape(len(starts), cells)
    summed = np.cumsum(np.concatenate([begun[:, cells - block + 1 :], begun], axis=1), axis=1, dtype=np.float32)
    summed = np.concatenate([np.zeros((len(starts), 1), np.float32), summed], axis=1)
    return summed[:, block : block + cells] - summed[:, :cells]


def mean_replicates(pooled: Pooled, drawn: Bootstrap) -> Array:
    cell, cells = drawn.cell_of(pooled.request), drawn.weights.shape[1]
    sums = np.bincount(cell, pooled.values, minlength=cells)
    counts = np.bincount(cell, minlength=cells)
    return (drawn.weights @ sums) / np.maximum(drawn.weights @ counts, 1e-9)


def percentile_replicates(pooled: Pooled, drawn: Bootstrap, percents: Sequence[float]) -> Array:
    """One column for each percent. Exact to one of the values on a grid about the percentile, all of them if few."""
    grid = _grid(pooled.values, percents, drawn.effective_requests)
    cell, cells = drawn.cell_of(pooled.request), drawn.weights.shape[1]
    place = np.searchsorted(grid, pooled.values)  # the first grid value at or above it
    counts = np.bincount(cell * (len(grid) + 1) + place, minlength=cells * (len(grid) + 1))
    at_or_below = np.cumsum(counts.reshape(cells, -1), axis=1).astype(np.float32)
    reached = drawn.weights @ at_or_below
    needed = np.outer(reached[:, -1], np.asarray(percents) / 100) * (1 - 1e-6)
    columns = [np.argmax(reached[:, :-1] >= needed[:, i : i + 1], axis=1) for i in range(len(percents))]
    found = [reached[np.arange(len(reached)), c] >= needed[:, i] for i, c in enumerate(columns)]
    return np.stack([np.where(ok, grid[c], grid[-1]) for ok, c in zip(found, columns, strict=True)], axis=1)


def _grid(values: Array, percents: Sequence[float], requests: float) -> Array:
    """Sorted values at ranks ten standard errors about each percent, and the least and the greatest."""
    size, ranks = len(values), [np.array([0, len(values) - 1])]
    for percent in percents:
        share = percent / 100
        reach = 10 * sqrt(max(share * (1 - share), 1 / requests) / requests)
        low, high = max(0.0, share - reach) * (size - 1), min(1.0, share + reach) * (size - 1)
        ranks.append(np.unique(np.linspace(low, high, GRID_RANKS).astype(np.int64)))
    wanted = np.unique(np.concatenate(ranks))
    return np.unique(np.partition(values, wanted)[wanted])


def nearest_rank(values: Array, percents: Sequence[float]) -> list[float]:
    """As `derive.percentile`, for arrays."""
    ranks = [max(0, ceil(len(values) * percent / 100) - 1) for percent in percents]
    ordered = np.partition(values, ranks)
    return [float(ordered[rank]) for rank in ranks]


def interval(replicates: Array, num_blocks: float, confidence: float = CONFIDENCE, *, widen: float = 1.0) -> Interval:
    """The replicates between two quantiles, those moved outward as there are few blocks."""
    blocks = max(2.0, num_blocks)
    far = t_quantile((1 + confidence) / 2, blocks - 1) * sqrt(blocks / (blocks - 1))
    tail = NormalDist().cdf(-far)
    low, middle, high = np.quantile(replicates, [tail, 0.5, 1 - tail])
    return Interval(float(middle + widen * (low - middle)), float(middle + widen * (high - middle)))


def spread(replicates: Array, drawn: Bootstrap, confidence: float = CONFIDENCE) -> Interval:
    """The interval of a statistic's replicates, all drawn by `drawn`."""
    return interval(replicates, drawn.num_blocks, confidence, widen=drawn.dependence.widen)


def never_negative(found: Interval) -> Interval:
    """Of a statistic of times or rates."""
    return found if found.low is None else Interval(max(0.0, found.low), found.high)


def t_quantile(probability: float, freedom: float) -> float:
    """Student's t: with t = sqrt(f) tan(a), its density in the angle a is proportional to cos(a)^(f-1)."""
    angle = np.linspace(0, pi / 2, 8001)
    density = np.cos(angle) ** (min(freedom, 1e4) - 1)
    cumulated = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    reached = np.interp(abs(2 * probability - 1), cumulated / cumulated[-1], angle)
    return float(np.copysign(sqrt(min(freedom, 1e4)) * np.tan(reached), probability - 0.5))


def bounded(found: Interval, percent: float, drawn: Bootstrap, confidence: float = CONFIDENCE) -> Interval:
    """Without the end that so few requests cannot know: more than chance lies beyond their least or greatest value."""
    effective, tail = drawn.effective_requests, (1 - confidence) / 2
    low = found.low if (1 - percent / 100) ** effective <= tail else None
    return Interval(low, found.high if (percent / 100) ** effective <= tail else None)
