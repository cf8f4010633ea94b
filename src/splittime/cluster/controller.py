"""What is done about replicas, from what is seen of them: no I/O, and time is an argument.

    controller = FleetController(ScaleSettings(max_replicas=8))
    decision = controller.decide(now_ns, Fleet(revision="r1", replicas=(...), held_tokens=0))

`config.ReplicaCount` says how many should serve. Whoever decides again with what became of the actions gets there:

- too few: a replica that drains is taken back, one that sleeps is woken, another is started, in this order;
- too many: one that still starts is stopped, or the one that has least to do is drained; when it has nothing left, it
  falls asleep where the warm pool lacks one, and else is stopped. At most a tenth of them at once, and one such step in
  `down_delay_s / 10`;
- lost: it is stopped for good, and counts no more, so another takes its place. Where starting fails again and again,
  each attempt waits twice as long, a minute at the most;
- of another revision (model or settings): `surge` of the new one are started, and for each that is ready an old one is
  drained, so that as many are ready as the load needs all the while;
- on trial: one replica of the revision that is tried, beside the others, until whoever compares them has decided.

No replica is stopped that has something to do, unless it is lost or has drained for `drain_s`. All replicas together
are at most `max_replicas + surge`.
"""

from collections.abc import Collection, Iterable
from enum import StrEnum
from typing import NamedTuple

import msgspec

from splittime.cluster.config import ReplicaCount, ScaleLoad, ScaleSettings

SETTLE_S = 1.0  # from the order to drain until "nothing to do" is believed: gateways must have heard of it
MAX_START_PAUSE_S = 60.0
DOWN_SHARE, DOWN_STEPS = 0.1, 10


class FleetState(StrEnum):
    """What a replica is. STARTING, or being woken: it will serve; WARMING: it starts, and falls asleep when it is
    ready. DRAINING: it is given nothing new. LOST: it has ended, or answers no more."""

    STARTING = "starting"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    ASLEEP = "asleep"
    LOST = "lost"


class FleetReplica(msgspec.Struct, frozen=True):
    """One replica as it is seen. tokens: that run and wait there. capacity_tokens: that it has room for."""

    name: str
    state: FleetState
    revision: str
    tokens: int = 0
    capacity_tokens: int = 0


class Fleet(msgspec.Struct, frozen=True):
    """All replicas as they are seen. revision: that all should have. trial: that one should have, to be compared.
    held_tokens: of requests that wait in gateways for a place."""

    revision: str
    replicas: tuple[FleetReplica, ...] = ()
    held_tokens: int = 0
    trial: str | None = None


class FleetAction(StrEnum):
    """What can be done. WARM: start one that falls asleep. ADMIT: let one that drains or warms serve after all."""

    START = "start"
    WARM = "warm"
    WAKE = "wake"
    ADMIT = "admit"
    DRAIN = "drain"
    SLEEP = "sleep"
    STOP = "stop"


class FleetOrder(NamedTuple):
    """name: of the replica, "" for one that is started. why: for whoever reads the log. is_urgent: others do not
    suffice until it is done; else it may be started in the background."""

    action: FleetAction
    name: str
    revision: str
    why: str
    is_urgent: bool = False


class FleetDecision(NamedTuple):
    """wanted: how many should serve. needed: for the load of this moment alone."""

    orders: list[FleetOrder]
    wanted: int
    needed: int


class FleetController:
    """The controller remembers what was needed of late, since when replicas drain, and which starts have failed.
    num_before: replicas that serve or will, by one before it."""

    def __init__(self, settings: ScaleSettings, num_before: int = 0) -> None:
        self.settings = settings
        self._count = ReplicaCount(settings, num_before)
        self._capacity = 0.0
        self._draining_since: dict[str, int] = {}
        self._has_served: set[str] = set()
        self._lost: set[str] = set()
        self._starts: dict[str, StartPauses] = {}  # by revision
        self._down_ns: int | None = None

    def decide(self, at_ns: int, fleet: Fleet) -> FleetDecision:
        """Returns what is to be done now. Call it about once a second, and do all of it before the next call."""
        self._remember(at_ns, fleet)
        main = [one for one in fleet.replicas if one.revision != fleet.trial]
        groups = _Groups.of(main, fleet.revision)
        busy = sum(one.tokens for one in fleet.replicas if one.state is not FleetState.LOST) + fleet.held_tokens
        wanted = self._count.noted(at_ns, ScaleLoad(busy, self._capacity), len(groups.awake))
        room = self._room(fleet.replicas)
        orders = [*_stop_lost(fleet.replicas), *self._tried(at_ns, fleet, room)]
        room -= sum(order.action is FleetAction.START for order in orders)
        orders += self._sized(at_ns, fleet, groups, wanted, room)
        orders += self._ended(at_ns, fleet, groups, wanted, {order.name for order in orders})
        return FleetDecision(orders, wanted, self._count.needed)

    # ---- what is remembered

    def _remember(self, at_ns: int, fleet: Fleet) -> None:
        """Note who drains since when, who serves for the first time, and who was lost before it ever did."""
        by_state: dict[FleetState, list[FleetReplica]] = {state: [] for state in FleetState}
        for one in fleet.replicas:
            by_state[one.state].append(one)
        draining, ready, lost = (by_state[state] for state in (FleetState.DRAINING, FleetState.READY, FleetState.LOST))
        self._draining_since = {one.name: self._draining_since.get(one.name, at_ns) for one in draining}
        self._note_starts(at_ns, fleet, ready, lost)
        self._lost = {one.name for one in lost}
        self._has_served = (self._has_served | {one.name for one in ready}) & {one.name for one in fleet.replicas}
        capacity = sum(one.capacity_tokens for one in ready) / max(1, len(ready))
        self._capacity = capacity or self._capacity

    def _note_starts(self, at_ns: int, fleet: Fleet, ready: list[FleetReplica], lost: list[FleetReplica]) -> None:
        known = self._lost | self._has_served
        succeeded = {one.revision for one in ready if one.name not in known}
        failed = {one.revision for one in lost if one.name not in known}
        revisions = {fleet.revision, fleet.trial or fleet.revision}
        self._starts = {name: self._starts.get(name) or StartPauses() for name in revisions}
        for name, starts in self._starts.items():
            starts.note(at_ns, failed=name in failed, succeeded=name in succeeded)

    def _room(self, replicas: Iterable[FleetReplica]) -> int:
        """Returns how many more there may be."""
        living = sum(one.state is not FleetState.LOST for one in replicas)
        return self.settings.max_replicas + self.settings.surge - living

    # ---- ends

    def _ended(
        self, at_ns: int, fleet: Fleet, groups: "_Groups", wanted: int, ordered: Collection[str]
    ) -> list[FleetOrder]:
        """Returns what is done with replicas that have drained, and with sleeping ones that nobody needs."""
        places = self._num_warm(wanted) - len(groups.asleep)
        orders = []
        for one in fleet.replicas:
            if one.state is not FleetState.DRAINING or one.name in ordered or not self._has_drained(at_ns, one):
                continue
            keeps = one.revision == fleet.revision and places > 0 and one.tokens == 0
            places -= keeps
            action = FleetAction.SLEEP if keeps else FleetAction.STOP
            orders.append(FleetOrder(action, one.name, one.revision, "drained" if not one.tokens else "drained long"))
        able = [one for one in groups.asleep if one.name not in ordered]
        surplus = able[max(0, len(able) + min(0, places)) :]
        unneeded = [(one, "enough sleep") for one in surplus] + [(one, "its revision") for one in groups.asleep_old]
        return orders + [FleetOrder(FleetAction.STOP, one.name, one.revision, why) for one, why in unneeded]

    def _has_drained(self, at_ns: int, one: FleetReplica) -> bool:
        lasted_s = (at_ns - self._draining_since[one.name]) / 1e9
        return lasted_s >= (self.settings.drain_s if one.tokens else SETTLE_S)

    def _num_warm(self, wanted: int) -> int:
        """Returns how many should sleep: as many as might be woken, at the most."""
        return min(self.settings.warm_pool, self.settings.max_replicas - wanted)

    # ---- a trial

    def _tried(self, at_ns: int, fleet: Fleet, room: int) -> list[FleetOrder]:
        """Returns the order for the replica of the revision on trial, if there is none yet."""
        living = any(one.revision == fleet.trial and one.state is not FleetState.LOST for one in fleet.replicas)
        if fleet.trial is None or living or room <= 0 or not self._starts[fleet.trial].may(at_ns):
            return []
        return [FleetOrder(FleetAction.START, "", fleet.trial, "on trial")]

    # ---- how many

    def _sized(self, at_ns: int, fleet: Fleet, groups: "_Groups", wanted: int, room: int) -> list[FleetOrder]:
        missing = wanted - len(groups.awake)
        if missing > 0:
            return self._more(at_ns, fleet, groups, missing, room)
        if groups.old:
            return self._rolled(at_ns, fleet, groups, wanted, room)
        if missing < 0:
            return self._fewer(at_ns, groups, wanted)
        lacks = self._num_warm(wanted) - len(groups.asleep) - len(groups.draining)
        return self._started(at_ns, fleet.revision, min(lacks, room), "for the warm pool", FleetAction.WARM)

    def _more(self, at_ns: int, fleet: Fleet, groups: "_Groups", missing: int, room: int) -> list[FleetOrder]:
        why = f"{missing} too few"
        able = [*groups.draining, *groups.asleep][:missing]  # those that sleep before those that warm
        actions = (FleetAction.WAKE if one.state is FleetState.ASLEEP else FleetAction.ADMIT for one in able)
        orders = [FleetOrder(action, one.name, one.revision, why) for action, one in zip(actions, able, strict=True)]
        number = min(missing - len(orders), room)
        return orders + self._started(at_ns, fleet.revision, number, why, is_urgent=True)

    def _started(
        self,
        at_ns: int,
        revision: str,
        number: int,
        why: str,
        action: FleetAction = FleetAction.START,
        *,
        is_urgent: bool = False,
    ) -> list[FleetOrder]:
        if number <= 0 or not self._starts[revision].may(at_ns):
            return []
        return [FleetOrder(action, "", revision, why, is_urgent)] * number

    def _rolled(self, at_ns: int, fleet: Fleet, groups: "_Groups", wanted: int, room: int) -> list[FleetOrder]:
        """Returns the next step of a change of revision: old ones go as new ones come."""
        may_start = self._starts[fleet.revision].may(at_ns)
        starting = [one for one in groups.old if one.state is FleetState.STARTING and may_start]
        spare = max(0, groups.num_ready - wanted)
        going = starting + [one for one in groups.old if one.state is FleetState.READY][:spare]
        staying = len(groups.awake) - len(going)
        number = wanted + min(self.settings.surge, len(groups.old) - len(going)) - staying
        number, is_urgent = min(number, room + len(starting)), groups.num_ready < wanted
        started = self._started(at_ns, fleet.revision, number, "of the new revision", is_urgent=is_urgent)
        return _let_go(going, "of another revision") + started

    def _fewer(self, at_ns: int, groups: "_Groups", wanted: int) -> list[FleetOrder]:
        """Let go of who has not begun first, then of who has least to do. To none at all, all go at once."""
        pause_ns = self.settings.down_delay_s * 1e9 / DOWN_STEPS
        if wanted and self._down_ns is not None and at_ns - self._down_ns < pause_ns:
            return []
        self._down_ns = at_ns
        surplus = len(groups.awake) - wanted
        number = min(surplus, max(1, int(len(groups.awake) * DOWN_SHARE))) if wanted else surplus
        ordered = sorted(groups.awake, key=lambda one: (one.state is FleetState.READY, one.tokens))
        return _let_go(ordered[:number], f"{surplus} too many")


class StartPauses:
    """When starting is tried again after replicas were lost that had never been ready."""

    def __init__(self) -> None:
        self._failures, self._failed_ns = 0, 0

    def note(self, at_ns: int, *, failed: bool, succeeded: bool) -> None:
        """Starts have failed or succeeded; those that fail at once are one failure."""
        if succeeded:
            self._failures = 0
        elif failed:
            self._failures, self._failed_ns = self._failures + 1, at_ns

    def may(self, at_ns: int) -> bool:
        pause_s = min(MAX_START_PAUSE_S, 2.0 ** min(self._failures, 10)) if self._failures else 0.0
        return at_ns - self._failed_ns >= pause_s * 1e9


class _Groups(NamedTuple):
    """Replicas by what can be done with them; those on trial are in none. awake: that serve, or will. old: of these,
    the ones of another revision. draining: of the right one. asleep: of it too; those that will sleep come last."""

    awake: list[FleetReplica]
    old: list[FleetReplica]
    draining: list[FleetReplica]
    asleep: list[FleetReplica]
    asleep_old: list[FleetReplica]

    @classmethod
    def of(cls, replicas: Iterable[FleetReplica], revision: str) -> "_Groups":
        groups = cls([], [], [], [], [])
        for one in replicas:
            is_right = one.revision == revision
            if one.state in (FleetState.STARTING, FleetState.READY):
                groups.awake.append(one)
                groups.old.append(one) if not is_right else None
            elif one.state in (FleetState.ASLEEP, FleetState.WARMING):
                (groups.asleep if is_right else groups.asleep_old).append(one)
            elif one.state is FleetState.DRAINING and is_right:
                groups.draining.append(one)
        groups.asleep.sort(key=lambda one: one.state is FleetState.WARMING)
        return groups

    @property
    def num_ready(self) -> int:
        return sum(one.state is FleetState.READY for one in self.awake)


def _let_go(replicas: Iterable[FleetReplica], why: str) -> list[FleetOrder]:
    """Returns the orders that drain who serves, and stop who has not begun."""
    orders = []
    for one in replicas:
        action = FleetAction.DRAIN if one.state is FleetState.READY else FleetAction.STOP
        orders.append(FleetOrder(action, one.name, one.revision, why))
    return orders


def _stop_lost(replicas: Iterable[FleetReplica]) -> list[FleetOrder]:
    lost = (one for one in replicas if one.state is FleetState.LOST)
    return [FleetOrder(FleetAction.STOP, one.name, one.revision, "lost") for one in lost]
