"""From what replicas' processes and gauges say to what the controller is told of them."""

import time
from collections.abc import Mapping
from typing import NamedTuple

from splittime.cluster.controller import FleetReplica, FleetState
from splittime.cluster.gateway_files import LOST_S
from splittime.cluster.gauges import ReplicaGauges
from splittime.cluster.replica_process import ReplicaSeen
from splittime.cluster.state import ManagedReplica, ReplicaPhase

NAP_S = 120.0  # to fall asleep
COMING = (ReplicaPhase.STARTING, ReplicaPhase.WARMING, ReplicaPhase.WAKING)
FLEET_STATES = {
    ReplicaPhase.STARTING: FleetState.STARTING,
    ReplicaPhase.WAKING: FleetState.STARTING,
    ReplicaPhase.WARMING: FleetState.WARMING,
    ReplicaPhase.SERVING: FleetState.READY,
    ReplicaPhase.DRAINING: FleetState.DRAINING,
    ReplicaPhase.SLEEPING: FleetState.ASLEEP,
}


class Nap(NamedTuple):
    """What a replica is to be asked so that it is as its phase says."""

    path: str


SLEEP, WAKE = Nap("/sleep"), Nap("/wake")


class ReplicaWatch:
    """One replica, watched: `note` takes what is seen of it. gauges: the latest that it told. words: its last ones."""

    def __init__(self, replica: ManagedReplica, start_s: float, at_s: float) -> None:
        self._replica, self._start_s, self._heard_s = replica, start_s, at_s
        self.gauges: ReplicaGauges | None = None
        self._is_gone, self.words = False, ""

    def note(self, seen: ReplicaSeen | None, gauges: ReplicaGauges | None, at_s: float) -> None:
        """seen: None for a process that nobody knows. at_s: on a clock that only goes forward."""
        self._is_gone, self.words = seen is None or not seen.is_alive, "" if seen is None else seen.words
        replica = self._replica
        replica.url = replica.url if seen is None else seen.url
        if gauges is not None or replica.url is None:
            self._heard_s = at_s
        self.gauges = gauges or self.gauges
        if gauges is not None:
            self._advance(gauges)

    def _advance(self, gauges: ReplicaGauges) -> None:
        """What it was to become, it is; and one that serves no more, by its own word, is to become that again."""
        phase = self._replica.phase
        if phase in (ReplicaPhase.STARTING, ReplicaPhase.WAKING) and gauges.is_awake and gauges.is_ready:
            enter(self._replica, ReplicaPhase.SERVING)
        elif phase is ReplicaPhase.SERVING and not (gauges.is_awake and gauges.is_ready):
            enter(self._replica, ReplicaPhase.STARTING if gauges.is_awake else ReplicaPhase.WAKING)
        elif phase is ReplicaPhase.WARMING:
            enter(self._replica, ReplicaPhase.SLEEPING)

    @property
    def nap(self) -> Nap | None:
        """Returns what it is to be asked now, if it is not asked already."""
        if self.gauges is None:
            return None
        if self._replica.phase is ReplicaPhase.SLEEPING and self.gauges.is_awake and self.lasted_s <= NAP_S:
            return SLEEP
        return WAKE if self._replica.phase is ReplicaPhase.WAKING and not self.gauges.is_awake else None

    @property
    def lasted_s(self) -> float:
        return time.time() - self._replica.since_unix_s

    def is_lost(self, at_s: float) -> bool:
        phase = self._replica.phase
        is_slow = phase in COMING and self.lasted_s > self._start_s
        return self._is_gone or is_slow or at_s - self._heard_s > LOST_S

    def as_fleet(self, name: str, at_s: float, is_listed: bool) -> FleetReplica:
        """is_listed: a gateway may still send requests to it, though it drains."""
        replica = self._replica
        state = FleetState.LOST if self.is_lost(at_s) else FLEET_STATES[replica.phase]
        tokens, capacity = (self.gauges.tokens, self.gauges.capacity_tokens) if self.gauges else (0, 0)
        if state is FleetState.DRAINING and is_listed:
            tokens = max(1, tokens)
        return FleetReplica(name, state, replica.revision, tokens, capacity)


def enter(replica: ManagedReplica, phase: ReplicaPhase) -> None:
    replica.phase, replica.since_unix_s = phase, time.time()


def names_by(replicas: Mapping[str, ManagedReplica], phase: ReplicaPhase) -> list[str]:
    return [name for name, one in replicas.items() if one.phase is phase]
