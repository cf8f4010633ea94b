"""What `/metrics` and `/stats` tell of who was chosen: by affinity, and how far and how busy upstreams are."""

import time
from typing import TYPE_CHECKING, Any

from splittime.ledger.export.metrics import MetricSpec

if TYPE_CHECKING:
    from splittime.gateway.service import GatewayService
    from splittime.gateway.upstreams import Upstream

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


def distance_stats(upstream: "Upstream", at_ns: int) -> dict[str, Any]:
    """Returns where an upstream is, and how long a request would wait there."""
    return {
        "region": upstream.config.region,
        "round_trip_ns": upstream.round_trip.ns,
        "expected_wait_ns": upstream.waits.wait_ns(at_ns),
    }
