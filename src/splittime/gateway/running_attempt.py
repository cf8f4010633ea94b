"""One attempt while it runs: a place at an upstream, the relay to it, and what is written down when it ends.

It ends once, however many say so, and then its place is free, the breaker and the metrics know, and the account has it.
"""

import time

from splittime.core.errors import SplittimeError
from splittime.gateway import verdict as verdicts
from splittime.gateway.relay import Relay
from splittime.gateway.request_account import RequestAccount
from splittime.gateway.resume.resumption import Resumption
from splittime.gateway.routing.escalation import AskedAnew
from splittime.gateway.routing.prefix_table import SeenPrefix
from splittime.gateway.service import GatewayService
from splittime.gateway.upstreams import Routed
from splittime.ledger.attempts import CANCELLED, TIED_LOST, UNSURE

now_ns = time.monotonic_ns


class RunningAttempt:
    """attempt_id: by which the upstream knows it. begin_ns: when it was sent. tokens, prompt_tokens: of its request, as
    estimated. prefix: of its prompt, where affinity remembers it. tied_to: the id of the attempt that it races with; ""
    for none."""

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
        self.attempt_id, self.begin_ns, self.tied_to = attempt_id, begin_ns, ""
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

    async def open(self) -> None:
        """Returns when it has the first byte of an answer that the client shall have; `run` gives it on. Raises
        `UpstreamFailure`, and has ended then."""
        try:
            await self.relay.open()
        except verdicts.UpstreamFailure as failure:
            self._end_failed(failure)
            raise

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

    def give_up(self, ending: str) -> None:
        """End an attempt that nobody needs any more: an answer that has begun is cut off."""
        self.relay.close()
        self.end(ending)

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
        is_silent = self.relay.first_byte_ns is None and verdict.code in verdicts.OWN_LIMITS
        may_hang = is_silent and not self._gateway.lag.was_late(self.begin_ns)
        if may_hang and upstream.in_flight.hangs(self.begin_ns, at_ns, upstream.config.first_byte_s):
            verdict = verdict._replace(whose=verdicts.Whose.HEALTH, is_answered=True)
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
            attempt_id=self.attempt_id,
            tied_to=self.tied_to,
            lost_tokens=self._prompt_tokens if ending in (TIED_LOST, UNSURE) else 0,
            first_tokens=self.resumption.first_tokens if self.relay.first_byte_ns else None,
        )
        self._gateway.metrics.count_attempt(upstream.name, ending or "answered", verdict.whose)
        self._gateway.queue.leave(self.routed, self._tenant, self._tokens)
