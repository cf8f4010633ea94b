"""What `/metrics` and `/stats` tell of routing: who was chosen by affinity, how far and how busy upstreams are, and
what was decided by difficulty; that is counted as accounts are closed. Models are the config's."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from splittime.ledger.account import ClosedAccount
from splittime.ledger.export.metrics import MetricSpec

if TYPE_CHECKING:
    from splittime.gateway.service import GatewayService
    from splittime.gateway.upstreams import Upstream

DECIDED = "splittime_gateway_difficulty_total"
CHECKED = "splittime_gateway_first_tokens_total"
HELD = "splittime_gateway_first_tokens_held_seconds_total"
ANEW = "splittime_gateway_asked_anew_seconds_total"

ROUTING_METRICS = (
    MetricSpec(
        "splittime_gateway_affinity_total",
        "counter",
        ("result",),
        "Attempts by [affinity]: hit, capped (who served the beginning had too much to do), none (nobody did)",
    ),
    MetricSpec("splittime_gateway_affinity_blocks", "gauge", (), "Pieces of prompts that affinity remembers"),
    MetricSpec(
        "splittime_gateway_round_trip_seconds", "gauge", ("upstream",), "To the upstream and back, as TCP measured it"
    ),
    MetricSpec(
        "splittime_gateway_expected_wait_seconds",
        "gauge",
        ("upstream",),
        "For a first byte of a request that were sent now, from those that have none yet",
    ),
)
DIFFICULTY_METRICS = (
    MetricSpec(DECIDED, "counter", ("model", "choice"), "Requests for a [[difficulty]] by the choice, small or large"),
    MetricSpec(
        CHECKED,
        "counter",
        ("upstream", "verdict", "why"),
        "Answers of small models by what their first tokens said, and why unsure ones were kept",
    ),
    MetricSpec(HELD, "counter", ("verdict",), "Time for which such answers were held back, from their first piece on"),
    MetricSpec(ANEW, "counter", ("verdict",), "Time of the attempts whose answers were not given, and asked anew"),
)


def routing_series(gateway: "GatewayService") -> dict[str, dict[tuple[str, ...], float]]:
    """Returns the samples of `ROUTING_METRICS` by name and labels; what is not known has none."""
    upstreams, at_ns = gateway.seen_upstreams.items(), time.monotonic_ns()
    trips = {(name,): one.round_trip.ns for name, one in upstreams}
    waits = {(name,): one.waits.wait_ns(at_ns) for name, one in upstreams}
    return {
        "splittime_gateway_affinity_total": {(name,): count for name, count in gateway.affinity.results.items()},
        "splittime_gateway_affinity_blocks": {(): gateway.affinity.num_blocks},
        "splittime_gateway_round_trip_seconds": {key: ns / 1e9 for key, ns in trips.items() if ns is not None},
        "splittime_gateway_expected_wait_seconds": {key: ns / 1e9 for key, ns in waits.items() if ns is not None},
    }


def _distance(upstream: "Upstream", at_ns: int) -> dict[str, Any]:
    """Returns where an upstream is, and how long a request would wait there."""
    return {
        "region": upstream.config.region,
        "round_trip_ns": upstream.round_trip.ns,
        "expected_wait_ns": upstream.waits.wait_ns(at_ns),
    }


def counted(account: ClosedAccount) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yields name, labels and increase of each series that an account adds to."""
    routing = account.routing
    if routing is not None and routing.difficulty is not None:
        yield DECIDED, (routing.model, routing.difficulty.choice), 1
    for attempt in account.attempts:
        found = attempt.first_tokens
        if found is not None:
            yield CHECKED, (attempt.upstream, found.verdict, found.why), 1
            yield HELD, (found.verdict,), found.held_ns / 1e9
            if attempt.error == found.verdict:
                yield ANEW, (found.verdict,), (attempt.end_ns - attempt.begin_ns) / 1e9


def upstream_stats(name: str, upstream: "Upstream", at_ns: int) -> dict[str, Any]:
    """Returns what `/stats` tells of one upstream."""
    breaker = upstream.breaker
    return {
        "name": name,
        "requests": upstream.requests,
        "tokens": upstream.tokens,
        "limit": upstream.limit,
        "is_open": breaker.is_open,
        "is_busy": breaker.is_busy(at_ns),
        "failing": upstream.failing,
        "asked_again_in_s": round(breaker.wait_ns(at_ns) / 1e9, 3),
        **_distance(upstream, at_ns),
    }
