"""The gateways of a simulated fleet, one in each region: the same queue, choice, affinity, breakers and budget of
retries as `splittime gateway` has, under virtual time.

What is simulated here is what lies around them: that an attempt's bytes travel, that a first byte comes, that an
upstream breaks off, and the order in which `forwarding` and `running_attempt` tell the parts of it.
"""

import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

from splittime.cluster.gateway_files import max_in_flight, retry_bounds
from splittime.cluster.simulated.load import FleetRequest
from splittime.cluster.simulated.servers import Agenda, FleetServer
from splittime.cluster.simulated.settings import FleetSettings
from splittime.core.errors import Refused
from splittime.gateway.breaker import LeftOut
from splittime.gateway.config import AffinityConfig, BreakerConfig, QueueConfig, RetryConfig, UpstreamConfig
from splittime.gateway.fair_queue import FairQueue
from splittime.gateway.retry_budget import RetryBudget, longest_pause_s
from splittime.gateway.routing.affinity import PrefixAffinity
from splittime.gateway.routing.prefix_table import SeenPrefix
from splittime.gateway.routing.regions import Regions
from splittime.gateway.tenant_share import QueuedRequest
from splittime.gateway.upstreams import Routed, Router, Upstream

MODEL, TENANT, SCOPE = "m", "anybody", b"fleet"
TOLD_S = 1.0  # from a change of the fleet until the gateways have a config of it
MAX_BLOCKS = 2**20  # that affinity remembers
OnFleetEnd = Callable[[FleetRequest], None]


class RoundRobin(Router):
    """One upstream after the other, of those that may be asked and have room: what a plain proxy does."""

    _next = 0

    def choose(self, model: str, now_ns: int, tried: Collection[str] = (), *_: Any, **__: Any) -> Routed | None:
        line = self.of_model(model)
        for step in range(len(line)):
            upstream = line[(self._next + step) % len(line)]
            if upstream.name not in tried and upstream.has_room and upstream.breaker.allows(now_ns):
                self._next = (self._next + step + 1) % len(line)
                return Routed(upstream, ())
        return super().choose(model, now_ns, tried) if tried else None


class PlaceGrant:
    """Does as a future for who waits in the queue. on_place: called with the place, or with why there is none."""

    def __init__(self, on_place: Callable[[Routed | BaseException], None]) -> None:
        self._on_place = on_place
        self._result: Routed | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._result is not None or self._error is not None

    def cancelled(self) -> bool:
        return False

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Routed:
        assert self._result is not None, "it has no place"
        return self._result

    def set_result(self, result: Routed, /) -> None:
        self._result = result
        self._on_place(result)

    def set_exception(self, exception: BaseException, /) -> None:
        self._error = exception
        self._on_place(exception)


class FleetGateway:
    """number: of its region. max_num_seqs: of each server, from which its bounds follow as those of `splittime up` do.
    on_end: called with each request that has ended, whatever came of it."""

    def __init__(
        self,
        number: int,
        settings: FleetSettings,
        max_num_seqs: int,
        agenda: Agenda,
        rng: random.Random,
        on_end: OnFleetEnd,
    ) -> None:
        self.settings, self.agenda, self.rng, self.on_end = settings, agenda, rng, on_end
        self.number, self._region = number, settings.regions[number]
        self._upstreams: dict[str, Upstream] = {}  # all that it has known
        self._left_out = LeftOut()
        self.servers: dict[str, FleetServer] = {}
        self._max_in_flight = max_in_flight(max_num_seqs)
        self.retries = RetryConfig(**retry_bounds(max_num_seqs))
        self.retry_budget = RetryBudget(self.retries)
        is_on = settings.affinity and settings.routing == "gateway"
        self.affinity = PrefixAffinity(AffinityConfig(max_blocks=MAX_BLOCKS) if is_on else None)
        queue = QueueConfig(max_requests=65_536, max_tokens=2**40, shed_from=1.0, max_wait_s=settings.max_wait_s)
        self._router = self._router_to([])
        self.queue = FairQueue(queue, self._router, clock=agenda.clock)

    def use(self, servers: Sequence[FleetServer]) -> None:
        """These are its upstreams from now on; what it knows of those that it had already stays."""
        for server in servers:
            if server.name not in self._upstreams:
                self._upstreams[server.name], self.servers[server.name] = self._upstream(server), server
        self._router = self._router_to([self._upstreams[server.name] for server in servers])
        self.queue.lead_to(self._router)

    def _router_to(self, upstreams: Sequence[Upstream]) -> Router:
        if self.settings.routing == "round_robin":
            return RoundRobin(upstreams, self.rng)
        regions = Regions(self._region, is_on=len(self.settings.regions) > 1)
        return Router(upstreams, self.rng, affinity=self.affinity, regions=regions)

    def _upstream(self, server: FleetServer) -> Upstream:
        region = self.settings.regions[server.region] if len(self.settings.regions) > 1 else None
        return Upstream(
            UpstreamConfig(
                name=server.name,
                url="http://127.0.0.1:1",
                models=(MODEL,),
                kind="splittime",
                max_in_flight=self._max_in_flight,
                region=region,
                resume=True,
            ),
            BreakerConfig(),
            left_out=self._left_out,
        )

    # ---- a request

    def arrive(self, request: FleetRequest) -> None:
        self.retry_budget.note_request(self.agenda.now_ns)
        prefix = self.affinity.see(SCOPE, request.text) if request.blocks else None
        self.admit(request, prefix)

    def admit(self, request: FleetRequest, prefix: SeenPrefix | None) -> None:
        """Have it wait for a place, and send it when it has one."""
        agenda, tokens = self.agenda, self._tokens(request)
        until_ns = agenda.now_ns + round(self.settings.max_wait_s * 1e9)
        grant = PlaceGrant(lambda place: agenda.at(agenda.now_ns, self._placed, request, tokens, prefix, place))
        waiting = QueuedRequest(TENANT, MODEL, tokens, request.tried, prefix, grant, agenda.now_ns)
        try:
            self.queue.line_up(waiting, until_ns=until_ns)
        except Refused as refused:
            self.end(request, refused.info.code)
            return
        if not grant.done():
            agenda.at(until_ns, self._too_late, waiting, request)

    def _tokens(self, request: FleetRequest) -> int:
        """Returns its tokens as the gateway estimates them."""
        return request.prompt + self.settings.assumed_max_tokens

    def _too_late(self, waiting: QueuedRequest, request: FleetRequest) -> None:
        if not waiting.granted.done():
            self.queue.abandon(waiting)
            self.end(request, self.queue.too_late(TENANT).info.code)

    def _placed(
        self, request: FleetRequest, tokens: int, prefix: SeenPrefix | None, place: Routed | BaseException
    ) -> None:
        if isinstance(place, Refused):
            self.end(request, place.info.code)
            return
        assert isinstance(place, Routed)
        request.tried.append(place.upstream.name)
        request.attempts += 1
        FleetAttempt(self, request, place, tokens, prefix, self.servers[place.upstream.name]).send()

    def again(
        self, request: FleetRequest, prefix: SeenPrefix | None, *, has_begun: bool, is_outright: bool = False
    ) -> None:
        """An attempt has failed: another is made if there may be one. is_outright: as of `UpstreamFailure`."""
        now_ns, num_attempts = self.agenda.now_ns, request.attempts
        others = [one for one in self._router.allowed(MODEL, now_ns) if one.name not in request.tried]
        is_failover = is_outright and any(one.breaker.is_well for one in others)
        may_ask, budget = self._router.may_ask(MODEL, now_ns), self.retry_budget
        if not (may_ask and budget.may_retry(num_attempts, now_ns, is_free=has_begun, is_failover=is_failover)):
            self.end(request, "broken" if has_begun else "failed")
        elif has_begun:
            request.is_resumed = True
            self.admit(request, prefix)
        else:
            self.agenda.after(
                self.rng.uniform(0, longest_pause_s(self.retries, num_attempts)), self.admit, request, prefix
            )

    def end(self, request: FleetRequest, ending: str) -> None:
        request.ending, request.end_ns = ending, self.agenda.now_ns
        if request.attempts:  # it was charged with its first place
            self.queue.settle(TENANT, self._tokens(request), request.prompt + request.generated)
        self.on_end(request)


class FleetAttempt:
    """One request sent to one upstream. half_rtt_ns: how long bytes travel."""

    def __init__(
        self,
        gateway: FleetGateway,
        request: FleetRequest,
        routed: Routed,
        tokens: int,
        prefix: SeenPrefix | None,
        server: FleetServer,
    ) -> None:
        self.request, self._gateway, self._routed, self._tokens = request, gateway, routed, tokens
        self._prefix, self._server, self._upstream = prefix, server, routed.upstream
        settings, is_near = gateway.settings, server.region == gateway.number
        self._rtt_ns = round((settings.local_rtt_ms if is_near else settings.rtt_ms) * 1e6)
        self.half_rtt_ns = self._rtt_ns // 2
        self._sent_ns = gateway.agenda.now_ns
        self._has_begun = self._is_over = False
        self._successes = self._upstream.breaker.num_successes

    def send(self) -> None:
        gateway, agenda = self._gateway, self._gateway.agenda
        self._upstream.waits.sent(self._tokens, self._sent_ns)
        gateway.affinity.note_sent(self._prefix, self._upstream.name, self._routed.affinity)
        if self._server.is_dead:
            connect_ns = self._upstream.config.connect_s * 1e9 if self._server.is_silent else self._rtt_ns
            agenda.at(self._sent_ns + connect_ns, self._fail)
            return
        self._upstream.round_trip.note(self._rtt_ns)
        agenda.at(self._sent_ns + self.half_rtt_ns, self._server.receive, self)

    def begin(self) -> None:
        """A byte of the answer has come."""
        if self._has_begun or self._is_over:
            return
        now_ns, self._has_begun = self._gateway.agenda.now_ns, True
        self._upstream.waits.begun(self._tokens, now_ns)
        self._upstream.breaker.note_begun()
        if self.request.first_ns is None:
            self.request.first_ns = now_ns

    def end(self) -> None:
        """The answer is whole."""
        if self._is_over:
            return
        gateway = self._gateway
        self._is_over, self.request.generated = True, self.request.output
        self._upstream.breaker.note_success()
        gateway.affinity.note_answered(self._prefix, self._upstream.name)
        gateway.queue.leave(self._routed, TENANT, self._tokens)
        gateway.end(self.request, "answered")

    def broken(self, *, is_silent: bool) -> None:
        """The server is gone: the gateway learns it by a reset connection, or by its own time-outs."""
        agenda, config = self._gateway.agenda, self._upstream.config
        if not is_silent:
            agenda.at(agenda.now_ns + self.half_rtt_ns, self._fail)
        elif self._has_begun:
            agenda.after(config.between_s, self._fail)
        else:
            agenda.at(self._sent_ns + config.first_byte_s * 1e9, self._fail)

    def _fail(self) -> None:
        if self._is_over:
            return
        gateway, now_ns = self._gateway, self._gateway.agenda.now_ns
        self._is_over = True
        if not self._has_begun:
            self._upstream.waits.gone(self._tokens, now_ns)
        gateway.affinity.note_failed(self._prefix, self._upstream.name)
        self._upstream.breaker.note_failure(now_ns)
        gateway.queue.leave(self._routed, TENANT, self._tokens)
        is_outright = self._successes == self._upstream.breaker.num_successes
        gateway.again(self.request, self._prefix, has_begun=self.request.first_ns is not None, is_outright=is_outright)
