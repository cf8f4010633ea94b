"""One request, from turning to it until its end: the body that a server of this kind understands, and the outcome.

A connection that the server had closed while it lay idle is replaced in silence. If one is closed on a request before
anything of an answer was read, the request is sent again, and its outcome says so: other clients see an error. A
request that is to be hung up on counts its delay from being sent; a slow reader really stops reading its socket.

What becomes of one request on the wire, and how it ended.

Every instant is taken where it happens: in `connection`'s callbacks. What ended a request is told apart here and only
here (`Ending`): whole; hung up as planned; refused (a status of 400 or more, its message kept); failed (no connection,
a connection broken off, an answer that is no event stream, an error inside the stream, a stream that stops without
saying that it is done); out of time.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from splittime.bench.alarm import Alarm, AlarmEntry
from splittime.bench.book.records import Ending, Outcome
from splittime.bench.schedule import Job, Planned
from splittime.bench.share import LoadShare
from splittime.core.errors import ConfigError
from splittime.present.terminal import clipped
from splittime.wire.connection import SLOW_READER_BUFFER_BYTES, Connection, Pool
from splittime.wire.sse import MAX_EVENT_BYTES, AnswerReader, EventLines, body_text
from splittime.wire.target import Target, check_key

MAX_ERROR_BODY_BYTES = 64 * 1024
MAX_CHUNKS = 2**20


now_ns = time.monotonic_ns

KNOWS_IGNORE_EOS = frozenset({"splittime", "vllm", "sglang", "llama.cpp", "mock"})
TELLS_TOKEN_IDS = frozenset({"splittime", "mock"})
TELLS_USAGE_PER_CHUNK = frozenset({"vllm", "sglang"})  # their token ids would bring the whole prompt back as well
_encode = msgspec.json.Encoder().encode


class TimedExchange:
    """`ended` is done once the end is known. on_first: told when the first chunk with content was read.
    after_reading: called after each piece of an answer that goes on."""

    def __init__(self, on_first: Callable[[int], None] | None = None) -> None:
        self.reading = AnswerReader()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ending: Ending | None = None
        self.error: str | None = None
        self.sent_ns: int | None = None
        self.headers_ns: int | None = None
        self.end_ns: int | None = None
        self.status: int | None = None
        self.is_over_on_the_wire = False  # the connection told the end itself: whole, or lost
        self._lines = EventLines()
        self._on_first = on_first
        self.after_reading: Callable[[], None] | None = None
        self._is_stream = False
        self._content_type = ""
        self._error_body = bytearray()

    @property
    def has_begun(self) -> bool:
        """Something of an answer was read."""
        return self.headers_ns is not None

    def on_sent(self, at_ns: int) -> None:
        if self.sent_ns is None:
            self.sent_ns = at_ns

    def on_headers(self, status: int, content_type: str, at_ns: int) -> None:
        self.status, self.headers_ns, self._content_type = status, at_ns, content_type
        self._is_stream = status < 300 and content_type.lower().startswith("text/event-stream")

    def on_body(self, piece: bytes, at_ns: int) -> None:
        if not self._is_stream:
            self._error_body += piece[: MAX_ERROR_BODY_BYTES - len(self._error_body)]
            return
        for data in self._lines.feed(piece):
            self.reading.take(data, at_ns)
        if self._lines.is_too_long:
            what = f"an event of the stream is longer than {MAX_EVENT_BYTES:,} bytes"
            self.finish(Ending.FAILED, what, at_ns)
            return
        if len(self.reading.chunk_ns) > MAX_CHUNKS:
            self.finish(Ending.FAILED, f"the stream has more than {MAX_CHUNKS:,} chunks", at_ns)
            return
        if self._on_first is not None and self.reading.chunk_ns:
            self._on_first(at_ns)
            self._on_first = None
        if self.after_reading is not None and self.ending is None:
            self.after_reading()

    def on_end(self, at_ns: int) -> None:
        self.is_over_on_the_wire = True
        self.finish(*self._judge(), at_ns)

    def on_lost(self, error: Exception | None, at_ns: int) -> None:
        self.is_over_on_the_wire = True
        if self.reading.is_done and self.reading.error is None:
            self.finish(Ending.COMPLETE, None, at_ns)
            return
        why = f": {error}" if error is not None else " by the server"
        after = f"after {len(self.reading.chunk_ns)} chunks" if self.has_begun else "before an answer"
        self.finish(Ending.FAILED, f"the connection was closed {after}{why}", at_ns)

    def finish(self, ending: Ending, error: str | None, at_ns: int) -> None:
        """The first end is the end."""
        if self.ending is None:
            self.ending, self.error, self.end_ns = ending, error, at_ns
            self.ended.set_result(None)

    def _judge(self) -> tuple[Ending, str | None]:
        """Returns what an answer is whose HTTP message is whole."""
        reading, status = self.reading, self.status or 0
        if status >= 400:
            return Ending.REFUSED, body_text(bytes(self._error_body)) or f"status {status}"
        if not self._is_stream:
            what = body_text(bytes(self._error_body))
            return Ending.FAILED, clipped(f"no event stream but status {status}, {self._content_type or '-'}: {what}")
        if reading.error is not None:
            return Ending.FAILED, reading.error
        if reading.is_done or reading.finish_reason is not None:  # some servers never say [DONE]
            return Ending.COMPLETE, None
        return Ending.FAILED, f"the stream ended after {len(reading.chunk_ns)} chunks without [DONE]"


def body_of(planned: Planned, kind: str, model: str | None) -> bytes:
    """The JSON of a request, as far as a server of this kind understands it."""
    options = {"include_usage": True}
    if kind in TELLS_USAGE_PER_CHUNK:
        options["continuous_usage_stats"] = True
    body: dict[str, Any] = {"max_tokens": planned.output_tokens, "stream": True, "stream_options": options}
    if model is not None:
        body["model"] = model
    if planned.messages is not None:
        body["messages"] = planned.messages
    else:
        body["prompt"] = planned.prompt
    if planned.exact_output and kind in KNOWS_IGNORE_EOS:
        body["ignore_eos"] = True
    if kind in TELLS_TOKEN_IDS:
        body["return_token_ids"] = True
    elif kind == "llama.cpp":
        body["timings_per_token"] = True
    return _encode({**body, **planned.body})


class Client:
    """Sends jobs to one arm. `begin_ns` is the run's begin, to be set before the first: outcomes count from it.
    first_chunks: when each came, and its response TTFT; whoever reads it clears it."""

    def __init__(self, share: LoadShare, arm: int, alarm: Alarm) -> None:
        self.pool = Pool(share.targets[arm])
        self.in_flight: set[TimedExchange] = set()
        self.first_chunks: list[tuple[int, int]] = []
        self._share, self._arm = share, arm
        self._alarm, self._timeout_ns = alarm, int(share.timeout_s * 1e9)
        self.begin_ns = 0
        self._head = _head(share.targets[arm])

    async def send(self, job: Job, intended_ns: int, held_ns: int = 0) -> Outcome:
        """Turn to a job now. `intended_ns` is an instant of the clock. Never raises for what the server does."""
        picked_up_ns, begin_ns = now_ns(), self.begin_ns
        exchange, connect_ns, resent = await self._exchange(self._request(job), job.planned, intended_ns)
        reading = exchange.reading
        assert exchange.ending is not None
        return Outcome(
            **facts_of(job, self._share),
            ending=exchange.ending,
            intended_ns=intended_ns - begin_ns,
            held_ns=held_ns,
            picked_up_ns=picked_up_ns - begin_ns,
            connect_ns=connect_ns,
            resent=resent,
            sent_ns=_since(begin_ns, exchange.sent_ns),
            headers_ns=_since(begin_ns, exchange.headers_ns),
            chunk_ns=tuple(at_ns - begin_ns for at_ns in reading.chunk_ns),
            chunk_tokens=reading.chunk_tokens,
            end_ns=_since(begin_ns, exchange.end_ns),
            status=exchange.status,
            error=exchange.error,
            finish_reason=reading.finish_reason,
            prompt_tokens=reading.prompt_tokens,
            output_tokens=reading.output_tokens,
            cached_tokens=reading.cached_tokens,
        )

    def hang_up_all(self, why: str) -> None:
        """The run is stopped: whatever is in flight ends now."""
        for exchange in list(self.in_flight):
            exchange.finish(Ending.CANCELLED, why, now_ns())

    def _request(self, job: Job) -> bytes:
        body = body_of(job.planned, self._share.kinds[self._arm], self._share.models[self._arm])
        path = b"/v1/chat/completions" if job.planned.messages is not None else b"/v1/completions"
        return b"POST %b%b%bX-Request-Id: %b\r\nContent-Length: %d\r\n\r\n%b" % (
            self._head[0],
            path,
            self._head[1],
            request_id_of(job, self._share).encode("ascii"),
            len(body),
            body,
        )

    async def _exchange(
        self, request: bytes, planned: Planned, intended_ns: int
    ) -> tuple[TimedExchange, int | None, int]:
        """Carry out, on another connection if an idle one is closed on it; the last is how often that was so."""
        deadline_ns = now_ns() + self._timeout_ns
        resent = 0
        while True:
            exchange = TimedExchange(
                lambda at_ns: self.first_chunks.append((at_ns - self.begin_ns, at_ns - intended_ns))
            )
            self.in_flight.add(exchange)
            connect_ns = None
            try:
                connection, connect_ns = await self._connect(planned, (deadline_ns - now_ns()) / 1e9)
                await self._carry_out(connection, request, exchange, planned, deadline_ns)
            except OSError as error:
                is_late = isinstance(error, TimeoutError) or now_ns() >= deadline_ns  # its clock is coarser
                ending = Ending.TIMED_OUT if is_late else Ending.FAILED
                exchange.finish(ending, clipped(f"cannot connect: {error}"), now_ns())
            finally:
                self.in_flight.discard(exchange)
            was_stale = connect_ns == 0 and exchange.ending is Ending.FAILED and not exchange.has_begun
            if not was_stale:
                return exchange, connect_ns, resent
            resent += 1

    async def _connect(self, planned: Planned, within_s: float) -> tuple[Connection, int]:
        """A slow reader gets a connection of its own with a small buffer: else the kernel would read for it."""
        if not planned.read_delay_ns:
            return await self.pool.take(within_s)
        connection, connect_ns = await self.pool.connect(within_s, SLOW_READER_BUFFER_BYTES)
        connection.is_for_one = True
        return connection, connect_ns

    async def _carry_out(
        self, connection: Connection, request: bytes, exchange: TimedExchange, planned: Planned, deadline_ns: int
    ) -> None:
        if planned.read_delay_ns:
            exchange.after_reading = lambda: self._pause(connection, planned.read_delay_ns)
        if exchange.ending is None:
            connection.ask(request, exchange)
        timers = [self._end_at(deadline_ns, exchange, Ending.TIMED_OUT, f"no end within {self._timeout_ns / 1e9:g} s")]
        if planned.cancel_after_ns is not None:
            at_ns = (exchange.sent_ns or now_ns()) + planned.cancel_after_ns
            timers.append(self._end_at(at_ns, exchange, Ending.CANCELLED, None))
        try:
            await exchange.ended
        finally:
            for timer in timers:
                timer.cancel()
            if not exchange.is_over_on_the_wire:
                connection.hang_up()

    def _end_at(self, at_ns: int, exchange: TimedExchange, ending: Ending, error: str | None) -> AlarmEntry:
        return self._alarm.call_at(at_ns, lambda: exchange.finish(ending, error, now_ns()))

    def _pause(self, connection: Connection, delay_ns: int) -> None:
        if connection.is_open:
            connection.pause_reading()
            self._alarm.call_at(now_ns() + delay_ns, connection.resume_reading)


def unsent(job: Job, share: LoadShare, intended_ns: int) -> Outcome:
    """A request whose turn did not come. `intended_ns` counts from the run's begin."""
    return Outcome(**facts_of(job, share), ending=Ending.UNSENT, intended_ns=intended_ns)


def request_id_of(job: Job, share: LoadShare) -> str:
    return f"{share.run_id}-{job.planned.index}-{job.arm}"


def facts_of(job: Job, share: LoadShare) -> dict[str, Any]:
    """Returns what an outcome says whatever became of the request."""
    planned = job.planned
    return {
        "index": planned.index,
        "request_id": request_id_of(job, share),
        "phase": planned.phase,
        "arm": job.arm,
        "session": planned.session,
        "turn": planned.turn,
        "worker": share.worker,
        "expected_prompt_tokens": planned.expected_prompt_tokens,
        "expected_output_tokens": planned.output_tokens if planned.exact_output else None,
        "expected_cached_tokens": planned.expected_cached_tokens,
        "tags": planned.tags,
    }


def _since(begin_ns: int, at_ns: int | None) -> int | None:
    return None if at_ns is None else at_ns - begin_ns


def _head(target: Target) -> tuple[bytes, bytes]:
    """Returns what stands before and after the path of every request."""
    address = target.address
    check_key(target.api_key)
    lines = [f" HTTP/1.1\r\nHost: {address.authority}", "Content-Type: application/json", "Accept: text/event-stream"]
    if target.api_key is not None:
        lines.append(f"Authorization: Bearer {target.api_key}")
    try:
        return address.path.encode("ascii"), ("\r\n".join(lines) + "\r\n").encode("latin-1")
    except UnicodeEncodeError as error:
        raise ConfigError(f"the URL or the key has a character that HTTP cannot send: {error}", param="url") from None
