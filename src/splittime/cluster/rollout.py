"""Another revision of model or settings: tried on one replica first where `[canary]` says so, then for all.

The launch that is in force is the state's `revision`; the controller changes replicas to it one by one.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import aiohttp

from splittime.cluster.config import ReplicaLaunch
from splittime.cluster.gateways import ManagedGateways
from splittime.cluster.observed import names_by
from splittime.cluster.state import ClusterState, ReplicaPhase
from splittime.cluster.status import FleetEvent
from splittime.cluster.trial import RevisionTrial
from splittime.gateway.config import CanaryConfig
from splittime.gateway.versions.canary import CanaryDecision
from splittime.ledger.account import ClosedAccount

if TYPE_CHECKING:
    from splittime.diagnose.comparison import Comparison

PERIOD_S = 1.0


class Rollout:
    """`begin` with a launch; `advance` again and again. start_s: for the replica on trial to serve. trial: the
    comparison that runs, once it does."""

    def __init__(self, state: ClusterState, canary: CanaryConfig | None, start_s: float) -> None:
        self._state, self._canary, self._start_s = state, canary, start_s
        self.trial: RevisionTrial | None = None
        self._looked_s, self._begun_s = 0.0, time.monotonic()

    def begin(self, launch: ReplicaLaunch, canary: CanaryConfig | None) -> None:
        """Have all replicas be of this launch; one first, if there is a canary and others to compare it with."""
        state, revision = self._state, launch.revision
        self._canary, self.trial, state.trial = canary, None, None
        self._begun_s, self._start_s = time.monotonic(), launch.replica.start_s
        if revision == state.revision:
            return
        state.launches[revision] = launch
        if canary is not None and names_by(state.replicas, ReplicaPhase.SERVING):
            state.trial = revision
        else:
            state.revision = revision

    async def advance(
        self, session: aiohttp.ClientSession, gateways: ManagedGateways, events: deque[FleetEvent]
    ) -> None:
        """Go on with the trial, if there is one; what it comes to is in the events."""
        state, now_s = self._state, time.monotonic()
        if state.trial is None or now_s - self._looked_s < PERIOD_S:
            return
        self._looked_s = now_s
        if self.trial is None:
            self._await_replica(now_s, events)
            return
        revisions = {name: one.revision for name, one in state.replicas.items()}
        for answer in await gateways.accounts(session):
            self.trial.note(answer, revisions)
        decision = await asyncio.get_running_loop().run_in_executor(None, self.trial.look, now_s)
        if decision.promotes is not None:
            self._end(decision, events)

    def _await_replica(self, now_s: float, events: deque[FleetEvent]) -> None:
        """The comparison begins when the replica on trial serves; one that never does is an answer too."""
        state = self._state
        serving = (state.replicas[name] for name in names_by(state.replicas, ReplicaPhase.SERVING))
        if state.trial is not None and any(one.revision == state.trial for one in serving):
            canary = self._canary or CanaryConfig()
            self.trial = RevisionTrial(canary, state.revision, state.trial, now_s, compare_revisions)
        elif now_s - self._begun_s > self._start_s:
            self._end(CanaryDecision(False, f"its replica did not serve within {self._start_s:g} s"), events)

    def _end(self, decision: CanaryDecision, events: deque[FleetEvent]) -> None:
        state, what = self._state, "promoted" if decision.promotes else "rolled_back"
        events.append(FleetEvent(round(time.time(), 3), what, "", str(state.trial), decision.why))
        state.revision = state.trial if decision.promotes and state.trial else state.revision
        state.trial = self.trial = None

    def stats(self) -> dict[str, Any] | None:
        return None if self.trial is None else {"revision": self.trial.new, **self.trial.stats()}


def compare_revisions(
    control: Sequence[ClosedAccount], tried: Sequence[ClosedAccount], margin: float, confidence: float
) -> "Comparison":
    """Returns `bench compare`'s verdict on the accounts of both revisions."""
    from splittime.diagnose.compare_accounts import compare_accounts  # scipy: a second

    return compare_accounts(control, tried, margin, confidence)
