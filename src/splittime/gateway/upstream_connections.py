"""Connections to upstreams: HTTP/1.1 of our own, because what a gateway adds to a token is what it does for each piece.

A piece of a stream wakes the request's task once, and nothing is built for it: no timer (one of the answer watches all
its waits), no chunk object, no copy. A general client took twice as long for a request and a half longer for a piece.

An answer is whole by its length, by its last chunk, or by the connection's close if it has neither; not so over TLS,
where a close does not tell whether somebody on the way cut it. A connection is used again only after an answer that was
whole and allows it, and for `KEEPALIVE_S` at most; an upstream may close it at the same moment, so that a request that
finds one closed within `STALE_WITHIN_S`, before any byte of an answer, is sent again, once, over a new one. Later it
has been worked at: it may be what ended its server. A head, or what stands between two
pieces of a body, is read for at most `MAX_HEAD_BYTES`. No redirects, no cookies, no proxies of the environment.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

import httptools

from splittime.gateway.routing.round_trips import RoundTrips
from splittime.gateway.upstream_answer import UpstreamAnswer
from splittime.wire.target import Address

KEEPALIVE_S = 4.0  # below the 5 s after which uvicorn, and so vLLM, closes an idle connection
STALE_WITHIN_S = 1.0  # longer than a message there and back
MAX_HEAD_BYTES = 256 * 1024
NOT_HTTP = (httptools.HttpParserError, httptools.HttpParserUpgrade)
IN_A_PATH = "/%:@!$&'()*+,;=~-._"  # and what a config has escaped already


class NoConnection(ConnectionError):
    """An upstream could not be reached. is_too_late: it did not answer in time."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.is_too_late = isinstance(error, TimeoutError)


def request_bytes(method: str, address: Address, path: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """headers: without line ends."""
    authority = address.authority
    if not authority.isascii():
        authority = authority.encode("idna").decode()
    lines = [f"{method} {quote(address.path + path, IN_A_PATH)} HTTP/1.1", f"host: {authority}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode("latin-1") + (body or b"")


def _now_s() -> float:
    return asyncio.get_running_loop().time()


class AskedBytes(NamedTuple):
    """A request as it is sent, and how long a connection for it may take. at_s: of the loop's clock, when it was."""

    request: bytes
    connect_s: float
    at_s: float


class UpstreamConnection(asyncio.Protocol):
    """One connection, one request at a time. idle: where it waits for another, by its address. ask_again: given what a
    kept connection was asked that had been closed. idle_since_s: of the loop's clock."""

    transport: Any
    _parser: Any
    _answer: UpstreamAnswer | None
    _unanswered: AskedBytes | None  # of a connection that was kept, until a byte of the answer is there

    def __init__(
        self,
        idle: "dict[Address, list[UpstreamConnection]]",
        ask_again: Callable[[Address, AskedBytes, UpstreamAnswer], None],
        address: Address,
    ) -> None:
        self._idle, self._ask_again, self._address = idle, ask_again, address
        self._answer, self._parser, self.transport = None, None, None
        self._was_asked, self._unanswered = False, None
        self._has_length, self._is_head_read, self._num_head_bytes = False, False, 0
        self.is_open, self.idle_since_s = False, 0.0

    def ask(self, asked: AskedBytes, answer: UpstreamAnswer | None = None) -> UpstreamAnswer:
        """Send a request. Returns its answer, of which nothing is there yet. answer: one that was to come from another
        connection."""
        if answer is None:
            answer = UpstreamAnswer(self)
        else:
            answer.come_from(self)
        self._answer, self._parser = answer, httptools.HttpResponseParser(self)
        self._has_length, self._is_head_read, self._num_head_bytes = False, False, 0
        self._was_asked, self._unanswered = True, asked if self._was_asked else None
        self.transport.write(asked.request)
        return answer

    def cut(self) -> None:
        self._answer = None
        self.transport.abort()

    def pause(self) -> None:
        self.transport.pause_reading()

    def resume(self, answer: UpstreamAnswer | None) -> None:
        """An answer has been taken: read on, if it is the one that is being read."""
        if answer is self._answer and self.is_open and not self.transport.is_closing():
            self.transport.resume_reading()

    def connection_made(self, transport: Any) -> None:
        self.transport, self.is_open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open, waiting = False, self._idle.get(self._address, [])
        if self in waiting:
            waiting.remove(self)
        answer, asked, self._parser = self._answer, self._unanswered, None  # which has this connection
        if answer is not None and asked is not None and _now_s() - asked.at_s < STALE_WITHIN_S:
            self._answer = self._unanswered = None
            self._ask_again(self._address, asked, answer)
        elif answer is not None:
            is_end = exc is None and self._is_head_read and not (self._has_length or self._address.is_tls)
            self._end(None if is_end else ConnectionResetError(str(exc or "the connection was closed")))

    def data_received(self, data: bytes) -> None:
        if self._answer is None:  # more than was asked for
            self.transport.abort()
            return
        self._unanswered = None
        self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except NOT_HTTP as error:
            self._fail(f"the answer is not HTTP/1.1: {error}")
        if self._num_head_bytes > MAX_HEAD_BYTES and self._answer is not None:
            self._fail(f"the answer has more than {MAX_HEAD_BYTES} bytes that are in no body")

    def _fail(self, words: str) -> None:
        self._end(ValueError(words))
        self.transport.abort()

    def _end(self, error: OSError | ValueError | None = None) -> None:
        answer, self._answer, self._parser = self._answer, None, None
        if answer is not None:
            answer.end(error)

    # ---- the parser's calls

    def on_message_begin(self) -> None:
        if self._answer is None:  # behind a whole answer, in one piece with its end
            self.transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._answer is None or self._is_head_read:  # a trailer
            return
        name = name.lower()
        self._answer.headers.setdefault(name, value)
        self._has_length = self._has_length or name in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        if self._answer is None:
            return
        status = self._parser.get_status_code()
        if status < 100:
            self._fail(f"the answer's status is {status}")
        elif status < 200:  # "continue", "early hints"
            self._answer.headers.clear()
            self._has_length = False
        else:
            self._is_head_read = True
            self._answer.begin(status)

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        if self._answer is not None and not self._is_head_read:
            self._fail("an answer before the answer has a body")
        elif self._answer is not None:
            self._answer.feed(body)

    def on_message_complete(self) -> None:
        if self._answer is None or not self._is_head_read:
            return
        may_go_on = self._parser.should_keep_alive()
        self._end()
        if self.transport.get_write_buffer_size():  # it answered early: nobody is to read the request's rest
            self.transport.abort()
        elif may_go_on and self.is_open and not self.transport.is_closing():
            self.resume(None)
            self.idle_since_s = _now_s()
            self._idle.setdefault(self._address, []).append(self)
        else:
            self.transport.close()


class UpstreamConnections:
    """All of a gateway's. round_trips: told of each connection that a request gets."""

    def __init__(self, round_trips: RoundTrips) -> None:
        self._round_trips = round_trips
        self._idle: dict[Address, list[UpstreamConnection]] = {}
        self._asking: set[asyncio.Task[None]] = set()  # again; the loop itself keeps no tasks alive
        self._tls: ssl.SSLContext | None = None
        self._sweep: asyncio.TimerHandle | None = None

    async def ask(
        self,
        method: str,
        address: Address,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        *,
        connect_s: float,
    ) -> UpstreamAnswer:
        """Send a request. Returns its answer, of which nothing may be there yet. path: behind the address's own.
        headers: without line ends. Raises `NoConnection`."""
        connection = self._kept(address) or await self._connected(address, connect_s)
        self._round_trips.note(address.host, address.port, connection.transport.get_extra_info("socket"))
        return connection.ask(AskedBytes(request_bytes(method, address, path, headers, body), connect_s, _now_s()))

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in [one for some in self._idle.values() for one in some]:
            connection.transport.abort()
        for task in self._asking:
            task.cancel()

    def _begin_again(self, address: Address, asked: AskedBytes, answer: UpstreamAnswer) -> None:
        """The upstream has closed a kept connection as the request came: send it over a new one."""
        if not answer.is_given_up:
            task = asyncio.get_running_loop().create_task(self._over_new(address, asked, answer))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _over_new(self, address: Address, asked: AskedBytes, answer: UpstreamAnswer) -> None:
        try:
            connection = await self._connected(address, asked.connect_s)
        except NoConnection as error:
            answer.end(error.with_traceback(None))
            return
        if answer.is_given_up:
            connection.transport.abort()
        else:
            connection.ask(asked, answer)

    def _kept(self, address: Address) -> UpstreamConnection | None:
        """Returns the connection that was used last and is idle, if it is not too old."""
        idle, now_s = self._idle.get(address, []), _now_s()
        while idle:
            connection = idle.pop()
            is_closing = not connection.is_open or connection.transport.is_closing()
            if not is_closing and now_s - connection.idle_since_s < KEEPALIVE_S:
                return connection
            connection.transport.abort()
        return None

    async def _connected(self, address: Address, within_s: float) -> UpstreamConnection:
        loop, made = asyncio.get_running_loop(), partial(UpstreamConnection, self._idle, self._begin_again, address)
        if address.is_tls and self._tls is None:
            self._tls = ssl.create_default_context()
        tls = self._tls if address.is_tls else None
        if self._sweep is None:
            self._sweep = loop.call_later(KEEPALIVE_S, self._drop_old)
        try:
            async with asyncio.timeout(within_s):
                _, connection = await loop.create_connection(made, address.host, address.port, ssl=tls)
        except OSError as error:
            raise NoConnection(error) from error
        return connection

    def _drop_old(self) -> None:
        """Close what has been idle for too long, and forget addresses that nobody asks any more."""
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - KEEPALIVE_S
        for address, connections in list(self._idle.items()):
            for connection in [one for one in connections if one.idle_since_s <= oldest_s]:
                connection.transport.abort()
            if not connections:
                del self._idle[address]
        self._sweep = loop.call_later(KEEPALIVE_S, self._drop_old)
