"""How much a tenant uses, against the limits of its key (`tenants`).

What a minute allows is a bucket that fills evenly and holds a minute's worth. A request takes one from the bucket of
requests. Its tokens are known later than it is let in: prompt tokens when it is handed over, output tokens at its end.
So the bucket of tokens may fall below nothing, and lets nobody in until it has filled up again.
"""

from splittime.server.admission import Refused
from splittime.server.tenants import Tenant

MINUTE_NS = 60_000_000_000


class Bucket:
    """per_minute: None for no limit."""

    def __init__(self, per_minute: int | None) -> None:
        self.per_minute = per_minute
        self.level = float(per_minute or 0)
        self._filled_ns = 0

    def take(self, amount: int, now_ns: int) -> None:
        if self.per_minute is not None:
            self._fill(now_ns)
            self.level -= amount

    def wait_s(self, wanted: int, now_ns: int) -> float:
        """Until it holds so much; 0.0 if it does."""
        if self.per_minute is None:
            return 0.0
        self._fill(now_ns)
        return max(0.0, (wanted - self.level) * 60 / self.per_minute)

    def _fill(self, now_ns: int) -> None:
        assert self.per_minute is not None
        if self._filled_ns:
            gained = max(0, now_ns - self._filled_ns) * self.per_minute / MINUTE_NS
            self.level = min(float(self.per_minute), self.level + gained)
        self._filled_ns = now_ns


class Quota:
    """What one tenant uses now, and what its limits leave."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.num_open = 0
        self._requests, self._tokens = Bucket(tenant.requests_per_minute), Bucket(tenant.tokens_per_minute)

    def check(self, now_ns: int) -> None:
        """Raises `Refused` if one more may not come in now. Takes nothing."""
        limit = self.tenant.max_open_requests
        if limit is not None and self.num_open >= limit:
            raise self._refused("max_open_requests", limit, 1.0)
        for name, bucket in (("requests_per_minute", self._requests), ("tokens_per_minute", self._tokens)):
            wait_s = bucket.wait_s(1, now_ns)
            if wait_s:
                raise self._refused(name, bucket.per_minute, wait_s)

    def enter(self, now_ns: int) -> None:
        """One that was checked comes in."""
        self._requests.take(1, now_ns)
        self.num_open += 1

    def leave(self) -> None:
        self.num_open -= 1

    def use_tokens(self, count: int, now_ns: int) -> None:
        self._tokens.take(count, now_ns)

    def _refused(self, reason: str, limit: int | None, wait_s: float) -> Refused:
        return Refused(
            f"the key {self.tenant.name!r} has used what its {reason} allows",
            reason=reason,
            queued=self.num_open,
            limit=limit,
            retry_after_s=round(max(0.001, wait_s), 3),
        )
