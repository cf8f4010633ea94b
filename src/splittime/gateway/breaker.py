"""Whether an upstream may be asked now, how many requests it has at once, and how many retries a tenant may have.

*Breaker*: closed, open after failures in a row, then open for one request that tries. `verdict` says what is a failure,
a success or a pause. An upstream with a checker (`upstream_checks`) is asked by the gateway itself first, so no request
finds out whether it lives again. What opens by one tenant's requests is open for that tenant, and for others when they
meet a failure too. A 429 without a reason may be about its request, so it pauses the upstream for that tenant alone;
if another tenant is refused before that is over, it holds for all. A later, shorter pause shortens none.

*In flight*: a cap that is too high moves the queue to the upstream, where no tenant's share is kept; one that is too
low leaves it idle. The wait in the upstream's own queue tells them apart; the time of an answer does not.

* A splittime upstream tells each request's wait in its account (`account_wait_ns`). The median of `WINDOW` answers to
  requests sent under the present limit is judged. Beyond `queue_wait_s` the limit falls by the part of the requests
  that its queue holds: waits beside times (Little's law, 1961), as TCP Vegas does (Brakmo and Peterson, 1995).
* Any other upstream tells how many wait (`/metrics`, `upstream_checks`). A queue that none of `POLLS` polls found empty
  is standing, as in CoDel (Nichols and Jacobson, 2012); the limit falls by the fewest that were in it. Polls while more
  are in flight than may be are not judged.

It falls to half at most, never below one. Without a standing queue it rises by one if it was reached. It begins at
`max_in_flight`, never exceeds that, and stays there for an upstream that tells nothing.

*Retries*: a share of a tenant's requests of the latest window, and a few where they are few. Without a bound, retries
would be more requests for upstreams that fail because they have too many. Free are those that go on with a stream
after its upstream died, and those that leave an upstream that answers nobody (`forwarding`).
"""

import time
from collections import deque
from collections.abc import Awaitable, Callable
from statistics import median
from typing import TypeVar

from splittime.gateway.config import BreakerConfig, RetryConfig
from splittime.ledger.attempts import NestedStage
from splittime.ledger.stages import Cause, Stage

WINDOW, POLLS = 16, 3
LACKING = frozenset({Cause.BATCH_SLOTS, Cause.KV_BLOCKS, Cause.TOKEN_BUDGET, Cause.POLICY})
MAX_PAUSE_S = 2.0
PARTS = 60  # of a window; the oldest goes as a whole
LEAST_BACKOFF_S = 1.0  # where a 429 does not say for how long


def account_wait_ns(stages: tuple[NestedStage, ...]) -> int:
    """Returns how long a request waited at its upstream because that had too many. A wait for the end of the step that
    runs, for a grammar or an adapter of its own, or while the server was paused is none."""
    return sum(
        stage.end_ns - stage.begin_ns
        for stage in stages
        if stage.stage is Stage.PREEMPTED or (stage.stage is Stage.QUEUE and stage.cause in LACKING)
    )


class InFlightLimit:
    """now: the limit. The upstream tells it when it is full (`note_full`) and what it hears of waits."""

    def __init__(self, most: int, queue_wait_s: float) -> None:
        self._most, self._queue_wait_ns = most, queue_wait_s * 1e9
        self.now = most
        self._changed_ns = 0
        self._was_full = False
        self._waits: list[tuple[int, int]] = []  # (wait, whole time) of the window
        self._polls: list[int] = []

    def note_full(self) -> None:
        self._was_full = True

    def note_wait(self, wait_ns: int, lasted_ns: int, sent_ns: int, now_ns: int) -> None:
        """A request is over that waited so long of its time at the upstream."""
        if sent_ns < self._changed_ns:
            return
        self._waits.append((wait_ns, lasted_ns))
        if len(self._waits) >= WINDOW:
            waits, self._waits = self._waits, []
            if median(wait for wait, _ in waits) > self._queue_wait_ns:
                held = sum(wait for wait, _ in waits) / max(1, sum(lasted for _, lasted in waits))
                self._lower(round(self.now * held), now_ns)
            else:
                self._raise(now_ns)

    def note_waiting(self, count: int, in_flight: int, now_ns: int) -> None:
        """A poll found so many waiting."""
        if in_flight > self.now:
            return
        self._polls.append(count)
        if len(self._polls) >= POLLS:
            least, self._polls = min(self._polls), []
            if least > 0:
                self._lower(least, now_ns)
            else:
                self._raise(now_ns)

    def _lower(self, excess: int, now_ns: int) -> None:
        self._set(max(1, self.now // 2, self.now - max(1, excess)), now_ns)

    def _raise(self, now_ns: int) -> None:
        if self._was_full:
            self._set(min(self._most, self.now + 1), now_ns)

    def _set(self, limit: int, now_ns: int) -> None:
        self._was_full = False
        if limit != self.now:
            self.now, self._changed_ns = limit, now_ns
            self._waits, self._polls = [], []


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


class LeftOut:
    """until_ns: from then on nobody is left out of what any upstream that shares this was not to be asked for."""

    until_ns = 0


class Breaker:
    """Times are ns of one monotonic clock, given by the caller. left_out: shared with others, by default with none.
    has_checker: somebody asks it while it is open. num_successes: since the start."""

    def __init__(self, config: BreakerConfig, left_out: LeftOut | None = None) -> None:
        self.config, self.left_out = config, left_out or LeftOut()
        self._failures = 0  # in a row
        self._open_until_ns: int | None = None
        self._busy_until_ns = 0
        self._paused_until_ns: dict[str, int] = {}  # by tenant
        self._trying: object = None  # who tries it while it is open, alone
        self._is_checked = True
        self.has_checker = False
        self.num_successes = 0
        self._failed_for: set[str] = set()  # tenants, of the failures in a row
        self._is_one_tenants_doing = False  # the latest failure, and those before it in the row
        self._good_ns: dict[str, int] = {}  # by tenant, the latest success

    @property
    def is_well(self) -> bool:
        """Returns whether nothing is known against it since its latest success."""
        return self._failures == 0 and self._open_until_ns is None

    @property
    def is_open(self) -> bool:
        """Returns whether failures have opened it and no request has succeeded since."""
        return self._open_until_ns is not None

    def is_busy(self, now_ns: int) -> bool:
        """Returns whether a 429 asked for a pause that is not over."""
        return now_ns < self._busy_until_ns

    def allows(self, now_ns: int, tenant: str = "") -> bool:
        """tenant: who would be asked for, where that matters: it may have a pause of its own."""
        return now_ns >= self._paused_until_ns.get(tenant, 0) and self.may_be_asked(now_ns, tenant)

    def may_be_asked(self, now_ns: int, tenant: str = "") -> bool:
        """Returns whether it may, but for a tenant's own pause."""
        if self.is_busy(now_ns):
            return False
        if self._open_until_ns is None or (tenant not in self._failed_for and self._is_left_to_others):
            return True
        return self._is_checked and now_ns >= self._open_until_ns and self._trying is None

    @property
    def _is_left_to_others(self) -> bool:
        """Returns whether it was opened by one tenant's requests alone, which may have brought that about: of others,
        who have had answers, each finds out by himself. Else who sends what it fails at would shut them out."""
        return (
            len(self._failed_for) == 1 and "" not in self._failed_for and bool(self._good_ns.keys() - self._failed_for)
        )

    def is_to_be_checked(self, now_ns: int) -> bool:
        """Returns whether it is open, and has been left alone for as long as it should."""
        return self._open_until_ns is not None and not self._is_checked and now_ns >= self._open_until_ns

    def note_checked(self, now_ns: int, *, is_well: bool) -> None:
        """The gateway has asked it itself."""
        if self._open_until_ns is not None:
            self._is_checked = is_well
            self._open_until_ns = now_ns if is_well else self._until_ns(now_ns)

    def wait_ns(self, now_ns: int) -> int:
        """Returns how long until it may allow a request."""
        return max(0, self._busy_until_ns - now_ns, (self._open_until_ns or 0) - now_ns)

    def begin(self, asking: object) -> None:
        """A request goes to the upstream. The one that tries an open breaker is alone until it leaves."""
        if self.is_open and self._trying is None:
            self._trying = asking

    def leave(self, asking: object) -> None:
        """The request is over, whatever came of it. Those that were there before the one that tries let nobody in."""
        if self._trying is asking:
            self._trying = None

    def note_begun(self) -> None:
        """A stream has begun: one that tries has succeeded, however long it lasts, and one failure opens it again."""
        if self._trying is not None:
            self._failures, self._open_until_ns, self._trying = self.config.failures - 1, None, None

    def note_success(self, now_ns: int = 0, tenant: str = "") -> None:
        self.num_successes += 1
        self._good_ns[tenant] = now_ns
        self._failed_for.clear()
        self._failures, self._open_until_ns, self._trying = 0, None, None

    def note_failure(self, now_ns: int, tenant: str = "") -> None:
        """tenant: of a request that may have brought the failure about; "" for one that cannot have."""
        if self._is_one_tenants_doing and tenant not in self._failed_for:
            self._failures = 0  # what that tenant met was not held against others, and is not now
        self._failures += 1
        self._failed_for.add(tenant)
        self._is_one_tenants_doing = not self.is_open and self._is_one_tenants(now_ns)
        is_enough = self._failures >= self.config.failures  # as it is, where one tried an open breaker
        if is_enough and not self._is_one_tenants_doing:
            self._open_until_ns = self._until_ns(now_ns)
            self._is_checked = not self.has_checker

    def _is_one_tenants(self, now_ns: int) -> bool:
        """Returns whether one tenant alone has met the failures, while another has had answers of late: what a request
        brings about is not held against others."""
        if not self._is_left_to_others:
            return False
        since_ns = now_ns - int(self.config.open_s * 1e9)
        return any(at_ns > since_ns for name, at_ns in self._good_ns.items() if name not in self._failed_for)

    def _until_ns(self, now_ns: int) -> int:
        return now_ns + int(self.config.open_s * 1e9)

    def note_busy(
        self, now_ns: int, retry_after_s: float | None, tenant: str = "", *, is_for_one: bool = False
    ) -> None:
        """retry_after_s: None where it did not say. tenant: whom it may have been about; "" where it was about all.
        is_for_one: whom it was about, whoever else meets it too."""
        asked_s = LEAST_BACKOFF_S if retry_after_s is None else retry_after_s
        until_ns = now_ns + int(min(asked_s, self.config.max_backoff_s) * 1e9)
        paused = {name: over_ns for name, over_ns in self._paused_until_ns.items() if over_ns > now_ns}
        if not tenant or (paused.keys() - {tenant} and not is_for_one):
            self._busy_until_ns = max(self._busy_until_ns, until_ns)
        if tenant:
            paused[tenant] = max(until_ns, paused.get(tenant, 0))
            self.left_out.until_ns = max(self.left_out.until_ns, until_ns)
        self._paused_until_ns = paused

    def pause_ns(self, tenant: str, now_ns: int) -> int:
        """Returns for how long this tenant is to leave it alone, whoever else may ask it."""
        return max(0, self._paused_until_ns.get(tenant, 0) - now_ns)

    def take_over(self, other: "Breaker") -> None:
        """Go on from what another has seen of the same upstream, by this one's config."""
        vars(self).update(vars(other) | {"config": self.config, "_trying": None})


Found = TypeVar("Found")


class LeftAlone:
    def __init__(self, config: BreakerConfig) -> None:
        self._breaker = Breaker(config)

    async def unless(self, asking: Callable[[], Awaitable[Found | None]]) -> Found | None:
        """Returns what is answered; None where that fails (`OSError`, `ValueError`), or is not tried for now. An answer
        of None says nothing of who was asked."""
        if not self._breaker.allows(time.monotonic_ns()):
            return None
        self._breaker.begin(asking)
        try:
            found = await asking()
        except (OSError, ValueError):
            self._breaker.note_failure(time.monotonic_ns())
            return None
        finally:
            self._breaker.leave(asking)
        if found is not None:
            self._breaker.note_success()
        return found
