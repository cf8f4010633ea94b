"""Where answers are kept. One interface, for rows in SQLite (`SqliteAnswers`) and for Valkey (`ValkeyAnswers`).

Each call may wait for a disk or a network, so that all are made on the cache's own thread. Each may raise one of
`STORE_ERRORS`, which is a miss: an answer that cannot be read or kept is asked of an upstream. None takes longer the
more answers there are: a purge goes by parts, so that what is looked up meanwhile waits for one of them.

A Valkey or Redis that several gateways share takes four commands: GET, SET, DEL, SCAN. Each answer is a value with a
time to live; the server bounds its own memory (`maxmemory`, `maxmemory-policy`). What is shared are equal requests'
answers: the questions of like ones are searched in each gateway's memory, so that a gateway finds by likeness what it
has kept itself. A server that does not answer is a miss.

A Valkey or Redis that several gateways share, asked by one connection (RESP2, the protocol of both).

A server that does not answer in time is left alone for `PAUSE_S`, so that nobody waits for it again and again. One
exchange has one deadline, however slowly its bytes come; a name that is not resolved takes as long as the system's
resolver. Whoever asks waits, so that all of it is for a thread and not for the event loop.
"""

import contextlib
import os
import socket
import sqlite3
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from splittime.core.errors import ConfigError
from splittime.gateway.cache.answers import KeptAnswer, from_bytes, to_bytes

TIMEOUT_S, PAUSE_S = 0.25, 5.0
MAX_REPLY_BYTES = 128 * 2**20  # of all replies of an exchange
MAX_LINE_BYTES = 65536
MAX_DEPTH = 4  # of lists in lists
DEFAULT_PORT = 6379
STORE_ERRORS = (sqlite3.Error, OSError, ValueError)
FORMAT = 2  # of a row; a file of another is emptied
LAST_ROW = 2**63 - 1
PART = 64  # answers that are looked at, or go, in one turn of the thread
PREFIX = b"splittime:answer:1:"
BEGUN = b"splittime:answers-since"
SCANNED = b"256"


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


class Purge(msgspec.Struct, frozen=True, kw_only=True):
    """Which answers go: all that each given field names. tenant: None for everybody's."""

    tenant: str | None = None
    model: str | None = None
    key: str | None = None
    older_than_unix_s: float | None = None

    def takes(self, answer: KeptAnswer) -> bool:
        return self.takes_one(answer.tenant, answer.model, answer.key, answer.created_unix_s)

    def takes_one(self, tenant: str, model: str, key: str, created_unix_s: float) -> bool:
        named = ((self.tenant, tenant), (self.model, model), (self.key, key))
        if any(wanted is not None and wanted != found for wanted, found in named):
            return False
        return self.older_than_unix_s is None or created_unix_s < self.older_than_unix_s


class AnswerStore(Protocol):
    """Keeps answers within a number of bytes and an age."""

    @property
    def num_answers(self) -> int:
        """Returns how many there are; of a shared store, how many this gateway has put there."""

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of these."""

    def get(self, key: str) -> KeptAnswer | None:
        """Returns an answer, as it was put."""

    def put(self, answer: KeptAnswer, max_age_s: float) -> list[str]:
        """Keep an answer for so long; returns the keys of those that went for it."""

    def purge(self, which: Purge) -> Iterator[list[str]]:
        """Take answers out, of those that are there now; yields the keys of those that went, after each part."""

    def each(self) -> Iterator[KeptAnswer]:
        """Yields every answer that an index at the start needs, the oldest first."""

    def begun_unix_s(self) -> float | None:
        """Returns when it was empty last: nothing from before is in it. None where that is not known."""

    def close(self) -> None:
        """Let go of the file or the connection."""


class SqliteAnswers:
    """path: None for memory. Bounded by `max_bytes` of answers: who was used longest ago goes first."""

    def __init__(self, path: str | None, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows = _opened(path)
        self._ticks, self.num_answers, self.num_bytes = self._rows.execute(
            "SELECT coalesce(max(used), 0), count(*), coalesce(sum(size), 0) FROM answers"
        ).fetchone()

    def get(self, key: str) -> KeptAnswer | None:
        row = self._rows.execute("SELECT body FROM answers WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        self._ticks += 1
        self._rows.execute("UPDATE answers SET used = ? WHERE key = ?", (self._ticks, key))
        return from_bytes(row[0])

    def put(self, answer: KeptAnswer, max_age_s: float) -> list[str]:
        body, size = to_bytes(answer), answer.size
        if size > self._max_bytes:
            return []
        self._delete([answer.key])
        now_s = answer.created_unix_s
        words = "SELECT key FROM answers WHERE expires_unix_s < ? LIMIT ?"
        old = self._rows.execute(words, (now_s, PART)).fetchall()  # the rest goes with the next ones
        gone = self._delete([key for (key,) in old])
        while self.num_bytes + size > self._max_bytes:
            gone += self._delete([self._rows.execute("SELECT key FROM answers ORDER BY used LIMIT 1").fetchone()[0]])
        self._ticks += 1
        values = (answer.key, answer.tenant, answer.model, now_s, now_s + max_age_s, self._ticks, size, body)
        self._rows.execute("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
        self.num_answers += 1
        self.num_bytes += size
        return gone

    def purge(self, which: Purge) -> Iterator[list[str]]:
        if which.key is not None:
            yield self._delete_taken("key = ?", (which.key,), which)[1]
            return
        at, last = 0, self._rows.execute("SELECT coalesce(max(rowid), 0) FROM answers").fetchone()[0]
        while at < last:
            at, gone = self._delete_taken("rowid > ? AND rowid <= ?", (at, last), which)
            yield gone

    def _delete_taken(self, where: str, values: tuple[object, ...], which: Purge) -> tuple[int, list[str]]:
        """Delete what is to go of one part of the rows; returns the last row that was looked at, and the keys."""
        words = f"SELECT rowid, key, tenant, model, created_unix_s FROM answers WHERE {where} ORDER BY rowid LIMIT ?"
        rows = self._rows.execute(words, (*values, PART)).fetchall()
        taken = [key for _, key, tenant, model, made_s in rows if which.takes_one(tenant, model, key, made_s)]
        return (rows[-1][0] if rows else LAST_ROW), self._delete(taken)

    def each(self) -> Iterator[KeptAnswer]:
        for (body,) in self._rows.execute("SELECT body FROM answers ORDER BY used"):
            with contextlib.suppress(ValueError):
                yield from_bytes(body)

    def begun_unix_s(self) -> float | None:
        (begun,) = self._rows.execute("SELECT min(unix_s) FROM begun").fetchone()
        return None if begun is None else float(begun)

    def close(self) -> None:
        self._rows.close()

    def _delete(self, keys: list[str]) -> list[str]:
        """Delete rows; returns the keys of those that were there."""
        gone = []
        for key in keys:
            row = self._rows.execute("DELETE FROM answers WHERE key = ? RETURNING size", (key,)).fetchone()
            if row is not None:
                gone.append(key)
                self.num_answers -= 1
                self.num_bytes -= row[0]
        return gone


def _opened(path: str | None) -> sqlite3.Connection:
    """Raises `ConfigError` for a file that cannot be one. The file is its owner's alone: answers are in it."""
    try:
        if path is not None:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        rows = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
        tables = {name for (name,) in rows.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and "answers" not in tables:
            raise sqlite3.DatabaseError(f"it is a database of something else, with {sorted(tables)[0]}")
        rows.execute("PRAGMA journal_mode = WAL")
        rows.execute("PRAGMA synchronous = OFF")  # what a crash of the machine loses is asked again
        if rows.execute("PRAGMA user_version").fetchone()[0] != FORMAT:
            _begin(rows)
        rows.execute(
            "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, tenant TEXT, model TEXT, created_unix_s REAL, "
            "expires_unix_s REAL, used INTEGER, size INTEGER, body BLOB)"
        )
        rows.execute("CREATE INDEX IF NOT EXISTS by_use ON answers (used)")
        rows.execute("CREATE INDEX IF NOT EXISTS by_expiry ON answers (expires_unix_s)")
        rows.execute(f"PRAGMA user_version = {FORMAT}")
    except (OSError, sqlite3.Error) as error:
        hint = "name a file that this process may write, or leave it out to keep answers in memory"
        raise ConfigError(
            f"cache.file: cannot use {path}: {error}", param="cache.file", value=path, hint=hint
        ) from error
    return rows


def _begin(rows: sqlite3.Connection) -> None:
    """Empty it, and write down when that was."""
    for table in ("answers", "begun"):
        rows.execute(f"DROP TABLE IF EXISTS {table}")
    rows.execute("CREATE TABLE begun (unix_s REAL)")
    rows.execute("INSERT INTO begun VALUES (?)", (time.time(),))


class ValkeyAnswers:
    """num_answers, num_bytes: what this gateway has put there."""

    def __init__(self, url: str) -> None:
        self._connection = ValkeyConnection(*address_of(url, "cache.valkey"))
        self.num_answers = self.num_bytes = 0

    def get(self, key: str) -> KeptAnswer | None:
        found = self._connection.ask(b"GET", PREFIX + key.encode())
        return from_bytes(found) if isinstance(found, bytes) else None

    def put(self, answer: KeptAnswer, max_age_s: float) -> list[str]:
        life_ms = b"%d" % max(1, int(max_age_s * 1000))
        begun = (b"SET", BEGUN, b"%.3f" % time.time(), b"NX")  # once, in a server that has lost what it had
        self._connection.ask_all(begun, (b"SET", PREFIX + answer.key.encode(), to_bytes(answer), b"PX", life_ms))
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

    def begun_unix_s(self) -> float | None:
        found = self._connection.ask(b"GET", BEGUN)
        return float(found) if isinstance(found, bytes) else None

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
