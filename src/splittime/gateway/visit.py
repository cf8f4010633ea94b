"""One request through the gateway, from its first byte to its last: the order of things.

    receive -> admit -> route -> upstream -> network -> deliver

`admit` is the wait for a place (its cause says so), `route` the decision and the pauses between attempts. `upstream`
begins when the request is sent; what of the time until the answer's end has been read is `network`,
`request_account` says.
"""

import asyncio
import random
import time
from functools import partial

from splittime.core.errors import (
    DeadlineExceeded,
    EngineError,
    ErrorInfo,
    Overloaded,
    Refused,
    SplittimeError,
    error_from_info,
)
from splittime.core.request import FinishReason
from splittime.gateway.blame import blame
from splittime.gateway.cache.giving import Giving
from splittime.gateway.cache.turn import CacheTurn
from splittime.gateway.degrade.lesser import Lesser, MarkedAnswer, lesser, template_answer
from splittime.gateway.failures import BrokenStream, Interrupted, UpstreamFailure
from splittime.gateway.fair_queue import QUEUE_TIMEOUT
from splittime.gateway.forwarded import ForwardedRequest, forwarded
from splittime.gateway.relay import Deadline, Relay
from splittime.gateway.request_account import RequestAccount, reason_of
from splittime.gateway.resume.resumption import Resumption
from splittime.gateway.sent_headers import sent_headers
from splittime.gateway.service import GatewayService
from splittime.gateway.sign_of_life import SignOfLife
from splittime.gateway.upstreams import Routed
from splittime.ledger.account import REFUSED
from splittime.ledger.stages import Cause, Stage
from splittime.web import http
from splittime.web.tenants import Quota, tenant_of

now_ns = time.monotonic_ns
SHED_DRAW = "splittime.shed_draw"  # key in an ASGI scope
MAX_PAUSE_S = 2.0


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
        self.account = RequestAccount(path, scope, self.tenant.name, gateway.ledger)
        self._turn = CacheTurn(gateway.cache, scope, self.account, self.tenant.name, send, self._headers)
        self._first_token_by_ns: int | None = None
        self._relay: Relay | Giving | None = None  # the latest
        self._work: asyncio.Task[None] | None = None
        self._quota: Quota | None = None  # that of its tenant, once it has let the request in
        self._was_granted = False
        self._ending: ErrorInfo | None = None  # why it is ended from outside
        self._upstream_name = ""
        self._lesser: Lesser | None = None
        self._sign = SignOfLife(send, self._headers, None)
        self._draw: float = scope.setdefault(SHED_DRAW, random.random())  # the same when it is looked at again

    async def serve(self) -> None:
        self.gateway.enter(self)
        try:
            await self._watched(self._degraded(await self._come_in()))
        except http.Disconnected:
            self.account.cancelled_ns = self.account.cancelled_ns or now_ns()
            self.account.close(FinishReason.ABORT, None)
        except SplittimeError as error:
            await self._refuse(error)
        finally:
            self._leave()

    # ---- in

    def refuse_at_once(self) -> http.AtOnce | None:
        """The refusal, if the head alone decides that there is no room now; else None, and nothing is taken."""
        self.account.request_id = http.new_request_id()
        try:
            self.account.request_id = http.request_id(self._scope)
            self._read_head()
        except Overloaded as error:
            self.account.enter(Stage.DELIVER, now_ns())
            self.gateway.metrics.count_refusal(error.info.code)
            return http.error_at_once(error, self._headers(), partial(self.account.close, REFUSED, error.info))
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
        self._quota = self.gateway.quota(self.tenant)
        self._quota.enter(now_ns())
        config = self.gateway.config
        body = await http.read_body_in_time(self._scope, self._receive, config.max_body_bytes, config.body_timeout_s)
        told, policy = forwarded(self._path, body, config.queue.assumed_max_tokens), self.gateway.policy
        request = self.account.request = policy.routed(told, self.tenant.name, self._scope)
        policy.require(request)
        self.account.enter(Stage.ADMIT, now_ns())
        return request

    # ---- while it is served

    async def _watched(self, request: ForwardedRequest) -> None:
        """Forward it, and cancel that at once when the client goes away."""
        loop = asyncio.get_running_loop()
        work = self._work = loop.create_task(self._answer(request))
        gone = loop.create_task(self._until_gone())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not (self._relay is not None and self._relay.is_answered):
                self.account.cancelled_ns = now_ns()
                self._turn.goes_on(work.cancel) or work.cancel()
            await asyncio.wait({work})
        finally:
            gone.cancel()
            work.cancel()
        if not work.cancelled():
            work.result()
        elif self._ending is not None:
            raise error_from_info(self._ending)
        else:
            raise http.Disconnected

    def _degraded(self, request: ForwardedRequest) -> ForwardedRequest:
        """Returns what the ladder's stages that are entered now make of a request."""
        gateway, level = self.gateway, self.gateway.ladder.observe(now_ns())
        if level:
            stages, assumed = gateway.ladder.stages[:level], gateway.config.queue.assumed_max_tokens
            self._lesser = lesser(request, stages, assumed)
            self.account.request, self.account.degraded = self._lesser.request, self._lesser.stage
            return self._lesser.request
        return request

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

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
            given = self._relay = await self._turn.given(request)
            self._send = self._turn.send
            if given is not None:
                await given.run()
                return self.account.close_answered(given, None)
        if request.is_stream and not self._turn.leads:  # whose comments would be given to others
            self._sign = SignOfLife(self._send, self._headers, self.gateway.config.queue.sign_of_life_s)
        await self._forward(request)

    async def _forward(self, request: ForwardedRequest) -> None:
        """Attempt after attempt, until one is answered or no other may be made."""
        gateway, tried, resumption = self.gateway, list[str](), Resumption(request)
        gateway.retry_budget.note_request(now_ns())
        failure: UpstreamFailure | None = None
        while True:
            try:
                routed = await self._admitted(request, resumption.tried(gateway.router, tried))
            except Overloaded:
                if failure is None:
                    raise
                break
            if not resumption.suits(routed.upstream):
                gateway.queue.give_back(routed, self.tenant.name, request.tokens)
                break
            try:
                await self._attempt(request, routed, resumption)
                return
            except UpstreamFailure as latest:
                failure = latest
            tried.append(routed.upstream.name)
            if not (failure.is_retryable and self._may_retry(request, len(tried), failure)):
                break
            if not isinstance(failure, Interrupted):
                await self._pause(len(tried))
        await self._tell_failure(failure)

    async def _admitted(self, request: ForwardedRequest, tried: list[str]) -> Routed:
        """Returns the upstream that has a place for it."""
        at_ns, client_ns = now_ns(), self.account.deadline_ns
        until_ns = at_ns + int(self.gateway.config.queue.max_wait_s * 1e9)
        until_ns = until_ns if client_ns is None else min(until_ns, client_ns)
        self.account.enter(Stage.ADMIT, at_ns)
        try:
            entering = self.gateway.queue.enter(
                self.tenant.name,
                request.pool,
                request.tokens,
                until_ns=until_ns,
                tried=tried,
                draw=self._draw,
                on_wait=lambda: self.account.enter(Stage.ADMIT, now_ns(), Cause.UPSTREAM_SLOTS),
            )
            routed = await self._sign.during(entering, until_ns)
        except Refused as refused:
            if until_ns == client_ns and refused.reason == QUEUE_TIMEOUT:
                raise DeadlineExceeded.before("an upstream had room for it") from None
            raise
        self._was_granted = True
        self.account.enter(Stage.ROUTE, now_ns())
        return routed

    def _may_retry(self, request: ForwardedRequest, num_attempts: int, failure: UpstreamFailure) -> bool:
        """One that goes on with a stream is within `max_attempts`, and not counted by the budget of retries: an
        upstream that dies has done its part of the work, and all its streams break off at once."""
        gateway, at_ns = self.gateway, now_ns()
        if num_attempts >= gateway.config.retries.max_attempts or not gateway.router.allowed(request.pool, at_ns):
            return False
        if self.account.deadline_ns is not None and at_ns >= self.account.deadline_ns:
            return False
        return isinstance(failure, Interrupted) or gateway.retry_budget.take(at_ns)

    async def _pause(self, num_attempts: int) -> None:
        """A random moment, so that requests that failed together do not come back together."""
        longest_s = self.gateway.config.retries.pause_s * 2 ** (num_attempts - 1)
        self.account.enter(Stage.ROUTE, now_ns(), Cause.RETRY_PAUSE)
        await asyncio.sleep(random.uniform(0, min(longest_s, MAX_PAUSE_S)))

    async def _attempt(self, request: ForwardedRequest, routed: Routed, resumption: Resumption) -> None:
        """Returns when the client has the answer, whole or with an error event at its end."""
        gateway, upstream = self.gateway, routed.upstream
        self._upstream_name = upstream.name
        deadline = self._deadline(upstream.config.total_s)
        self.account.begin_attempt()
        account = self.account
        headers = sent_headers(self._scope, upstream, account.attempt_id, deadline.at_ns, self._first_token_by_ns)
        begin_ns = now_ns()
        relay = self._relay = Relay(
            gateway.session,
            upstream,
            headers,
            deadline,
            resumption,
            max_answer_bytes=gateway.config.max_answer_bytes,
            send=self._send,
            answer_headers=self._headers,
            on_read=lambda: account.note_read(upstream, relay, begin_ns),
            mark=MarkedAnswer(self._lesser.mark if self._lesser is not None else {}),
            has_begun=self._sign.has_begun,
        )
        self.account.enter(Stage.UPSTREAM, begin_ns)
        error: SplittimeError | None = None
        ending = "cancelled"
        try:
            await relay.run()
            ending = ""
            upstream.breaker.note_success()
        except (UpstreamFailure, BrokenStream) as failure:
            error, ending = failure.error, failure.error.info.code
            blame(upstream.breaker, failure, is_own=gateway.lag.explains(ending, begin_ns))
            if isinstance(failure, UpstreamFailure):
                raise
        finally:
            if ending == "cancelled":
                upstream.breaker.note_nothing()
            self.account.keep_attempt(routed, relay, begin_ns, ending)
            gateway.metrics.count_attempt(upstream.name, ending or "answered")
            gateway.queue.leave(routed, self.tenant.name, request.tokens)
        self.account.close_answered(relay, error)

    def _deadline(self, total_s: float) -> Deadline:
        config_ns, client_ns = self.account.start_ns + int(total_s * 1e9), self.account.deadline_ns
        if client_ns is not None and client_ns <= config_ns:
            return Deadline(client_ns, is_clients=True)
        return Deadline(config_ns, is_clients=False)

    # ---- out

    def _headers(self) -> http.Headers:
        """Returns the headers that every answer has."""
        headers = [(b"x-request-id", self.account.request_id.encode("latin-1"))]
        if self._upstream_name:
            headers.append((b"x-splittime-upstream", self._upstream_name.encode()))
        headers += self._lesser.headers if self._lesser is not None else []
        return [*headers, *self._turn.headers, (b"server-timing", self.account.timing())]

    async def _answer_by_template(self, told: Lesser) -> None:
        """No upstream is asked."""
        self.account.enter(Stage.DELIVER, now_ns())
        kind, body = template_answer(told, self.account.request_id)
        await http.respond(self._send, body, content_type=kind, headers=self._headers(), until_taken=True)
        self.account.close(FinishReason.STOP, None)

    async def _tell_failure(self, failure: UpstreamFailure | None) -> None:
        """No attempt was answered: tell what the last upstream said itself, or else why there is no answer."""
        assert failure is not None, "an attempt has failed"
        self.account.enter(Stage.DELIVER, now_ns())
        if failure.answer is None or not isinstance(self._relay, Relay) or self._relay.has_begun:
            raise failure.error
        await self._relay.give_answer(failure.answer)
        self.account.close(reason_of(failure.error), failure.error.info)

    async def _refuse(self, error: SplittimeError) -> None:
        self.account.enter(Stage.DELIVER, now_ns())
        if isinstance(error, Overloaded):
            self.gateway.metrics.count_refusal(error.info.code)
        if self._sign.has_begun or (self._relay is not None and self._relay.has_begun):
            last = http.error_event(error.info)
            await self._send({"type": "http.response.body", "body": last, "more_body": False})
        else:
            await http.respond_error(self._send, error, self._headers())
        self.account.close(reason_of(error), error.info)

    def _leave(self) -> None:
        """Give back what it holds, and correct what its tenant was charged."""
        if not self.account.is_closed:  # something unforeseen was raised; the edge has answered 500
            self.account.close(FinishReason.ERROR, EngineError("the gateway failed").info)
        self._turn.leave(self._relay)
        used = self.account.used_tokens(self._relay)
        if self._was_granted and self.account.request is not None:
            self.gateway.queue.settle(self.tenant.name, self.account.request.tokens, used)
        if self._quota is not None:
            self._quota.leave(used, now_ns())
            self.gateway.budgets.use(self.tenant.name, used)
        self.gateway.leave(self)
        self._relay = self._work = self._quota = None  # no circle is left for the garbage collector
