"""A Valkey or Redis that several gateways share, asked by one connection (RESP2, the protocol of both).

A server that does not answer within `TIMEOUT_S` is left alone for `PAUSE_S`, so that nobody waits for it again and
again. Whoever asks waits, so that all of it is for a thread and not for the event loop.
"""

import socket
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from splittime.core.errors import ConfigError

TIMEOUT_S, PAUSE_S = 0.25, 5.0
MAX_REPLY_BYTES = 128 * 2**20
DEFAULT_PORT = 6379


class ValkeyConnection:
    """One connection, made when it is needed. Raises `OSError` for a server that does not answer, or not so."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._socket: socket.socket | None = None
        self._away_until_s = 0.0

    def ask(self, *parts: bytes) -> object:
        """Returns the reply: bytes, a number, None, or a list of these."""
        return self._asked((parts,))[0]

    def ask_together(self, *commands: Sequence[bytes]) -> list[Any]:
        """Returns the replies of commands that the store carries out one behind the other, all of them or none."""
        replies = self._asked(((b"MULTI",), *commands, (b"EXEC",)))[-1]
        if not isinstance(replies, list) or len(replies) != len(commands):
            raise ConnectionError("the store answered EXEC otherwise")
        return replies

    def _asked(self, commands: Sequence[Sequence[bytes]]) -> list[object]:
        if time.monotonic() < self._away_until_s:
            raise ConnectionError("the store did not answer a moment ago")
        try:
            return self._replies(commands)
        except (OSError, ValueError, EOFError) as error:
            self.close()
            self._away_until_s = time.monotonic() + PAUSE_S
            raise ConnectionError(f"the store does not answer: {error}") from error

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _replies(self, commands: Sequence[Sequence[bytes]]) -> list[object]:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, TIMEOUT_S)
            self._socket.settimeout(TIMEOUT_S)
            self._file = self._socket.makefile("rb")
        self._socket.sendall(b"".join(map(_written, commands)))
        return [self._reply() for _ in commands]

    def _reply(self) -> object:
        line = self._file.readline(65536)
        kind, rest = line[:1], line[1:].rstrip(b"\r\n")
        if not line.endswith(b"\n"):
            raise EOFError("the reply has no end")
        if kind == b"-":
            raise OSError(rest.decode("utf-8", "replace")[:200])
        if kind == b"$":
            return self._bulk(int(rest))
        if kind == b"*":
            return [self._reply() for _ in range(int(rest))]
        return int(rest) if kind == b":" else rest

    def _bulk(self, size: int) -> bytes | None:
        if size < 0:
            return None
        if size > MAX_REPLY_BYTES:
            raise ValueError(f"a reply of {size} bytes")
        data = self._file.read(size + 2)
        if len(data) != size + 2:
            raise EOFError("the reply has no end")
        return data[:-2]


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
    if parts.scheme not in ("redis", "valkey") or not parts.hostname or parts.path not in ("", "/") or "@" in url:
        message = f"{param} is no redis://HOST:PORT; TLS, passwords and numbered databases are not built"
        raise ConfigError(message, code="not_built", param=param, hint=hint)  # without it: it may have a key
    return parts.hostname, port
