"""Answers in a Valkey or Redis that several gateways share, by the four commands that it takes: GET, SET, DEL, SCAN.

Each answer is a value with a time to live; the server bounds its own memory (`maxmemory`, `maxmemory-policy`). What is
shared are equal requests' answers: the questions of like ones are searched in each gateway's memory, so that a gateway
finds by likeness what it has kept itself. A server that does not answer within `TIMEOUT_S` is a miss, and is left alone
for `PAUSE_S`, so that no request waits for it again and again.
"""

import contextlib
import socket
import time
from collections.abc import Iterator
from itertools import islice
from urllib.parse import urlsplit

from splittime.core.errors import ConfigError
from splittime.gateway.cache.kept import KeptAnswer, from_bytes, to_bytes
from splittime.gateway.cache.stores import PART, Purge

PREFIX = b"splittime:answer:1:"
TIMEOUT_S, PAUSE_S = 0.25, 5.0
SCANNED = b"256"
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
        if time.monotonic() < self._away_until_s:
            raise ConnectionError("the store did not answer a moment ago")
        try:
            return self._asked(parts)
        except (OSError, ValueError, EOFError) as error:
            self.close()
            self._away_until_s = time.monotonic() + PAUSE_S
            raise ConnectionError(f"the store does not answer: {error}") from error

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _asked(self, parts: tuple[bytes, ...]) -> object:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, TIMEOUT_S)
            self._socket.settimeout(TIMEOUT_S)
            self._file = self._socket.makefile("rb")
        told = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
        self._socket.sendall(b"*%d\r\n%b" % (len(parts), told))
        return self._reply()

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


class ValkeyAnswers:
    """num_answers, num_bytes: what this gateway has put there."""

    def __init__(self, url: str) -> None:
        self._connection = ValkeyConnection(*address_of(url))
        self.num_answers = self.num_bytes = 0

    def get(self, key: str) -> KeptAnswer | None:
        found = self._connection.ask(b"GET", PREFIX + key.encode())
        return from_bytes(found) if isinstance(found, bytes) else None

    def put(self, answer: KeptAnswer, max_age_s: float) -> list[str]:
        life_ms = b"%d" % max(1, int(max_age_s * 1000))
        self._connection.ask(b"SET", PREFIX + answer.key.encode(), to_bytes(answer), b"PX", life_ms)
        self.num_answers += 1
        self.num_bytes += answer.size
        return []

    def purge(self, which: Purge) -> Iterator[list[str]]:
        names = iter([PREFIX + which.key.encode()]) if which.key is not None else self._names()
        while part := list(islice(names, PART)):
            yield [key for name in part if (key := self._purged(name, which)) is not None]

    def _purged(self, name: bytes, which: Purge) -> str | None:
        """Returns the key of an answer that was to go and went."""
        found = self._connection.ask(b"GET", name)
        with contextlib.suppress(ValueError):  # another version's
            if isinstance(found, bytes) and which.takes(answer := from_bytes(found)):
                return answer.key if self._connection.ask(b"DEL", name) else None
        return None

    def each(self) -> Iterator[KeptAnswer]:
        """Yields none: whose questions they are, each gateway knows of itself."""
        return iter(())

    def close(self) -> None:
        self._connection.close()

    def _names(self) -> Iterator[bytes]:
        cursor = b"0"
        while True:
            told = self._connection.ask(b"SCAN", cursor, b"MATCH", PREFIX + b"*", b"COUNT", SCANNED)
            if not (isinstance(told, list) and len(told) == 2 and isinstance(told[0], bytes)):
                raise ConnectionError("the store answered SCAN otherwise")
            yield from told[1]
            cursor = told[0]
            if cursor == b"0":
                return


def address_of(url: str) -> tuple[str, int]:
    """Returns host and port. Raises `ConfigError` for more than these."""
    hint = "as redis://127.0.0.1:6379, in a network that may read the answers"
    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORT
    except ValueError as error:
        raise ConfigError(f"cache.valkey: {error}", param="cache.valkey", hint=hint) from None
    if parts.scheme not in ("redis", "valkey") or not parts.hostname or parts.path not in ("", "/") or "@" in url:
        message = "cache.valkey is no redis://HOST:PORT; TLS, passwords and numbered databases are not built"
        raise ConfigError(message, code="not_built", param="cache.valkey", hint=hint)  # without it: it may have a key
    return parts.hostname, port
