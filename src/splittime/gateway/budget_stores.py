"""Where the budgets of tenants are kept over restarts: a SQLite file, or a Valkey or Redis that several gateways share.

Both add differences and return the totals, in one transaction. Neither keeps a day or a month that is over.
"""

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from splittime.gateway.config import GatewayConfig
from splittime.gateway.valkey_connection import ValkeyConnection, address_of

BUSY_S = 5.0  # for another gateway that writes
STORE_ERRORS = (sqlite3.Error, OSError)
SCHEMA = "CREATE TABLE IF NOT EXISTS budget (tenant TEXT, period TEXT, tokens INTEGER, PRIMARY KEY (tenant, period))"
ADD = "INSERT INTO budget VALUES (?, ?, ?) ON CONFLICT (tenant, period) DO UPDATE SET tokens = tokens + excluded.tokens"
PREFIX = b"splittime:budget:1:"
KEPT_S = 40 * 86_400  # longer than a month

Account = tuple[str, str]  # a tenant and a period: 2026-11-27 or 2026-11


class BudgetStore(Protocol):
    """`add` waits for a disk or a network, and raises one of `STORE_ERRORS`."""

    def add(self, added: Mapping[Account, int], periods: tuple[str, str]) -> Counter[Account]:
        """Adds tokens; returns all that was used in these periods, by every gateway of this store."""

    def close(self) -> None:
        """Lets go of the connection."""


class BudgetFile:
    """path: of the SQLite file, which is made where there is none."""

    def __init__(self, path: str) -> None:
        self._path = path

    def add(self, added: Mapping[Account, int], periods: tuple[str, str]) -> Counter[Account]:
        with self._connected() as connection:
            connection.execute(SCHEMA)
            connection.executemany(ADD, [(*account, tokens) for account, tokens in added.items()])
            if added:
                connection.execute("DELETE FROM budget WHERE period NOT IN (?, ?)", periods)
            rows = connection.execute("SELECT tenant, period, tokens FROM budget").fetchall()
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
    """One hash for each period, with the tokens of each tenant. An exchange whose reply is lost is charged twice."""

    def __init__(self, url: str) -> None:
        self._connection, self._url = ValkeyConnection(*address_of(url, "limits_valkey")), url

    def add(self, added: Mapping[Account, int], periods: tuple[str, str]) -> Counter[Account]:
        commands: list[tuple[bytes, ...]] = [
            (b"HINCRBY", PREFIX + period.encode(), tenant.encode(), b"%d" % tokens)
            for (tenant, period), tokens in added.items()
            if tokens
        ]
        commands += [(b"EXPIRE", PREFIX + period.encode(), b"%d" % KEPT_S) for period in periods]
        asked = [(b"HGETALL", PREFIX + period.encode()) for period in periods]
        told = self._connection.ask_together(*commands, *asked)[-len(asked) :]
        return Counter(dict(entry for period, one in zip(periods, told, strict=True) for entry in _used(period, one)))

    def close(self) -> None:
        self._connection.close()

    def __str__(self) -> str:
        return self._url


def store_of(config: GatewayConfig) -> BudgetStore | None:
    if config.limits_valkey is not None:
        return BudgetsInValkey(config.limits_valkey)
    return None if config.budget_file is None else BudgetFile(config.budget_file)


def _used(period: str, told: list[bytes]) -> Iterator[tuple[Account, int]]:
    for tenant, tokens in zip(told[::2], told[1::2], strict=True):
        yield (tenant.decode(), period), int(tokens)
