"""Connections to upstreams: HTTP/1.1 of our own, because what a gateway adds to a token is what it does for each piece.

A piece of a stream wakes the request's task once, and nothing is built for it: no timer (one of the answer watches all
its waits), no chunk object, no copy. A general client took twice as long for a request and a half longer for a piece.

An answer is whole by its length, by its last chunk, or by the connection's close if it has neither; not so over TLS,
where a close may be somebody's on the way. A connection is used again after an answer that was whole and allows it, for
`KEEPALIVE_S` at most. A request that finds one closed within `STALE_WITHIN_S`, before any byte of an answer, is sent
again, once, over a new one; later it may be what ended its server. A head, or what stands between two pieces of a body,
is read for at most `MAX_HEAD_BYTES`. No redirects, no cookies, no proxies of the environment. What the client has not
taken is read up to `MAX_UNREAD_BYTES` and the end of that read, which may bring 256 KiB; then TCP tells the upstream.

`RoundTrips`: how far an upstream is, by Linux' least round trip of its connection (`tcpi_min_rtt` of TCP_INFO, five
minutes), read by a system call whenever a request gets a connection. A proxy that ends it is taken for the upstream.

`FirstByteWaits`: how long a request that comes now waits for a first byte: the tokens of requests that the upstream has
not begun to answer, over the rate at which such tokens came to a first byte of late (Little's law, 1961). Streams count
no more: a server that computes several at once begins the next beside them. While nothing comes the rate falls.
"""

import asyncio
import math
import socket
import ssl
import struct
from collections.abc import Callable, Collection, Mapping
from copy import copy
from functools import partial
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import httptools

from splittime.wire.target import Address

TCP_INFO = getattr(socket, "TCP_INFO", None)
MIN_RTT_AT, MIN_RTT = 148, struct.Struct("=I")  # in us, in `struct tcp_info`
NOT_MEASURED = 2**32 - 1
RISE = 8  # of the way to a longer one with each request
FORGET_S = 30.0  # in which a rate forgets all but 1/e
LEAST_SEEN_S = 0.05  # for a rate to be told
LEAST_TOKENS = 1e-9  # a rate falls to so many at most, and never to "nothing was seen"
MOST_S = 86_400.0  # of a wait that is told: records keep its nanoseconds in 64 bits
MAX_UNREAD_BYTES = 64 * 1024
KEEPALIVE_S = 4.0  # below the 5 s after which uvicorn, and so vLLM, closes an idle connection
STALE_WITHIN_S = 1.0  # longer than a message there and back
MAX_HEAD_BYTES = 256 * 1024
NOT_HTTP = (httptools.HttpParserError, httptools.HttpParserUpgrade)
IN_A_PATH = "/%:@!$&'()*+,;=~-._"  # and what a config has escaped already


class RoundTrip:
    """ns: from the gateway to an address and back; None while nobody knows. It falls at once to a shorter one, and
    rises by an eighth of the difference to a longer one: connections may have taken different ways."""

    __slots__ = ("ns",)

    def __init__(self) -> None:
        self.ns: int | None = None

    def note(self, ns: int) -> None:
        if self.ns is None or ns <= self.ns:
            self.ns = ns
        else:
            self.ns += (ns - self.ns) // RISE


class RoundTrips:
    """One `RoundTrip` for each host and port that a config names."""

    def __init__(self) -> None:
        self._by_address: dict[tuple[str, int], RoundTrip] = {}

    def of(self, host: str, port: int) -> RoundTrip:
        """Returns that of an address of the config."""
        return self._by_address.setdefault((host, port), RoundTrip())

    def note(self, host: str | None, port: int | None, connection: Any) -> None:
        """A request has this socket to that address."""
        known = self._by_address.get((host or "", port or 0))
        ns = None if known is None else min_rtt_ns(connection)
        if known is not None and ns is not None:
            known.note(ns)

    def keep(self, addresses: Collection[tuple[str, int]]) -> None:
        """Drops all other addresses, which no config names now."""
        self._by_address = {address: one for address, one in self._by_address.items() if address in addresses}


def min_rtt_ns(connection: Any) -> int | None:
    """Returns the least round trip of a connected socket; None if the system does not tell."""
    if TCP_INFO is None or connection is None:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO, MIN_RTT_AT + MIN_RTT.size)
    except OSError:  # it is closed already
        return None
    if len(info) < MIN_RTT_AT + MIN_RTT.size:
        return None
    (us,) = MIN_RTT.unpack_from(info, MIN_RTT_AT)
    return None if us == NOT_MEASURED else us * 1000


class FirstByteWaits:
    """tokens: of requests that were sent and have no first byte. Times are ns of one monotonic clock."""

    def __init__(self) -> None:
        self.tokens = 0
        self._requests = 0
        self._begun = self._seconds = 0.0
        self._since_ns: int | None = None  # up to when `_seconds` has been counted, while any wait

    def sent(self, tokens: int, now_ns: int) -> None:
        self._elapse(now_ns)
        self._since_ns = now_ns
        self._requests += 1
        self.tokens += tokens

    def begun(self, tokens: int, now_ns: int) -> None:
        """A request that was sent has the first byte of an answer."""
        self.gone(tokens, now_ns)
        self._begun += tokens

    def gone(self, tokens: int, now_ns: int) -> None:
        """A request that was sent is over, and had none."""
        self._elapse(now_ns)
        self._requests -= 1
        self.tokens -= tokens
        if self._requests == 0:
            self._since_ns = None

    def wait_ns(self, now_ns: int) -> int | None:
        """Returns the wait of a request that is sent now; None while too little was seen."""
        if self.tokens == 0:
            return 0
        self._elapse(now_ns)
        if self._seconds < LEAST_SEEN_S or self._begun <= 0:
            return None
        return int(min(self.tokens * self._seconds / self._begun, MOST_S) * 1e9)

    def _elapse(self, now_ns: int) -> None:
        if self._since_ns is not None and now_ns > self._since_ns:
            kept = math.exp((self._since_ns - now_ns) / 1e9 / FORGET_S)
            self._begun = max(self._begun * kept, LEAST_TOKENS) if self._begun else 0.0
            self._seconds = self._seconds * kept + FORGET_S * (1 - kept)  # the same, looked at often or once
            self._since_ns = now_ns


class AnswerSource(Protocol):
    """The connection that an answer comes from."""

    def pause(self) -> None:
        """Read no more for now."""

    def resume(self, answer: "UpstreamAnswer | None") -> None:
        """Read on, if this is the answer that is being read."""

    def cut(self) -> None:
        """End the connection: nobody reads the rest."""


class UpstreamAnswer:
    """One answer, as it is read. status, headers: known once `piece` has returned; names in lower case, the first of
    each name counts. is_given_up: nobody wants it any more."""

    def __init__(self, connection: AnswerSource) -> None:
        self.status, self.headers = 0, dict[bytes, bytes]()
        self._connection = connection
        self.is_given_up = False
        self._pieces: list[bytes] = []
        self._num_unread = 0
        self._is_whole = False
        self._error: OSError | ValueError | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._until_s = 0.0  # of the loop's clock: when the wait has lasted too long

    @property
    def content_type(self) -> str:
        return self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")

    async def piece(self, within_s: float) -> bytes:
        """Returns all that has been read and not returned yet, as soon as there is any; b"" at the end. Raises
        `TimeoutError`, `OSError` for a connection that broke off, `ValueError` for what is not HTTP."""
        if not (self._pieces or self._is_whole or self._error):
            await self._wait(within_s)
        if self._pieces:
            return self._taken()
        if self._error is not None:
            raise copy(self._error)  # whose frames have this answer
        return b""

    def close(self) -> None:
        """Nobody reads on: a connection in the middle of an answer is cut."""
        self.is_given_up = True
        self._stop()
        if not self._is_whole:
            self._connection.cut()

    def _taken(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        if self._num_unread > MAX_UNREAD_BYTES:
            self._connection.resume(self)
        self._num_unread = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _wait(self, within_s: float) -> None:
        self._until_s = self._loop.time() + within_s
        if self._watch is None or self._watch.when() > self._until_s:
            self._stop()
            self._watch = self._loop.call_later(within_s, self._look)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _look(self) -> None:
        """The timer of an earlier wait, which later ones leave as it is."""
        self._watch = None
        if self._waiter is None or self._waiter.done():
            return
        left_s = self._until_s - self._loop.time()
        if left_s > 0:
            self._watch = self._loop.call_later(left_s, self._look)
        else:
            self._waiter.set_exception(TimeoutError())

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    # ---- what its connection tells

    def come_from(self, connection: AnswerSource) -> None:
        """Take note that it is asked for again, over another connection; nothing of it was there."""
        self._connection = connection

    def begin(self, status: int) -> None:
        """Takes note that the head is there, for which `piece` does not wait."""
        self.status = status

    def feed(self, piece: bytes) -> None:
        self._pieces.append(piece)
        before, self._num_unread = self._num_unread, self._num_unread + len(piece)
        if before <= MAX_UNREAD_BYTES < self._num_unread:
            self._connection.pause()
        self._wake()

    def end(self, error: OSError | ValueError | None = None) -> None:
        """Takes note that it is whole, or, with an error, that nothing more of it comes. The connection of one that is
        whole may be another's by now."""
        if self._is_whole:
            return
        self._is_whole, self._error = error is None, error
        self._stop()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


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
