"""Another revision of model or settings: tried on one replica first where `[canary]` says so, then for all.

The launch that is in force is the state's `revision`; the controller changes replicas to it one by one.

Whether another revision is as good as the one that serves: what its one replica answered, beside the others.

The comparison is the gateway's for configs (`gateway.versions.canary`), with the replica's revision in the place of
the config's version: a look at so many requests of each, then at twice as many, with less of the chance of error each
time. There is no comparison with before: who is routed where is chance, so both arms have the same clients.
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
from splittime.gateway.config import CanaryConfig
from splittime.gateway.versions.canary import CanaryDecision
from splittime.ledger.account import ClosedAccount

if TYPE_CHECKING:
    from splittime.diagnose.comparison import Comparison
from collections.abc import Iterable, Mapping

import msgspec

from splittime.gateway.versions.canary import CanaryTrial, CompareArms
from splittime.ledger.account_json import account_from_json

PERIOD_S = 1.0
MAX_KNOWN = 20_000  # ids of requests that were counted


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


class RevisionTrial:
    """old, new: revisions. began_s: on a clock that only goes forward."""

    def __init__(self, config: CanaryConfig, old: str, new: str, began_s: float, compare: CompareArms) -> None:
        self.old, self.new = old, new
        self._until_s = began_s + config.max_s
        self._trial = CanaryTrial(config, frozenset(), (), (old, new), compare)
        self._known: dict[str, None] = {}

    def note(self, answer: Mapping[str, Any] | None, revisions: Mapping[str, str]) -> None:
        """Take in what a gateway answers of its latest requests. revisions: by the name of the replica."""
        for told in (answer or {}).get("accounts", ()):
            if told["request_id"] in self._known:
                continue
            account = account_from_json(told)
            revision = _revision(account, revisions)
            if revision is not None:
                self._known[account.request_id] = None
                self._trial.note(msgspec.structs.replace(account, config_version=revision))
        self._forget()

    def look(self, now_s: float) -> CanaryDecision:
        """Returns what is decided; takes a while, and may be called on any thread."""
        if self._trial.is_due:
            decision = self._trial.look()()
            self._trial.last_look = decision.why
            if decision.promotes is not None:
                return decision
        if now_s >= self._until_s:
            return CanaryDecision(False, f"not decided in time. {self._trial.last_look}")
        return CanaryDecision(None, self._trial.last_look)

    def stats(self) -> dict[str, Any]:
        told = self._trial.stats()
        return {name: told[name] for name in ("requests", "requests_of_others", "next_look_at", "last_look")}

    def _forget(self) -> None:
        for request_id in list(self._known)[: max(0, len(self._known) - MAX_KNOWN)]:
            del self._known[request_id]


def _revision(account: ClosedAccount, revisions: Mapping[str, str]) -> str | None:
    """Returns the revision that answered; None where several were tried, or none that is known."""
    found = set(_found(account, revisions))
    return found.pop() if len(found) == 1 else None


def _found(account: ClosedAccount, revisions: Mapping[str, str]) -> Iterable[str | None]:
    return (revisions.get(attempt.upstream) for attempt in account.attempts)
