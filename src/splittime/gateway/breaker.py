"""Whether an upstream may be asked now: closed, open after failures in a row, then open for one request that tries.

What counts as a failure, a success or a pause, `verdict` says; `Upstream.hear` tells it here. An upstream that has a
checker (`health_checks`) is asked by the gateway itself before a request may try it, so that nobody's request finds out
whether it lives again. What opens by one tenant's requests alone is open for that tenant, and for others when they meet
a failure too.

A 429 that tells no reason may be about its request: its size, its tenant's own part of something. So it pauses the
upstream for that tenant alone. When another tenant is refused there too before that is over, it is the upstream that
has too much to do, or the gateway's key that is used up, and the pause holds for all. No pause is cut short by a later,
shorter one.
"""

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from splittime.gateway.config import BreakerConfig

LEAST_BACKOFF_S = 1.0  # where a 429 does not say for how long


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
