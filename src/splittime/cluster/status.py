"""What is told of a running cluster: `status.json`, written at each look, read by `splittime up --status`."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from splittime.cluster.controller import FleetDecision
from splittime.cluster.observed import ReplicaWatch
from splittime.cluster.state import ClusterState

if TYPE_CHECKING:
    from splittime.cluster.gateways import ManagedGateways
    from splittime.cluster.keeper import Rollout


class FleetEvent(msgspec.Struct, frozen=True):
    """What was done, or decided. what: an action, failed, promoted, rolled_back or refused. words: the last lines of a
    replica that has ended by itself."""

    at_unix_s: float
    what: str
    name: str
    revision: str
    why: str
    words: str = ""


def status_json(
    state: ClusterState,
    watches: Mapping[str, ReplicaWatch],
    gateways: "ManagedGateways",
    rollout: "Rollout",
    decision: FleetDecision,
    events: Sequence[FleetEvent],
    at_s: float,
) -> bytes:
    """Returns the status as JSON. at_s: on the clock of the watches."""
    told = {
        "at_unix_s": round(time.time(), 3),
        "revision": state.revision,
        "trial": state.trial and {"revision": state.trial, **(rollout.stats() or {})},
        "wanted": decision.wanted,
        "needed": decision.needed,
        "gateways": [
            {"url": one.url, "is_alive": one.is_alive, "held_tokens": one.gauges.held_tokens if one.gauges else None}
            for one in gateways.seen
        ],
        "replicas": [_replica(name, state, watches, at_s) for name in state.replicas],
        "events": events,
    }
    return msgspec.json.format(msgspec.json.encode(told))


def _replica(name: str, state: ClusterState, watches: Mapping[str, ReplicaWatch], at_s: float) -> dict[str, Any]:
    one, watch = state.replicas[name], watches.get(name)
    gauges = None if watch is None else watch.gauges
    return {
        "name": name,
        "phase": str(one.phase),
        "revision": one.revision,
        "url": one.url,
        "since_s": round(time.time() - one.since_unix_s, 1),
        "tokens": None if gauges is None else gauges.tokens,
        "capacity_tokens": None if gauges is None else gauges.capacity_tokens,
        "is_lost": watch is not None and watch.is_lost(at_s),
    }
