"""Tokens of a tenant by day and by month, in UTC, kept over restarts: `tokens_per_day`, `tokens_per_month`.

A limit by the minute fills up again; a budget is used up, and its tenant is refused (429) until the day or the month is
over. What a request used is known at its end, so what it may use is reserved until then: a budget may be overdrawn by
one request. A request that was cancelled counts by what its upstream told until then, or by an estimate.

The counts are in a store (`budget_stores`), written once a second off the path: what a killed gateway had not written,
a second's worth, is not charged. Only differences are added there, so gateways that share a store share the budgets, a
second late. A day or month that has begun is never gone back from, whatever the clock is set to. A store that cannot
be written is logged, and the counts go on in memory.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from splittime.core.errors import ConfigError, Refused
from splittime.gateway.budget_stores import STORE_ERRORS, Account, BudgetFile, BudgetStore
from splittime.gateway.config import GatewayConfig, TenantConfig
from splittime.gateway.exchanges import Exchanges
from splittime.gateway.valkey_connection import address_of

WRITE_S = 1.0
RESERVED_S = 1.0  # when to come back where open requests have reserved the rest
DAY, MONTH = "tokens_per_day", "tokens_per_month"


class TokenBudget(NamedTuple):
    """One limit of one tenant. kind: DAY or MONTH."""

    tenant: str
    kind: str
    limit: int


def budgets_of(tenants: Iterable[TenantConfig]) -> list[TokenBudget]:
    found = [(tenant.name, kind, getattr(tenant, kind)) for tenant in tenants for kind in (DAY, MONTH)]
    return [TokenBudget(*one) for one in found if one[2] is not None]


def check_budgets(config: GatewayConfig) -> None:
    """Raises `ConfigError` for a budget that a restart would forget, and for two places to keep them in."""
    if config.limits_valkey is not None:
        address_of(config.limits_valkey, "limits_valkey")
        if config.budget_file is not None:
            message = "budget_file: there is limits_valkey too"
            raise ConfigError(message, param="budget_file", value=config.budget_file, hint="keep one of them")
    for number, tenant in enumerate(config.tenant):
        for budget in budgets_of([tenant]) if config.budget_file is None and config.limits_valkey is None else ():
            param = f"tenant[{number}].{budget.kind}"
            hint = 'budget_file = "budgets.sqlite" keeps what was used; limits_valkey does for several gateways'
            message = f"{param} needs a budget_file: a restart would give it all again"
            raise ConfigError(message, param=param, value=budget.limit, hint=hint)


class Calendar:
    """Which day and month it is, never an earlier one than before. clock: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._latest = clock, 0.0

    def now(self) -> datetime:
        self._latest = max(self._latest, self._clock())
        return datetime.fromtimestamp(self._latest, UTC)

    def period(self, kind: str) -> str:
        return self.now().strftime("%Y-%m-%d" if kind == DAY else "%Y-%m")

    def left_s(self, kind: str) -> float:
        """Returns the seconds until this day or month is over."""
        now = self.now()
        day = now.replace(hour=0, minute=0, second=0, microsecond=0)
        ends = day + timedelta(days=1) if kind == DAY else (day.replace(day=1) + timedelta(days=32)).replace(day=1)
        return (ends - now).total_seconds()


class TokenBudgets:
    """`open` begins inside the event loop, `close` ends.

    store: a file is read at once, and `ConfigError` is raised for one that cannot be used; what a shared store holds is
    known after `open`. None for counts in memory alone, as a rehearsal keeps them.
    """

    def __init__(
        self, tenants: Sequence[TenantConfig], store: BudgetStore | None, calendar: Calendar | None = None
    ) -> None:
        self._calendar = calendar or Calendar()
        self._by_tenant: dict[str, list[TokenBudget]] = {}
        for budget in budgets_of(tenants):
            self._by_tenant.setdefault(budget.tenant, []).append(budget)
        self._store = store if self._by_tenant else None
        self._used: Counter[Account] = Counter()  # as the store says, with what is not written
        self._unwritten: Counter[Account] = Counter()
        self._reserved: Counter[str] = Counter()  # by tenant, of the requests that are open
        self._exchanges = None if self._store is None else self._exchanged_with(self._store)
        if isinstance(self._store, BudgetFile):
            self._read(self._store)

    def check(self, tenant: str) -> None:
        """Raises `Refused` if a budget of this tenant is used up, or all that is left of it reserved."""
        for _, kind, limit in self._by_tenant.get(tenant, ()):
            left = limit - self._used[tenant, self._calendar.period(kind)]
            if left <= self._reserved[tenant]:
                message = f"the key {tenant!r} has used what its {kind} allows"
                later_s = max(1.0, self._calendar.left_s(kind))
                if left > 0:
                    message, later_s = f"{message}, with what its open requests may use", RESERVED_S
                raise Refused(message, reason=kind, limit=limit, retry_after_s=round(later_s, 3))

    def reserve(self, tenant: str, tokens: int) -> None:
        """Keep so many tokens for a request, until `release`. Raises as `check` does, and keeps none."""
        self.check(tenant)
        if tenant in self._by_tenant:
            self._reserved[tenant] += tokens

    def release(self, tenant: str, tokens: int) -> None:
        """Give back what was reserved; what was used of it is told by `use`."""
        if tenant in self._by_tenant:
            self._reserved[tenant] -= tokens

    def use(self, tenant: str, tokens: int) -> None:
        for _, kind, _ in self._by_tenant.get(tenant, ()):
            account = (tenant, self._calendar.period(kind))
            self._used[account] += tokens
            self._unwritten[account] += tokens

    def used(self) -> dict[tuple[str, ...], float]:
        """Returns the tokens used by (tenant, kind) of the days and months that are now."""
        budgets = [budget for budgets in self._by_tenant.values() for budget in budgets]
        return {(one.tenant, one.kind): self._used[one.tenant, self._calendar.period(one.kind)] for one in budgets}

    # ---- the store

    def open(self) -> None:
        if self._exchanges is not None:
            self._exchanges.begin(f"budgets are counted and not written to {self._store}")

    async def close(self) -> None:
        """Writes what is not written yet, unless the store is away."""
        if self._exchanges is not None and self._store is not None:
            await self._exchanges.end()
            self._store.close()

    @property
    def is_written(self) -> bool:
        """Returns whether the last write succeeded, or there is nothing to write."""
        return self._exchanges is None or self._exchanges.succeeded

    def _read(self, file: BudgetFile) -> None:
        try:
            self._used = file.add({}, self._periods())
        except STORE_ERRORS as error:
            hint = "give a file that this process may write, or take the budgets out"
            message = f"budget_file: cannot use {file}: {error}"
            raise ConfigError(message, param="budget_file", value=str(file), hint=hint) from error

    def _exchanged_with(self, store: BudgetStore) -> Exchanges[Counter[Account], Counter[Account]]:
        return Exchanges(WRITE_S, self._take, lambda added: store.add(added, self._periods()), self._keep)

    def _take(self) -> Counter[Account]:
        added, self._unwritten = self._unwritten, Counter()
        return added

    def _keep(self, told: Counter[Account]) -> None:
        self._used = told + self._unwritten

    def _periods(self) -> tuple[str, str]:
        return self._calendar.period(DAY), self._calendar.period(MONTH)
