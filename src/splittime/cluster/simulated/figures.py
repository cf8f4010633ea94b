"""What a simulated fleet came to: what users felt, what it cost, how soon it reacted."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from splittime.cluster.simulated.fleet import FleetRun
from splittime.cluster.simulated.load import FleetLoadSpec, FleetRequest
from splittime.cluster.simulated.settings import FleetSettings
from splittime.ledger.derive import percentiles

NUM_PERIODS = 60
RECOVERED = 0.99  # of the requests of a second, good


class FleetPeriod(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the run: how many came, the share of them that were good, and the fleet at its end."""

    at_s: float
    requests: int
    good: float | None
    ready: int
    starting: int
    asleep: int
    held: int
    waiting: int
    running: int


class SurgeReaction(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from the begin of a surge until the first server was ordered, until one of those was ready, and until the
    last second in which more than a hundredth of the requests were not good. None: never."""

    decided_s: float | None
    ready_s: float | None
    recovered_s: float


class FleetFigures(msgspec.Struct, frozen=True, kw_only=True):
    """endings: requests by how they ended. good: the share of all that came whose answer was whole and kept the SLO.
    lost: requests that had no byte and got none, but were not refused. Times in ms, of answered requests; None where
    there were none. retried: requests with more than one attempt; resumed: of these, with a stream. cached: of all
    prompt tokens, found in prefix caches. replica_hours, asleep_hours: of servers that were up, and of those that
    slept. failures: processes, and nodes, that failed. lasted_s: virtual time."""

    requests: int
    too_long: int
    endings: dict[str, int]
    good: float
    lost: int
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    e2e_ms: dict[str, float]
    retried: int
    resumed: int
    cached: float
    replica_hours: float
    asleep_hours: float
    most_ready: int
    failures: tuple[int, int]
    lasted_s: float
    capacity_tokens: int
    reaction: SurgeReaction | None
    periods: tuple[FleetPeriod, ...]


def figures_of(run: FleetRun, spec: FleetLoadSpec) -> FleetFigures:
    """Returns the figures of a run that is over."""
    requests, now_ns = run.load.requests, run.agenda.now_ns
    answered = [request for request in requests if request.ending == "answered"]
    endings = Counter(request.ending for request in requests)
    up_ns = [(server.ended_ns or now_ns) - server.begun_ns - server.slept_ns for server in run.servers.values()]
    return FleetFigures(
        requests=len(requests),
        too_long=run.load.num_too_long,
        endings=dict(endings),
        good=_good_share(requests, run.settings) or 0.0,
        lost=endings["failed"],
        ttft_ms=_percentiles_ms([ttft_ns(request) for request in answered]),
        tpot_ms=_percentiles_ms([tpot_ns(request) for request in answered if request.output > 1]),
        e2e_ms=_percentiles_ms([request.end_ns - request.at_ns for request in answered]),
        retried=sum(request.attempts > 1 for request in requests),
        resumed=sum(request.is_resumed for request in requests),
        cached=sum(request.cached for request in answered) / max(1, sum(request.prompt for request in answered)),
        replica_hours=sum(up_ns) / 3600e9,
        asleep_hours=sum(server.slept_ns for server in run.servers.values()) / 3600e9,
        most_ready=max((sample.ready for sample in run.samples), default=0),
        failures=(run.num_failures[False], run.num_failures[True]),
        lasted_s=now_ns / 1e9,
        capacity_tokens=run.capacity_tokens,
        reaction=_reaction(run, spec),
        periods=tuple(_periods(run)),
    )


def ttft_ns(request: FleetRequest) -> int:
    assert request.first_ns is not None, "it was answered"
    return request.first_ns - request.at_ns


def tpot_ns(request: FleetRequest) -> int:
    assert request.first_ns is not None, "it was answered"
    return round((request.end_ns - request.first_ns) / max(1, request.output - 1))


def is_good(request: FleetRequest, settings: FleetSettings) -> bool:
    if request.ending != "answered":
        return False
    return ttft_ns(request) <= settings.ttft_s * 1e9 and tpot_ns(request) <= settings.tpot_s * 1e9


def _good_share(requests: Sequence[FleetRequest], settings: FleetSettings) -> float | None:
    return sum(is_good(request, settings) for request in requests) / len(requests) if requests else None


def _percentiles_ms(times_ns: list[int]) -> dict[str, float]:
    """Returns percentiles in ms; {} of nothing."""
    return {name: round(ns / 1e6, 3) for name, ns in percentiles(times_ns, (50, 90, 99)).items()}


def _reaction(run: FleetRun, spec: FleetLoadSpec) -> SurgeReaction | None:
    if spec.surge_at_s is None:
        return None
    since_ns = spec.surge_at_s * 1e9
    after = [(ordered_ns, ready_ns) for ordered_ns, ready_ns in run.begun if ordered_ns >= since_ns]
    decided = next(((ordered_ns - since_ns) / 1e9 for ordered_ns, _ in after), None)
    ready = next(((ready_ns - since_ns) / 1e9 for _, ready_ns in after if ready_ns is not None), None)
    seconds: dict[int, list[FleetRequest]] = {}
    for request in run.load.requests:
        if request.at_ns >= since_ns:
            seconds.setdefault(int((request.at_ns - since_ns) // 10**9), []).append(request)
    bad = [at_s for at_s, some in seconds.items() if (_good_share(some, run.settings) or 0.0) < RECOVERED]
    return SurgeReaction(decided_s=decided, ready_s=ready, recovered_s=max(bad, default=-1) + 1.0)


def _periods(run: FleetRun) -> list[FleetPeriod]:
    """Returns at most `NUM_PERIODS` parts of the run, equally long, of whole samples."""
    samples = run.samples
    each = max(1, -(-len(samples) // NUM_PERIODS))
    came: dict[int, list[FleetRequest]] = {}
    for request in run.load.requests:
        came.setdefault(request.at_ns // (each * 10**9), []).append(request)
    periods = []
    for number in range(-(-len(samples) // each)):
        last, some = samples[min(len(samples), (number + 1) * each) - 1], came.get(number, [])
        good = _good_share(some, run.settings)
        fleet = last._asdict() | {"at_s": number * each * 1.0}
        del fleet["at_ns"]
        periods.append(FleetPeriod(requests=len(some), good=good, **fleet))
    return periods
