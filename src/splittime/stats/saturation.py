"""When to stop an open loop because the server is overloaded: a test, not a limit that somebody guessed.

A server that keeps up has a number of requests in flight, and a TTFT, that wander about a level. One that does not has
both growing without end. So both are asked, over the later part of what has been seen, whether they grew by more than
chance allows. Chance, here, is the worst that a server can be which still keeps up: at the edge of its capacity, where
the queue is a random walk without drift. The series is cut into `BLOCKS` equal stretches of time; with B means Y and
their increments d, for a random walk

    var(Y_B - Y_1) = (B - 4/3) v      var(d) = 2/3 v      v: what it gains in variance over one stretch

(the mean over a stretch holds a third of the walk within it), and so

    t = (Y_B - Y_1) / sqrt(3/2 s^2 (B - 4/3))      s^2 the increments' sample variance about their mean

is compared with Student's t of B - 2 degrees of freedom. What lies below the edge pulls back to its level and shows
less; noise on top of the walk makes s larger: both err on the side of going on.

It looks first after `FIRST_LOOK_S`, then each time 1.4 times as much time has passed. The first third of the time is
left out each time: the filling of an empty server is a rise too. The k-th look tests at level / (k (k+1)), which sums
to less than `level` over all looks, so a server that keeps up is stopped with about that probability at most, in a run
however long (Bonferroni). `tests/stats/test_saturation.py` makes 200 queues at 0.7 of their capacity, and at 1.3.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

LEVEL = 0.1
FIRST_LOOK_S = 20.0
LATER_BY = 1.4
BLOCKS = 16
FORGOTTEN = 1 / 3
MIN_VALUES = 5 * BLOCKS

Floats = NDArray[np.float64]


def rise(at_s: Sequence[float], values: Sequence[float], from_s: float, until_s: float) -> tuple[float, float] | None:
    """Returns how fast the series grew, a second, and the probability of that for a walk without drift; None for too
    few."""
    at, found = np.asarray(at_s, float), np.asarray(values, float)
    inside = (at >= from_s) & (at < until_s)
    if inside.sum() < MIN_VALUES:
        return None
    means = block_means(at[inside], found[inside], from_s, until_s)
    if means is None:
        return None
    growth, p = drift_test(means)
    return growth / ((until_s - from_s) * (BLOCKS - 1) / BLOCKS), p


def block_means(at_s: Floats, values: Floats, from_s: float, until_s: float) -> Floats | None:
    """Returns the mean of each of `BLOCKS` equal stretches; None if one is empty."""
    block = np.minimum(((at_s - from_s) / (until_s - from_s) * BLOCKS).astype(int), BLOCKS - 1)
    counts = np.bincount(block, minlength=BLOCKS)
    return np.bincount(block, weights=values, minlength=BLOCKS) / counts if counts.all() else None


def drift_test(means: Floats) -> tuple[float, float]:
    """Returns the growth from the first mean to the last, and its one-sided p-value."""
    growth = float(means[-1] - means[0])
    variance = 1.5 * float(np.diff(means).var(ddof=1)) * (len(means) - 4 / 3)
    if variance == 0.0:
        return growth, 0.0 if growth > 0 else 1.0
    return growth, float(stdtr(len(means) - 2, -growth / np.sqrt(variance)))


class Judge:
    """Gathers both series while a run goes on, and looks at them when it is time. Instants in ns from the begin."""

    def __init__(self, level: float = LEVEL, first_look_s: float = FIRST_LOOK_S) -> None:
        self._level, self._next_s = level, first_look_s
        self._looks = 0
        self._in_flight: tuple[list[float], list[float]] = ([], [])
        self._ttft: tuple[list[float], list[float]] = ([], [])

    def add_in_flight(self, at_ns: int, count: int) -> None:
        self._in_flight[0].append(at_ns / 1e9)
        self._in_flight[1].append(count)

    def add_ttft(self, found: Sequence[tuple[int, int]]) -> None:
        """When each first chunk came, and its TTFT: by intended start, an overloaded server's latest are absent."""
        for at_ns, ttft_ns in found:
            self._ttft[0].append(at_ns / 1e9)
            self._ttft[1].append(ttft_ns / 1e9)

    def look(self, now_ns: int) -> str | None:
        """Returns why to stop, or None. Costs nothing until it is time to look."""
        now_s = now_ns / 1e9
        if now_s < self._next_s:
            return None
        self._next_s = now_s * LATER_BY
        self._looks += 1
        level = self._level / (self._looks * (self._looks + 1))
        from_s = now_s * FORGOTTEN
        waiting = rise(*self._in_flight, from_s, now_s)
        first = rise(*self._ttft, from_s, now_s)
        if waiting is None or first is None or max(waiting[1], first[1]) >= level:
            return None
        return (
            f"overloaded: in the last {now_s - from_s:.0f} s requests in flight grew by {waiting[0]:.2f} and TTFT by "
            f"{first[0] * 1e3:.0f} ms each second (p = {waiting[1]:.1g} and {first[1]:.1g}, asked for {level:.1g})"
        )
