"""How many retries a tenant may have: a share of its requests of the latest window, and a few where they are few.

Without a bound every retry is one more request for upstreams that fail because they have too many. What is no such
request is free (`forwarding`): one that goes on with a stream, as an upstream that dies has done its part of the work,
and all its streams break off at once; and one that leaves an upstream that answers nobody for one that answers.
Tenants have budgets of their own: what one's requests make upstreams fail at takes no retry from another's.
"""

from collections import deque

from splittime.gateway.config import RetryConfig

MAX_PAUSE_S = 2.0
PARTS = 60  # of a window; the oldest goes as a whole


class RetryBudget:
    """Counts by parts of the window. Times are ns of one monotonic clock, given by the caller."""

    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self._part_ns = max(1, int(config.window_s * 1e9) // PARTS)
        self._parts: deque[list[int]] = deque()  # [number of the part, requests, retries]
        self._requests = self._retries = 0  # of all parts
        self.num_taken = 0  # retries since the start, failovers among them

    def note_request(self, now_ns: int) -> None:
        self._part(now_ns)[1] += 1
        self._requests += 1

    def may_retry(
        self,
        num_attempts: int,
        now_ns: int,
        deadline_ns: int | None = None,
        *,
        is_free: bool = False,
        is_failover: bool = False,
    ) -> bool:
        """Returns whether a request may have another attempt after so many, which is then counted. is_free: it is no
        retry, and bounded by `max_attempts` alone; is_failover: a retry, and not held against the budget."""
        if num_attempts >= self._config.max_attempts or (deadline_ns is not None and now_ns >= deadline_ns):
            return False
        self.num_taken += is_failover and not is_free
        return is_free or is_failover or self.take(now_ns)

    def take(self, now_ns: int) -> bool:
        """Returns whether one more retry may be had, which is then counted."""
        part = self._part(now_ns)
        if self._retries + 1 > self._allowed:
            return False
        part[2] += 1
        self._retries += 1
        self.num_taken += 1
        return True

    def used(self, now_ns: int) -> tuple[int, float]:
        """Returns the retries of the window, and how many it allows."""
        self._part(now_ns)
        return self._retries, self._allowed

    @property
    def _allowed(self) -> float:
        return self._config.ratio * self._requests + self._config.spare

    def _part(self, now_ns: int) -> list[int]:
        number = now_ns // self._part_ns
        while self._parts and self._parts[0][0] <= number - PARTS:
            _, requests, retries = self._parts.popleft()
            self._requests -= requests
            self._retries -= retries
        if not self._parts or self._parts[-1][0] != number:
            self._parts.append([number, 0, 0])
        return self._parts[-1]


class RetryBudgets:
    """The budgets of all tenants. num_taken: of all, as of one."""

    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self._by_tenant: dict[str, RetryBudget] = {}

    def of(self, tenant: str) -> RetryBudget:
        return self._by_tenant.get(tenant) or self._by_tenant.setdefault(tenant, RetryBudget(self._config))

    @property
    def num_taken(self) -> int:
        return sum(one.num_taken for one in self._by_tenant.values())

    def used(self, now_ns: int) -> tuple[int, float]:
        """Returns the retries of the window, and how many it allows."""
        each = [one.used(now_ns) for one in self._by_tenant.values()]
        return sum(used for used, _ in each), sum(allowed for _, allowed in each)


def longest_pause_s(config: RetryConfig, num_attempts: int) -> float:
    """Returns the longest pause behind so many attempts."""
    return min(config.pause_s * 2 ** (num_attempts - 1), MAX_PAUSE_S)
