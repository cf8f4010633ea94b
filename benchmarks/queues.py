"""Queues whose truth is known, as fast as numpy: what an interval or a test is held against.

A request's wait follows from the one before it (Lindley 1952): w' = max(0, w + service - gap), which unrolled is the
sum so far less the least sum so far, so a whole run is two cumulative passes. What is returned are times from arrival
to the end of service, in means of service, of a stationary queue: the first `WARM_UP` requests are thrown away.

    mm1     Poisson arrivals, exponential service: times are exponential with mean 1 / (1 - rho)
    gm1     gamma gaps with a coefficient of variation of 2, in bursts: exponential with mean 1 / (1 - s), where s
            solves s = E exp(-(1 - s) gap)
    md4     four servers, service always 1: in order of arrival each serves every fourth request, so it is four walks.
            No formula is used: truth is a run of some millions
    mmpp    one server, Poisson arrivals whose rate alternates between 1.8 and 0.2 times the mean, each for 20 services
            in the mean: a run of some millions too
    mh2     one server, Poisson arrivals, service of two kinds, a coefficient of variation of 2: millions too

The first four are those on which the constants of `stats.intervals` were chosen; `mh2` was held out.
"""

from collections.abc import Callable
from functools import cache
from math import log, sqrt

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Shape = tuple[int, int]

WARM_UP = 4_000
WARM_UP_NEAR_CAPACITY = 20_000  # from rho 0.9 on
BURST_CV = 2.0
SERVICE_CV = 2.0
BUSY, CALM, HOLD = 1.8, 0.2, 20.0
SERVERS = 4
LONG_RUNS, LONG_RUN = 8, 1_000_000
PERCENTS = (50, 90, 99)


def waits(steps: Array) -> Array:
    """Of each request along the last axis; `steps`: its service less the gap to the next."""
    sums = np.cumsum(steps, axis=-1)
    after = sums - np.minimum(np.minimum.accumulate(sums, axis=-1), 0)
    return np.concatenate([np.zeros((*after.shape[:-1], 1)), after[..., :-1]], axis=-1)


def mm1(rho: float, shape: Shape, rng: np.random.Generator) -> Array:
    service = rng.exponential(1.0, shape)
    return waits(service - rng.exponential(1 / rho, shape)) + service


def gm1(rho: float, shape: Shape, rng: np.random.Generator) -> Array:
    service, form = rng.exponential(1.0, shape), 1 / BURST_CV**2
    return waits(service - rng.gamma(form, 1 / rho / form, shape)) + service


def md4(rho: float, shape: Shape, rng: np.random.Generator) -> Array:
    runs, size = shape
    arrivals = np.cumsum(rng.exponential(1 / rho / SERVERS, shape), axis=1).reshape(runs, size // SERVERS, SERVERS)
    gaps = np.diff(arrivals, axis=1, append=arrivals[:, -1:] + 1)
    return np.moveaxis(waits(np.moveaxis(1.0 - gaps, 1, 2)), 2, 1).reshape(shape) + 1.0


def mmpp(rho: float, shape: Shape, rng: np.random.Generator) -> Array:
    service = rng.exponential(1.0, shape)
    arrivals = np.stack([_modulated(rho, shape[1], rng) for _ in range(shape[0])])
    return waits(service - np.diff(arrivals, axis=1, append=arrivals[:, -1:] + 1)) + service


def mh2(rho: float, shape: Shape, rng: np.random.Generator) -> Array:
    """Both kinds make the same share of the load ("balanced means")."""
    is_short = rng.random(shape) < (share := short_share())
    service = rng.exponential(1.0, shape) / (2 * np.where(is_short, share, 1 - share))
    return waits(service - rng.exponential(1 / rho, shape)) + service


def short_share() -> float:
    return (1 + sqrt((SERVICE_CV**2 - 1) / (SERVICE_CV**2 + 1))) / 2


def _modulated(rho: float, size: int, rng: np.random.Generator) -> Array:
    """Points of a Poisson process of rate 1, on a clock that runs by the rate of the moment."""
    phases = int(4 * size / rho / HOLD) + 20
    lengths = rng.exponential(HOLD, phases)
    rates = rho * np.where((np.arange(phases) + rng.integers(2)) % 2, BUSY, CALM)
    clock, at = (np.concatenate([[0.0], np.cumsum(part)]) for part in (lengths * rates, lengths))
    return np.interp(np.cumsum(rng.exponential(1.0, size)), clock, at)


QUEUES: dict[str, Callable[[float, Shape, np.random.Generator], Array]] = {
    "mm1": mm1,
    "md4": md4,
    "gm1": gm1,
    "mmpp": mmpp,
    "mh2": mh2,
}


def draw(queue: str, rho: float, size: int, runs: int, seed: int) -> Array:
    """So many runs of so many requests each, in a row each."""
    rng = np.random.default_rng(seed)
    before = WARM_UP_NEAR_CAPACITY if rho >= 0.9 else WARM_UP
    drawn, at_once = [], max(1, 4_000_000 // (before + size))
    for begin in range(0, runs, at_once):
        shape = (min(at_once, runs - begin), (before + size) // SERVERS * SERVERS)
        drawn.append(QUEUES[queue](rho, shape, rng)[:, -size:])
    return np.concatenate(drawn)


@cache
def truth(queue: str, rho: float) -> dict[str, float]:
    """Mean and percentiles, as `mean`, `p50`, ..."""
    if queue in ("mm1", "gm1"):
        mean = 1 / (1 - (rho if queue == "mm1" else _found_waiting(rho)))
        return {"mean": mean, **{f"p{percent}": -log(1 - percent / 100) * mean for percent in PERCENTS}}
    rng = np.random.default_rng(99)
    long = [QUEUES[queue](rho, (1, LONG_RUN), rng)[0, WARM_UP_NEAR_CAPACITY:] for _ in range(LONG_RUNS)]
    values = np.concatenate(long)
    found = np.percentile(values, PERCENTS)
    return {"mean": float(values.mean()), **{f"p{p}": float(v) for p, v in zip(PERCENTS, found, strict=True)}}


def _found_waiting(rho: float) -> float:
    """s of `gm1`, by halving: the share of requests that find others before them."""
    form, low, high = 1 / BURST_CV**2, 0.0, 1 - 1e-6
    for _ in range(60):
        middle = (low + high) / 2
        is_below = (1 + (1 - middle) / (rho * form)) ** -form > middle
        low, high = (middle, high) if is_below else (low, middle)
    return low
