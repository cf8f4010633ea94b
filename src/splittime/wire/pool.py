"""Open connections to one server, without a limit on their number; the last used goes first.

TCP_NODELAY is set on every one and read back: `sockets_without_nodelay` counts those where it is not. The name is
looked up once, before the load: all load goes to the first of its addresses that answers.
"""

import asyncio
import errno
import socket
import ssl
import time
from typing import Any

from splittime.core.errors import ConfigError
from splittime.wire.connection import Connection
from splittime.wire.target import Address, Target

now_ns = time.monotonic_ns
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
