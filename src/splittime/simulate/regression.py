"""A non-negative linear regression with a posterior that knows what the data do not tell, and draws from it.

The prior is a half-normal one for each coefficient, so wide that its term alone could make `PRIOR_WIDTH` times the mean
value. Errors count relative to the predicted value, and those beyond `HUBER` robust standard deviations count less
(Huber, 1964), in a few re-weighted rounds. The solution is that of Lawson and Hanson's NNLS on the prior's rows below
the data's: the most likely one.

Values that follow each other are not independent: a machine is slow for a while. So where the data decide, the
covariance is the one that is robust to clusters (Liang and Zeger, Biometrika 1986), of neighbours in time. Where two
columns rise and fall together the data do not decide, and the prior's width is left: along such a direction the
posterior reaches from all of one column's to all of the other's. It is a normal distribution cut off at 0
(`drawn_above_zero` draws from it): what the columns make together stays as sure as it is.
"""

import statistics
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

GIBBS_ROUNDS = 40
NORMAL = statistics.NormalDist()
FAR = 8.0  # standard deviations, beyond which there is nothing
LEAST_SHARE = 1e-12

Array = NDArray[np.float64]


def drawn_above_zero(middle: Array, covariance: Array, generator: np.random.Generator) -> Array:
    """Returns one draw of a normal distribution that is cut off at 0. middle: where it has its middle before, not below
    0. By Gibbs' sampler, along its own axes: on each it is a standard normal one between two bounds, and they are
    independent but for these. So it forgets where it began within some rounds, however alike two variables are."""
    scale = np.sqrt(np.maximum(np.diag(covariance), 0.0))  # they are of sizes that no decomposition has digits for
    scale[scale == 0] = 1.0
    sizes, axes = np.linalg.eigh(covariance / np.outer(scale, scale))
    known = sizes > 1e-12 * sizes.max(initial=0.0)
    axes = (axes[:, known] * np.sqrt(sizes[known])) * scale[:, None]
    values = middle + axes @ generator.standard_normal(axes.shape[1])
    if values.min() >= 0:
        return values
    places = np.zeros(axes.shape[1])
    for _ in range(GIBBS_ROUNDS):
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


NUM_CLUSTERS = 16
HUBER = 2.0
LEAST_SPREAD = 0.02  # else, where most values are all alike, the few others count for nothing
ROUNDS = 4
PRIOR_WIDTH = 3.0


class Line(NamedTuple):
    """coefficients: one for each column. covariance: of these, before it is cut off at 0."""

    coefficients: Array
    covariance: Array


def line_of(columns: Array, values: Array) -> Line:
    scale = np.where(columns.mean(axis=0) > 0, columns.mean(axis=0), 1.0)
    scaled, prior = columns / scale, np.full(columns.shape[1], 1 / (PRIOR_WIDTH * max(values.mean(), 1.0)))
    weights = 1 / np.maximum(values, values.mean() * 0.01 + 1)
    spread = 1.0
    for _ in range(ROUNDS):
        weighted = scaled * (weights / spread)[:, None]
        solved, _ = nnls(
            np.vstack([weighted, np.diag(prior)]), np.append(values * weights / spread, np.zeros(len(prior)))
        )
        predicted = np.maximum(scaled @ solved, values.mean() * 0.01 + 1)
        relative = values / predicted - 1
        spread = max(1.4826 * float(np.median(np.abs(relative - np.median(relative)))), LEAST_SPREAD)
        weights = np.sqrt(np.minimum(1.0, HUBER * spread / np.maximum(np.abs(relative), 1e-12))) / predicted
    return Line(solved / scale, _covariance(scaled, values, weights / spread, prior, solved) / np.outer(scale, scale))


def _covariance(scaled: Array, values: Array, weights: Array, prior: Array, solved: Array) -> Array:
    weighted, errors = scaled * weights[:, None], (values - scaled @ solved) * weights
    known = np.diag(prior**2)
    bread = np.linalg.inv(weighted.T @ weighted + known)
    clusters = clusters_of(len(values))
    pushes = np.array([weighted[some].T @ errors[some] for some in clusters])
    pushes -= pushes.mean(axis=0)  # at a coefficient of 0 they have one direction, and no sum of 0
    few = len(clusters) / max(1, len(clusters) - np.linalg.matrix_rank(scaled))
    return bread @ (few * pushes.T @ pushes + known) @ bread


def clusters_of(count: int) -> list[Array]:
    """Returns the indices of the values of each cluster: neighbours in time."""
    return np.array_split(np.arange(count), min(NUM_CLUSTERS, count))
