"""A fleet on paper: each request ends once, the same seed gives the same run, and the routing is the gateway's own."""

import random
from collections import Counter

import msgspec
import numpy as np
import pytest

from splittime.bench.distributions import LengthRows
from splittime.bench.traces import Trace
from splittime.cluster.scaling import ScaleSettings
from splittime.cluster.simulated import fleet
from splittime.cluster.simulated.figures import FleetFigures, figures_of
from splittime.cluster.simulated.fleet import FleetRun
from splittime.cluster.simulated.load import FleetLoadSpec, FleetRequest, load_of_trace
from splittime.cluster.simulated.settings import FailureSettings, FleetSettings, StartTimes
from splittime.core.errors import ConfigError
from splittime.core.facts import TokenCost
from splittime.gateway.upstreams import Router
from splittime.scheduler.config import SchedulerConfig
from splittime.simulate.data_sheet import replica_of_data_sheet

COST = TokenCost(
    weight_bytes=16_000_000_000,
    kv_bytes_per_token=131_072,
    operations_per_token=15_000_000_000,
    operations_per_sample=1_000_000_000,
    operations_per_context_token=524_288,
)
LIKE = replica_of_data_sheet("L40S", COST, SchedulerConfig(max_model_len=8192, max_num_batched_tokens=2048))
SIZES = ScaleSettings(min_replicas=1, max_replicas=24, spare=0, down_delay_s=30.0)
FIXED = FleetSettings(replicas=8, scaling="none")
KNOWN_ENDINGS = {"answered", "failed", "broken", "queue_full", "queue_timeout", "predicted_wait", "no_upstream"}


def trace_of(rate: float, lasts_s: float, *, most: int = 2000, groups: int = 0, seed: int = 5) -> Trace:
    """groups: of requests whose prompts begin alike; 0: nobody says."""
    rng, at_s, rows, blocks = random.Random(seed), 0.0, [], []
    while at_s < lasts_s:
        at_s += rng.expovariate(rate)
        rows.append((at_s, rng.randint(64, most), rng.randint(2, 200)))
        blocks.append(tuple(1000 * rng.randint(1, groups) + block for block in range(4)) if groups else ())
    times, inputs, outputs = (np.array(column) for column in zip(*rows, strict=True))
    inputs = np.maximum(inputs, 2048 * bool(groups))
    return Trace("drawn", times, LengthRows(inputs, outputs), tuple(blocks) if groups else None)


def run_of(settings: FleetSettings, trace: Trace, seed: int = 0, **spec) -> tuple[FleetRun, FleetFigures]:
    load_spec = FleetLoadSpec(jitter_s=0.1, **spec)
    load = load_of_trace(trace, load_spec, len(settings.regions), LIKE.config.max_model_len, seed)
    run = FleetRun(LIKE, settings, load, seed)
    run.run()
    return run, figures_of(run, load_spec)


def with_(settings: FleetSettings, **changes) -> FleetSettings:
    return msgspec.structs.replace(settings, **changes)


@pytest.mark.parametrize("scaling", ["tokens", "waiting", "none"])
@pytest.mark.parametrize("routing", ["gateway", "round_robin"])
def test_each_request_ends_once_whatever_fails(scaling, routing, monkeypatch):
    ended: Counter[FleetRequest] = Counter()
    end = FleetRun._ended
    monkeypatch.setattr(FleetRun, "_ended", lambda self, request: (ended.update([request]), end(self, request))[1])
    failing = FailureSettings(per_replica_hour=90.0, node_share=0.5)
    settings = with_(
        FIXED,
        regions=("a", "b"),
        scaling=scaling,
        routing=routing,
        scale=SIZES,
        failures=failing,
        starts=StartTimes(cold_s=5, wake_s=1),
    )
    run, figures = run_of(settings, trace_of(12, 60))
    assert set(ended) == set(run.load.requests)
    assert set(ended.values()) == {1}
    assert sum(figures.endings.values()) == figures.requests == len(run.load.requests)
    assert set(figures.endings) <= KNOWN_ENDINGS
    assert sum(run.num_failures.values()) > 3
    assert figures.resumed > 0
    for region in run.regions:
        assert region.gateway.queue.requests == region.gateway.queue.tokens == 0
        assert {one.requests for one in region.gateway._upstreams.values()} <= {0}
    for request in run.load.requests:
        if request.ending == "answered":
            assert request.generated == request.output
            assert request.at_ns < request.first_ns <= request.end_ns


def test_the_same_seed_gives_the_same_run():
    settings = with_(FIXED, scaling="tokens", scale=SIZES, failures=FailureSettings(per_replica_hour=60.0))
    trace = trace_of(10, 40)
    (_, once), (_, again), (_, other) = (run_of(settings, trace, seed) for seed in (1, 1, 2))
    assert once == again != other


def test_the_routing_is_the_gateways(monkeypatch):
    """Whoever changes how the gateway chooses changes what is simulated."""
    trace = trace_of(12, 30)
    _, own = run_of(FIXED, trace)
    monkeypatch.setattr(Router, "_least_of", lambda self, free: sorted(free, key=lambda one: one.name)[:2])
    _, first = run_of(FIXED, trace)
    assert first.ttft_ms["p99"] > 1.5 * own.ttft_ms["p99"]


def test_a_process_that_ends_loses_nothing_that_had_no_byte():
    failing = FailureSettings(per_replica_hour=120.0, node_share=0.0)
    run, figures = run_of(with_(FIXED, failures=failing), trace_of(8, 60))
    assert run.num_failures[False] > 5
    assert figures.retried > 0
    assert figures.lost == 0
    assert figures.endings == {"answered": figures.requests}


def test_what_dies_after_the_last_arrival_loses_nothing_that_had_no_byte():
    """No new requests add to the budget of retries, and some servers fall silent: it has room for what one had."""
    failing = FailureSettings(per_replica_hour=40.0)
    settings = with_(FIXED, max_wait_s=600.0, starts=StartTimes(cold_s=5, wake_s=1), failures=failing)
    run, figures = run_of(settings, trace_of(60, 15, most=7900))
    assert run.num_failures[True] > 2
    assert figures.retried > 100
    assert figures.endings == {"answered": figures.requests}


def test_round_robin_is_worse_where_requests_differ():
    """Few are long: who is given them in turn, whatever else there is, has some wait for others."""
    trace = trace_of(16, 60, most=7900)
    (_, own), (_, turns) = (run_of(with_(FIXED, routing=kind), trace) for kind in ("gateway", "round_robin"))
    assert own.ttft_ms["p99"] < 0.9 * turns.ttft_ms["p99"]


def test_affinity_finds_what_was_computed():
    trace = trace_of(6, 60, groups=30)
    (_, own), (_, without) = (run_of(with_(FIXED, affinity=is_on), trace) for is_on in (True, False))
    assert own.cached > without.cached + 0.1


def test_the_controller_starts_servers_and_a_warm_pool_is_sooner():
    settings = with_(FIXED, replicas=4, scaling="tokens", scale=SIZES, starts=StartTimes(cold_s=30, wake_s=1))
    warm = with_(settings, scale=msgspec.structs.replace(SIZES, warm_pool=8))
    surge = {"surge_at_s": 70.0, "surge_times": 4.0, "surge_s": 40.0}
    (_, cold), (_, woken) = (run_of(one, trace_of(6, 130), **surge) for one in (settings, warm))
    assert cold.reaction.decided_s < 20
    assert woken.reaction.ready_s < cold.reaction.ready_s - 15
    assert woken.good > cold.good
    assert woken.asleep_hours > 0 == cold.asleep_hours


def test_waiting_alone_lets_a_fleet_go_that_keeps_up(monkeypatch):
    """Nobody waits at servers that keep up: a scaler that sees no more has too few of them."""
    monkeypatch.setattr(fleet, "WINDOW_S", 30.0)
    settings, trace = with_(FIXED, scale=SIZES, starts=StartTimes(cold_s=30, wake_s=1)), trace_of(20, 120)
    (_, own), (_, blind) = (run_of(with_(settings, scaling=kind), trace) for kind in ("tokens", "waiting"))
    assert min(period.ready for period in blind.periods) == 1
    assert blind.good < own.good - 0.2


def test_what_cannot_be_is_refused():
    for settings, what in (
        (with_(FIXED, replicas=0), "replicas"),
        (with_(FIXED, regions=("a", "a")), "regions"),
        (with_(FIXED, failures=FailureSettings(per_replica_hour=-1)), "failures"),
    ):
        with pytest.raises(ConfigError, match=what):
            settings.validate()
    with pytest.raises(ConfigError, match="too many"):
        load_of_trace(trace_of(10, 10), FleetLoadSpec(copies=10**6), 1, 8192)
    with pytest.raises(ConfigError, match="no times"):
        load_of_trace(Trace("t", None, LengthRows(np.array([1]), np.array([1]))), FleetLoadSpec(), 1, 8192)
