"""When requests are meant to start: ns from the run's begin, drawn before anything is sent.

A *unit process* has one arrival in each unit of its own time, on average; a *rate profile* turns that time into
seconds. With rate r(t) and the expected number of arrivals L(t), the integral of r from 0 to t, the k-th arrival of a
unit process at u_k comes at the instant t with L(t) = u_k: exact for a Poisson process of any rate (time change), and a
ramp for the others alike.

    constant   u_k = k                           evenly
    poisson    gaps are exponential              true Poisson: nothing is rescaled, so a window's count varies as
                                                 Poisson's does (variance = mean), and the last arrival is by chance too
    gamma      gaps have mean 1 and standard deviation cv: shape 1 / cv^2, scale cv^2; cv > 1 comes in bursts

Instants are whole microseconds, so that the last bit of a logarithm cannot differ between machines.
`tests/loadgen/test_arrivals.py` holds gaps and counts to theory.
"""

from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.random import Generator

from splittime.core.errors import ConfigError
from splittime.loadgen.randomness import Floats

CHUNK = 1024
NS_PER_US = 1000
US_PER_S = 1e6


class RateProfile(msgspec.Struct, frozen=True, kw_only=True):
    """`rate` until `ramp_from_s`, linearly to `rate_end` within `ramp_s`, then `rate_end`; all in arrivals a second."""

    rate: float
    rate_end: float | None = None
    ramp_from_s: float = 0.0
    ramp_s: float = 0.0

    def expected(self, at_s: Floats) -> Floats:
        """L(t): the mean number of arrivals until then."""
        end_rate = self.rate if self.rate_end is None else self.rate_end
        in_ramp = np.clip(at_s - self.ramp_from_s, 0.0, self.ramp_s)
        slope = (end_rate - self.rate) / self.ramp_s if self.ramp_s else 0.0
        after = np.maximum(0.0, at_s - self.ramp_from_s - self.ramp_s)
        return (
            self.rate * np.minimum(at_s, self.ramp_from_s)
            + (self.rate + slope * in_ramp / 2) * in_ramp
            + (end_rate * after)
        )

    def when(self, count: Floats) -> Floats:
        """The inverse of `expected`. In the ramp: the root of a quadratic, in the form that does not cancel."""
        if self.rate_end is None or not self.ramp_s:
            return count / self.rate
        before = self.rate * self.ramp_from_s
        slope = (self.rate_end - self.rate) / self.ramp_s
        all_ramp = (self.rate + self.rate_end) / 2 * self.ramp_s
        in_ramp = np.clip(count - before, 0.0, all_ramp)
        ramp_s = 2 * in_ramp / (self.rate + np.sqrt(np.maximum(0.0, self.rate**2 + 2 * slope * in_ramp)))
        after = np.maximum(0.0, count - before - all_ramp)
        return np.minimum(count, before) / self.rate + ramp_s + after / self.rate_end


def unit_gaps(kind: str, rng: Generator, count: int, cv: float = 1.0) -> Floats:
    """Gaps of mean 1."""
    if kind == "constant":
        return np.ones(count)
    if kind == "poisson":
        return -np.log1p(-rng.random(count))
    if kind == "gamma":
        return rng.gamma(1 / cv**2, cv**2, count)
    kinds = "constant, poisson or gamma"
    raise ConfigError(f"no arrivals are called {kind!r}", param="arrivals", value=kind, limit=kinds, hint=kinds)


def arrivals_ns(kind: str, profile: RateProfile, rng: Generator, cv: float = 1.0) -> Iterator[int]:
    """Without end. Constant arrivals begin at 0; random ones after their first gap."""
    count = -1.0 if kind == "constant" else 0.0
    while True:
        counts = count + np.cumsum(unit_gaps(kind, rng, CHUNK, cv))
        count = float(counts[-1])
        yield from _whole_us(profile.when(counts))


def trace_arrivals_ns(at_s: Floats, speed_up: float) -> list[int]:
    """A trace's own times, so much faster."""
    return _whole_us(np.asarray(at_s) / speed_up)


def _whole_us(at_s: Floats) -> list[int]:
    return [at_us * NS_PER_US for at_us in np.rint(at_s * US_PER_S).astype(np.int64).tolist()]
