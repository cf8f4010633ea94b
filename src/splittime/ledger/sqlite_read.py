"""The ledger on disk, read while it is written or after its writer was killed.

Opened for writing a ledger file is its owner's alone, one writer at a time, with the tables of the present format.

The lock is on a file beside it (`FILE.lock`, with the writer's process id), which stays there when the writer ends: the
system gives a lock back however a process dies. A second one is on the ledger file itself, which may have another name
by a hard link. Its handle is open before SQLite's and closed after it, since to close a second handle of a file takes
SQLite's own locks away.
"""

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from splittime.core.errors import ConfigError, NotFound
from splittime.ledger.account import ClosedAccount
from splittime.ledger.facts import ServerFacts
from splittime.ledger.hops import Hop
from splittime.ledger.steps import StepRecord

Record = TypeVar("Record", ClosedAccount, StepRecord, Hop, ServerFacts)
MAX_FOUND_HOPS = 10_000
SCHEMA_VERSION = 3
OWNER_ONLY = 0o600
ACCOUNT_TABLES = {"accounts": False, "refused": True}  # and whether it holds the refused ones

_SCHEMA = """
CREATE TABLE IF NOT EXISTS accounts(
  seq INTEGER PRIMARY KEY, request_id TEXT NOT NULL, group_id TEXT NOT NULL, e2e_ns INTEGER NOT NULL,
  body TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS accounts_request_id ON accounts(request_id);
CREATE INDEX IF NOT EXISTS accounts_group_id ON accounts(group_id);
CREATE TABLE IF NOT EXISTS refused(
  seq INTEGER PRIMARY KEY, request_id TEXT NOT NULL, group_id TEXT NOT NULL, e2e_ns INTEGER NOT NULL,
  body TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS refused_request_id ON refused(request_id);
CREATE INDEX IF NOT EXISTS refused_group_id ON refused(group_id);
CREATE TABLE IF NOT EXISTS steps(seq INTEGER PRIMARY KEY, begin_ns INTEGER NOT NULL, body TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS steps_begin_ns ON steps(begin_ns);
CREATE TABLE IF NOT EXISTS hops(seq INTEGER PRIMARY KEY, trace_id TEXT NOT NULL, body TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS hops_trace_id ON hops(trace_id);
CREATE TABLE IF NOT EXISTS facts(seq INTEGER PRIMARY KEY, at_ns INTEGER NOT NULL, body TEXT NOT NULL);
"""


class OwnFile:
    """A ledger file that this process alone writes. Raises `ConfigError` with the way out."""

    def __init__(self, path: Path) -> None:
        try:
            self._locks = _locked(path)
        except OSError as error:
            raise _cannot_write(path, error.strerror or str(error)) from error
        try:
            self.connection = _open(path)
        except BaseException:
            self._give_back()
            raise

    def close(self) -> None:
        self.connection.close()  # the last connection to close also folds the WAL into the file
        self._give_back()

    def _give_back(self) -> None:
        for handle in self._locks:
            os.close(handle)


def require_free(path: Path) -> None:
    """Raises what opening does for a file that another server is writing now."""
    for handle in _locked(path):
        os.close(handle)


def _locked(path: Path) -> tuple[int, int]:
    """Returns the handles that hold the locks: of the name, and of the file by whatever name."""
    by_name = _lock(path)
    try:
        return by_name, _lock_file(path)
    except BaseException:
        os.close(by_name)
        raise


def _lock(path: Path) -> int:
    """The handle that holds the lock."""
    real = Path(os.path.realpath(path))  # two names of one file are one file
    handle = os.open(real.with_name(real.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNER_ONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 20).decode("ascii", "replace").strip()
        os.close(handle)
        raise _is_written(path, f"(process {holder or 'unknown'})") from None
    except OSError:
        os.close(handle)
        raise
    os.truncate(handle, 0)
    os.write(handle, b"%d\n" % os.getpid())
    return handle


def _lock_file(path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNER_ONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise _is_written(path, "by another name of the file") from None
    except OSError:
        os.close(handle)
        raise
    return handle


def _is_written(path: Path, how: str) -> ConfigError:
    hint = "give each server a --ledger-file of its own, or end that one"
    message = f"the ledger file {path} is being written by another splittime {how}"
    return ConfigError(message, param="ledger_file", value=str(path), hint=hint)


def _open(path: Path) -> sqlite3.Connection:
    try:
        _keep_to_owner(path)
        connection = sqlite3.connect(path, check_same_thread=False, timeout=5.0)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")  # survives kill -9; a power cut may cost the last batches
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version <= SCHEMA_VERSION:  # 0: a new file; of an older one only tables are missing
            connection.executescript(_SCHEMA)
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    except (OSError, sqlite3.Error) as error:
        raise _cannot_write(path, str(error)) from error
    if version > SCHEMA_VERSION:
        connection.close()
        raise ConfigError(f"ledger file {path} has format {version}, this splittime writes {SCHEMA_VERSION}")
    return connection


def _keep_to_owner(path: Path) -> None:
    """SQLite makes the files beside it (-wal, -shm) with the mode of the file."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNER_ONLY))
    for name in (path, f"{path}-wal", f"{path}-shm"):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # no such file; another's, who may give us leave
            os.chmod(name, OWNER_ONLY)


def _cannot_write(path: Path, why: str) -> ConfigError:
    hint = "Name a file in a folder that exists and can be written, on a local disk with room."
    return ConfigError(f"cannot write the ledger file {path}: {why}", param="ledger_file", hint=hint)


class LedgerFile:
    """A ledger file for reading. Same questions as `Ledger`, same order of answers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_file():
            raise NotFound(f"no ledger file at {path}", param="ledger", value=str(path))
        try:
            self._connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False)
            self._connection.execute("SELECT seq FROM accounts LIMIT 1")
            tables = self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            found = {name for (name,) in tables}
            self._has_facts, self._has_hops = "facts" in found, "hops" in found
            self._account_tables = [table for table in ACCOUNT_TABLES if table in found]
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.Error as error:
            hint = "A ledger is what `splittime serve --ledger-file FILE` writes."
            raise ConfigError(f"{path} is not a readable ledger file: {error}", param="ledger", hint=hint) from error
        if version > SCHEMA_VERSION:
            hint = "Read it with the splittime that wrote it, or a later one."
            words = f"ledger file {path} has format {version}, this splittime reads {SCHEMA_VERSION}"
            raise ConfigError(words, param="ledger", value=version, limit=SCHEMA_VERSION, hint=hint)

    def account(self, names: str | Iterable[str]) -> list[ClosedAccount]:
        names = list(_spellings(names) if isinstance(names, str) else names)
        marks = ", ".join("?" * len(names))
        where = f"WHERE request_id IN ({marks}) OR group_id IN ({marks}) ORDER BY seq"
        return self._accounts(where, (*names, *names))

    def accounts(self, slower_than_ms: float | None = None, limit: int = 100) -> list[ClosedAccount]:
        slower_than_ns = -1 if slower_than_ms is None else int(slower_than_ms * 1e6)
        found = self._accounts("WHERE e2e_ns > ? ORDER BY seq DESC LIMIT ?", (slower_than_ns, limit))
        found.reverse()
        return sorted(found, key=_ended_at_unix_ns)[-limit:] if limit else []

    def _accounts(self, where: str, values: tuple[Any, ...]) -> list[ClosedAccount]:
        queries = [f"SELECT body FROM {table} {where}" for table in self._account_tables]
        return [account for query in queries for account in self._records(query, values, _to_account)]

    def steps(self, limit: int = 100) -> list[StepRecord]:
        query = "SELECT body FROM steps ORDER BY seq DESC LIMIT ?"
        return self._records(query, (limit,), to_step)[::-1]

    def steps_between(self, begin_ns: int, end_ns: int, limit: int = -1) -> list[StepRecord]:
        """Returns the latest steps in this span of the host's monotonic clock, with the one in which it begins. No
        other is read: there is an index, and a file may hold millions. limit: -1 for all."""
        first = "(SELECT coalesce(max(begin_ns), 0) FROM steps WHERE begin_ns <= ?)"
        query = f"SELECT body FROM steps WHERE begin_ns BETWEEN {first} AND ? ORDER BY seq DESC LIMIT ?"
        latest = self._records(query, (begin_ns, end_ns, limit), to_step)
        return [step for step in reversed(latest) if step.end_ns >= begin_ns]

    def hops(self, trace_id: str) -> list[Hop]:
        """Returns the hops of a trace, of whichever tenant; none from a file that is older than hops are."""
        query = "SELECT body FROM hops WHERE trace_id = ? ORDER BY seq LIMIT ?"
        return self._records(query, (trace_id, MAX_FOUND_HOPS), _to_hop) if self._has_hops else []

    def latest_hops(self, limit: int) -> list[Hop]:
        """Returns the latest hops of all traces, oldest first."""
        query = "SELECT body FROM hops ORDER BY seq DESC LIMIT ?"
        return self._records(query, (limit,), _to_hop)[::-1] if self._has_hops else []

    def facts(self) -> ServerFacts | None:
        """The server's facts as they were last; None in a file of format 1, or of a server that never got ready."""
        if not self._has_facts:
            return None
        return next(iter(self._records("SELECT body FROM facts ORDER BY seq DESC LIMIT 1", (), _to_facts)), None)

    def _records(self, query: str, values: tuple[Any, ...], decode: Callable[[str], Record]) -> list[Record]:
        try:
            return [decode(body) for (body,) in self._connection.execute(query, values)]
        except (sqlite3.Error, msgspec.MsgspecError) as error:  # a damaged file, or one that another tool wrote in
            raise ConfigError(f"{self._path} is not a readable ledger file: {error}", param="ledger") from error

    def close(self) -> None:
        self._connection.close()


def _ended_at_unix_ns(account: ClosedAccount) -> int:
    """The monotonic clock starts anew when the host does, and a file may hold accounts from before that."""
    return account.started_at_unix_ns + account.end_ns - account.start_ns


def _spellings(request_id: str) -> list[str]:
    return [request_id, f"cmpl-{request_id}", f"chatcmpl-{request_id}"]


def _to_account(body: str) -> ClosedAccount:
    return msgspec.json.decode(body, type=ClosedAccount)


def to_step(body: str) -> StepRecord:
    return msgspec.json.decode(body, type=StepRecord)


def _to_hop(body: str) -> Hop:
    return msgspec.json.decode(body, type=Hop)


def _to_facts(body: str) -> ServerFacts:
    return msgspec.json.decode(body, type=ServerFacts)
