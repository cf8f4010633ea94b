"""The ledger on disk: SQLite in WAL mode, written by a thread of its own from a bounded queue, in batches.

Promises: `put` never waits and never raises (a full queue drops the record and counts it); the file is readable at any
moment, also after kill -9, and then lacks at most the last batch; what is beyond a bound, of rows or of bytes, is
deleted, oldest first. The file holds at most `max_bytes` and a batch; beside it lies what is not folded in (`-wal`).
The server's facts are asked for every `FACTS_INTERVAL_S` and at the end, and kept when they differ from the last.
A path that cannot be written, or that another process writes (`sqlite_open`), is a `ConfigError` at once; a disk that
fails later costs records (`num_unwritten`), logged once for each outage, and serving goes on.

    accounts(seq, request_id, group_id, e2e_ns, body)      body is the record as JSON, so that other tools can read it
    refused(the same)                                      since format 3: of requests that never reached the engine
    steps(seq, begin_ns, body)
    hops(seq, trace_id, body)                              not in each file of format 3
    facts(seq, at_ns, body)                                since format 2; at_ns: of the host's monotonic clock
"""

import logging
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
from splittime.ledger.sqlite_open import SCHEMA_VERSION, OwnFile
from splittime.ledger.steps import StepRecord

log = logging.getLogger("splittime.ledger")

Record = TypeVar("Record", ClosedAccount, StepRecord, Hop, ServerFacts)
Queued = ClosedAccount | StepRecord | Hop

ACCOUNT_TABLES = {"accounts": False, "refused": True}  # and whether it holds the refused ones
FACTS_INTERVAL_S = 10.0
MAX_FACTS = 100
HOPS_PER_ACCOUNT = 4  # kept in the file, in the mean
BATCH_INTERVAL_S = 0.1
MAX_BATCH_RECORDS = 2_000
MAX_FOUND_HOPS = 10_000
MAX_QUEUED_RECORDS = 50_000
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
    ) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._max_rows = {"accounts": max_accounts, "refused": max_accounts, "steps": max_steps, "facts": MAX_FACTS}
        self._max_rows["hops"] = HOPS_PER_ACCOUNT * max_accounts
        self._tell_facts = tell_facts
        self._facts: ServerFacts | None = None  # the last ones written
        self._facts_due_s = 0.0
        self._queue: deque[Queued] = deque()
        self._max_queued_records = max_queued_records
        self.num_dropped = self.num_unwritten = 0
        self._num_put = self._num_done = 0
        self._is_failing = False
        self._reader: LedgerFile | None = None
        self._file = OwnFile(path)
        self._connection = self._file.connection
        self.last_step_id = self._last_step_id()  # that servers before this one wrote; 0 if none did
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger-file", daemon=True)
        self._thread.start()

    def put(self, record: Queued) -> None:
        if len(self._queue) >= self._max_queued_records:
            self.num_dropped += 1
            return
        self._num_put += 1
        self._queue.append(record)

    def reader(self) -> "LedgerFile":
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
            return 0 if row is None else _to_step(row[0]).step_id
        except msgspec.MsgspecError as error:
            self._file.close()
            hint = "Name another file, or move this one away."
            message = f"ledger file {self._path}: its last step cannot be read: {error}"
            raise ConfigError(message, param="ledger_file", value=str(self._path), hint=hint) from error

    def _run(self) -> None:
        while not (self._stop.is_set() and not self._queue):
            self._wake.wait(BATCH_INTERVAL_S)
            self._wake.clear()
            while self._queue:
                self._write_batch()
            if monotonic() >= self._facts_due_s:
                self._keep_facts()
        self._keep_facts()
        self._file.close()

    def _write_batch(self) -> None:
        batch = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH_RECORDS))]
        if not self._write(lambda: self._insert(batch)):
            self.num_unwritten += len(batch)
        self._num_done += len(batch)

    def _write(self, insert: Callable[[], object]) -> bool:
        try:
            with self._connection:  # one transaction: committed whole, or rolled back whole
                insert()
                self._delete_oldest()
            self._is_failing = False
        except Exception as error:  # also what a record cannot be encoded for: the thread goes on
            if not self._is_failing:
                log.error("ledger file %s: %s; records are lost until it can be written again", self._path, error)
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
        return self._records(query, (limit,), _to_step)[::-1]

    def steps_between(self, begin_ns: int, end_ns: int) -> list[StepRecord]:
        """The steps that began in this span of the host's monotonic clock."""
        query = "SELECT body FROM steps WHERE begin_ns BETWEEN ? AND ? ORDER BY seq"
        return self._records(query, (begin_ns, end_ns), _to_step)

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


def _to_json(record: Queued | ServerFacts) -> str:
    return msgspec.json.encode(record).decode()


def _to_account(body: str) -> ClosedAccount:
    return msgspec.json.decode(body, type=ClosedAccount)


def _to_step(body: str) -> StepRecord:
    return msgspec.json.decode(body, type=StepRecord)


def _to_hop(body: str) -> Hop:
    return msgspec.json.decode(body, type=Hop)


def _to_facts(body: str) -> ServerFacts:
    return msgspec.json.decode(body, type=ServerFacts)
