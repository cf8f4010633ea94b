"""One HTTP/1.1 connection, of our own because the instants matter: bytes are timed in the callback that brings them.

An `ExchangeEvents` hears what happens on the wire, each with its instant: sent, headers, pieces of the body, the end.
A server that decodes in steps writes to all its streams at once: so the bytes of all connections are read and timed
first, and understood in the same turn of the event loop after that.

What it promises, and `tests/bench/test_client.py` checks:

* with a write buffer limit of 0, `on_sent` is called when the last byte has gone to the kernel (under TLS: to it or to
  the encrypting layer's buffer);
* an answer is whole by its length, by its last chunk, or by the connection's close if it has neither;
* a connection is used again only after an answer that was whole and allows it;
* a header, or what stands between two pieces of a body, is read for at most `MAX_HEAD_BYTES`.
"""

import asyncio
import select
import time
from typing import TYPE_CHECKING, Any, Protocol

import httptools

if TYPE_CHECKING:
    from splittime.wire.pool import Pool

now_ns = time.monotonic_ns
MAX_HEAD_BYTES = 2**20
MAX_TYPE_BYTES = 200


class ExchangeEvents(Protocol):
    """One request's side of a connection."""

    def on_sent(self, at_ns: int) -> None: ...
    def on_headers(self, status: int, content_type: str, at_ns: int) -> None: ...
    def on_body(self, piece: bytes, at_ns: int) -> None: ...
    def on_end(self, at_ns: int) -> None:
        """The answer is whole."""
        ...

    def on_lost(self, error: Exception | None, at_ns: int) -> None:
        """The connection ended before the answer was whole."""
        ...


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self._exchange: ExchangeEvents | None = None
        self._parser: Any = None
        self._transport: Any = None
        self._content_type = ""
        self._has_length = False
        self._is_full = False
        self._num_head_bytes = 0  # since the last byte of a body
        self._read_ns = 0
        self._unread: list[tuple[int, bytes]] = []
        self._ended = select.poll()
        self.is_open = False
        self.is_for_one = False  # not to be used again

    @property
    def is_usable(self) -> bool:
        """Open, and the kernel holds neither an end nor an answer that nobody asked for."""
        return self.is_open and not self._ended.poll(0)

    # ---- what we do

    def ask(self, request: bytes, exchange: ExchangeEvents) -> None:
        self._exchange = exchange
        self._num_head_bytes = 0
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)
        if not self._is_full:
            exchange.on_sent(now_ns())

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self.is_open:
            self._transport.resume_reading()

    def hang_up(self) -> None:
        """Close at once, with whatever is on its way."""
        self._exchange = None
        if self.is_open:
            self._transport.abort()

    # ---- what happens to us

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.is_open = True
        transport.set_write_buffer_limits(high=0)
        self._ended.register(transport.get_extra_info("socket"), select.POLLIN)
        self._pool.note_open(self)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self._exchange is not None:
            self._exchange.on_sent(now_ns())

    def data_received(self, data: bytes) -> None:
        self._unread.append((now_ns(), data))
        self._pool.understand_soon(self)

    def understand(self) -> None:
        """Take apart what was read."""
        unread, self._unread = self._unread, []
        for self._read_ns, data in unread:
            if self._parser is None or self._exchange is None:  # an answer that nobody asked for, or wants any more
                self._transport.abort()
                return
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._give_up(f"the answer is not HTTP: {error}")
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._give_up(f"the answer's header is longer than {MAX_HEAD_BYTES:,} bytes")

    def _give_up(self, why: str) -> None:
        exchange, self._exchange = self._exchange, None
        self._transport.abort()
        if exchange is not None:
            exchange.on_lost(ValueError(why), self._read_ns)

    def connection_lost(self, exc: Exception | None) -> None:
        self.understand()
        self.is_open = False
        self._pool.forget(self)
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if exc is None and self._parser is not None and self._ends_by_closing():
            exchange.on_end(now_ns())
        else:
            exchange.on_lost(exc, now_ns())

    def _ends_by_closing(self) -> bool:
        """HTTP's third way to end a body: neither a length nor chunks, and the connection closes."""
        return bool(self._content_type) and not self._has_length

    # ---- the parser's calls

    def on_message_begin(self) -> None:
        self._content_type, self._has_length = "", False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._content_type = value[:MAX_TYPE_BYTES].decode("latin-1")
        elif name in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        if self._parser is None or self._exchange is None:  # more than was asked for, behind a whole answer
            return
        status = self._parser.get_status_code()
        if status >= 200:
            self._exchange.on_headers(status, self._content_type, self._read_ns)

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        if self._exchange is not None:
            self._exchange.on_body(body, self._read_ns)

    def on_message_complete(self) -> None:
        if self._parser is None or self._parser.get_status_code() < 200 or self._exchange is None:
            return
        self._num_head_bytes = 0
        exchange, self._exchange = self._exchange, None
        self._pool.give_back(self, self._parser.should_keep_alive())
        self._parser = None
        exchange.on_end(self._read_ns)
