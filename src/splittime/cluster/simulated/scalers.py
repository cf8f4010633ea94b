"""Who decides how many servers a simulated region has: the controller of `splittime up`, or who is compared with it."""

from collections import deque
from math import ceil
from typing import Protocol

import msgspec

from splittime.cluster.controller import Fleet, FleetAction, FleetController, FleetOrder, FleetReplica, FleetState
from splittime.cluster.scaling import ScaleSettings
from splittime.cluster.simulated.servers import REVISION
from splittime.cluster.simulated.settings import Scaling

POLL_S, WINDOW_S = 15.0, 300.0
WAITING_EACH = 5
MOST_TIMES, MOST_MORE = 2, 4


class FleetScaler(Protocol):
    """Says what is to be done about a region's servers. num_waiting: requests that wait at servers."""

    def orders(self, at_ns: int, fleet: Fleet, num_waiting: int) -> list[FleetOrder]: ...


class TokenScaler:
    """The controller itself."""

    def __init__(self, settings: ScaleSettings) -> None:
        self._controller = FleetController(settings)

    def orders(self, at_ns: int, fleet: Fleet, num_waiting: int) -> list[FleetOrder]:
        return self._controller.decide(at_ns, fleet).orders


class WaitingScaler:
    """Autoscaling on waiting alone, as KEDA and the autoscaler of Kubernetes do it with a server's gauge of waiting
    requests: asked each `POLL_S`, one replica for each `WAITING_EACH` that wait, at most twice as many or `MOST_MORE`
    more at once, and never fewer than were wanted in the last `WINDOW_S`. A server that keeps up has nobody waiting."""

    def __init__(self, settings: ScaleSettings) -> None:
        self._settings = settings
        self._asked_ns: int | None = None
        self._wanted: deque[tuple[int, int]] = deque()  # when, how many

    def orders(self, at_ns: int, fleet: Fleet, num_waiting: int) -> list[FleetOrder]:
        orders = [_order(FleetAction.STOP, one) for one in fleet.replicas if _is_over(one)]
        if self._asked_ns is not None and at_ns - self._asked_ns < POLL_S * 1e9:
            return orders
        self._asked_ns = at_ns
        awake = [one for one in fleet.replicas if one.state in (FleetState.STARTING, FleetState.READY)]
        wanted = self._number(at_ns, num_waiting, len(awake))
        orders += [FleetOrder(FleetAction.START, "", REVISION, "waiting")] * (wanted - len(awake))
        surplus = sorted(awake, key=lambda one: (one.state is FleetState.READY, one.tokens))[
            : max(0, -wanted + len(awake))
        ]
        return orders + [_order(_letting_go(one), one) for one in surplus]

    def _number(self, at_ns: int, num_waiting: int, num_awake: int) -> int:
        settings = self._settings
        asked = min(settings.max_replicas, max(1, settings.min_replicas, ceil(num_waiting / WAITING_EACH)))
        self._wanted.append((at_ns, asked))
        while self._wanted[0][0] < at_ns - WINDOW_S * 1e9:
            self._wanted.popleft()
        if asked > num_awake:
            return min(asked, max(MOST_TIMES * num_awake, num_awake + MOST_MORE))
        has_window = at_ns >= WINDOW_S * 1e9
        most = max(number for _, number in self._wanted)
        return min(num_awake, most) if has_window else num_awake


def scaler_of(kind: Scaling, settings: ScaleSettings, replicas: int) -> FleetScaler:
    """Returns who decides. replicas: of this region at the begin."""
    if kind == "waiting":
        return WaitingScaler(settings)
    if kind == "none":
        fixed = {"min_replicas": replicas, "max_replicas": replicas, "spare": 0, "warm_pool": 0}
        return TokenScaler(msgspec.structs.replace(settings, **fixed))
    return TokenScaler(settings)


def _is_over(one: FleetReplica) -> bool:
    return one.state is FleetState.LOST or (one.state is FleetState.DRAINING and not one.tokens)


def _letting_go(one: FleetReplica) -> FleetAction:
    return FleetAction.DRAIN if one.state is FleetState.READY else FleetAction.STOP


def _order(action: FleetAction, one: FleetReplica) -> FleetOrder:
    return FleetOrder(action, one.name, one.revision, "waiting")
