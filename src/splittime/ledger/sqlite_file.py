"""The ledger on disk: SQLite in WAL mode, written by a thread of its own from a bounded queue, in batches.

Promises: `put` never waits and never raises (a full queue drops the record and counts it); the file is readable at any
moment, also after kill -9, and then lacks at most the last batch; what is beyond a bound, of rows or of bytes, is
deleted, oldest first. The file holds at most `max_bytes` and a batch; beside it lies what is not folded in (`-wal`).
While the disk takes nothing, records wait in the queue, and are written when there is room again.
The server's facts are asked for every `FACTS_INTERVAL_S` and at the end, and kept when they differ from the last.
A path that cannot be written, or that another process writes (`sqlite_read`), is a `ConfigError` at once; a disk that
fails later, or is too slow, is logged once for each outage, and serving goes on. One that fails is tried by one record.
`num_unwritten`: records that cannot be written at all, and those that still wait at the end.

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
from collections.abc import Callable
from pathlib import Path
from time import monotonic, monotonic_ns

import msgspec

from splittime.core.errors import ConfigError
from splittime.ledger.account import ClosedAccount
from splittime.ledger.facts import ServerFacts
from splittime.ledger.hops import Hop
from splittime.ledger.ring import weight_bytes
from splittime.ledger.sqlite_read import ACCOUNT_TABLES, LedgerFile, OwnFile, to_step
from splittime.ledger.steps import StepRecord

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
            return 0 if row is None else to_step(row[0]).step_id
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
