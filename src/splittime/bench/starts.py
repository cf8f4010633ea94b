"""When each phase's requests start: warm-up, then the measured window with no pause between, then cool-down.

One process of arrivals runs through all three, so that the window finds the server as busy as it will be, and leaves it
so until the window's last request has its answer. The window is [from, until) of intended starts. Given by a number of
requests, it ends where the next arrival would have come: n gaps for n requests, so that n / length is the rate.

Instants are ns from the run's begin, drawn before anything is sent. A *unit process* has one arrival in each unit of
its own time, on average; a *rate profile* turns that time into seconds. With rate r(t) and the expected number of
arrivals L(t), the integral of r from 0 to t, the k-th arrival of a unit process at u_k comes at the instant t with L(t)
= u_k: exact for a Poisson process of any rate (time change), and a ramp for the others alike.

    constant   u_k = k                           evenly
    poisson    gaps are exponential              true Poisson: nothing is rescaled, so a window's count varies as
                                                 Poisson's does (variance = mean), and the last arrival is by chance too
    gamma      gaps have mean 1 and standard deviation cv: shape 1 / cv^2, scale cv^2; cv > 1 comes in bursts

Instants are whole microseconds, so that the last bit of a logarithm cannot differ between machines.
`tests/bench/test_arrivals.py` holds gaps and counts to theory.
"""

import math
from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.random import Generator

from splittime.bench.book.records import Phase
from splittime.bench.distributions import Floats, stream
from splittime.bench.spec import LoadSpec
from splittime.bench.spec_rules import DEFAULT_DURATION_S, MAX_REQUESTS
from splittime.bench.traces import Trace
from splittime.core.errors import ConfigError

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


NS_PER_S = 1e9
REQUESTS_PER_WORKER_S = 50
MIN_POOL, MAX_POOL = 200, 20_000

Instants = list[int] | list[None]


class Starts(msgspec.Struct, frozen=True, kw_only=True):
    """`at_ns` by phase, in order; nothing is begun at or after `end_ns`. In a closed loop there are no instants."""

    at_ns: dict[Phase, Instants]
    from_ns: int | None = None
    until_ns: int | None = None
    end_ns: int | None = None

    def phase_at(self, at_ns: int) -> Phase:
        assert self.from_ns is not None
        assert self.until_ns is not None
        if at_ns < self.from_ns:
            return Phase.WARM_UP
        return Phase.MEASURED if at_ns < self.until_ns else Phase.COOL_DOWN


class _Arrivals:
    """Arrivals in order, taken from the front."""

    def __init__(self, instants: Iterator[int]) -> None:
        self._instants = instants
        self.next_ns = next(instants)

    def first(self, count: int) -> list[int]:
        return [self._take() for _ in range(count)]

    def until(self, end_ns: int) -> list[int]:
        taken: list[int] = []
        while self.next_ns < end_ns:
            taken.append(self._take())
            if len(taken) > MAX_REQUESTS:
                raise ConfigError("more arrivals than can be drawn beforehand", param="duration_s", limit=MAX_REQUESTS)
        return taken

    def _take(self) -> int:
        taken, self.next_ns = self.next_ns, next(self._instants)
        return taken


def draw_starts(spec: LoadSpec, trace: Trace | None) -> Starts:
    if spec.is_closed:
        return _closed(spec)
    if spec.arrival_kind == "trace":
        assert trace is not None
        return _of_trace(spec, trace)
    return _of_process(spec)


def _closed(spec: LoadSpec) -> Starts:
    """A window of seconds gets a pool of requests that should outlast it."""
    assert spec.concurrency is not None
    duration_s = spec.duration_s or (DEFAULT_DURATION_S if spec.num_requests is None else None)
    num_measured = spec.num_requests
    if num_measured is None:
        assert duration_s is not None
        pool = math.ceil(spec.concurrency * duration_s * REQUESTS_PER_WORKER_S)
        num_measured = min(MAX_POOL, max(MIN_POOL, pool))
    counts = (spec.warm_up_requests, num_measured, spec.cool_down_requests)
    end_ns = None if duration_s is None else round(duration_s * NS_PER_S)
    return Starts(at_ns={phase: [None] * count for phase, count in zip(Phase, counts, strict=True)}, end_ns=end_ns)


def _of_process(spec: LoadSpec) -> Starts:
    assert spec.rate is not None
    duration_s = spec.duration_s or (DEFAULT_DURATION_S if spec.num_requests is None else None)
    profile = RateProfile(
        rate=spec.rate,
        rate_end=spec.rate_end,
        ramp_from_s=spec.warm_up_s,
        ramp_s=(spec.ramp_s or duration_s or 0.0) if spec.rate_end is not None else 0.0,
    )
    line = _Arrivals(arrivals_ns(spec.arrival_kind, profile, stream(spec.seed, "arrivals"), spec.cv or 1.0))
    if spec.warm_up_requests:
        warm_up = line.first(spec.warm_up_requests)
        from_ns = max(line.next_ns, warm_up[-1] + 1)
    else:
        from_ns = round(spec.warm_up_s * NS_PER_S)
        warm_up = line.until(from_ns)
    return _window(spec, line, warm_up, from_ns, duration_s)


def _of_trace(spec: LoadSpec, trace: Trace) -> Starts:
    """The trace is measured from its first row; what warms up before it comes evenly, at the trace's mean rate."""
    assert trace.at_s is not None
    rate = trace.mean_rate * spec.speed_up
    num_warm_up = spec.warm_up_requests or round(spec.warm_up_s * rate)
    from_ns = round((spec.warm_up_s or num_warm_up / rate) * NS_PER_S)
    warm_up = [from_ns * i // num_warm_up for i in range(num_warm_up)]
    once = trace_arrivals_ns(trace.at_s, spec.speed_up)
    period_ns = once[-1] + max(1, round(NS_PER_S / rate))
    line = _Arrivals(_again_and_again([from_ns + at_ns for at_ns in once], period_ns))
    duration_s = spec.duration_s or (period_ns / NS_PER_S if spec.num_requests is None else None)
    return _window(spec, line, warm_up, from_ns, duration_s)


def _again_and_again(once: list[int], period_ns: int) -> Iterator[int]:
    shift_ns = 0
    while True:
        yield from (at_ns + shift_ns for at_ns in once)
        shift_ns += period_ns


def _not_before(edge_ns: int, instants: list[int]) -> list[int]:
    """Several may come at one instant, with a phase's edge among them: those behind it come 1 ns later."""
    return [max(edge_ns, at_ns) for at_ns in instants]


def _window(spec: LoadSpec, line: _Arrivals, warm_up: list[int], from_ns: int, duration_s: float | None) -> Starts:
    if duration_s is None:
        assert spec.num_requests is not None
        measured = _not_before(from_ns, line.first(spec.num_requests))
        until_ns = max(line.next_ns, measured[-1] + 1)
    else:
        until_ns = from_ns + round(duration_s * NS_PER_S)
        measured = _not_before(from_ns, line.until(until_ns))
    end_ns = until_ns + round(spec.cool_down_s * NS_PER_S)
    at_ns: dict[Phase, Instants] = {
        Phase.WARM_UP: warm_up,
        Phase.MEASURED: measured,
        Phase.COOL_DOWN: _not_before(until_ns, line.until(end_ns)),
    }
    return Starts(at_ns=at_ns, from_ns=from_ns, until_ns=until_ns, end_ns=end_ns)
