"""The account of one request through the gateway: its stages, its attempts, and what is handed to the ledger.

When the end of an answer has been read and the upstream told its own account, the time since the request was sent is
divided by lengths, not by instants of two clocks: first the account's length, then what the client did not take
(`client_wait`, as far as there is a difference), and the rest is `network` (ADR 23).
"""

import secrets
import time
from collections.abc import Callable
from typing import Protocol

from splittime.core.errors import DeadlineExceeded, EngineError, ErrorInfo, SplittimeError, UpstreamError
from splittime.core.request import FinishReason
from splittime.core.trace_context import NO_TRACE, TraceContext
from splittime.gateway.answer_events import AnswerEvents, NestedAccount, ignored
from splittime.gateway.audit import AuditLog
from splittime.gateway.breaker import account_wait_ns
from splittime.gateway.budgets import LearntUse
from splittime.gateway.forwarded import ENDPOINTS, ForwardedRequest
from splittime.gateway.relay import Relay
from splittime.gateway.tracing import attempt_context
from splittime.gateway.upstreams import Routed, Upstream
from splittime.gateway.verdict import Whose
from splittime.ledger.account import REFUSED, TRY_AGAIN, Account, ClosedAccount
from splittime.ledger.attempts import Attempt, FirstTokens
from splittime.ledger.derive import server_timing
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.store import Ledger
from splittime.web import http
from splittime.wire.sse import AnswerReader

now_ns = time.monotonic_ns
UNKNOWN = "unknown"  # finish reason of an answer that told none
MAX_MODEL_CHARS = 256


class EndedAnswer(Protocol):
    """Where the answer comes from that a client has: an upstream (`Relay`), or the cache."""

    @property
    def events(self) -> AnswerEvents: ...
    @property
    def status(self) -> int | None: ...
    @property
    def ended_ns(self) -> int | None: ...


class RequestAccount:
    """attempt_id: by which the latest upstream knows the request, so that no client can take another's. cancelled_ns:
    when its client went away. deadline_ns: the client's own. version: of the config, in the account. asked_anew_tokens:
    of answers that nobody was given, which its tenant used all the same. sent_ns: when its latest attempt was.
    on_read: called when the end of an answer has been read."""

    def __init__(
        self,
        path: str,
        scope: http.Scope,
        tenant: str,
        ledger: Ledger,
        version: str = "",
        audit: AuditLog | None = None,
    ) -> None:
        self._path, self._scope, self._tenant, self._ledger = path, scope, tenant, ledger
        self._version, self._audit = version, audit
        self.start_ns: int = scope.get(http.START_NS) or now_ns()
        self._started_at_unix_ns = time.time_ns() - (now_ns() - self.start_ns)
        self._account = Account("", self.start_ns, Stage.RECEIVE)
        self._attempts: list[Attempt] = []
        self._nested = NestedAccount()
        self._trace = http.trace_context(scope)
        self.request_id = self.attempt_id = self.degraded = ""
        self.request: ForwardedRequest | None = None
        self.cancelled_ns: int | None = None
        self.deadline_ns: int | None = None
        self.asked_anew_tokens = 0
        self.sent_ns = self.start_ns
        self.on_read: Callable[[Relay], None] = ignored

    @property
    def is_closed(self) -> bool:
        return self._account.end_ns is not None

    @property
    def own_id(self) -> str:
        """The id of the answer: the latest attempt's, or the request's own where no upstream was asked."""
        return f"{ENDPOINTS[self._path].prefix}-{self.attempt_id or self.request_id}"

    def enter(self, stage: Stage, at_ns: int, cause: Cause | None = None) -> None:
        self._account.enter(stage, at_ns, cause)

    def timing(self) -> bytes:
        """Returns the stages so far, as a Server-Timing header."""
        return server_timing(self._account.intervals(now_ns()), self.start_ns).encode("latin-1")

    # ---- attempts

    def begin_attempt(self, attempt_id: str) -> None:
        """What is read from now on is this attempt's answer."""
        self._nested, self.attempt_id, self.sent_ns = NestedAccount(), attempt_id, now_ns()

    def attempt_traceparent(self, attempt_id: str) -> str:
        """Returns what an attempt's upstream is told, where spans are made: of the client's trace, or of one
        that begins here."""
        if self._trace == NO_TRACE:
            self._trace = TraceContext(secrets.token_hex(16), "")
        return attempt_context(self._trace.trace_id, attempt_id).traceparent

    def note_read(self, upstream: Upstream, begin_ns: int, relay: Relay) -> None:
        """The end of the answer has been read: divide the time since it was sent, and begin to deliver."""
        self.on_read(relay)  # before its client has the end, and may ask again
        at_ns = now_ns()
        if upstream.keeps_accounts and relay.events.is_done:
            nested = relay.events.nested()
            if nested.duration_ns > at_ns - begin_ns:
                longer_ms = (nested.duration_ns - (at_ns - begin_ns)) / 1e6
                nested = NestedAccount(fault=f"the upstream's account is {longer_ms:.3f} ms longer than the gateway's")
            if not nested.fault:
                self._divide(begin_ns + nested.duration_ns, at_ns, relay.blocked_ns)
            self._nested = nested
        self._account.enter(Stage.DELIVER, at_ns)

    def used_tokens(self, relay: Relay | EndedAnswer | None, learnt: LearntUse) -> int:
        """Returns the tokens of the request, as told, or as estimated, and learns from those that are told: that both
        are 0 tells nothing. None of a request that no upstream was sent, or of whose answers its client was given none;
        but who leaves one that works at it, or is given none by his own doing, has used what it did until then."""
        if self.request is None or not isinstance(relay, Relay):
            return 0
        request, resumed_after = self.request, relay.resumed_after
        was_left = self.cancelled_ns is not None or (self.deadline_ns is not None and now_ns() >= self.deadline_ns)
        is_own = relay.failed_by is Whose.REQUEST or (relay.failed_by is None and was_left)
        if not (relay.has_given or is_own) or ((relay.status or 200) >= 300 and not resumed_after):
            return 0
        usage = relay.events.read()
        prompt, output = usage.prompt_tokens, usage.output_tokens
        if request.is_written and not (prompt or output):
            prompt = output = None
        lasted_s = ((relay.first_byte_ns or now_ns()) - self.sent_ns) / 1e9  # of a whole answer this is all
        if prompt is not None and output is not None:
            if relay.events.is_done and not resumed_after:
                pieces = relay.events.num_pieces
                learnt.note(self._tenant, request, output, pieces, lasted_s)
            return prompt + output
        prompt, text_bytes = request.prompt_tokens if prompt is None else prompt, relay.events.text_bytes
        if not (request.is_stream or text_bytes):
            return prompt + learnt.unseen_tokens(self._tenant, request, lasted_s)
        return prompt + self._written_tokens(relay, learnt, text_bytes)

    def _written_tokens(self, relay: Relay, learnt: LearntUse, text_bytes: int) -> int:
        """Returns the tokens of what there is of an answer that did not tell them."""
        assert self.request is not None, "it was sent"
        told = learnt.written_tokens(self._tenant, self.request, relay.events.num_pieces, text_bytes)
        most = self.request.output_tokens
        return min(told + relay.resumed_after, most) if self.request.is_bounded else told + relay.resumed_after

    def _divide(self, upstream_ns: int, at_ns: int, blocked_ns: int) -> None:
        """upstream_ns: when the upstream's account would have ended if it had begun with the sending."""
        blocked_ns = min(blocked_ns, at_ns - upstream_ns)
        if blocked_ns:
            self._account.enter(Stage.CLIENT_WAIT, upstream_ns)
        self._account.enter(Stage.NETWORK, upstream_ns + blocked_ns)

    def keep_attempt(
        self,
        routed: Routed,
        relay: Relay,
        begin_ns: int,
        error: str,
        *,
        lost_tokens: int = 0,
        first_tokens: FirstTokens | None = None,
    ) -> None:
        """Write down an attempt that is over."""
        nested, usage, at_ns = self._nested, relay.events.read(), now_ns()
        if nested.stages and (limit := routed.upstream.in_flight_limit) is not None:
            limit.note_wait(account_wait_ns(nested.stages), nested.duration_ns, begin_ns, at_ns)
        self._attempts.append(
            Attempt(
                upstream=routed.upstream.name,
                request_id=self.attempt_id,
                considered=routed.considered,
                begin_ns=begin_ns,
                end_ns=at_ns,
                status=relay.status,
                first_byte_ns=relay.first_byte_ns,
                error=error,
                num_events=relay.events.num_events,
                knows_tokens=usage.output_tokens is not None,
                nested=nested.stages,
                nested_fault=nested.fault,
                resumed_by=relay.resumed_by,
                resumed_after=relay.resumed_after,
                lost_tokens=lost_tokens,
                first_tokens=first_tokens,
                affinity=routed.affinity,
            )
        )

    # ---- the end

    def close_answered(self, relay: EndedAnswer, error: SplittimeError | None) -> None:
        """The client has an answer: close the account at the instant at which it had the end."""
        usage, events, status = relay.events.read(), relay.events, relay.status or 0
        at_ns = relay.ended_ns or now_ns()
        if self.cancelled_ns is not None:  # others had the answer
            self.close(FinishReason.ABORT, None, at_ns, usage)
        elif error is not None:
            self.close(reason_of(error), error.info, at_ns, usage)
        elif events.error is not None:
            words = f"an error inside the stream: {events.error.message}"
            told = UpstreamError(words, code="upstream_error_event")
            self.close(FinishReason.ERROR, told.info, at_ns, usage)
        elif status >= 400:
            refused = UpstreamError(f"the upstream answered {status}", code=f"upstream_{status}", status=status)
            self.close(REFUSED, refused.info, at_ns, usage)
        else:
            self.close(usage.finish_reason or UNKNOWN, None, at_ns, usage)

    def close(
        self, finish_reason: str, error: ErrorInfo | None, at_ns: int | None = None, usage: AnswerReader | None = None
    ) -> None:
        """Close the account and hand it to the ledger."""
        at_ns = now_ns() if at_ns is None else at_ns
        self._account.close(at_ns)
        usage, request = usage or AnswerReader(), self.request
        account = ClosedAccount(
            request_id=self.request_id,
            group_id=self.own_id,
            model="" if request is None else request.model[:MAX_MODEL_CHARS],
            endpoint=ENDPOINTS[self._path].name,
            started_at_unix_ns=self._started_at_unix_ns,
            start_ns=self.start_ns,
            end_ns=at_ns,
            intervals=tuple(self._account.intervals()),
            finish_reason=finish_reason,
            error=error,
            prompt_tokens=usage.prompt_tokens or 0,
            cached_tokens=usage.cached_tokens or 0,
            output_tokens=usage.output_tokens or 0,
            cancelled_ns=self.cancelled_ns,
            unseen_ns=self._scope.get(http.UNSEEN_NS, 0),
            tenant=self._tenant,
            max_tokens=0 if request is None else request.output_tokens,
            deadline_ns=self.deadline_ns,
            attempts=tuple(self._attempts),
            trace_id=self._trace.trace_id,
            parent_id=self._trace.span_id,
            degraded=self.degraded,
            routing=None if request is None else request.decision,
            config_version=self._version,
        )
        self._ledger.add_account(account)
        if self._audit is not None:
            self._audit.note_request(account, None if request is None else request.body)


def reason_of(error: SplittimeError) -> str:
    """Returns the finish reason of a request that ended with this error."""
    if isinstance(error, DeadlineExceeded) or error.info.code == "upstream_total_timeout":
        return FinishReason.DEADLINE
    is_ours = isinstance(error, UpstreamError | EngineError) and error.info.status != TRY_AGAIN
    return FinishReason.ERROR if is_ours else REFUSED
