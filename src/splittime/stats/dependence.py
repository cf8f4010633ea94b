"""How alike neighbouring requests are: by how much a figure of them is less sure than one of independent requests.

Requests that follow each other share a queue. A mean of n of them varies as much as one of n / `times` independent
ones, and at nine tenths of a server's capacity `times` is in the hundreds: 400 requests then tell no more than one or
two.

    times = (R(0) + 2 sum R(k)) / R(0)          R: the autocovariance of a series in time order

The sum goes on while the sums of neighbouring pairs, R(2k) + R(2k+1), are positive, each taken for no more than the one
before (Geyer 1992, "initial monotone sequence"). It is divided by 1 - lags / n, since every R(k) is too small by what
the series' own mean has taken away.
"""

import numpy as np
from numpy.typing import NDArray

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
