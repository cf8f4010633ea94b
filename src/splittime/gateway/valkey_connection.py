"""A Valkey or Redis that several gateways share, asked by one connection (RESP2, the protocol of both).

A server that does not answer in time is left alone for `PAUSE_S`, so that nobody waits for it again and again. One
exchange has one deadline, however slowly its bytes come; a name that is not resolved takes as long as the system's
resolver. Whoever asks waits, so that all of it is for a thread and not for the event loop.
"""

import socket
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from splittime.core.errors import ConfigError

TIMEOUT_S, PAUSE_S = 0.25, 5.0
MAX_REPLY_BYTES = 128 * 2**20  # of all replies of an exchange
MAX_LINE_BYTES = 65536
MAX_DEPTH = 4  # of lists in lists
DEFAULT_PORT = 6379


class ErrorReply(Exception):
    """What the store says is wrong with a command. Inside a list it is one of the replies."""


class ValkeyConnection:
    """One connection, made when it is needed. Raises `OSError` for a server that does not answer, or not so."""

    def __init__(self, host: str, port: int, timeout_s: float = TIMEOUT_S) -> None:
        self._address, self._timeout_s = (host, port), timeout_s
        self._socket: socket.socket | None = None
        self._received = bytearray()
        self._until_s = self._away_until_s = 0.0
        self._num_received = 0

    def ask(self, *parts: bytes) -> object:
        """Returns the reply: bytes, a number, None, or a list of these and of `ErrorReply`."""
        return self.ask_all(parts)[0]

    def ask_all(self, *commands: Sequence[bytes]) -> list[object]:
        """Returns the replies of commands that are sent at once."""
        if time.monotonic() < self._away_until_s:
            raise ConnectionError("the store did not answer a moment ago")
        try:
            return self._asked(commands)
        except (OSError, ValueError, EOFError, ErrorReply) as error:
            self.close()
            self._away_until_s = time.monotonic() + PAUSE_S
            raise ConnectionError(f"the store does not answer: {error}") from error

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._received.clear()

    def _asked(self, commands: Sequence[Sequence[bytes]]) -> list[object]:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, self._timeout_s)
        self._until_s, self._num_received = time.monotonic() + self._timeout_s, 0
        self._socket.settimeout(self._timeout_s)
        self._socket.sendall(b"".join(map(_written, commands)))
        replies = [self._reply(0) for _ in commands]
        for reply in replies:
            if isinstance(reply, ErrorReply):
                raise reply
        return replies

    def _reply(self, depth: int) -> object:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            return ErrorReply(rest.decode("utf-8", "replace")[:200])
        if kind == b"$":
            return self._bulk(int(rest))
        if kind == b"*":
            if depth == MAX_DEPTH:
                raise ValueError("lists in lists in lists")
            return [self._reply(depth + 1) for _ in range(int(rest))]
        return int(rest) if kind == b":" else rest

    def _line(self) -> bytes:
        while (end := self._received.find(b"\r\n")) < 0:
            if len(self._received) > MAX_LINE_BYTES:
                raise ValueError("a line without an end")
            self._receive()
        return self._taken(end)

    def _bulk(self, size: int) -> bytes | None:
        if size < 0:
            return None
        while len(self._received) < size + 2:
            self._receive()
        return self._taken(size)

    def _taken(self, size: int) -> bytes:
        """Returns so many bytes, and takes the end of the line behind them too."""
        taken = bytes(self._received[:size])
        del self._received[: size + 2]
        return taken

    def _receive(self) -> None:
        assert self._socket is not None
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left_s)
        data = self._socket.recv(65536)
        self._num_received += len(data)
        if not data:
            raise EOFError("the reply has no end")
        if self._num_received > MAX_REPLY_BYTES:
            raise ValueError(f"more than {MAX_REPLY_BYTES} bytes")
        self._received += data


def _written(parts: Sequence[bytes]) -> bytes:
    told = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"*%d\r\n%b" % (len(parts), told)


def address_of(url: str, param: str) -> tuple[str, int]:
    """Returns host and port. Raises `ConfigError` for more than these."""
    hint = "as redis://127.0.0.1:6379, in a network that may read what is kept there"
    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORT
    except ValueError as error:
        raise ConfigError(f"{param}: {error}", param=param, hint=hint) from None
    has_more = parts.path not in ("", "/") or "@" in url or "?" in url or "#" in url
    if parts.scheme not in ("redis", "valkey") or not parts.hostname or has_more:
        message = f"{param} is no redis://HOST:PORT; TLS, passwords and numbered databases are not built"
        raise ConfigError(message, code="not_built", param=param, hint=hint)  # without it: it may have a key
    return parts.hostname, port
