"""A ledger file opened for writing: its owner's alone, one writer at a time, with the tables of the present format.

The lock is on a file beside it (`FILE.lock`, with the writer's process id), which stays there when the writer ends: the
system gives a lock back however a process dies. A second one is on the ledger file itself, which may have another name
by a hard link. Its handle is open before SQLite's and closed after it, since to close a second handle of a file takes
SQLite's own locks away.
"""

import contextlib
import fcntl
import os
import sqlite3
from pathlib import Path

from splittime.core.errors import ConfigError

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
