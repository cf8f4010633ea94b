"""A closed account as OpenTelemetry spans, in OTLP's JSON: the request, its stages, its attempts, and what an upstream
told of its own.

    chat MODEL                       server; the parent is the client's span, where it sent `traceparent`
      receive, admit, route, ...     internal; a stage each, end to end, so they sum to the request
      chat MODEL                     client; an attempt each: its id is what the upstream got as its parent
        upstream, network, ...       internal; the stages within the attempt
          queue, prefill, ...        internal; what an upstream told that keeps accounts of its own

Names of attributes are those of OpenTelemetry's conventions for generative AI, and `splittime.*` for what they lack.
No text of a prompt or an answer is in a span. An upstream's stages are lengths of its own clock: they are placed at
the beginning of its attempt, where the account's `upstream` begins.

Spans to a collector, off the path: accounts wait in a bounded queue, and a task posts them in batches (OTLP, JSON).

What does not fit, and what the collector did not take, is dropped and counted: no request waits for a collector.
"""

import asyncio
import hashlib
import logging
import secrets
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple

import msgspec

from splittime import __version__
from splittime.core.trace_context import TraceContext
from splittime.gateway.config import TracingConfig
from splittime.gateway.decoded_answer import ask_whole
from splittime.gateway.upstream_connections import UpstreamConnections
from splittime.ledger.account import ClosedAccount
from splittime.ledger.attempts import NO_FAILURE, Attempt
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord
from splittime.wire.target import Target

AT_UPSTREAM = frozenset({Stage.UPSTREAM, Stage.NETWORK, Stage.CLIENT_WAIT})
INTERNAL, SERVER, CLIENT = 1, 2, 3
ERROR = 2
OPERATIONS = {"chat": "chat", "responses": "chat", "messages": "chat", "completions": "text_completion"}
BITS = 56  # of a trace's id, at its right, which are random (W3C Trace Context, level 2)

Span = dict[str, Any]
Value = str | int | float | bool | None
log = logging.getLogger("splittime.gateway")

BATCH_ACCOUNTS = 256
EVERY_S = 0.5
POST_S = 5.0
LAST_S = 2.0  # for what waits when the gateway ends
SENT, QUEUE_FULL, NOT_TAKEN = "sent", "queue_full", "not_taken"


class Lasted(NamedTuple):
    """A stage between two instants of the gateway's clock."""

    stage: Stage
    cause: Cause | None
    begin_ns: int
    end_ns: int


def attempt_context(trace_id: str, attempt_id: str) -> TraceContext:
    """Returns what an upstream is told that it works for: the span that this attempt will be."""
    return TraceContext(trace_id, _span_id(trace_id, attempt_id))


def is_sampled(trace_id: str, share: float) -> bool:
    """Returns whether a trace is among this share of all: the same for each of its requests, in every gateway."""
    return bool(trace_id) and int(trace_id[-BITS // 4 :], 16) < share * 2**BITS


def num_spans(account: ClosedAccount) -> int:
    return 1 + len(account.intervals) + sum(1 + len(attempt.nested) for attempt in account.attempts)


def spans_of(account: ClosedAccount) -> list[Span]:
    """Returns the spans of an account that has a trace; `num_spans` of them."""
    return list(_SpanMaker(account).spans())


class _SpanMaker:
    def __init__(self, account: ClosedAccount) -> None:
        self._account = account
        self._unix_ns = account.started_at_unix_ns - account.start_ns  # what makes an instant a time of day
        self._root_id = _span_id(account.trace_id, f"{account.group_id}/{account.start_ns}")
        self._upstream_ids: dict[str, str] = {}  # of the stage `upstream`, by attempt
        self._operation = OPERATIONS.get(account.endpoint, account.endpoint)
        self._name = f"{self._operation} {account.model}".rstrip()

    def spans(self) -> Iterator[Span]:
        account, inside = self._account, self._by_attempt()
        yield self._root()
        for number, one in enumerate(account.intervals):
            attempt = inside.get(number)
            parent_id = self._root_id if attempt is None else _span_id(account.trace_id, attempt.request_id)
            span_id = _span_id(account.trace_id, f"{self._root_id}/{number}")
            if attempt is not None and one.stage is Stage.UPSTREAM:
                self._upstream_ids[attempt.request_id] = span_id
            yield self._stage(Lasted(one.stage, one.cause, one.begin_ns, one.end_ns), span_id, parent_id)
        for attempt in account.attempts:
            yield from self._attempt(attempt)

    def _by_attempt(self) -> dict[int, Attempt]:
        """Returns the attempt that a stage lies in, by its number: of two at once, the one that did not fail."""
        found = {}
        for number, one in enumerate(self._account.intervals):
            for attempt in sorted(self._account.attempts, key=lambda attempt: not attempt.error):
                is_inside = attempt.begin_ns <= one.begin_ns and one.end_ns <= attempt.end_ns
                if is_inside and one.stage in AT_UPSTREAM:
                    found[number] = attempt
        return found

    def _root(self) -> Span:
        account, error = self._account, self._account.error
        told: dict[str, Value] = {
            **self._common(),
            "gen_ai.request.max_tokens": account.max_tokens or None,
            "gen_ai.response.id": account.group_id,
            "gen_ai.response.finish_reasons": account.finish_reason,
            "gen_ai.usage.input_tokens": account.prompt_tokens or None,
            "gen_ai.usage.output_tokens": account.output_tokens or None,
            "error.type": None if error is None else error.code,
            "splittime.request_id": account.request_id,
            "splittime.tenant": account.tenant or None,
            "splittime.degraded": account.degraded or None,
        }
        span = self._span(self._name, SERVER, account.start_ns, account.end_ns, self._root_id, account.parent_id, told)
        return span if error is None else span | {"status": {"code": ERROR}}

    def _attempt(self, attempt: Attempt) -> Iterator[Span]:
        span_id = _span_id(self._account.trace_id, attempt.request_id)
        first_ns, has_failed = attempt.first_byte_ns, attempt.error not in NO_FAILURE
        told: dict[str, Value] = {
            **self._common(),
            "splittime.upstream": attempt.upstream,
            "http.response.status_code": attempt.status,
            "error.type": attempt.error if has_failed else None,
            "splittime.ending": None if has_failed else attempt.error or None,
            "splittime.first_byte_ms": None if first_ns is None else (first_ns - attempt.begin_ns) / 1e6,
        }
        span = self._span(self._name, CLIENT, attempt.begin_ns, attempt.end_ns, span_id, self._root_id, told)
        yield span | {"status": {"code": ERROR}} if has_failed else span
        for number, one in enumerate(attempt.nested):
            lasted = Lasted(one.stage, one.cause, attempt.begin_ns + one.begin_ns, attempt.begin_ns + one.end_ns)
            parent_id = self._upstream_ids.get(attempt.request_id, span_id)
            yield self._stage(lasted, _span_id(self._account.trace_id, f"{span_id}/{number}"), parent_id)

    def _common(self) -> dict[str, Value]:
        model = self._account.model
        operation: dict[str, Value] = {"gen_ai.operation.name": self._operation, "gen_ai.provider.name": "splittime"}
        return {**operation, "gen_ai.request.model": model or None}

    def _stage(self, lasted: Lasted, span_id: str, parent_id: str) -> Span:
        told: dict[str, Value] = {"splittime.cause": None if lasted.cause is None else lasted.cause.value}
        return self._span(lasted.stage.value, INTERNAL, lasted.begin_ns, lasted.end_ns, span_id, parent_id, told)

    def _span(
        self, name: str, kind: int, begin_ns: int, end_ns: int, span_id: str, parent_id: str, told: dict[str, Value]
    ) -> Span:
        attributes = [{"key": key, "value": _value(key, value)} for key, value in told.items() if value is not None]
        return {
            "traceId": self._account.trace_id,
            "spanId": span_id,
            **({"parentSpanId": parent_id} if parent_id else {}),
            "name": name,
            "kind": kind,
            "startTimeUnixNano": str(begin_ns + self._unix_ns),
            "endTimeUnixNano": str(end_ns + self._unix_ns),
            "attributes": attributes,
        }


def export_body(spans: list[Span], service_name: str) -> dict[str, Any]:
    """Returns what is posted to a collector's `/v1/traces`."""
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": service_name}}]}
    scope = {"name": "splittime.gateway", "version": __version__}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": scope, "spans": spans}]}]}


def _span_id(trace_id: str, name: str) -> str:
    return hashlib.sha256(f"{trace_id}/{name}".encode()).hexdigest()[:16]


def _value(key: str, value: str | int | float) -> dict[str, Any]:
    if key == "gen_ai.response.finish_reasons":
        return {"arrayValue": {"values": [{"stringValue": value}]}}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}


class SpanExporter:
    """`note` takes an account, `open` begins, `close` ends. spans: by what became of them."""

    def __init__(
        self, config: TracingConfig, key: str | None, connections: UpstreamConnections, pool: Executor
    ) -> None:
        self._config, self._key, self._connections, self._pool = config, key, connections, pool
        self._address = Target(url=config.url).address
        self._waiting: deque[ClosedAccount] = deque()
        self._num_waiting = 0  # spans
        self._is_failing = False
        self._task: asyncio.Task[None] | None = None
        self.spans: Counter[str] = Counter({SENT: 0, QUEUE_FULL: 0, NOT_TAKEN: 0})

    def note(self, record: ClosedAccount | StepRecord) -> None:
        """Take an account, if its trace is among those that are told and there is room."""
        if isinstance(record, StepRecord):
            return
        if not record.trace_id:  # no upstream was asked, and its client has none
            record = msgspec.structs.replace(record, trace_id=secrets.token_hex(16))
        if not is_sampled(record.trace_id, self._config.share):
            return
        count = num_spans(record)
        if self._num_waiting + count > self._config.max_queue:
            self.spans[QUEUE_FULL] += count
            return
        self._waiting.append(record)
        self._num_waiting += count

    def open(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Post what waits, as far as that takes `LAST_S`; the rest is dropped."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            async with asyncio.timeout(LAST_S):
                while self._waiting:
                    await self._post()
        except TimeoutError:
            log.warning("spans are dropped: the collector did not take them within %.0f s", LAST_S)
        self.spans[NOT_TAKEN] += sum(map(num_spans, self._waiting))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            while self._waiting:
                await self._post()

    async def _post(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(BATCH_ACCOUNTS, len(self._waiting)))]
        count = sum(map(num_spans, batch))
        self._num_waiting -= count
        ended = NOT_TAKEN
        try:
            encoding = partial(_encoded, batch, self._config.service_name)
            await self._send(await asyncio.get_running_loop().run_in_executor(self._pool, encoding))
            ended, self._is_failing = SENT, False
        except (OSError, ValueError) as error:
            self._tell_failing(str(error) or type(error).__name__)
        finally:
            self.spans[ended] += count

    async def _send(self, body: bytes) -> None:
        """Raises `OSError` or `ValueError` where the collector did not take it."""
        where = self._connections, self._address, "/v1/traces"
        status, _ = await ask_whole(*where, self._key, body, within_s=POST_S, max_bytes=0)
        if status >= 300:
            raise OSError(f"it answered {status}")

    def _tell_failing(self, why: str) -> None:
        """Log the first of an outage."""
        if not self._is_failing:
            log.warning("spans are dropped, the collector at %s does not take them: %s", self._config.url, why[:300])
        self._is_failing = True


def _encoded(batch: list[ClosedAccount], service_name: str) -> bytes:
    spans = [span for account in batch for span in spans_of(account)]
    return msgspec.json.encode(export_body(spans, service_name))
