"""Where the budgets of tenants are kept over restarts: a SQLite file, or a Valkey or Redis that several gateways share.

Both add differences, each once, and return the totals. Neither keeps a day or a month that is over for long.
"""

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from splittime.gateway.config import GatewayConfig
from splittime.gateway.shared_counters import SharedCounters

BUSY_S = 5.0  # for another gateway that writes
STORE_ERRORS = (sqlite3.Error, OSError)
SCHEMA = "CREATE TABLE IF NOT EXISTS budget (tenant TEXT, period TEXT, tokens INTEGER, PRIMARY KEY (tenant, period))"
ADD = "INSERT INTO budget VALUES (?, ?, ?) ON CONFLICT (tenant, period) DO UPDATE SET tokens = tokens + excluded.tokens"
PREFIX = "splittime:budget:1:"

Account = tuple[str, str]  # a tenant and a period: 2026-11-27 or 2026-11


class BudgetStore(Protocol):
    """`add` waits for a disk or a network, and raises one of `STORE_ERRORS`."""

    def add(self, added: Mapping[Account, int], periods: tuple[str, str]) -> Counter[Account]:
        """Adds tokens; returns all that was used in these periods, by every gateway of this store. What it could not
        add goes with the next call."""

    def close(self) -> None:
        """Lets go of the connection."""


class BudgetFile:
    """path: of the SQLite file, which is made where there is none."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._waiting: Counter[Account] = Counter()

    def add(self, added: Mapping[Account, int], periods: tuple[str, str]) -> Counter[Account]:
        self._waiting.update(added)
        with self._connected() as connection:
            connection.execute(SCHEMA)
            connection.executemany(ADD, [(*account, tokens) for account, tokens in self._waiting.items()])
            if self._waiting:
                connection.execute("DELETE FROM budget WHERE period NOT IN (?, ?)", periods)
            rows = connection.execute("SELECT tenant, period, tokens FROM budget").fetchall()
        self._waiting.clear()
        return Counter({(tenant, period): tokens for tenant, period, tokens in rows})

    def close(self) -> None:
        """Does nothing: each connection is closed when it has written."""

    def __str__(self) -> str:
        return self._path

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """One transaction; the connection is closed behind it."""
        with contextlib.closing(sqlite3.connect(Path(self._path), timeout=BUSY_S)) as connection, connection:
            yield connection


class BudgetsInValkey:
    """One hash for each period, with the tokens of each tenant."""

    def __init__(self, url: str) -> None:
        self._counters = SharedCounters(url)

    def add(self, added: Mapping[Account, int], periods: tuple[str, str]) -> Counter[Account]:
        amounts = {(PREFIX + period, tenant): tokens for (tenant, period), tokens in added.items() if tokens}
        told = self._counters.exchange(amounts, [PREFIX + period for period in periods])
        used: Counter[Account] = Counter()
        for period in periods:
            used.update({(tenant, period): tokens for tenant, tokens in told[PREFIX + period].items()})
        return used

    def close(self) -> None:
        self._counters.close()

    def __str__(self) -> str:
        return str(self._counters)


def store_of(config: GatewayConfig) -> BudgetStore | None:
    if config.limits_valkey is not None:
        return BudgetsInValkey(config.limits_valkey)
    return None if config.budget_file is None else BudgetFile(config.budget_file)
