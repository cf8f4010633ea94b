"""When each phase's requests start: warm-up, then the measured window with no pause between, then cool-down.

One process of arrivals runs through all three, so that the window finds the server as busy as it will be, and leaves it
so until the window's last request has its answer. The window is [from, until) of intended starts. Given by a number of
requests, it ends where the next arrival would have come: n gaps for n requests, so that n / length is the rate.
"""

import math
from collections.abc import Iterator

import msgspec

from splittime.core.errors import ConfigError
from splittime.ledger.client_book import Phase
from splittime.loadgen.arrivals import RateProfile, arrivals_ns, trace_arrivals_ns
from splittime.loadgen.randomness import stream
from splittime.loadgen.spec import LoadSpec
from splittime.loadgen.spec_rules import DEFAULT_DURATION_S, MAX_REQUESTS
from splittime.loadgen.traces import Trace

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


class _Line:
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
    line = _Line(arrivals_ns(spec.arrival_kind, profile, stream(spec.seed, "arrivals"), spec.cv or 1.0))
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
    line = _Line(_again_and_again([from_ns + at_ns for at_ns in once], period_ns))
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


def _window(spec: LoadSpec, line: _Line, warm_up: list[int], from_ns: int, duration_s: float | None) -> Starts:
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
