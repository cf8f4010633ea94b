"""A fleet in virtual time: gateways that route, servers that compute, a scaler in each region, and what fails.

    run = FleetRun(replica, FleetSettings(replicas=1000), load, seed=0)
    run.run(say)
    run.samples, run.servers, load.requests         from which `figures` makes what is told

One run is a function of its arguments: nothing is asked of a clock, and all chance is drawn from the seed. Each request
ends once: answered, refused by a gateway, failed before its first byte, or broken off behind it.
"""

import random
from collections import deque
from collections.abc import Callable
from math import ceil
from typing import NamedTuple, Protocol

import msgspec

from splittime.cluster.controller import Fleet, FleetAction, FleetController, FleetOrder, FleetReplica, FleetState
from splittime.cluster.gateway_files import LOST_S
from splittime.cluster.scaling import ScaleSettings
from splittime.cluster.simulated.gateways import TOLD_S, FleetGateway
from splittime.cluster.simulated.load import FleetLoad, FleetRequest
from splittime.cluster.simulated.servers import REVISION, Agenda, FleetServer
from splittime.cluster.simulated.settings import FleetSettings, Scaling, share_of
from splittime.simulate.replica import Replica
from splittime.simulate.shape import StepShape

TICK_S = 1.0
FILL_S = 30.0  # a fleet begins empty: until it has filled, nobody scales it
PROCESS_NOTICE_S = 1.0
BEGINNING = (FleetAction.START, FleetAction.WAKE, FleetAction.ADMIT)
SayFleet = Callable[[str, float], None]
POLL_S, WINDOW_S = 15.0, 300.0
WAITING_EACH = 5
MOST_TIMES, MOST_MORE = 2, 4


class FleetSample(NamedTuple):
    """The fleet at an instant. held: requests that wait in gateways; waiting, running: at servers."""

    at_ns: int
    ready: int
    starting: int
    asleep: int
    held: int
    waiting: int
    running: int


class Region(NamedTuple):
    """A region's gateway and its scaler."""

    gateway: FleetGateway
    orders: Callable[[int, Fleet, int], list[FleetOrder]]


class FleetRun:
    """begun: when servers were ordered to begin; and again, with when they were ready: (ordered_ns, ready_ns).
    num_failures: of servers, by whether their node fell silent."""

    def __init__(self, like: Replica, settings: FleetSettings, load: FleetLoad, seed: int = 0) -> None:
        self.settings, self.load, self._like = settings.validate(), load, like.steady()
        self.agenda, self._rng = Agenda(), random.Random(seed)
        self.capacity_tokens = settings.capacity_tokens or capacity_of(like, load.requests, settings.tpot_s)
        self.servers: dict[str, FleetServer] = {}
        self.samples: list[FleetSample] = []
        self.begun: list[tuple[int, int | None]] = []
        self.num_failures = {False: 0, True: 0}
        self._num_ended = self._num_told = 0
        self._is_telling = False
        self.regions = [self._region(number) for number in range(len(settings.regions))]
        for number in range(len(settings.regions)):
            for _ in range(share_of(settings.replicas, number, len(settings.regions))):
                self._start(number).become(FleetState.READY)
        self._tell()

    def run(self, say: SayFleet = lambda words, share: None) -> None:
        """Until every request has ended."""
        requests, agenda = self.load.requests, self.agenda
        if requests:
            agenda.at(requests[0].at_ns, self._arrive, 0)
            self._tick()
        while self._num_ended < len(requests):
            agenda.run_one()
            if self._num_ended >= self._num_told:
                self._num_told += max(1, len(requests) // 200)
                say(f"{agenda.now_ns / 1e9:,.0f} s of the fleet's time", self._num_ended / len(requests))

    def _region(self, number: int) -> Region:
        settings = self.settings
        max_num_seqs, rng = self._like.config.max_num_seqs, random.Random(self._rng.random())
        gateway = FleetGateway(number, settings, max_num_seqs, self.agenda, rng, self._ended)
        replicas = share_of(settings.replicas, number, len(settings.regions))
        return Region(gateway, scaler_of(settings.scaling, settings.scale_of(number), replicas).orders)

    # ---- requests

    def _arrive(self, index: int) -> None:
        requests = self.load.requests
        self.regions[requests[index].home].gateway.arrive(requests[index])
        if index + 1 < len(requests):
            self.agenda.at(requests[index + 1].at_ns, self._arrive, index + 1)

    def _ended(self, request: FleetRequest) -> None:
        self._num_ended += 1

    # ---- once a second

    def _tick(self) -> None:
        now_ns = self.agenda.now_ns
        self._fail_some()
        for number, region in enumerate(self.regions):
            if now_ns < FILL_S * 1e9:
                break
            own = [server for server in self.servers.values() if server.region == number and server.ended_ns is None]
            fleet = Fleet(REVISION, tuple(server.seen() for server in own), region.gateway.queue.tokens)
            for order in region.orders(now_ns, fleet, sum(server.num_waiting for server in own)):
                self._carry_out(order, number)
        self.samples.append(self._sample())
        self.agenda.after(TICK_S, self._tick)

    def _sample(self) -> FleetSample:
        living = [server for server in self.servers.values() if server.ended_ns is None]
        states = [server.state for server in living if not server.is_dead]
        return FleetSample(
            self.agenda.now_ns,
            states.count(FleetState.READY),
            states.count(FleetState.STARTING),
            states.count(FleetState.ASLEEP),
            sum(region.gateway.queue.requests for region in self.regions),
            sum(server.num_waiting for server in living),
            sum(server.num_running for server in living),
        )

    # ---- what fails

    def _fail_some(self) -> None:
        """Have some servers fail within the next second."""
        failures = self.settings.failures
        if not failures.per_replica_hour:
            return
        chance = failures.per_replica_hour * TICK_S / 3600
        for server in list(self.servers.values()):
            if server.state is FleetState.READY and not server.is_dead and self._rng.random() < chance:
                is_silent = self._rng.random() < failures.node_share
                self.agenda.after(self._rng.uniform(0, TICK_S), self._fail, server, is_silent)

    def _fail(self, server: FleetServer, is_silent: bool) -> None:
        if server.is_dead or server.ended_ns is not None:
            return
        self.num_failures[is_silent] += 1
        server.die(is_silent=is_silent)
        self.agenda.after(LOST_S if is_silent else PROCESS_NOTICE_S, self._notice, server)

    def _notice(self, server: FleetServer) -> None:
        server.known_lost = True
        self._will_tell()

    # ---- what the scaler orders

    def _carry_out(self, order: FleetOrder, number: int) -> None:
        action, starts, now_ns = order.action, self.settings.starts, self.agenda.now_ns
        server = self.servers[order.name] if order.name else self._start(number)
        if action in BEGINNING:
            self.begun.append((now_ns, None))
        if action in (FleetAction.START, FleetAction.WARM):
            server.become(FleetState.STARTING if action is FleetAction.START else FleetState.WARMING)
            self.agenda.after(self._spread(starts.cold_s), self._is_up, server, now_ns)
        elif action is FleetAction.WAKE:
            server.become(FleetState.STARTING)
            self.agenda.after(self._spread(starts.wake_s), self._is_up, server, now_ns)
        elif action is FleetAction.ADMIT:
            server.become(FleetState.STARTING if server.state is FleetState.WARMING else FleetState.READY)
        elif action is FleetAction.DRAIN:
            server.become(FleetState.DRAINING)
        elif action is FleetAction.SLEEP:
            server.become(FleetState.ASLEEP)
        else:
            server.stop()
        self._will_tell()

    def _start(self, number: int) -> FleetServer:
        drift = self._like.costs.errors.drift
        factor = self._rng.lognormvariate(0.0, drift) if drift else 1.0
        name = f"replica-{len(self.servers)}"
        server = FleetServer(name, number, self._like, factor, self.capacity_tokens, self.agenda)
        self.servers[name] = server
        return server

    def _spread(self, seconds: float) -> float:
        spread = self.settings.starts.spread
        return seconds * self._rng.uniform(1 - spread, 1 + spread)

    def _is_up(self, server: FleetServer, ordered_ns: int) -> None:
        if server.ended_ns is None and server.state in (FleetState.STARTING, FleetState.WARMING):
            is_awake = server.state is FleetState.STARTING
            server.become(FleetState.READY if is_awake else FleetState.ASLEEP)
            if is_awake:
                self.begun.append((ordered_ns, self.agenda.now_ns))
            self._will_tell()

    # ---- what gateways know

    def _will_tell(self) -> None:
        if not self._is_telling:
            self._is_telling = True
            self.agenda.after(TOLD_S, self._tell)

    def _tell(self) -> None:
        """Each gateway has the servers that serve, as far as that is known."""
        self._is_telling = False
        serving = [one for one in self.servers.values() if one.state is FleetState.READY and not one.known_lost]
        for region in self.regions:
            region.gateway.use(serving)


def capacity_of(like: Replica, requests: list[FleetRequest], tpot_s: float) -> int:
    """Returns the tokens that a server can have at once, running and waiting, so that requests like these have a token
    in `tpot_s` by its cost model; at most its KV cache. Each running request needs a row in each step, and in the mean
    as much of its prompt computed there as it has tokens to come."""
    count = max(1, len(requests))
    prompt = sum(request.prompt for request in requests) / count
    output = max(1.0, sum(request.output for request in requests) / count)
    held, limit, config = prompt + output / 2, tpot_s * 1e9, like.config
    most = max(1, min(config.max_num_seqs, int(config.num_blocks * config.block_size / held)))
    low = 1
    while low < most:
        rows = (low + most + 1) // 2
        low, most = (rows, most) if _step_ns(like, rows, prompt, output, held) <= limit else (low, rows - 1)
    return round(low * held)


def _step_ns(like: Replica, rows: int, prompt: float, output: float, held: float) -> float:
    """Returns what a step takes in the mean with so many running: their tokens, and its part of their prompts."""
    decode = like.costs.step_time(StepShape(rows, rows, rows, round(rows * held), 0))
    tokens = max(1, min(round(prompt), like.config.max_num_batched_tokens - rows))
    pairs = round(tokens * prompt / 2)
    mixed = like.costs.step_time(StepShape(rows + 1, rows + tokens, rows, round(rows * held + prompt), pairs))
    num_mixed = prompt / tokens * rows / output  # for each step that decodes alone
    return decode.step_ns + num_mixed * max(0, mixed.step_ns - decode.step_ns)


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
