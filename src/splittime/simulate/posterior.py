"""Draws from a normal distribution of many variables that is cut off at 0.

Gibbs' sampler, along the axes of the distribution itself: on each it is a standard normal one between two bounds, and
the axes are independent but for these bounds. So it forgets where it began within some rounds, however alike two
variables are. Plain Python and numpy: what only predicts has no use for scipy.
"""

import statistics

import numpy as np
from numpy.typing import NDArray

ROUNDS = 40
NORMAL = statistics.NormalDist()
FAR = 8.0  # standard deviations, beyond which there is nothing
LEAST_SHARE = 1e-12

Array = NDArray[np.float64]


def drawn_above_zero(middle: Array, covariance: Array, generator: np.random.Generator) -> Array:
    """Returns one draw. middle: where the distribution has its middle before it is cut off, not below 0."""
    scale = np.sqrt(np.maximum(np.diag(covariance), 0.0))  # they are of sizes that no decomposition has digits for
    scale[scale == 0] = 1.0
    sizes, axes = np.linalg.eigh(covariance / np.outer(scale, scale))
    known = sizes > 1e-12 * sizes.max(initial=0.0)
    axes = (axes[:, known] * np.sqrt(sizes[known])) * scale[:, None]
    values = middle + axes @ generator.standard_normal(axes.shape[1])
    if values.min() >= 0:
        return values
    places = np.zeros(axes.shape[1])
    for _ in range(ROUNDS):
        for axis, direction in enumerate(axes.T):
            rest = middle + axes @ places - direction * places[axis]
            places[axis] = _between(*_bounds(rest, direction), places[axis], generator.random())
    return np.maximum(middle + axes @ places, 0.0)


def _bounds(rest: Array, direction: Array) -> tuple[float, float]:
    """Returns between which factors of the direction nothing is below 0."""
    low, high = -FAR, FAR
    for start, step in zip(rest.tolist(), direction.tolist(), strict=True):
        if step > 0:
            low = max(low, -start / step)
        elif step < 0:
            high = min(high, -start / step)
    return low, high


def _between(low: float, high: float, now: float, share: float) -> float:
    """Returns a standard normal value between these bounds, by a share of what lies between; as it is where nothing
    does."""
    if not low < high:
        return now
    below, above = NORMAL.cdf(low), NORMAL.cdf(high)
    if above - below < LEAST_SHARE:
        return now
    return min(max(NORMAL.inv_cdf(min(max(below + share * (above - below), 1e-300), 1 - 1e-16)), low), high)
