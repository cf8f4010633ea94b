"""What tenants use by the minute, told to each other by several gateways through a Valkey or Redis (`limits_valkey`).

Each gateway counts its own tenants' use and lets requests in by its own buckets, so that no request waits for the
store. Every `EXCHANGE_S` it adds their use since the last exchange to the store's totals, and takes from its buckets
what the totals have grown beyond its own part, which is the others' use. So `requests_per_minute` and
`tokens_per_minute` are those of all gateways together. What open requests have reserved is told as used, and given back
when it is known what they used; what a gateway that was killed had reserved fills up again like all else. Limits are
overdrawn by what the others let in within one exchange, and by the full buckets that a gateway starts with; then nobody
is let in until the buckets have filled again.

A gateway whose store is away goes on by its own buckets, and tells later what was used; no bucket falls further than a
minute below nothing for that. `max_open_requests` is each gateway's own: what runs at a gateway that was killed would
never be given back.
"""

from collections.abc import Callable, Mapping
from time import monotonic_ns
from typing import NamedTuple

from splittime.gateway.exchanges import Exchanges
from splittime.gateway.shared_counters import Field, SharedCounters
from splittime.web.quota import Quota

EXCHANGE_S = 0.25
HASH = "splittime:use:1"
REQUESTS, TOKENS = "requests ", "tokens "  # before a tenant's name, in the hash's fields


class Use(NamedTuple):
    requests: int = 0
    tokens: int = 0

    def plus(self, other: "Use", sign: int = 1) -> "Use":
        return Use(self.requests + sign * other.requests, self.tokens + sign * other.tokens)


class TenantUse:
    """What one tenant has used at this gateway and at the others. own: as the store was told last. elsewhere: as the
    store told last; None before."""

    def __init__(self) -> None:
        self.own = Use()
        self.elsewhere: Use | None = None
        self._quota: Quota | None = None
        self._before = Use()  # that quota

    def now(self, quota: Quota) -> Use:
        """Returns what was used here until now. A change of the config keeps the quota; another one is of a tenant
        that comes back."""
        if quota is not self._quota:
            self._quota, self._before = quota, self.own
        return self._before.plus(_use_of(quota))

    def hear(self, total: Use) -> Use:
        """Returns how much more the others have used, tokens below 0 where they gave back what they had reserved. A
        store that was emptied gives nothing: it tells nothing, or less than what was told to it here."""
        elsewhere = total.plus(self.own, sign=-1)
        before = self.elsewhere or elsewhere
        more, self.elsewhere = elsewhere.plus(before, sign=-1), elsewhere
        is_emptied = not total.tokens or elsewhere.tokens < 0 <= before.tokens
        return Use(max(0, more.requests), max(0, more.tokens) if is_emptied else more.tokens)


class SharedLimits:
    """quotas: returns those of the version that serves now, by tenant. `open` begins inside the event loop."""

    def __init__(self, url: str, quotas: Callable[[], Mapping[str, Quota]]) -> None:
        self._counters, self._quotas = SharedCounters(url), quotas
        self._tenants: dict[str, TenantUse] = {}
        self._exchanges = Exchanges(EXCHANGE_S, self._added, self._exchanged, self._take)

    def open(self) -> None:
        self._exchanges.begin(f"limits by the minute are this gateway's own: {self._counters}")

    async def close(self) -> None:
        """Tells the others what was used last, unless the store is away."""
        await self._exchanges.end()
        self._counters.close()

    @property
    def is_shared(self) -> bool:
        """Returns whether the last exchange succeeded."""
        return self._exchanges.succeeded

    def _limited(self) -> dict[str, Quota]:
        return {name: quota for name, quota in self._quotas().items() if _has_limit(quota)}

    def _added(self) -> dict[Field, int]:
        """Returns what was used since the last time."""
        added: dict[Field, int] = {}
        for name, quota in self._limited().items():
            tenant = self._tenants.setdefault(name, TenantUse())
            now = tenant.now(quota)
            more, tenant.own = now.plus(tenant.own, sign=-1), now
            added |= {(HASH, REQUESTS + name): more.requests, (HASH, TOKENS + name): more.tokens}
        return {field: amount for field, amount in added.items() if amount}

    def _exchanged(self, added: dict[Field, int]) -> dict[str, int]:
        return self._counters.exchange(added, [HASH])[HASH]

    def _take(self, totals: dict[str, int]) -> None:
        now_ns = monotonic_ns()
        for name, quota in self._limited().items():
            tenant = self._tenants.setdefault(name, TenantUse())
            total = Use(totals.get(REQUESTS + name, 0), totals.get(TOKENS + name, 0))
            quota.use_elsewhere(*tenant.hear(total), now_ns)


def _has_limit(quota: Quota) -> bool:
    return quota.tenant.requests_per_minute is not None or quota.tenant.tokens_per_minute is not None


def _use_of(quota: Quota) -> Use:
    return Use(quota.used_requests, quota.used_tokens + quota.reserved_tokens)
