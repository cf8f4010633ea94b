"""A server with declared timings: what a load generator measures against it is known beforehand.

It speaks OpenAI's completions and chats over plain asyncio and httptools, and no model is behind it: token k of an
answer is written at the instant

    admitted + ttft + prompt_tokens * ttft_per_token + k * itl

on the monotonic clock (`alarm`), whatever the writing of the ones before it took, so no error adds up. `Timings` can
spoil it in the ways that real servers and networks do: several tokens in a chunk, a buffer that holds chunks back,
steps as of Nagle's algorithm, errors, and freezes, in which no time passes for anybody. With `slots` requests queue for
them, first come first served: then it has a capacity, and a knee.

`lateness_ns` is its own error, measured as it runs: from the declared instant to the bytes given to the kernel.

One answer of the mock server: the declared `Timings`, what is asked, when each chunk is due, and its bytes.
"""

import asyncio
import collections
import random
import socket
import time
from collections.abc import Sequence
from typing import Any

import httptools
import msgspec

from splittime.bench import event_loop
from splittime.bench.alarm import Alarm
from splittime.core.errors import ConfigError
from splittime.ledger.derive import percentiles


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """What is declared, in ns.

    tokens_per_chunk: so many tokens are written as one event, when the last of them is due.
    buffer_chunks: events are held back until so many have gathered. nagle_every: each N-th chunk waits 40 ms more.
    freezes: (begin, length) counted from the first request: nothing goes on, not even a wait.
    error_rate: share of requests that are answered 500. break_rate: share whose stream breaks off halfway, with an
        error event; both drawn from `seed`.
    slots: at most so many at a time, the rest in a queue; None: no limit.
    """

    ttft_ns: int = 50_000_000
    ttft_per_token_ns: int = 0
    itl_ns: int = 10_000_000
    tokens_per_chunk: int = 1
    buffer_chunks: int = 1
    nagle_every: int = 0
    freezes: tuple[tuple[int, int], ...] = ()
    error_rate: float = 0.0
    break_rate: float = 0.0
    slots: int | None = None
    seed: int = 0

    def validate(self) -> None:
        for name in ("ttft_ns", "ttft_per_token_ns", "itl_ns", "nagle_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be below 0", param=name, value=getattr(self, name), limit=0)
        for name in ("tokens_per_chunk", "buffer_chunks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", param=name, value=getattr(self, name), limit=1)
        for name in ("error_rate", "break_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is a share of requests", param=name, value=getattr(self, name), limit=1)
        if self.slots is not None and self.slots < 1:
            raise ConfigError("slots must be at least 1", param="slots", value=self.slots, limit=1)


def after(begin_ns: int, duration_ns: int, freezes: Sequence[tuple[int, int]]) -> int:
    """The instant at which so much time has passed since `begin_ns` outside all freezes (absolute, in order)."""
    at_ns = begin_ns
    for freeze_ns, length_ns in freezes:
        if freeze_ns + length_ns <= at_ns:
            continue
        if at_ns + duration_ns < freeze_ns:
            break
        duration_ns -= max(0, freeze_ns - at_ns)
        at_ns = freeze_ns + length_ns
    return at_ns + duration_ns


MODEL = "mock"
TOKEN_TEXT = " tick"
NAGLE_STEP_NS = 40_000_000


class MockRequest(msgspec.Struct):
    """What it reads of a request's body."""

    prompt: Any = None
    messages: list[Any] | None = None
    max_tokens: int = 16
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False

    @property
    def output_tokens(self) -> int:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def prompt_tokens(self) -> int:
        if isinstance(self.prompt, list):
            return len(self.prompt)
        text = self.prompt if isinstance(self.prompt, str) else " ".join(str(m) for m in self.messages or ())
        return len(text.split())

    @property
    def includes_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


class Answering:
    """One answer while it is written."""

    def __init__(self, connection: "MockConnection", server: "MockServer", asked: MockRequest, request_id: str) -> None:
        self._connection, self._server, self._asked = connection, server, asked
        self._id = f"cmpl-{request_id or 'mock'}"
        self._is_error, self._breaks = server.misfortune()
        self._entry: Any = None
        self._admitted_ns = 0
        self._written = 0  # tokens
        self._chunks = 0
        self._held: list[bytes] = []
        self._usual = b""  # the event that all chunks but the last are
        self._delay_ns = 0
        self._is_over = False

    def begin(self, admitted_ns: int) -> None:
        self._admitted_ns = admitted_ns
        self._next()

    def abandon(self) -> None:
        """The client is gone."""
        if not self._is_over:
            self._is_over = True
            if self._entry is not None:
                self._entry.cancel()
            self._server.leave(self)

    def _due_ns(self) -> int:
        """When the next chunk is due: with the last of its tokens."""
        timings, asked = self._server.timings, self._asked
        last = min(self._written + timings.tokens_per_chunk, asked.output_tokens)
        if not asked.stream:
            last = asked.output_tokens
        work_ns = timings.ttft_ns + asked.prompt_tokens * timings.ttft_per_token_ns + max(0, last - 1) * timings.itl_ns
        return after(self._admitted_ns, work_ns, self._server.freezes) + self._delay_ns

    def _next(self) -> None:
        if self._server.timings.nagle_every and self._chunks % self._server.timings.nagle_every == 1:
            self._delay_ns = NAGLE_STEP_NS
        else:
            self._delay_ns = 0
        due_ns = self._due_ns()
        self._entry = self._server.alarm.call_at(due_ns, lambda: self._write(due_ns))

    def _write(self, due_ns: int) -> None:
        if self._is_error:
            self._fail()
        elif not self._asked.stream:
            self._connection.answer(200, self._whole())
            self._end()
        else:
            self._stream(due_ns)

    def _fail(self) -> None:
        error = {"message": "the mock server was told to fail", "type": "server_error", "code": "declared"}
        self._connection.answer(500, {"error": error})
        self._end()

    def _stream(self, due_ns: int) -> None:
        asked, timings = self._asked, self._server.timings
        count = min(timings.tokens_per_chunk, asked.output_tokens - self._written)
        is_last = self._written + count >= asked.output_tokens
        if self._breaks and self._written + count > asked.output_tokens // 2:
            broken = b'data: {"error":{"message":"the mock server was told to break off"}}\n\n'
            self._connection.write(broken, is_last=True)
            self._end()
            return
        is_usual = not is_last and count == timings.tokens_per_chunk
        self._usual = self._usual or self._event(timings.tokens_per_chunk, is_last=False)
        self._held.append(self._usual if is_usual else self._event(count, is_last))
        self._written += count
        self._chunks += 1
        if is_last or len(self._held) >= timings.buffer_chunks:
            self._connection.write(b"".join(self._held) + (self._closing() if is_last else b""), is_last)
            self._server.lateness_ns.append(now_ns() - due_ns)
            self._held.clear()
        if is_last:
            self._end()
        else:
            self._next()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._connection.is_answered(self)
            self._server.leave(self)

    # ---- what is written

    def _event(self, count: int, is_last: bool) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if is_last else None}
        text = TOKEN_TEXT * count
        if self._asked.messages is not None:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text
        if self._asked.return_token_ids:
            choice["token_ids"] = [7] * count
        return b"data: " + msgspec.json.encode({"id": self._id, "model": MODEL, "choices": [choice]}) + b"\n\n"

    def _closing(self) -> bytes:
        if not self._asked.includes_usage:
            return b"data: [DONE]\n\n"
        last = {"id": self._id, "model": MODEL, "choices": [], "usage": self._usage(self._written)}
        return b"data: " + msgspec.json.encode(last) + b"\n\ndata: [DONE]\n\n"

    def _whole(self) -> dict[str, Any]:
        count = self._asked.output_tokens
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "text": TOKEN_TEXT * count}
        if self._asked.messages is not None:
            choice["message"] = {"role": "assistant", "content": choice.pop("text")}
        return {"id": self._id, "model": MODEL, "choices": [choice], "usage": self._usage(count)}

    def _usage(self, output_tokens: int) -> dict[str, Any]:
        prompt_tokens = self._asked.prompt_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


now_ns = time.monotonic_ns
VOCAB_SIZE = 1000
MAX_MODEL_LEN = 131_072
MOST_KEPT = 200_000  # latenesses and ids: the latest, so that one that runs for days does not grow
HEAD = b"HTTP/1.1 %d %b\r\nServer: splittime-mock\r\nContent-Type: %b\r\n"
_REASONS = {200: b"OK", 400: b"Bad Request", 404: b"Not Found", 500: b"Internal Server Error"}


class MockServer:
    """`async with MockServer(Timings()) as server: server.url`."""

    def __init__(self, timings: Timings | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        self.timings = timings or Timings()
        self.timings.validate()
        self._host, self._port = host, port
        self._random = random.Random(self.timings.seed)
        self.freezes: tuple[tuple[int, int], ...] = ()
        self.in_service = self.most_in_service = 0
        self.waiting: collections.deque[Answering] = collections.deque()
        self.lateness_ns: collections.deque[int] = collections.deque(maxlen=MOST_KEPT)
        self.served = 0
        self.request_ids: collections.deque[str] = collections.deque(maxlen=MOST_KEPT)
        self._begin_ns: int | None = None

    async def __aenter__(self) -> "MockServer":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Raises `ConfigError` if the port is taken."""
        event_loop.allow()
        loop = asyncio.get_running_loop()
        self.alarm = Alarm()
        self._connections: set[MockConnection] = set()
        try:
            self._server = await loop.create_server(lambda: MockConnection(self), self._host, self._port, backlog=2048)
        except OSError as error:
            self.alarm.close()
            raise ConfigError(f"cannot listen on {self._host}:{self._port}: {error}", param="port") from error
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        for connection in list(self._connections):
            connection.close()
        self.alarm.close()
        await asyncio.sleep(0)

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._port}"

    def stats(self) -> dict[str, Any]:
        """Counts, and its own lateness in ns so far, which is forgotten with the telling."""
        late_ns = percentiles(self.lateness_ns)
        self.lateness_ns.clear()
        counts = {"served": self.served, "in_service": self.in_service, "waiting": len(self.waiting)}
        return {**counts, "most_in_service": self.most_in_service, "lateness_ns": late_ns}

    def keep(self, connection: "MockConnection") -> None:
        self._connections.add(connection)

    def forget(self, connection: "MockConnection") -> None:
        self._connections.discard(connection)

    def misfortune(self) -> tuple[bool, bool]:
        """Returns whether the next request is answered with an error, and whether its stream breaks."""
        return self._random.random() < self.timings.error_rate, self._random.random() < self.timings.break_rate

    def arrive(self, answering: "Answering", arrived_ns: int) -> None:
        """A request is in: admit it now or in its turn."""
        if self._begin_ns is None:
            self._begin_ns = arrived_ns
            self.freezes = tuple((arrived_ns + begin, length) for begin, length in sorted(self.timings.freezes))
        if self.timings.slots is not None and self.in_service >= self.timings.slots:
            self.waiting.append(answering)
            return
        self._admit(answering, arrived_ns)

    def leave(self, answering: "Answering") -> None:
        """A request is done or its client is gone: the next one's turn."""
        if answering in self.waiting:
            self.waiting.remove(answering)
            return
        self.in_service -= 1
        self.served += 1
        if self.waiting:
            self._admit(self.waiting.popleft(), now_ns())

    def _admit(self, answering: "Answering", at_ns: int) -> None:
        self.in_service += 1
        self.most_in_service = max(self.most_in_service, self.in_service)
        answering.begin(at_ns)


class MockConnection(asyncio.Protocol):
    """One client's connection: requests in, answers out, one at a time."""

    def __init__(self, server: MockServer) -> None:
        self._server = server
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._path, self._request_id = b"", ""
        self._body = bytearray()
        self._answering: Answering | None = None
        self._has_head = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=0)
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server.keep(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.forget(self)
        if self._answering is not None:
            self._answering.abandon()

    def close(self) -> None:
        self._transport.abort()

    # ---- the parser's calls

    def on_message_begin(self) -> None:
        self._path, self._request_id = b"", ""
        self._body.clear()

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._request_id = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        arrived_ns = now_ns()
        path = self._path.split(b"?")[0]
        if self._parser.get_method() == b"POST" and path in (b"/v1/completions", b"/v1/chat/completions"):
            self._generate(arrived_ns)
        elif path == b"/v1/models":
            card: dict[str, Any] = {"id": MODEL, "object": "model", "owned_by": "splittime-mock"}
            card |= {"max_model_len": MAX_MODEL_LEN, "vocab_size": VOCAB_SIZE}
            self.answer(200, {"object": "list", "data": [card]})
        elif path == b"/stats":
            self.answer(200, self._server.stats())
        elif path == b"/health":
            self.answer(200, {"status": "ok"})
        else:
            self.answer(404, {"error": {"message": f"no {path.decode('latin-1')} here", "type": "not_found_error"}})

    def _generate(self, arrived_ns: int) -> None:
        try:
            asked = msgspec.json.decode(self._body, type=MockRequest)
        except msgspec.MsgspecError as error:
            self.answer(400, {"error": {"message": str(error), "type": "invalid_request_error"}})
            return
        if asked.output_tokens < 1:
            self.answer(400, {"error": {"message": "max_tokens must be at least 1", "type": "invalid_request_error"}})
            return
        self._server.request_ids.append(self._request_id)
        self._answering = Answering(self, self._server, asked, self._request_id)
        self._server.arrive(self._answering, arrived_ns)

    # ---- writing

    def is_answered(self, answering: Answering) -> None:
        if self._answering is answering:
            self._answering = None

    def write(self, data: bytes, is_last: bool = False) -> None:
        """A piece of a stream; the head goes with the first."""
        head = b""
        if not self._has_head:
            self._has_head = True
            head = HEAD % (200, _REASONS[200], b"text/event-stream") + b"Transfer-Encoding: chunked\r\n\r\n"
        end = b"0\r\n\r\n" if is_last else b""
        self._has_head = not is_last
        self._transport.write(b"%b%x\r\n%b\r\n%b" % (head, len(data), data, end))

    def answer(self, status: int, body: dict[str, Any]) -> None:
        data = msgspec.json.encode(body)
        head = HEAD % (status, _REASONS[status], b"application/json")
        self._transport.write(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(data), data))
