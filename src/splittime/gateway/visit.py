"""One request through the gateway, from its first byte to its last: the order of things.

    receive -> admit -> route -> upstream -> network -> deliver

`admit` is the wait for a place (its cause says so), `route` the decision and the pauses between attempts. `upstream`
begins when the request is sent; what of the time until the answer's end has been read is `network`,
`request_account` says. `forwarding` brings it to upstreams; this is what comes before and after.
"""

import asyncio
import random
import time
from functools import partial

import msgspec

from splittime.core.errors import EngineError, ErrorInfo, Overloaded, SplittimeError, error_from_info
from splittime.core.request import FinishReason
from splittime.gateway.answer_events import ignored
from splittime.gateway.cache.turn import CacheTurn, Giving
from splittime.gateway.degrade import Lesser, lesser, template_answer
from splittime.gateway.forwarded import ForwardedRequest, error_at_once, error_event, forwarded, respond_error
from splittime.gateway.forwarding import Forwarding, SignOfLife
from splittime.gateway.relay import Relay
from splittime.gateway.request_account import RequestAccount, reason_of
from splittime.gateway.responses import bound
from splittime.gateway.service import GatewayService
from splittime.ledger.account import REFUSED
from splittime.ledger.stages import Stage
from splittime.web import http
from splittime.web.reading import BodySender, read_beside
from splittime.web.tenants import QuotaUse, Sharer, tenant_of

now_ns = time.monotonic_ns
SHED_DRAW = "splittime.shed_draw"  # key in an ASGI scope


class GatewayVisit:
    """receive, send: a caller that only asks whether there is room (`refuse_at_once`) may leave them out."""

    def __init__(
        self,
        gateway: GatewayService,
        path: str,
        scope: http.Scope,
        receive: http.Receive = http.receive_nothing,
        send: http.Send = http.send_nothing,
    ) -> None:
        self.gateway, self._path, self._scope, self._receive, self._send = gateway, path, scope, receive, send
        self.tenant = tenant_of(scope)
        self.account = RequestAccount(path, scope, self.tenant.name, gateway.ledger, gateway.version, gateway.audit)
        self._turn: CacheTurn | None = None
        self._first_token_by_ns: int | None = None
        self._given: Giving | None = None  # the cache's answer
        self._forwarding: Forwarding | None = None
        self._work: asyncio.Task[None] | None = None
        self._quota: QuotaUse | None = None  # what it has of its tenant's limits, once they have let it in
        self._reserved_tokens = 0  # of its tenant's budgets
        self._used_tokens: int | None = None  # once they have been charged
        self._ending: ErrorInfo | None = None  # why it is ended from outside
        self._lesser: Lesser | None = None
        self._sign: SignOfLife | None = None
        self._draw: float = scope.setdefault(SHED_DRAW, random.random())  # the same when it is looked at again

    async def serve(self) -> None:
        self._sender = BodySender(Sharer(self.tenant.name, self.tenant.weight), self._receive)
        self.gateway.enter(self)
        try:
            await self._watched(await self._degraded(await self._come_in()))
        except http.Disconnected:
            self.account.cancelled_ns = self.account.cancelled_ns or now_ns()
            self.account.close(FinishReason.ABORT, None)
        except SplittimeError as error:
            await self._refuse(error.with_traceback(None))  # whose frames may have it
        finally:
            self._leave()

    # ---- in

    def refuse_at_once(self) -> http.AtOnce | None:
        """The refusal, if the head alone decides that there is no room now; else None, and nothing is taken."""
        try:
            self.account.request_id = http.request_id(self._scope)
            self._read_head()
        except Overloaded as error:
            self.account.enter(Stage.DELIVER, now_ns())
            self.gateway.metrics.count_refusal(error.info.code)
            close = partial(self.account.close, REFUSED, error.info)
            return error_at_once(self._path, error, self._headers(), close)
        except SplittimeError:  # a fault of its own, answered when its body has been read
            return None
        return None

    def _read_head(self) -> None:
        """Raises `Refused` if there is no room for this tenant."""
        self.account.deadline_ns = http.deadline_ns(self._scope, self.account.start_ns)
        self._first_token_by_ns = http.first_token_by_ns(self._scope, self.account.start_ns)
        self.gateway.require_serving()
        self.gateway.require_allowance(self.tenant)
        self.gateway.queue.require_room(self.tenant.name, self._draw)

    async def _come_in(self) -> ForwardedRequest:
        """Raises what the client must be told, or `Disconnected`."""
        self.account.request_id = http.new_request_id()
        self.account.request_id = http.request_id(self._scope)
        self._read_head()
        self._quota = self.gateway.quota(self.tenant).enter(now_ns())
        self.account.on_read = self._settle
        config = self.gateway.config
        body = await http.read_body_in_time(self._scope, self._receive, config.max_body_bytes, config.body_timeout_s)
        assumed = config.queue.assumed_max_tokens
        told = await read_beside(self._sender, len(body), forwarded, self._path, body, assumed)
        policy = self.gateway.policy
        request = self.account.request = policy.routed(told, self.tenant.name, self._scope)
        self._quota.count_as(request.answers, now_ns())
        policy.require(request)
        request = self.account.request = self._estimated(bound(self.gateway, request, self.tenant))
        self._reserve(request)
        self.account.enter(Stage.ADMIT, now_ns())
        return request

    def _estimated(self, request: ForwardedRequest) -> ForwardedRequest:
        """Returns the request with the tokens that its answers are expected to have."""
        learnt, assumed = self.gateway.learnt, self.gateway.config.queue.assumed_max_tokens
        expected = learnt.expected_tokens(self.tenant.name, request, assumed)
        return msgspec.structs.replace(request, expected_tokens=expected)

    def _reserve(self, request: ForwardedRequest) -> None:
        """Raises `Refused` where what others of its tenant may use leaves nothing of a limit or a budget."""
        assert self._quota is not None, "it has come in"
        assumed = self.gateway.config.queue.assumed_max_tokens
        tokens = self.gateway.learnt.reserved_tokens(self.tenant.name, request, assumed)
        self.gateway.budgets.reserve(self.tenant.name, tokens)
        self._reserved_tokens = tokens
        self._quota.reserve(tokens, now_ns(), needed=1)

    # ---- while it is served

    async def _watched(self, request: ForwardedRequest) -> None:
        """Forward it, and cancel that at once when the client goes away."""
        loop = asyncio.get_running_loop()
        work = self._work = loop.create_task(self._answer(request))
        gone = loop.create_task(http.until_gone(self._receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not (self._source is not None and self._source.is_answered):
                self.account.cancelled_ns = now_ns()
                (self._turn is not None and self._turn.goes_on(work.cancel)) or work.cancel()
            await asyncio.wait({work})
        finally:
            gone.cancel()
            work.cancel()
        try:
            if not work.cancelled():
                work.result()
            elif self._ending is not None:
                raise error_from_info(self._ending)
            else:
                raise http.Disconnected
        finally:
            del work  # whose error has this frame

    async def _degraded(self, request: ForwardedRequest) -> ForwardedRequest:
        """Returns what the ladder's stages that are entered now make of a request."""
        gateway, level = self.gateway, self.gateway.ladder.observe(now_ns())
        if level:
            stages, assumed = gateway.ladder.stages[:level], gateway.config.queue.assumed_max_tokens
            made = await read_beside(self._sender, len(request.body), lesser, request, stages, assumed)
            if made.stage:
                self._lesser = made
                self.account.request, self.account.degraded = self._estimated(made.request), made.stage
                return self.account.request
        return request

    @property
    def _source(self) -> Relay | Giving | None:
        """Where the answer comes from, as far as that is known."""
        return self._given or (self._forwarding.relay if self._forwarding is not None else None)

    def end_early(self, error: ErrorInfo) -> None:
        """The gateway shuts down: end it with this error."""
        if self._work is not None and not self._work.done():
            self._ending = error
            self._work.cancel()

    def cut(self) -> None:
        """Cut the connection, without waiting for the client to read anything."""
        if (connection := http.connection(self._scope)) is not None:
            connection.abort()

    async def _answer(self, request: ForwardedRequest) -> None:
        """By a template, from the cache, or from an upstream. A lesser answer is not kept, nor given from what is."""
        if self._lesser is not None and self._lesser.answer is not None:
            return await self._answer_by_template(self._lesser)
        if self._lesser is None:
            given = self._given = await self._cached(request)
            if given is not None:
                await given.run()
                return self.account.close_answered(given, None)
        is_led = self._turn is not None and self._turn.leads  # a sign of life would be given to others
        every_s = self.gateway.config.queue.sign_of_life_s if request.is_stream and not is_led else None
        self._sign = SignOfLife(self._send, self._headers, every_s)
        self._forwarding = Forwarding(
            self.gateway,
            self.account,
            self._scope,
            tenant=self._sender.sharer,
            draw=self._draw,
            first_token_by_ns=self._first_token_by_ns,
            send=self._send,
            headers=self._headers,
            sign=self._sign,
            mark=self._lesser.mark if self._lesser is not None else {},
        )
        await self._forwarding.run(request)

    async def _cached(self, request: ForwardedRequest) -> Giving | None:
        """Returns the cache's answer, if it has one."""
        gateway, name = self.gateway, self.tenant.name
        turn = self._turn = CacheTurn(gateway, self._scope, self.account, name, self._send, self._headers)
        given = await turn.given(request)
        self._send = turn.send
        return given

    # ---- out

    def _headers(self) -> http.Headers:
        """Returns the headers that every answer has."""
        headers = [(b"x-request-id", self.account.request_id.encode("latin-1"))]
        headers += self._forwarding.named if self._forwarding is not None else []
        headers += self._lesser.headers if self._lesser is not None else []
        headers += self._turn.headers if self._turn is not None else []
        return [*headers, (b"server-timing", self.account.timing())]

    async def _answer_by_template(self, told: Lesser) -> None:
        """No upstream is asked."""
        self.account.enter(Stage.DELIVER, now_ns())
        kind, body = template_answer(told, self.account.request_id)
        await http.respond(self._send, body, content_type=kind, headers=self._headers(), until_taken=True)
        self.account.close(FinishReason.STOP, None)

    async def _refuse(self, error: SplittimeError) -> None:
        self.account.enter(Stage.DELIVER, now_ns())
        if isinstance(error, Overloaded):
            self.gateway.metrics.count_refusal(error.info.code)
        if any(one is not None and one.has_begun for one in (self._sign, self._source)):
            last = error_event(self._path, error.info)
            await self._send({"type": "http.response.body", "body": last, "more_body": False})
        else:
            await respond_error(self._send, self._path, error, self._headers())
        self.account.close(reason_of(error), error.info)

    def _leave(self) -> None:
        """Give back what it holds, and correct what its tenant was charged."""
        if not self.account.is_closed:  # something unforeseen was raised; the edge has answered 500
            self.account.close(FinishReason.ERROR, EngineError("the gateway failed").info)
        try:
            if self._turn is not None:
                self._turn.leave(self._source)
            self._settle(self._source)
        finally:
            was_granted = self._forwarding is not None and self._forwarding.was_granted
            if was_granted and self.account.request is not None:
                self.gateway.queue.settle(self.tenant.name, self.account.request.tokens, self._used_tokens or 0)
            if self._quota is not None:
                self._quota.leave(0, now_ns())
            self.gateway.leave(self)
            # No circle is left for the garbage collector.
            self._given = self._forwarding = self._work = self._quota = self._turn = self._sign = None
            self.account.on_read = ignored

    def _settle(self, source: Relay | Giving | None) -> None:
        """Charge its tenant what it used, once, and give back what was reserved."""
        if self._used_tokens is not None or self._quota is None:
            return
        self._used_tokens, name, budgets = 0, self.tenant.name, self.gateway.budgets
        try:
            self._used_tokens = self.account.used_tokens(source, self.gateway.learnt)
        finally:
            used = self._used_tokens + self.account.asked_anew_tokens
            self._quota.settle(used, now_ns())
            budgets.release(name, self._reserved_tokens)
            self._reserved_tokens = 0
            budgets.use(name, used)
