"""Spans to a collector, off the path: accounts wait in a bounded queue, and a task posts them in batches (OTLP, JSON).

What does not fit, and what the collector did not take, is dropped and counted: no request waits for a collector.
"""

import asyncio
import logging
import secrets
from collections import Counter, deque
from concurrent.futures import Executor
from functools import partial

import msgspec

from splittime.gateway.config import TracingConfig
from splittime.gateway.decoded_answer import ask_whole
from splittime.gateway.tracing.spans import export_body, is_sampled, num_spans, spans_of
from splittime.gateway.upstream_connections import UpstreamConnections
from splittime.ledger.account import ClosedAccount
from splittime.ledger.steps import StepRecord
from splittime.wire.target import Target

log = logging.getLogger("splittime.gateway")

BATCH_ACCOUNTS = 256
EVERY_S = 0.5
POST_S = 5.0
LAST_S = 2.0  # for what waits when the gateway ends
SENT, QUEUE_FULL, NOT_TAKEN = "sent", "queue_full", "not_taken"


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
