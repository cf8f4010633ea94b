"""The controller's process: looks at replicas and gateways, has `controller` decide, and does it; twice a second.

It keeps nothing that cannot be found again: replicas run without it, gateways read their files, and what was decided is
in the state's file. So one that was killed leaves everything running, and the next goes on.

A replica that drains has nothing to do once all gateways have the config without it and it has no request. A gateway
that has another config than its file says is told to read it again.

Another revision of model or settings: tried on one replica first where `[canary]` says so, then for all. The
launch that is in force is the state's `revision`; the controller changes replicas to it one by one.

The comparison of what that one replica answered with what the others did is the gateway's for configs
(`gateway.canary`), with the replica's revision in the place of the config's version: a look at so many
requests of each, then at twice as many, with less of the chance of error each time. There is no comparison with before:
who is routed where is chance, so both arms have the same clients.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from splittime.cluster import observed
from splittime.cluster.config import Cluster, ReplicaLaunch, read_cluster
from splittime.cluster.controller import Fleet, FleetAction, FleetController, FleetDecision, FleetOrder
from splittime.cluster.gateways import ManagedGateways
from splittime.cluster.places import ReplicaPlaces, key_of
from splittime.cluster.replica_process import ReplicaSeen
from splittime.cluster.state import (
    KEPT_EVENTS,
    REREAD,
    STATUS,
    ClusterState,
    ListedReplica,
    ManagedReplica,
    ReplicaPhase,
    StateFile,
    write_whole,
)
from splittime.core.errors import SplittimeError
from splittime.gateway.canary import CanaryDecision
from splittime.gateway.config import CanaryConfig
from splittime.ledger.account import ClosedAccount

if TYPE_CHECKING:
    from splittime.diagnose.comparison import Comparison

import msgspec

from splittime.gateway.canary import CanaryTrial, CompareArms
from splittime.ledger.account_json import account_from_json

log = logging.getLogger("splittime.cluster")

TICK_S = 0.5
NAP_ANSWER_S = 130.0
LAST_LINES, LAST_LETTERS = 3, 500
MAX_PEERS = 8
AWAKE_PHASES = (ReplicaPhase.STARTING, ReplicaPhase.SERVING, ReplicaPhase.WAKING)
PHASES = {
    FleetAction.DRAIN: ReplicaPhase.DRAINING,
    FleetAction.SLEEP: ReplicaPhase.SLEEPING,
    FleetAction.WAKE: ReplicaPhase.WAKING,
}
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
        if canary is not None and observed.names_by(state.replicas, ReplicaPhase.SERVING):
            state.trial = revision
        else:
            state.revision = revision

    async def advance(
        self, session: aiohttp.ClientSession, gateways: ManagedGateways, events: deque[observed.FleetEvent]
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

    def _await_replica(self, now_s: float, events: deque[observed.FleetEvent]) -> None:
        """The comparison begins when the replica on trial serves; one that never does is an answer too."""
        state = self._state
        serving = (state.replicas[name] for name in observed.names_by(state.replicas, ReplicaPhase.SERVING))
        if state.trial is not None and any(one.revision == state.trial for one in serving):
            canary = self._canary or CanaryConfig()
            self.trial = RevisionTrial(canary, state.revision, state.trial, now_s, compare_revisions)
        elif now_s - self._begun_s > self._start_s:
            self._end(CanaryDecision(False, f"its replica did not serve within {self._start_s:g} s"), events)

    def _end(self, decision: CanaryDecision, events: deque[observed.FleetEvent]) -> None:
        state, what = self._state, "promoted" if decision.promotes else "rolled_back"
        events.append(observed.FleetEvent(round(time.time(), 3), what, "", str(state.trial), decision.why))
        state.revision = state.trial if decision.promotes and state.trial else state.revision
        state.trial = self.trial = None

    def stats(self) -> dict[str, Any] | None:
        return None if self.trial is None else {"revision": self.trial.new, **self.trial.stats()}


def compare_revisions(
    control: Sequence[ClosedAccount], tried: Sequence[ClosedAccount], margin: float, confidence: float
) -> "Comparison":
    """Returns `bench compare`'s verdict on the accounts of both revisions."""
    from splittime.diagnose.compare import compare_accounts  # scipy: a second

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
            found = {revisions.get(attempt.upstream) for attempt in account.attempts}
            revision = found.pop() if len(found) == 1 else None  # several were tried, or none that is known
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


class FleetKeeper:
    """`run` goes on until `end` is called; then it ends all replicas. path: of the cluster's config."""

    def __init__(self, path: Path, cluster: Cluster, places: ReplicaPlaces) -> None:
        self._path, self._cluster, self._places = path, cluster, places
        self._file = StateFile(cluster.folder)
        self.state = self._file.read() or ClusterState.begun(cluster)
        self._controller = self._controlled(cluster)
        self._gateways = ManagedGateways(cluster)
        self._rollout = Rollout(self.state, cluster.config.canary, cluster.config.replica.start_s)
        self._watches: dict[str, observed.ReplicaWatch] = {}
        self._naps: dict[str, asyncio.Task[Any]] = {}
        self._events: deque[observed.FleetEvent] = deque(maxlen=KEPT_EVENTS)
        self._ended = asyncio.Event()

    def end(self) -> None:
        self._ended.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        async with aiohttp.ClientSession(trust_env=False, cookie_jar=aiohttp.DummyCookieJar()) as session:
            while not self._ended.is_set():
                begin_s = time.monotonic()
                await self._tick(session)
                left_s = max(0.01, TICK_S - (time.monotonic() - begin_s))
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._ended.wait()
            for nap in self._naps.values():
                nap.cancel()
        await loop.run_in_executor(None, self._places.close)

    async def _tick(self, session: aiohttp.ClientSession) -> None:
        wish = self._cluster.folder / REREAD
        if wish.exists():
            wish.unlink()
            await self._read_again()
        placed, at_s = await self._in_thread(self._places.look), time.monotonic()
        # who was started by one who was killed before it wrote that down, or was to end then
        for name in set(placed) - set(self.state.replicas):
            self._places.end(name)
        await self._note(session, placed, at_s)
        await self._gateways.look(session)
        await self._rollout.advance(session, self._gateways, self._events)
        decision = self._controller.decide(time.monotonic_ns(), self._fleet(at_s))
        for order in decision.orders:
            await self._try(order)
        self._nap_where_due(session)
        self.state.forget_launches()
        self._file.write(self.state)
        await self._in_thread(partial(self._gateways.lead, self._listed(), self.state.launches[self.state.revision]))
        self._tell(decision)

    async def _in_thread(self, work: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, work)

    def _controlled(self, cluster: Cluster) -> FleetController:
        num_before = sum(one.phase in AWAKE_PHASES for one in self.state.replicas.values())
        return FleetController(cluster.config.scale, num_before)

    # ---- what is seen

    async def _note(self, session: aiohttp.ClientSession, placed: Mapping[str, ReplicaSeen], at_s: float) -> None:
        names = list(self.state.replicas)
        gauges = await asyncio.gather(*(self._gauges(session, name, placed.get(name)) for name in names))
        start_s = self._cluster.config.replica.start_s
        for name, told in zip(names, gauges, strict=True):
            if name not in self._watches:
                self._watches[name] = observed.ReplicaWatch(self.state.replicas[name], start_s, at_s)
            self._watches[name].note(placed.get(name), told, at_s)

    async def _gauges(
        self, session: aiohttp.ClientSession, name: str, seen: ReplicaSeen | None
    ) -> observed.ReplicaGauges | None:
        if seen is None or seen.url is None:
            return None
        launch = self.state.launches[self.state.replicas[name].revision]
        return await observed.replica_gauges(session, seen.url, launch, key_of(launch))

    def _fleet(self, at_s: float) -> Fleet:
        seen = tuple(
            watch.as_fleet(name, at_s, is_listed=not self._gateways.have_taken) for name, watch in self._watches.items()
        )
        return Fleet(self.state.revision, seen, self._gateways.held_tokens, self.state.trial)

    # ---- what is done

    async def _try(self, order: FleetOrder) -> None:
        """Do it; one that fails is told, and the others are done. What was started and is not there is lost."""
        try:
            await self._do(order)
        except Exception as error:  # of this system, or of Ray
            log.exception("%s %s failed", order.action, order.name)
            self._note_event("failed", order.name, order.revision, f"{order.action}: {error}")

    async def _do(self, order: FleetOrder) -> None:
        name, state, words = order.name, self.state, ""
        if order.action in (FleetAction.START, FleetAction.WARM):
            name = await self._start(order)
        elif order.action is FleetAction.STOP:
            lines = [line for line in self._watches.pop(name).words.splitlines() if line.strip()]
            words = "\n".join(lines[-LAST_LINES:])[-LAST_LETTERS:]
            del state.replicas[name]
            self._places.end(name)
        elif order.action is FleetAction.ADMIT:
            was_warming = state.replicas[name].phase is ReplicaPhase.WARMING
            observed.enter(state.replicas[name], ReplicaPhase.STARTING if was_warming else ReplicaPhase.SERVING)
        else:
            observed.enter(state.replicas[name], PHASES[order.action])
        self._note_event(str(order.action), name, order.revision, order.why, words)
        log.info("%s %s (%s): %s", order.action, name, order.revision, f"{order.why} {words}".strip())

    def _note_event(self, what: str, name: str, revision: str, why: str, words: str = "") -> None:
        self._events.append(observed.FleetEvent(round(time.time(), 3), what, name, revision, why, words))

    async def _start(self, order: FleetOrder) -> str:
        """Write it down first: one that was started and not written down is ended."""
        state = self.state
        state.num_started += 1
        name = f"r{state.num_started}"
        phase = ReplicaPhase.STARTING if order.action is FleetAction.START else ReplicaPhase.WARMING
        state.replicas[name] = ManagedReplica(order.revision, phase, time.time())
        self._file.write(state)
        launch = state.launches[order.revision]
        peers = self._peers if launch.replica.shares_blocks else ()
        await self._in_thread(partial(self._places.start, name, launch, peers, in_background=not order.is_urgent))
        return name

    @property
    def _peers(self) -> list[str]:
        """Returns the addresses of some that serve, those that began latest."""
        serving = [self.state.replicas[name] for name in observed.names_by(self.state.replicas, ReplicaPhase.SERVING)]
        return [one.url for one in serving if one.url is not None][-MAX_PEERS:]

    def _nap_where_due(self, session: aiohttp.ClientSession) -> None:
        self._naps = {name: task for name, task in self._naps.items() if not task.done()}
        for name, watch in self._watches.items():
            nap, url = watch.nap, self.state.replicas[name].url
            if nap is None or url is None or name in self._naps:
                continue
            launch = self.state.launches[self.state.replicas[name].revision]
            query = f"?level={launch.replica.sleep_level}" if nap.path == "/sleep" else ""
            asking = observed.ask(session, "POST", url + nap.path + query, key_of(launch), NAP_ANSWER_S)
            self._naps[name] = asyncio.get_running_loop().create_task(asking)

    def _listed(self) -> list[ListedReplica]:
        """Returns the replicas that gateways may ask. Streams go on at another only where all have one revision."""
        state, listed = self.state, []
        serving = observed.names_by(state.replicas, ReplicaPhase.SERVING)
        for name in serving:
            one = state.replicas[name]
            if one.url is not None:
                listed.append(ListedReplica(name, one.url, state.launches[one.revision], one.revision == self._resumed))
        return listed

    @property
    def _resumed(self) -> str:
        """The revision whose streams go on at another replica: the old one, until none is left of it."""
        serving = {one.revision for one in self.state.replicas.values() if one.phase is ReplicaPhase.SERVING}
        return next((name for name in self.state.launches if name in serving), self.state.revision)

    # ---- another config

    async def _read_again(self) -> None:
        try:
            cluster = await self._in_thread(partial(read_cluster, self._path))
            key_of(cluster.launch)
            await self._in_thread(partial(self._gateways.change, cluster))
        except SplittimeError as error:
            self._note_event("refused", "", "", error.info.message)
            log.warning("the config is refused, and the one before stays: %s", error.info.message)
            return
        if cluster.config.scale != self._cluster.config.scale:
            self._controller = self._controlled(cluster)
        self._cluster, self.state.config = cluster, cluster.config
        self._rollout.begin(cluster.launch, cluster.config.canary)

    def _tell(self, decision: FleetDecision) -> None:
        told = status_json(
            self.state, self._watches, self._gateways, self._rollout, decision, list(self._events), time.monotonic()
        )
        write_whole(self._cluster.folder / STATUS, told)


def status_json(
    state: ClusterState,
    watches: Mapping[str, observed.ReplicaWatch],
    gateways: ManagedGateways,
    rollout: Rollout,
    decision: FleetDecision,
    events: Sequence[observed.FleetEvent],
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


def _replica(
    name: str, state: ClusterState, watches: Mapping[str, observed.ReplicaWatch], at_s: float
) -> dict[str, Any]:
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
