"""The ledger: a bounded ring of closed accounts and step records in memory, and, if asked, a file behind it.

Owns: the rings, their index, the list of subscribers. What was refused has a ring and a table of its own: a server that
is asked for ten times what it can do refuses a thousand a second, and would remember nobody that it served.

`add_account` and `add_step` are called on the serving path and only append: they never wait for the disk (see
`sqlite`), and nothing that a subscriber or the disk does wrong reaches the caller. What goes wrong is counted in
`counts()` and logged. An account that does not verify is kept as evidence.

An engine counts its steps from 1. In a file that holds a former server's, they are counted on, with one number left out
since no step of ours follows one of theirs; accounts, which name steps, with them. Each step tells how many requests
had been refused for want of room: of refusals by the thousand the rings hold the latest.

Reads return the latest `limit`, oldest first. Safe to read from other threads while one adds.
"""

import heapq
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Reversible, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Generic, NamedTuple, TypeVar

import msgspec

from splittime.core.errors import for_books
from splittime.core.settings import Doc
from splittime.ledger.account import ClosedAccount
from splittime.ledger.facts import ServerFacts
from splittime.ledger.hops import Hop, HopBook
from splittime.ledger.sqlite import FileWriter, LedgerFile, weight_bytes
from splittime.ledger.steps import StepRecord

log = logging.getLogger("splittime.ledger")

Subscriber = Callable[[ClosedAccount | StepRecord], None]
Record = TypeVar("Record", ClosedAccount, StepRecord)
TellFacts = Callable[[], ServerFacts | None]


class Ran(NamedTuple):
    """How long a server's processes, and all others, have run on its processors since the machine began, in ns, and how
    long its control groups have been throttled; None if they do not tell."""

    server_ns: int
    others_ns: int
    throttled_ns: int | None = None


TellRan = Callable[[], Ran | None]
MAX_FILE_ACCOUNTS, MAX_FILE_STEPS = 100_000, 1_000_000
LEAST_BYTES = 2**20  # an empty file has some pages
MAX_FILE_BYTES, MAX_MEMORY_BYTES = 2 * 2**30, 256 * 2**20
ID_PREFIXES = ("cmpl-", "chatcmpl-", "embd-", "rerank-", "score-", "prefill-")
OTHER_PREFIXES = ("resp_", "msg_")  # of the same requests' ids in the answers of other APIs, which no account has
ANSWER_PREFIXES = (*ID_PREFIXES, *OTHER_PREFIXES)


class Ring(Generic[Record], Reversible[Record]):
    """The latest records of a kind, bounded in number and in bytes. The latest one stays, however large it is."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._records: deque[Record] = deque()
        self._weights: deque[int] = deque()  # of each, found once: a full ring lets one go for each that comes
        self.num_bytes = 0

    def add(self, record: Record) -> list[Record]:
        """Returns those that had to go, oldest first."""
        self._records.append(record)
        self._weights.append(weight_bytes(record))
        self.num_bytes += self._weights[-1]
        gone: list[Record] = []
        while len(self._records) > 1 and (len(self._records) > self._most or self.num_bytes > self._most_bytes):
            gone.append(self._records.popleft())
            self.num_bytes -= self._weights.popleft()
        return gone

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def __reversed__(self) -> Iterator[Record]:
        return reversed(self._records)


class LedgerCounts(msgspec.Struct, frozen=True):
    """Since start. `dropped` records found the file's queue full, `unwritten` ones met an error while being written."""

    accounts: int = 0
    steps: int = 0
    invalid_accounts: int = 0
    subscriber_errors: int = 0
    dropped: int = 0
    unwritten: int = 0
    kept_bytes: int = 0  # of those in memory now, roughly


class LedgerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the ledger's file."""

    ledger_file: Annotated[str | None, Doc("SQLite file for all accounts and steps; default: memory only.")] = None
    max_file_accounts: Annotated[int, Doc("Accounts kept in the ledger file.", 1)] = MAX_FILE_ACCOUNTS
    max_file_steps: Annotated[int, Doc("Steps kept in the ledger file.", 1)] = MAX_FILE_STEPS
    max_file_bytes: Annotated[
        int, Doc("Bytes of accounts and steps kept in the ledger file; the oldest go.", LEAST_BYTES)
    ] = MAX_FILE_BYTES
    max_memory_bytes: Annotated[
        int, Doc("Bytes of accounts kept in memory, and as many of steps; the oldest go.", LEAST_BYTES)
    ] = MAX_MEMORY_BYTES


class Ledger:
    """All closed accounts and step records of this process, the latest in memory and optionally more in a file."""

    def __init__(
        self,
        path: Path | str | None = None,
        *,
        max_accounts: int = 4096,
        max_steps: int = 16384,
        max_file_accounts: int = MAX_FILE_ACCOUNTS,
        max_file_steps: int = MAX_FILE_STEPS,
        max_file_bytes: int = MAX_FILE_BYTES,
        max_memory_bytes: int = MAX_MEMORY_BYTES,
    ) -> None:
        self._lock = threading.Lock()
        self._served: Ring[ClosedAccount] = Ring(max_accounts, max_memory_bytes)
        self._refused: Ring[ClosedAccount] = Ring(max_accounts, max_memory_bytes)
        self._by_id: dict[str, tuple[ClosedAccount, ...]] = {}  # of lists the collector would see each
        self._steps: Ring[StepRecord] = Ring(max_steps, max_memory_bytes)
        self._subscribers: list[Subscriber] = []
        self.hop_book = HopBook()
        self._num_accounts = self._num_steps = self._num_invalid = self._num_subscriber_errors = self._num_refused = 0
        self._tell_facts: TellFacts | None = None
        self._tell_ran: TellRan | None = None
        self._file = (
            FileWriter(Path(path), max_file_accounts, max_file_steps, tell_facts=self.facts, max_bytes=max_file_bytes)
            if path is not None
            else None
        )
        last_step_id = self._file.last_step_id if self._file is not None else 0
        self._num_steps_before = last_step_id + 1 if last_step_id else 0

    def add_account(self, account: ClosedAccount) -> None:
        if self._num_steps_before:
            step_ids = tuple(step_id + self._num_steps_before for step_id in account.token_steps)
            account = msgspec.structs.replace(account, token_steps=step_ids)
        if account.error is not None and (kept := for_books(account.error)) is not account.error:
            account = msgspec.structs.replace(account, error=kept)
        try:
            account.verify()
        except ValueError as error:
            self._num_invalid += 1
            log.error("account %s does not verify: %s", account.request_id, error)
        with self._lock:
            self._num_accounts += 1
            self._num_refused += account.is_turned_away
            self._remember(account)
        self._pass_on(account)

    def add_step(self, record: StepRecord) -> None:
        record = self._completed(record)
        with self._lock:
            self._num_steps += 1
            self._steps.add(record)
        self._pass_on(record)

    def _completed(self, record: StepRecord) -> StepRecord:
        """With what the server knows, and not its engine."""
        told: dict[str, int] = {}
        if self._num_steps_before:
            told["step_id"] = record.step_id + self._num_steps_before
        if self._num_refused:
            told["num_refused"] = self._num_refused
        ran = self._tell_ran() if self._tell_ran is not None else None
        if ran is not None:
            told |= {"server_ran_ns": ran.server_ns, "others_ran_ns": ran.others_ns}
            told |= {} if ran.throttled_ns is None else {"throttled_ns": ran.throttled_ns}
        return msgspec.structs.replace(record, **told) if told else record

    def account(self, request_id: str, tenant: str | None = None) -> list[ClosedAccount]:
        """The accounts of a request id, a response id (all its choices), or a response id without its prefix; of this
        tenant's requests, if one is named."""
        names = (request_id, *(prefix + request_id for prefix in ID_PREFIXES))
        with self._lock:
            kept = (_of_tenant(self._by_id.get(name, ()), tenant) for name in names)
            found = next((accounts for accounts in kept if accounts), [])
        if not found and self._file is not None:
            found = _of_tenant(self._file.reader().account(names), tenant)
        if not found and (prefix := next((each for each in OTHER_PREFIXES if request_id.startswith(each)), "")):
            return self.account(request_id.removeprefix(prefix), tenant)
        return [account for account in found if not account.is_refused] or found  # whoever is refused may say any id

    def accounts(
        self, slower_than_ms: float | None = None, limit: int = 100, tenant: str | None = None
    ) -> list[ClosedAccount]:
        """The latest accounts, of those whose E2E is more than `slower_than_ms`, and of this tenant if one is named."""
        slower_than_ns = -1 if slower_than_ms is None else slower_than_ms * 1e6
        with self._lock:
            rings = (reversed(self._served), reversed(self._refused))
            latest = heapq.merge(*rings, key=lambda account: account.end_ns, reverse=True)
            latest = (account for account in latest if tenant in (None, account.tenant))
            slow = (account for account in latest if account.end_ns - account.start_ns > slower_than_ns)
            return list(islice(slow, limit))[::-1]

    def steps(self, limit: int = 100) -> list[StepRecord]:
        with self._lock:
            return list(islice(reversed(self._steps), limit))[::-1]

    def add_hops(self, hops: Sequence[Hop]) -> int:
        """Keep hops of one tenant's trace, all or none. Returns how many are new. Raises as `HopBook.add` does."""
        new = self.hop_book.add(hops)
        for hop in new if self._file is not None else ():
            self._file.put(hop)  # type: ignore[union-attr]
        return len(new)

    def hops(self, trace_id: str, tenant: str | None = None) -> list[Hop]:
        """Returns the hops of a trace; of this tenant, if one is named."""
        found = self.hop_book.of_trace(trace_id, tenant)
        if found or self._file is None:
            return found
        return [hop for hop in self._file.reader().hops(trace_id) if tenant in (None, hop.tenant)]

    def facts(self) -> ServerFacts | None:
        """Returns what the server says of itself now (`describe_by`); the file's thread asks too."""
        return self._tell_facts() if self._tell_facts is not None else None

    def describe_by(self, facts: TellFacts | None, ran: TellRan | None = None) -> None:
        """From now on ask these what the server is, and how long it and others have run: by whoever serves."""
        self._tell_facts, self._tell_ran = facts, ran

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` with each account and step from now on, on the adding thread: it must be quick."""
        self._subscribers.append(subscriber)

    def counts(self) -> LedgerCounts:
        return LedgerCounts(
            accounts=self._num_accounts,
            steps=self._num_steps,
            invalid_accounts=self._num_invalid,
            subscriber_errors=self._num_subscriber_errors,
            dropped=self._file.num_dropped if self._file else 0,
            unwritten=self._file.num_unwritten if self._file else 0,
            kept_bytes=self._served.num_bytes + self._refused.num_bytes + self._steps.num_bytes,
        )

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until the file holds all that was added so far; False if that took longer than `timeout_s`."""
        return self._file.flush(timeout_s) if self._file is not None else True

    def close(self) -> None:
        """Write what is queued and close the file. The memory stays readable."""
        if self._file is not None:
            self._file.close()

    def _remember(self, account: ClosedAccount) -> None:
        ring = self._refused if account.is_refused else self._served
        for gone in ring.add(account):
            self._forget(gone)
        for name in {account.request_id, account.group_id}:
            self._by_id[name] = (*self._by_id.get(name, ()), account)

    def _forget(self, account: ClosedAccount) -> None:
        for name in {account.request_id, account.group_id}:
            left = tuple(other for other in self._by_id.pop(name) if other is not account)
            if left:
                self._by_id[name] = left

    def _pass_on(self, record: ClosedAccount | StepRecord) -> None:
        if self._file is not None:
            self._file.put(record)
        for subscriber in self._subscribers:
            try:
                subscriber(record)
            except Exception:  # a subscriber's fault is not the request's
                self._num_subscriber_errors += 1
                log.exception("a ledger subscriber failed")


def _of_tenant(accounts: Iterable[ClosedAccount], tenant: str | None) -> list[ClosedAccount]:
    return [account for account in accounts if tenant in (None, account.tenant)]


def open_readonly(path: Path | str) -> LedgerFile:
    """A ledger file, for reading, while it is being written or after its writer was killed."""
    return LedgerFile(Path(path))
