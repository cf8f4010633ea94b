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

Open connections to one server, without a limit on their number; the last used goes first.

TCP_NODELAY is set on every one and read back: `sockets_without_nodelay` counts those where it is not. The name is
looked up once, before the load: all load goes to the first of its addresses that answers.
"""

import asyncio
import errno
import select
import socket
import ssl
import time
from typing import Any, Protocol

import httptools

from splittime.core.errors import ConfigError
from splittime.wire.target import Address, Target

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


CONNECT_TIMEOUT_S = 10.0
SLOW_READER_BUFFER_BYTES = 4096
OUT_OF_SOCKETS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)


class Pool:
    """Connections to one server."""

    def __init__(self, target: Target) -> None:
        self._address = target.address
        self._tls = ssl.create_default_context() if self._address.is_tls else None
        self._place: tuple[int, Any] | None = None
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._unread: list[Connection] = []
        self.most_open = 0
        self.sockets_without_nodelay = 0
        self.out_of_sockets = 0

    async def look_up(self) -> None:
        """Find an address that takes connections, and keep the first one. Raises `ConfigError`."""
        found, error = await addresses(self._address), None
        for family, place in found:
            self.use((family, place))
            try:
                connection, _ = await self.connect()
            except OSError as reason:
                error = error or reason
            else:
                self.give_back(connection, is_reusable=True)
                return
        where = f"{self._address.host}:{self._address.port}"
        raise ConfigError(f"cannot connect to {where}: {error}", param="url", hint="is the server running there?")

    def use(self, place: tuple[int, Any]) -> None:
        """Connect to this family and address."""
        self._place = place

    async def take(self, within_s: float = CONNECT_TIMEOUT_S) -> tuple[Connection, int]:
        """An open connection, and how long it took to connect: 0 for one that was open. Raises `OSError`."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection, 0
            connection.hang_up()
        return await self.connect(within_s)

    async def connect(
        self, within_s: float = CONNECT_TIMEOUT_S, receive_buffer_bytes: int | None = None
    ) -> tuple[Connection, int]:
        """A new connection, with TLS if the address says so, and how long it took. Raises `OSError`, a
        `TimeoutError` when it took too long."""
        within_s = min(within_s, CONNECT_TIMEOUT_S)
        begin_ns = now_ns()
        try:
            async with asyncio.timeout(within_s):
                connection = await self._connect(receive_buffer_bytes)
        except TimeoutError:
            raise TimeoutError(f"no connection within {within_s:g} s") from None
        except OSError as error:
            self.out_of_sockets += error.errno in OUT_OF_SOCKETS
            raise
        return connection, now_ns() - begin_ns

    async def _connect(self, receive_buffer_bytes: int | None) -> Connection:
        if self._place is None:
            raise RuntimeError("look_up comes first")
        loop = asyncio.get_running_loop()
        family, place = self._place
        plain = socket.socket(family, socket.SOCK_STREAM)
        try:
            plain.setblocking(False)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if receive_buffer_bytes is not None:
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
            await loop.sock_connect(plain, place)
            if not plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY):
                self.sockets_without_nodelay += 1
            name = self._address.host if self._tls else None
            _, connection = await loop.create_connection(
                lambda: Connection(self), sock=plain, ssl=self._tls, server_hostname=name
            )
        except BaseException:
            plain.close()
            raise
        return connection

    def close(self) -> None:
        for connection in list(self._all):
            connection.hang_up()
        self._idle.clear()

    # ---- what connections tell

    def understand_soon(self, connection: Connection) -> None:
        """When all that is there has been read."""
        self._unread.append(connection)
        if len(self._unread) == 1:
            asyncio.get_running_loop().call_soon(self._understand)

    def _understand(self) -> None:
        unread, self._unread = self._unread, []
        for connection in unread:
            connection.understand()

    def note_open(self, connection: Connection) -> None:
        self._all.add(connection)
        self.most_open = max(self.most_open, len(self._all))

    def give_back(self, connection: Connection, is_reusable: bool) -> None:
        if is_reusable and connection.is_open and not connection.is_for_one:
            self._idle.append(connection)
        else:
            connection.hang_up()

    def forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


async def addresses(address: Address) -> list[tuple[int, Any]]:
    """Returns where a name leads. Raises `ConfigError` for one that leads nowhere."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        hint = "check the host's name in the URL"
        raise ConfigError(f"no address for {address.host}: {error}", param="url", hint=hint) from error
    return [(family, place) for family, _, _, _, place in found]
