"""One request brought to upstreams: attempt after attempt, until its client has an answer or no other may be made.

Each attempt waits for a place (`fair_queue`), asks one upstream (`RunningAttempt`), and gives the place back. What
follows a failure is decided here: another attempt, that goes on with a stream where one had begun (`resume`), or the
failure is told.

While a stream waits for an upstream, its client is told that it does, and how long that may last at the most. The head
of the answer goes first, so that what refuses the request afterwards is an error event and no status of its own.
Comments are no events: clients skip them, and proxies between see that the connection lives.

An attempt ends once, however many say so. Then its place is free, and breaker, metrics and account know.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from splittime.core.errors import DeadlineExceeded, Overloaded, Refused, SplittimeError
from splittime.gateway import verdict as verdicts
from splittime.gateway.breaker import longest_pause_s
from splittime.gateway.breaks import Deadline
from splittime.gateway.degrade import MarkedAnswer
from splittime.gateway.fair_queue import QUEUE_TIMEOUT
from splittime.gateway.forwarded import ForwardedRequest
from splittime.gateway.relay import Relay
from splittime.gateway.request_account import RequestAccount, reason_of
from splittime.gateway.responses import HeldResponse
from splittime.gateway.resume import Asked, Resumption
from splittime.gateway.routing.affinity import SeenPrefix
from splittime.gateway.routing.escalation import AskedAnew, DifficultyTurn
from splittime.gateway.service import GatewayService
from splittime.gateway.upstreams import Routed, Upstream, sent_headers
from splittime.gateway.verdict import Interrupted, UpstreamFailure, Whose
from splittime.ledger.attempts import CANCELLED, UNSURE
from splittime.ledger.stages import Cause, Stage
from splittime.web import http
from splittime.web.reading import BodySender
from splittime.web.tenants import Sharer

now_ns = time.monotonic_ns
HEAD: http.Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


class RunningAttempt:
    """attempt_id: by which the upstream knows it. begin_ns: when it was sent. tokens, prompt_tokens: of its request, as
    estimated. prefix: of its prompt, where affinity remembers it."""

    def __init__(
        self,
        gateway: GatewayService,
        account: RequestAccount,
        routed: Routed,
        relay: Relay,
        resumption: Resumption,
        *,
        attempt_id: str,
        begin_ns: int,
        tenant: str,
        tokens: int,
        prompt_tokens: int,
        prefix: SeenPrefix | None = None,
        is_stream: bool = True,
        is_written: bool = True,
    ) -> None:
        self._gateway, self._account, self._tenant = gateway, account, tenant
        self._tokens, self._prompt_tokens, self._prefix = tokens, prompt_tokens, prefix
        self.routed, self.relay, self.resumption = routed, relay, resumption
        self.attempt_id, self.begin_ns = attempt_id, begin_ns
        self.is_ended, self._successes = False, routed.upstream.breaker.num_successes
        self._is_stream = is_stream
        self._plain_tokens = 0 if is_written else tokens  # what writes a whole answer is soon in no prompt's way
        self._has_begun = not is_stream  # of no stream the first byte is the end, which tells nothing of a queue
        relay.on_first_byte = self._begun
        if is_stream:
            routed.upstream.waits.sent(tokens, begin_ns)
        else:
            routed.upstream.in_flight.plain_tokens += self._plain_tokens
        gateway.affinity.note_sent(prefix, routed.upstream.name, routed.affinity)

    async def run(self) -> None:
        """Returns when the client has the answer, whole or with an error event at its end. Raises `UpstreamFailure`, or
        `AskedAnew` where that is not given."""
        error: SplittimeError | None = None
        try:
            await self.relay.run()
            verdict = self.relay.verdict  # that of a refusal which is the request's own has an answer
            self.end(verdict.code if verdict.answer is None else "", verdict)
        except verdicts.AttemptFailure as failure:
            error = failure.with_traceback(None).error  # whose frames may have it
            self._end_failed(failure)
            if isinstance(failure, verdicts.UpstreamFailure):
                raise
        except AskedAnew as asked:
            self.end(asked.verdict, verdicts.GOOD if asked.verdict == UNSURE else verdicts.LEFT)
            raise
        finally:
            self.end(CANCELLED)
        self._account.close_answered(self.relay, error)

    def _begun(self) -> None:
        is_answer = self.relay.status is None or self.relay.status in verdicts.ANSWERED
        if is_answer and not (self._has_begun or self.is_ended):
            self._has_begun = True
            self.routed.upstream.waits.begun(self._tokens, now_ns())

    def _end_failed(self, failure: verdicts.AttemptFailure) -> None:
        code, successes = failure.error.info.code, self.routed.upstream.breaker.num_successes
        self.relay.failed_by = failure.verdict.whose
        if isinstance(failure, verdicts.UpstreamFailure):
            failure.is_outright = failure.verdict.is_upstreams and successes == self._successes
        self.end(code, verdicts.or_own(failure.verdict, is_own=self._gateway.lag.explains(code, self.begin_ns)))

    def end(self, ending: str, verdict: verdicts.AnswerVerdict = verdicts.LEFT) -> None:
        """ending: "" for an answer, or else a code."""
        if self.is_ended:
            return
        self.is_ended = True
        self.relay.tell_nobody()
        upstream, at_ns = self.routed.upstream, now_ns()
        is_silent = self.relay.first_byte_ns is None and verdict.whose in (
            verdicts.Whose.REQUEST,
            verdicts.Whose.CLIENT,
        )
        may_hang = is_silent and not self._gateway.lag.was_late(self.begin_ns)
        limits, is_own = upstream.config, verdict.code in verdicts.OWN_LIMITS
        if may_hang and upstream.in_flight.hangs(self.begin_ns, at_ns, limits.first_byte_s, is_own=is_own):
            verdict = verdict._replace(whose=verdicts.Whose.HEALTH, is_reached=True)
        if not self._is_stream:
            upstream.in_flight.plain_tokens -= self._plain_tokens
        elif not self._has_begun:
            upstream.waits.gone(self._tokens, at_ns)
        upstream.hear(verdict, self.relay.path, self.relay.model, at_ns, self._tenant)
        if verdict.is_against:
            self._gateway.affinity.note_failed(self._prefix, upstream.name)
        elif verdict.whose is verdicts.Whose.NOBODY:
            self._gateway.affinity.note_answered(self._prefix, upstream.name)
        self._account.keep_attempt(
            self.routed,
            self.relay,
            self.begin_ns,
            ending,
            lost_tokens=self._prompt_tokens if ending == UNSURE else 0,
            first_tokens=self.resumption.first_tokens if self.relay.first_byte_ns else None,
        )
        self._gateway.metrics.count_attempt(upstream.name, ending or "answered", verdict.whose)
        self._gateway.queue.leave(self.routed, self._tenant, self._tokens)


class SignOfLife:
    """every_s: between two comments; None for none. has_begun: the client has the head, by this or by a stream that
    broke off behind a whole event."""

    def __init__(self, send: http.Send, headers: Callable[[], http.Headers], every_s: float | None) -> None:
        self._send, self._headers, self._every_s = send, headers, every_s
        self.has_begun = False

    async def during(self, waiting: Coroutine[Any, Any, Routed], until_ns: int) -> Routed:
        """Returns what was waited for. until_ns: when the wait ends at the latest."""
        if self._every_s is None:
            return await waiting
        loop, telling = asyncio.get_running_loop(), list[asyncio.Task[None]]()

        def begin(every_s: float) -> None:
            telling.append(loop.create_task(self._tell(every_s, until_ns)))

        timer = loop.call_later(self._every_s, begin, self._every_s)
        try:
            return await waiting
        finally:
            timer.cancel()
            for task in telling:
                task.cancel()  # and not waited for: who is cancelled here would lose the place that it has just got

    async def _tell(self, every_s: float, until_ns: int) -> None:
        try:
            while True:
                await self._tell_once(max(0.0, (until_ns - now_ns()) / 1e9))
                await asyncio.sleep(every_s)
        except http.Disconnected:
            pass  # the request's own task sees it too

    async def _tell_once(self, left_s: float) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": [*HEAD, *self._headers()]})
        comment = b": queued; it has an upstream or is refused within %.1f s\n\n" % left_s
        await self._send({"type": "http.response.body", "body": comment, "more_body": True})


class Forwarding:
    """draw: of chance, for shedding. headers: returns those that every answer has. mark: what an answer says of itself
    that is less than was asked for. first_token_by_ns: when the client wants a first token.

    relay: the latest attempt's, which has the answer. upstream_name: whom the latest attempt asked, "" before one.
    was_granted: whether it ever had a place."""

    def __init__(
        self,
        gateway: GatewayService,
        account: RequestAccount,
        scope: http.Scope,
        *,
        tenant: Sharer,
        draw: float,
        first_token_by_ns: int | None,
        send: http.Send,
        headers: Callable[[], http.Headers],
        sign: SignOfLife,
        mark: dict[str, str],
    ) -> None:
        self._gateway, self._account, self._scope = gateway, account, scope
        self._tenant, self._draw, self._first_token_by_ns = tenant.name, draw, first_token_by_ns
        self._sender = BodySender(tenant, http.receive_never)  # who leaves has all of this cancelled
        self._send, self._headers, self._sign, self._mark = send, headers, sign, mark
        self._tried: list[str] = []  # whom it was sent to
        self._resumption: Resumption
        self._turn = DifficultyTurn(gateway, account, tenant.name)
        self._prefix: SeenPrefix | None = None
        self.relay: Relay | None = None
        self.upstream_name = ""
        self.was_granted = False

    async def run(self, request: ForwardedRequest) -> None:
        """Raises what the client must be told where no attempt was answered."""
        self._gateway.retry_budgets.of(self._tenant).note_request(now_ns())
        if self._gateway.lint is not None and request.is_written:
            self._gateway.lint.note(request)
        request = self._turn.begin(request)
        while True:
            try:
                return await self._until_answered(request)
            except AskedAnew:
                request = self._begin_again(request)

    def _begin_again(self, request: ForwardedRequest) -> ForwardedRequest:
        """An answer has come, and is not given. Returns what is asked now."""
        found = self._resumption.first_tokens
        assert found is not None, "there was a verdict"
        assert self.relay is not None, "an answer has come"
        asked = self._turn.asked_anew(request, found, self.relay.events.read())
        self._gateway.queue.settle(self._tenant, request.tokens, self._account.asked_anew_tokens)
        self.relay, self.upstream_name, self.was_granted = None, "", False
        self._tried.clear()
        return asked

    async def _until_answered(self, request: ForwardedRequest) -> None:
        gateway, tried = self._gateway, self._tried
        self._resumption = self._turn.resumption(request)
        self._prefix = gateway.affinity.seen(request, self._tenant)
        failure: UpstreamFailure | None = None
        while True:
            try:
                routed = await self._admitted(request, self._resumption.tried(gateway.router, tried))
            except Overloaded:
                if failure is None:
                    raise
                break
            if not self._resumption.suits(routed.upstream):
                gateway.queue.leave(routed, self._tenant, request.tokens)
                break
            try:
                await self._attempt(request, routed)
                return
            except UpstreamFailure as latest:
                failure = latest.with_traceback(None)  # which has this frame
            if not (failure.verdict.is_retryable and self._may_retry(request, len(tried), failure)):
                break
            self._sign.has_begun |= self.relay is not None and self.relay.has_begun
            if not isinstance(failure, Interrupted) and failure.verdict.whose is not Whose.PATH:
                await self._pause(len(tried))
        await self._tell_failure(failure)

    @property
    def named(self) -> http.Headers:
        """The headers that say who answers."""
        name, found = self.upstream_name, None if self.relay is None else self._resumption.first_tokens
        upstream = [(b"x-splittime-upstream", name.encode())] if name else []
        return [*upstream, *self._turn.headers(found)]

    async def _admitted(self, request: ForwardedRequest, tried: list[str]) -> Routed:
        """Returns the upstream that has a place for it."""
        at_ns, client_ns = now_ns(), self._account.deadline_ns
        if (place := self._turn.take_place()) is not None:
            return self._granted(place)
        until_ns = at_ns + int(self._gateway.config.queue.max_wait_s * 1e9)
        until_ns = until_ns if client_ns is None else min(until_ns, client_ns)
        self._account.enter(Stage.ADMIT, at_ns)
        try:
            entering = self._gateway.queue.enter(
                self._tenant,
                request.pool,
                request.tokens,
                until_ns=until_ns,
                tried=tried,
                lacking=partial(self._lacking, request),
                prefix=self._prefix,
                draw=self._draw,
                answers=request.places,
                on_wait=lambda: self._account.enter(Stage.ADMIT, now_ns(), Cause.UPSTREAM_SLOTS),
            )
            routed = await self._sign.during(entering, until_ns)
        except Refused as refused:
            if until_ns == client_ns and refused.reason == QUEUE_TIMEOUT:
                raise DeadlineExceeded.before("an upstream had room for it") from None
            raise
        return self._granted(routed)

    def _granted(self, routed: Routed) -> Routed:
        self.was_granted = True
        self._account.enter(Stage.ROUTE, now_ns())
        return routed

    def _may_retry(self, request: ForwardedRequest, num_attempts: int, failure: UpstreamFailure) -> bool:
        """What is not counted by the budget of retries: a stream that goes on, a path that an upstream does not have
        (that is known afterwards), and a request that leaves an upstream which nobody has an answer of for one that
        answers. The breaker bounds those; what the budget is against, upstreams that fail since they have too many
        requests, fail and answer by turns. A refusal that the request brought about is asked of one other, and takes
        nothing from what others may need."""
        gateway, at_ns, whose = self._gateway, now_ns(), failure.verdict.whose
        allowed = gateway.router.allowed(request.pool, at_ns, self._tenant)
        if not allowed:
            return False
        without = self._without(request, at_ns)
        others = [one for one in allowed if one.limit and one.name not in without]
        if (not others and not failure.verdict.is_passing) or (whose is Whose.REQUEST and num_attempts > 1):
            return False
        is_failover = failure.is_outright and any(one.breaker.is_well for one in others)
        return gateway.retry_budgets.of(self._tenant).may_retry(
            num_attempts,
            at_ns,
            self._account.deadline_ns,
            is_free=whose is Whose.PATH or isinstance(failure, Interrupted),
            is_failover=is_failover or whose is Whose.REQUEST,
        )

    def _without(self, request: ForwardedRequest, at_ns: int) -> list[str]:
        """Returns the upstreams that have been asked, or do not have the path."""
        return [*self._tried, *self._lacking(request, at_ns)]

    def _lacking(self, request: ForwardedRequest, at_ns: int) -> list[str]:
        """Returns who does not have its path or model, or asked its tenant for a pause."""
        return self._gateway.router.left_out(request.pool, request.path, request.model, self._tenant, at_ns)

    async def _pause(self, num_attempts: int) -> None:
        """A random moment, so that requests that failed together do not come back together."""
        self._account.enter(Stage.ROUTE, now_ns(), Cause.RETRY_PAUSE)
        pause_s = random.uniform(0, longest_pause_s(self._gateway.config.retries, num_attempts))
        deadline_ns = self._account.deadline_ns
        left_s = pause_s if deadline_ns is None else max(0.0, (deadline_ns - now_ns()) / 1e9)
        await asyncio.sleep(min(pause_s, left_s))
        if left_s < pause_s:
            raise DeadlineExceeded.before("another upstream was asked")

    async def _attempt(self, request: ForwardedRequest, routed: Routed) -> None:
        """Returns when the client has the answer, whole or with an error event at its end; gives back the place."""
        attempt = await self._sent(request, routed)
        self._account.enter(Stage.UPSTREAM, attempt.begin_ns)
        self.relay, self.upstream_name = attempt.relay, routed.upstream.name
        self._account.begin_attempt(attempt.attempt_id)
        await attempt.run()

    async def _sent(self, request: ForwardedRequest, routed: Routed) -> RunningAttempt:
        """Returns an attempt that has its place, and is about to be sent."""
        attempt_id, resumption = http.new_request_id(), self._resumption
        self._tried.append(routed.upstream.name)
        try:
            asked = await resumption.asked(routed.upstream, self._sender)
            begin_ns = now_ns()
            relay = self._relay(routed.upstream, resumption, asked, attempt_id, begin_ns)
        except BaseException:
            self._gateway.queue.leave(routed, self._tenant, request.tokens)
            raise
        return RunningAttempt(
            self._gateway,
            self._account,
            routed,
            relay,
            resumption,
            attempt_id=attempt_id,
            begin_ns=begin_ns,
            tenant=self._tenant,
            tokens=request.tokens,
            prompt_tokens=request.prompt_tokens,
            prefix=self._prefix,
            is_stream=request.is_stream,
            is_written=request.is_written,
        )

    def _relay(self, upstream: Upstream, resumption: Resumption, asked: Asked, attempt_id: str, begin_ns: int) -> Relay:
        deadline = self._deadline(upstream.config.total_s)
        headers = sent_headers(self._scope, upstream, attempt_id, deadline.at_ns, self._first_token_by_ns)
        if self._gateway.tracing is not None:
            headers["traceparent"] = self._account.attempt_traceparent(attempt_id)
        relay = Relay(
            self._gateway.connections,
            upstream,
            headers,
            deadline,
            resumption,
            asked,
            max_answer_bytes=self._gateway.config.max_answer_bytes,
            send=self._send,
            answer_headers=self._headers,
            on_read=partial(self._account.note_read, upstream, begin_ns),
            mark=MarkedAnswer(self._mark),
            has_begun=self._sign.has_begun,
        )
        relay.events.on_id = partial(self._note_id, upstream, relay)
        return relay

    def _note_id(self, upstream: Upstream, relay: Relay, response_id: str) -> None:
        """An upstream keeps its answer, which the client does not have yet."""
        if relay.status == 200 and self._account.request is not None:
            held = HeldResponse(upstream.name, self._account.request.model)
            self._gateway.held.note(self._tenant, response_id, held)

    def _deadline(self, total_s: float) -> Deadline:
        config_ns, client_ns = self._account.start_ns + int(total_s * 1e9), self._account.deadline_ns
        if client_ns is not None and client_ns <= config_ns:
            return Deadline(client_ns, is_clients=True)
        return Deadline(config_ns, is_clients=False)

    async def _tell_failure(self, failure: UpstreamFailure | None) -> None:
        """No attempt was answered: tell what the last upstream said itself, or else why there is no answer."""
        assert failure is not None, "an attempt has failed"
        self._account.enter(Stage.DELIVER, now_ns())
        answer = failure.verdict.answer
        if answer is None or self.relay is None or self.relay.has_begun:
            raise failure.error
        await self.relay.give_answer(answer)
        if failure.verdict.whose is Whose.PATH:
            return self._account.close_answered(self.relay, None)
        self._account.close(reason_of(failure.error), failure.error.info)
