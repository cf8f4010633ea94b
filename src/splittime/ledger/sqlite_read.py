"""The ledger on disk, read while it is written or after its writer was killed."""

import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from splittime.core.errors import ConfigError, NotFound
from splittime.ledger.account import ClosedAccount
from splittime.ledger.facts import ServerFacts
from splittime.ledger.hops import Hop
from splittime.ledger.sqlite_open import ACCOUNT_TABLES, SCHEMA_VERSION
from splittime.ledger.steps import StepRecord

Record = TypeVar("Record", ClosedAccount, StepRecord, Hop, ServerFacts)
MAX_FOUND_HOPS = 10_000


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
