"""A server with declared timings: what a load generator measures against it is known beforehand.

It speaks OpenAI's completions and chats over plain asyncio and httptools, and no model is behind it: token k of an
answer is written at the instant

    admitted + ttft + prompt_tokens * ttft_per_token + k * itl

on the monotonic clock (`alarm`), whatever the writing of the ones before it took, so no error adds up. `Timings` can
spoil it in the ways that real servers and networks do: several tokens in a chunk, a buffer that holds chunks back,
steps as of Nagle's algorithm, errors, and freezes, in which no time passes for anybody. With `slots` requests queue for
them, first come first served: then it has a capacity, and a knee.

`lateness_ns` is its own error, measured as it runs: from the declared instant to the bytes given to the kernel.
"""

import asyncio
import collections
import random
import socket
import time
from typing import Any

import httptools
import msgspec

from splittime.bench import sockets
from splittime.bench.alarm import Alarm
from splittime.bench.mock_answer import MODEL, Answering, MockRequest, Timings
from splittime.core.errors import ConfigError
from splittime.ledger.derive import percentiles

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
        sockets.allow()
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
