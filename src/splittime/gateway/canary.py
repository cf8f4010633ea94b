"""A config that a share of tenants tries, and what decides whether all get it.

Which tenants: they are put in the order of a hash of their name and the config's digest, and the first so many are
taken: the same config has the same tenants again, another has others.

Two comparisons, by whoever compares (`CompareArms`, `bench compare`'s statistics): of the canary's tenants with the
others meanwhile, and with themselves before. A tenant that always asks for more is slow beside the others whatever the
config is, and an hour that is slow for all makes everybody slower than before. So WORSE beside the others is rolled
back, unless the same tenants are shown to be as well off as before: going back costs little. Looking again and again
would find something by chance in the end: looks are taken at twice as many requests each, and the k-th has 1/2^k of the
chance of error that is allowed.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from math import ceil
from typing import Any, NamedTuple, Protocol

from splittime.core.request import FinishReason
from splittime.gateway.config import CanaryConfig
from splittime.ledger.account import ClosedAccount

MAX_KEPT = 4096  # accounts of each arm, the latest
ERROR_MARGIN = 0.01  # of all requests: more failures than that are never promoted
WORSE, BETTER, EQUIVALENT = "WORSE", "BETTER", "EQUIVALENT"


class ArmComparison(Protocol):
    """B against A: `diagnose.comparison.Comparison` is one."""

    @property
    def verdict(self) -> str: ...
    @property
    def why(self) -> str: ...


CompareArms = Callable[[Sequence[ClosedAccount], Sequence[ClosedAccount], float, float], ArmComparison]


class CanaryDecision(NamedTuple):
    """promotes: None while it is not decided."""

    promotes: bool | None
    why: str


def chosen(tenants: Iterable[str], share: float, digest: str) -> frozenset[str]:
    """Returns that share of the tenants, rounded up; at least one, and never all."""
    ordered = sorted(tenants, key=lambda name: sha256(f"{digest}:{name}".encode()).digest())
    return frozenset(ordered[: min(len(ordered) - 1, max(1, ceil(share * len(ordered) - 1e-9)))])


def failed_share(accounts: Sequence[ClosedAccount]) -> float:
    """Returns the share that ended with an error, of those that their clients did not leave."""
    counted = [account for account in accounts if account.finish_reason != FinishReason.ABORT]
    return sum(account.error is not None for account in counted) / max(1, len(counted))


class CanaryTrial:
    """tenants: who tries it. before: accounts of the same tenants from before it. version, old_version: of the accounts
    that count."""

    def __init__(
        self,
        config: CanaryConfig,
        tenants: frozenset[str],
        before: Sequence[ClosedAccount],
        versions: tuple[str, str],
        compare: CompareArms,
    ) -> None:
        self._config, self.tenants, self._before, self._compare = config, tenants, before, compare
        self._old, self._new = versions
        self._control: deque[ClosedAccount] = deque(maxlen=MAX_KEPT)
        self._tried: deque[ClosedAccount] = deque(maxlen=MAX_KEPT)
        self.num_control = self.num_tried = self._looks = 0
        self.last_look = ""

    def note(self, account: ClosedAccount) -> None:
        """An account is closed. One of a request that began under another version counts for neither arm."""
        if account.config_version == self._new:
            self.num_tried += 1
            self._tried.append(account)
        elif account.config_version == self._old and account.tenant not in self.tenants:
            self.num_control += 1
            self._control.append(account)

    @property
    def is_due(self) -> bool:
        """Returns whether both arms have enough for the next look."""
        return min(self.num_control, self.num_tried) >= self._config.min_requests * 2**self._looks

    def look(self) -> Callable[[], CanaryDecision]:
        """Begin a look; what is returned takes a while, and may be called on any thread."""
        self._looks += 1
        confidence = 1 - (1 - self._config.confidence) / 2**self._looks
        control, tried = list(self._control), list(self._tried)
        return lambda: self._decided(control, tried, confidence)

    def _decided(self, control: list[ClosedAccount], tried: list[ClosedAccount], confidence: float) -> CanaryDecision:
        beside = self._compare(control, tried, self._config.margin, confidence)
        if beside.verdict in (BETTER, EQUIVALENT):
            more = failed_share(tried) - failed_share(control)
            if more > ERROR_MARGIN:  # too few to be sure of it, which is no reason to promote them
                return CanaryDecision(None, f"{more:.1%} more of its requests fail, which is not sure yet")
            return CanaryDecision(True, f"beside the others: {beside.why}")
        if beside.verdict != WORSE:
            return CanaryDecision(None, f"beside the others: {beside.why}")
        return self._beside_itself(beside, tried, confidence)

    def _beside_itself(self, beside: ArmComparison, tried: list[ClosedAccount], confidence: float) -> CanaryDecision:
        """The canary is worse than the others: were its tenants better before?"""
        why = f"worse beside the others: {beside.why}"
        if len(self._before) < self._config.min_requests:
            return CanaryDecision(False, why)
        itself = self._compare(self._before, tried, self._config.margin, confidence)
        more = failed_share(tried) - failed_share(self._before)
        is_as_before = itself.verdict in (BETTER, EQUIVALENT) and more <= ERROR_MARGIN
        return CanaryDecision(is_as_before, f"{why} Beside the same tenants before: {itself.why}")

    def stats(self) -> dict[str, Any]:
        return {
            "version": self._new,
            "tenants": sorted(self.tenants),
            "requests": self.num_tried,
            "requests_of_others": self.num_control,
            "requests_before": len(self._before),
            "next_look_at": self._config.min_requests * 2**self._looks,
            "last_look": self.last_look,
        }
