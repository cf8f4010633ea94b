"""The ledger on disk: SQLite in WAL mode, written by a thread of its own from a bounded queue, in batches.

Promises: `put` never waits and never raises (a full queue drops the record and counts it); the file is readable at any
moment, also after kill -9, and then lacks at most the last batch; what is beyond a bound, of rows or of bytes, is
deleted, oldest first. The file holds at most `max_bytes` and a batch; beside it lies what is not folded in (`-wal`).
While the disk takes nothing, records wait in the queue, and are written when there is room again.
The server's facts are asked for every `FACTS_INTERVAL_S` and at the end, and kept when they differ from the last.
A path that cannot be written, or that another process writes, is a `ConfigError` at once; a disk that
fails later, or is too slow, is logged once for each outage, and serving goes on. One that fails is tried by one record.
`num_unwritten`: records that cannot be written at all, and those that still wait at the end.

    accounts(seq, request_id, group_id, e2e_ns, body)      body is the record as JSON, so that other tools can read it
    refused(the same)                                      since format 3: of requests that never reached the engine
    steps(seq, begin_ns, body)
    hops(seq, trace_id, body)                              not in each file of format 3
    facts(seq, at_ns, body)                                since format 2; at_ns: of the host's monotonic clock

The ledger on disk, read while it is written or after its writer was killed.

Opened for writing a ledger file is its owner's alone, one writer at a time, with the tables of the present format.

The lock is on a file beside it (`FILE.lock`, with the writer's process id), which stays there when the writer ends: the
system gives a lock back however a process dies. A second one is on the ledger file itself, which may have another name
by a hard link. Its handle is open before SQLite's and closed after it, since to close a second handle of a file takes
SQLite's own locks away.
"""

import contextlib
import fcntl
import logging
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic, monotonic_ns
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
        names = list([names, f"cmpl-{names}", f"chatcmpl-{names}"] if isinstance(names, str) else names)
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
        return [account for query in queries for account in self._records(query, values, ClosedAccount)]

    def steps(self, limit: int = 100) -> list[StepRecord]:
        query = "SELECT body FROM steps ORDER BY seq DESC LIMIT ?"
        return self._records(query, (limit,), StepRecord)[::-1]

    def steps_between(self, begin_ns: int, end_ns: int, limit: int = -1) -> list[StepRecord]:
        """Returns the latest steps in this span of the host's monotonic clock, with the one in which it begins. No
        other is read: there is an index, and a file may hold millions. limit: -1 for all."""
        first = "(SELECT coalesce(max(begin_ns), 0) FROM steps WHERE begin_ns <= ?)"
        query = f"SELECT body FROM steps WHERE begin_ns BETWEEN {first} AND ? ORDER BY seq DESC LIMIT ?"
        latest = self._records(query, (begin_ns, end_ns, limit), StepRecord)
        return [step for step in reversed(latest) if step.end_ns >= begin_ns]

    def hops(self, trace_id: str) -> list[Hop]:
        """Returns the hops of a trace, of whichever tenant; none from a file that is older than hops are."""
        query = "SELECT body FROM hops WHERE trace_id = ? ORDER BY seq LIMIT ?"
        return self._records(query, (trace_id, MAX_FOUND_HOPS), Hop) if self._has_hops else []

    def latest_hops(self, limit: int) -> list[Hop]:
        """Returns the latest hops of all traces, oldest first."""
        query = "SELECT body FROM hops ORDER BY seq DESC LIMIT ?"
        return self._records(query, (limit,), Hop)[::-1] if self._has_hops else []

    def facts(self) -> ServerFacts | None:
        """The server's facts as they were last; None in a file of format 1, or of a server that never got ready."""
        if not self._has_facts:
            return None
        return next(iter(self._records("SELECT body FROM facts ORDER BY seq DESC LIMIT 1", (), ServerFacts)), None)

    def _records(self, query: str, values: tuple[Any, ...], kind: type[Record]) -> list[Record]:
        try:
            return [msgspec.json.decode(body, type=kind) for (body,) in self._connection.execute(query, values)]
        except (sqlite3.Error, msgspec.MsgspecError) as error:  # a damaged file, or one that another tool wrote in
            raise ConfigError(f"{self._path} is not a readable ledger file: {error}", param="ledger") from error

    def close(self) -> None:
        self._connection.close()


def _ended_at_unix_ns(account: ClosedAccount) -> int:
    """The monotonic clock starts anew when the host does, and a file may hold accounts from before that."""
    return account.started_at_unix_ns + account.end_ns - account.start_ns


log = logging.getLogger("splittime.ledger")

Queued = ClosedAccount | StepRecord | Hop

FACTS_INTERVAL_S = 10.0
MAX_FACTS = 100
HOPS_PER_ACCOUNT = 4  # kept in the file, in the mean
BATCH_INTERVAL_S = 0.1
MAX_BATCH_RECORDS, MAX_BATCH_BYTES = 2_000, 8 * 2**20
MAX_QUEUED_RECORDS, MAX_QUEUED_BYTES = 50_000, 256 * 2**20
RETRY_S = 1.0  # while the disk takes nothing
OF_A_RECORD = (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError)
DELETED_SHARE = 64  # of the rows, one in so many goes at a time where there are too many bytes
DELETING_S = 0.5  # for a batch: of a file that is far too large the rest goes with later ones


class FileWriter:
    """The only writer of a ledger file."""

    def __init__(
        self,
        path: Path,
        max_accounts: int,
        max_steps: int,
        max_queued_records: int = MAX_QUEUED_RECORDS,
        tell_facts: Callable[[], ServerFacts | None] = lambda: None,
        max_bytes: int | None = None,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._max_rows = {"accounts": max_accounts, "refused": max_accounts, "steps": max_steps, "facts": MAX_FACTS}
        self._max_rows["hops"] = HOPS_PER_ACCOUNT * max_accounts
        self._tell_facts = tell_facts
        self._facts: ServerFacts | None = None  # the last ones written
        self._facts_due_s = 0.0
        self._queue: deque[Queued] = deque()
        self._max_queued_records, self._max_queued_bytes = max_queued_records, max_queued_bytes
        self.num_dropped = self.num_unwritten = 0
        self._num_put = self._num_done = self._num_put_bytes = self._num_done_bytes = 0
        self._is_failing = self._is_losing = False
        self._reader: LedgerFile | None = None
        self._file = OwnFile(path)
        self._connection = self._file.connection
        self.last_step_id = self._last_step_id()  # that servers before this one wrote; 0 if none did
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger-file", daemon=True)
        self._thread.start()

    def put(self, record: Queued) -> None:
        num_bytes = weight_bytes(record)
        if len(self._queue) >= self._max_queued_records or self._queued_bytes + num_bytes > self._max_queued_bytes:
            if not self._is_losing:
                log.error("ledger file %s: too many records wait to be written; those that come are lost", self._path)
            self._is_losing = True
            self.num_dropped += 1
            return
        self._num_put += 1
        self._num_put_bytes += num_bytes
        self._queue.append(record)

    @property
    def _queued_bytes(self) -> int:
        return self._num_put_bytes - self._num_done_bytes  # each is counted up in one thread alone

    def reader(self) -> LedgerFile:
        if self._reader is None:
            self._reader = LedgerFile(self._path)
        return self._reader

    def flush(self, timeout_s: float) -> bool:
        target, deadline_s = self._num_put, monotonic() + timeout_s
        while self._num_done < target and monotonic() < deadline_s and self._thread.is_alive():
            self._wake.set()
            self._stop.wait(0.002)
        return self._num_done >= target

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._stop.set()
        self._wake.set()
        self._thread.join()

    def _last_step_id(self) -> int:
        row = self._connection.execute("SELECT body FROM steps ORDER BY seq DESC LIMIT 1").fetchone()
        try:
            return 0 if row is None else msgspec.json.decode(row[0], type=StepRecord).step_id
        except msgspec.MsgspecError as error:
            self._file.close()
            hint = "Name another file, or move this one away."
            message = f"ledger file {self._path}: its last step cannot be read: {error}"
            raise ConfigError(message, param="ledger_file", value=str(self._path), hint=hint) from error

    def _run(self) -> None:
        while not (self._stop.is_set() and not self._queue):
            self._wake.wait(BATCH_INTERVAL_S)
            self._wake.clear()
            is_ending = self._stop.is_set()
            while self._queue and self._write_batch():
                pass
            if self._queue and is_ending:
                self.num_unwritten += len(self._queue)
                break
            if monotonic() >= self._facts_due_s:
                self._keep_facts()
            if self._is_failing:
                self._wake.wait(RETRY_S)
        self._keep_facts()
        self._file.close()

    def _write_batch(self) -> bool:
        """Returns whether the disk takes anything: else the batch is at the head of the queue again."""
        batch = self._next_batch()
        try:
            if not self._write(lambda: self._insert(batch)):
                self._queue.extendleft(reversed(batch))
                return False
        except Exception:  # one of them can be no row
            for record in batch:
                self._write_alone(record)
        self._num_done += len(batch)
        self._num_done_bytes += sum(map(weight_bytes, batch))
        self._is_losing = self._is_losing and bool(self._queue)
        return True

    def _next_batch(self) -> list[Queued]:
        """Returns what is written next: one record where the disk took nothing, so that a try costs little."""
        most_records, batch, num_bytes = 1 if self._is_failing else MAX_BATCH_RECORDS, list[Queued](), 0
        while self._queue and len(batch) < most_records and num_bytes < MAX_BATCH_BYTES:
            batch.append(self._queue.popleft())
            num_bytes += weight_bytes(batch[-1])
        return batch

    def _write_alone(self, record: Queued) -> None:
        try:
            is_written = self._write(lambda: self._insert([record]))
        except Exception as error:  # the thread goes on
            log.error("ledger file %s: a record cannot be written: %s", self._path, error)
            is_written = False
        self.num_unwritten += not is_written

    def _write(self, insert: Callable[[], object]) -> bool:
        """Returns whether the disk took it. Raises what is wrong with a record itself."""
        try:
            with self._connection:  # one transaction: committed whole, or rolled back whole
                insert()
                self._delete_oldest()
            self._is_failing = False
        except OF_A_RECORD:
            raise
        except sqlite3.Error as error:
            if not self._is_failing:
                log.error("ledger file %s: %s; records wait until it can be written again", self._path, error)
            self._is_failing = True
        return not self._is_failing

    def _keep_facts(self) -> None:
        try:
            facts = self._tell_facts()
        except Exception:  # the fault of who tells them is not the file's
            log.exception("the server's facts could not be had")
            facts = None
        if facts is not None and facts != self._facts:
            insert, row = "INSERT INTO facts(at_ns, body) VALUES(?, ?)", (monotonic_ns(), _to_json(facts))
            if self._write(lambda: self._connection.execute(insert, row)):
                self._facts = facts
        self._facts_due_s = monotonic() + (FACTS_INTERVAL_S if facts is not None else BATCH_INTERVAL_S)

    def _insert(self, batch: list[Queued]) -> None:
        accounts = [r for r in batch if isinstance(r, ClosedAccount)]
        for table, is_refused in ACCOUNT_TABLES.items():
            rows = [
                (r.request_id, r.group_id, r.end_ns - r.start_ns, _to_json(r))
                for r in accounts
                if r.is_refused == is_refused
            ]
            insert = f"INSERT INTO {table}(request_id, group_id, e2e_ns, body) VALUES(?, ?, ?, ?)"
            self._connection.executemany(insert, rows)
        steps = [(r.begin_ns, _to_json(r)) for r in batch if isinstance(r, StepRecord)]
        self._connection.executemany("INSERT INTO steps(begin_ns, body) VALUES(?, ?)", steps)
        hops = [(r.trace_id, _to_json(r)) for r in batch if isinstance(r, Hop)]
        self._connection.executemany("INSERT INTO hops(trace_id, body) VALUES(?, ?)", hops)

    def _delete_oldest(self) -> None:
        for table, max_rows in self._max_rows.items():
            self._connection.execute(
                f"DELETE FROM {table} WHERE seq <= (SELECT max(seq) FROM {table}) - ?", (max_rows,)
            )
        until_s = monotonic() + DELETING_S
        while self._max_bytes is not None and self._num_bytes() > self._max_bytes and self._delete_a_share():
            if monotonic() > until_s:
                break

    def _num_bytes(self) -> int:
        """Returns what the rows take; pages that are free again are used before the file grows."""
        pages, free, size = (
            self._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    def _delete_a_share(self) -> bool:
        """Deletes the oldest share of each table, so that they go back equally far; of a short one nothing, unless all
        are short. The latest row stays. Returns whether any was deleted."""
        spans = {table: self._span(table) for table in (*ACCOUNT_TABLES, "steps", "hops")}
        shares = {table: (last - first) // DELETED_SHARE for table, (first, last) in spans.items()}
        least = 0 if any(shares.values()) else 1
        deleted = 0
        for table, (first, last) in spans.items():
            until = min(first + max(shares[table], least) - 1, last - 1)
            deleted += self._connection.execute(f"DELETE FROM {table} WHERE seq <= ?", (until,)).rowcount
        return deleted > 0

    def _span(self, table: str) -> tuple[int, int]:
        """Returns the oldest and the latest row's number, found without reading the others; 0 where there is none."""
        ends = f"SELECT (SELECT min(seq) FROM {table}), (SELECT max(seq) FROM {table})"
        first, last = self._connection.execute(ends).fetchone()
        return (first or 0, last or 0)


def _to_json(record: Queued | ServerFacts) -> str:
    return msgspec.json.encode(record).decode()


ACCOUNT_BYTES, STEP_BYTES, HOP_BYTES = 1200, 800, 1024  # of one without tokens or rows; an account's places by id too
TOKEN_BYTES = 40  # of one of its numbers: the number, and its place in a tuple
INTERVAL_BYTES, PROMPT_PART_BYTES = 120, 190
ATTEMPT_BYTES, PART_BYTES = 700, 180  # one of its own, and of an upstream that was looked at, or a nested stage
ROW_BYTES, NAME_BYTES = 130, 60  # of a step: its numbers, and what a name takes beside its letters


def weight_bytes(record: ClosedAccount | StepRecord | Hop) -> int:
    """Returns what a record takes in memory, roughly: by its length, as a long answer's account has three numbers for
    each of its tokens."""
    if isinstance(record, ClosedAccount):
        numbers = len(record.token_steps) + len(record.token_ready_ns) + len(record.token_written_ns)
        parts = INTERVAL_BYTES * len(record.intervals) + PROMPT_PART_BYTES * len(record.prompt_parts)
        texts = len(record.prefixes) + len(record.answer_prefixes)
        attempts = sum(ATTEMPT_BYTES + PART_BYTES * (len(a.considered) + len(a.nested)) for a in record.attempts)
        return ACCOUNT_BYTES + TOKEN_BYTES * numbers + parts + attempts + texts
    if isinstance(record, StepRecord):
        chances = sum([len(told) for _, told in record.told_drafts if not isinstance(told, int)])
        comings = [coming for coming in record.told_comings if not isinstance(coming, int)]
        named = (record.rows, record.verified, record.told_drafts, record.late_rows, comings)
        of_rows = sum([ROW_BYTES + len(row[0]) for rows in named for row in rows])
        of_rows += TOKEN_BYTES * (len(record.told_comings) - len(comings))
        victims = sum(NAME_BYTES + len(name) for name in record.victims)
        return STEP_BYTES + of_rows + TOKEN_BYTES * chances + victims
    return HOP_BYTES
