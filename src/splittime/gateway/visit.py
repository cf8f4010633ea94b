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

from splittime import __version__
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
from splittime.gateway.fair_queue import QUEUE_TIMEOUT
from splittime.gateway.forwarded import ForwardedRequest, forwarded
from splittime.gateway.relay import BrokenStream, Deadline, Relay, UpstreamFailure
from splittime.gateway.request_account import RequestAccount, reason_of
from splittime.gateway.service import GatewayService
from splittime.gateway.upstreams import Routed, Upstream
from splittime.ledger.account import REFUSED
from splittime.ledger.stages import Cause, Stage
from splittime.web import http
from splittime.web.tenants import Quota, tenant_of

now_ns = time.monotonic_ns
TRACE_HEADERS = (b"traceparent", b"tracestate")
SLO_HEADER = "x-llm-d-slo-ttft-ms"
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
        self._first_token_by_ns: int | None = None
        self._relay: Relay | None = None  # the latest
        self._work: asyncio.Task[None] | None = None
        self._quota: Quota | None = None  # that of its tenant, once it has let the request in
        self._was_granted = False
        self._ending: ErrorInfo | None = None  # why it is ended from outside
        self._upstream_name = ""

    async def serve(self) -> None:
        self.gateway.enter(self)
        try:
            await self._watched(await self._come_in())
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
        self.gateway.quota(self.tenant).check(now_ns())
        self.gateway.queue.require_room(self.tenant.name)

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
        work = self._work = loop.create_task(self._forward(request))
        gone = loop.create_task(self._until_gone())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not (self._relay is not None and self._relay.is_answered):
                self.account.cancelled_ns = now_ns()
                work.cancel()
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

    async def _forward(self, request: ForwardedRequest) -> None:
        """Attempt after attempt, until one is answered or no other may be made."""
        gateway, tried = self.gateway, list[str]()
        gateway.retry_budget.note_request(now_ns())
        failure: UpstreamFailure | None = None
        while True:
            try:
                routed = await self._admitted(request, tried)
            except Overloaded:
                if failure is None:
                    raise
                break
            try:
                await self._attempt(request, routed)
                return
            except UpstreamFailure as latest:
                failure = latest
            tried.append(routed.upstream.name)
            if not (failure.is_retryable and self._may_retry(request, len(tried))):
                break
            await self._pause(len(tried))
        await self._tell_failure(failure)

    async def _admitted(self, request: ForwardedRequest, tried: list[str]) -> Routed:
        """Returns the upstream that has a place for it."""
        at_ns, client_ns = now_ns(), self.account.deadline_ns
        until_ns = at_ns + int(self.gateway.config.queue.max_wait_s * 1e9)
        until_ns = until_ns if client_ns is None else min(until_ns, client_ns)
        self.account.enter(Stage.ADMIT, at_ns)
        try:
            routed = await self.gateway.queue.enter(
                self.tenant.name,
                request.pool,
                request.tokens,
                until_ns=until_ns,
                tried=tried,
                on_wait=lambda: self.account.enter(Stage.ADMIT, now_ns(), Cause.UPSTREAM_SLOTS),
            )
        except Refused as refused:
            if until_ns == client_ns and refused.reason == QUEUE_TIMEOUT:
                raise DeadlineExceeded.before("an upstream had room for it") from None
            raise
        self._was_granted = True
        self.account.enter(Stage.ROUTE, now_ns())
        return routed

    def _may_retry(self, request: ForwardedRequest, num_attempts: int) -> bool:
        gateway, at_ns = self.gateway, now_ns()
        if num_attempts >= gateway.config.retries.max_attempts or not gateway.router.allowed(request.pool, at_ns):
            return False
        if self.account.deadline_ns is not None and at_ns >= self.account.deadline_ns:
            return False
        return gateway.retry_budget.take(at_ns)

    async def _pause(self, num_attempts: int) -> None:
        """A random moment, so that requests that failed together do not come back together."""
        longest_s = self.gateway.config.retries.pause_s * 2 ** (num_attempts - 1)
        self.account.enter(Stage.ROUTE, now_ns(), Cause.RETRY_PAUSE)
        await asyncio.sleep(random.uniform(0, min(longest_s, MAX_PAUSE_S)))

    async def _attempt(self, request: ForwardedRequest, routed: Routed) -> None:
        """Returns when the client has the answer, whole or with an error event at its end."""
        gateway, upstream = self.gateway, routed.upstream
        self._upstream_name = upstream.name
        deadline = self._deadline(upstream.config.total_s)
        self.account.begin_attempt()
        headers = self._forwarded_headers(upstream, deadline)
        begin_ns = now_ns()
        relay = self._relay = Relay(
            gateway.session,
            upstream,
            request,
            headers,
            deadline,
            max_answer_bytes=gateway.config.max_answer_bytes,
            send=self._send,
            answer_headers=self._headers,
            on_read=lambda: self.account.note_read(upstream, relay, begin_ns),
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
            _blame(upstream, failure)
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

    def _forwarded_headers(self, upstream: Upstream, deadline: Deadline) -> dict[str, str]:
        """What the upstream is told: its own key, never the client's, and what is left of the time."""
        headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            "user-agent": f"splittime-gateway/{__version__}",
            "x-request-id": self.account.attempt_id,
            "x-request-deadline-ms": _left_ms(deadline.at_ns),
        }
        if upstream.key is not None:
            headers["authorization"] = f"Bearer {upstream.key}"
        if upstream.keeps_accounts:
            headers["x-include-timing"] = "1"
        if self._first_token_by_ns is not None:
            headers[SLO_HEADER] = _left_ms(self._first_token_by_ns)
        for name in TRACE_HEADERS:
            value = http.header(self._scope, name)
            if value is not None and value.isascii() and value.isprintable():  # else no header of ours
                headers[name.decode()] = value
        return headers

    # ---- out

    def _headers(self) -> http.Headers:
        """Returns the headers that every answer has."""
        headers = [(b"x-request-id", self.account.request_id.encode("latin-1"))]
        if self._upstream_name:
            headers.append((b"x-splittime-upstream", self._upstream_name.encode()))
        return [*headers, (b"server-timing", self.account.timing())]

    async def _tell_failure(self, failure: UpstreamFailure) -> None:
        """No attempt was answered: tell what the last upstream said itself, or else why there is no answer."""
        self.account.enter(Stage.DELIVER, now_ns())
        if failure.answer is None or self._relay is None:
            raise failure.error
        await self._relay.give_answer(failure.answer)
        self.account.close(reason_of(failure.error), failure.error.info)

    async def _refuse(self, error: SplittimeError) -> None:
        self.account.enter(Stage.DELIVER, now_ns())
        relay = self._relay
        if isinstance(error, Overloaded):
            self.gateway.metrics.count_refusal(error.info.code)
        if relay is not None and relay.has_begun:
            last = http.error_event(error.info)
            await self._send({"type": "http.response.body", "body": last, "more_body": False})
        else:
            await http.respond_error(self._send, error, self._headers())
        self.account.close(reason_of(error), error.info)

    def _used_tokens(self) -> int:
        """Returns the tokens of the request, as told, or as estimated: of a stream that told none, one an event."""
        if self.account.request is None or self._relay is None or self._relay.first_byte_ns is None:
            return 0
        usage = self._relay.events.read()
        if usage.prompt_tokens is not None and usage.output_tokens is not None:
            return usage.prompt_tokens + usage.output_tokens
        most = self.account.request.output_tokens
        return self.account.request.prompt_tokens + (min(self._relay.events.num_events, most) if most else 0)

    def _leave(self) -> None:
        """Give back what it holds, and correct what its tenant was charged."""
        if not self.account.is_closed:  # something unforeseen was raised; the edge has answered 500
            self.account.close(FinishReason.ERROR, EngineError("the gateway failed").info)
        used = self._used_tokens()
        if self._was_granted and self.account.request is not None:
            self.gateway.queue.settle(self.tenant.name, self.account.request.tokens, used)
        if self._quota is not None:
            self._quota.leave(used, now_ns())
        self.gateway.leave(self)
        self._relay = self._work = self._quota = None  # no circle is left for the garbage collector


def _blame(upstream: Upstream, failure: UpstreamFailure | BrokenStream) -> None:
    """Tell the breaker what a failure says of the upstream."""
    if failure.is_fault:
        upstream.breaker.note_failure(now_ns())
    elif isinstance(failure, UpstreamFailure) and failure.answer is not None:
        upstream.breaker.note_busy(now_ns(), _retry_after_s(failure.answer.headers))
    else:
        upstream.breaker.note_nothing()


def _retry_after_s(headers: http.Headers) -> float | None:
    """Returns `Retry-After` in seconds; None for a date, or if there is none."""
    value = dict(headers).get(b"retry-after", b"")
    return float(value) if value.isdigit() else None


def _left_ms(until_ns: int) -> str:
    return str(max(1, (until_ns - now_ns()) // 1_000_000))
