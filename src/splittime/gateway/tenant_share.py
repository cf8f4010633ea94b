"""What waits for an upstream: one request, and what one tenant has of the queue and of the upstreams.

Before it is full it refuses by chance, and the more surely the more of its share a tenant holds. A queue
that takes everything until it is full and nothing then is a cliff: whoever comes late is refused whosever the queue is,
or another's request that has waited must go. So each tenant has a part of the queue as its weight is among the tenants
that are active now, and from `shed_from` of that part on its newcomers are refused with a chance that rises evenly to
one at the whole part: random early detection (Floyd and Jacobson 1993), for each tenant. What a tenant asks beyond its
part is thus refused when its head has been read, and nobody's place is taken by it.

One draw decides for a request, however often it is looked at.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from splittime.gateway.routing.prefix_table import SeenPrefix
from splittime.gateway.upstreams import Routed

FORGET_S = 10.0  # in which a rate forgets all but 1/e
LEAST_SEEN_S = 0.5  # for a rate to be told
LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0


class Sharing(Protocol):
    """What is asked of a tenant's share."""

    weight: float

    @property
    def is_active(self) -> bool: ...


def part_of(own: Sharing, all_shares: Iterable[Sharing]) -> float:
    """Returns the part of the queue that is this tenant's: its weight among those active, itself included."""
    weights = sum(share.weight for share in all_shares if share.is_active and share is not own)
    return own.weight / (own.weight + weights)


def chance(filled: float, shed_from: float) -> float:
    """Returns the chance with which a newcomer is refused. filled: how much of its part its tenant holds."""
    if filled <= shed_from:
        return float(filled >= 1.0)
    return min(1.0, (filled - shed_from) / (1.0 - shed_from)) if shed_from < 1.0 else 1.0


class GrantRate:
    """Tokens a second that go from a tenant's queue to upstreams, of late, over the time in which it had more to give:
    a tenant that asks for nothing is not slow. The tokens are estimates, as those that wait are. What was seen is
    forgotten in pauses too: it would refuse all who could show otherwise."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._kept_ns = 0  # up to when it was forgotten
        self._since_ns: int | None = None  # the latest grant, while there is more

    def note(self, tokens: int, now_ns: int, *, has_more: bool) -> None:
        """A request of the queue was granted. has_more: another of its tenant waits behind it."""
        self._forget(now_ns)
        if self._since_ns is not None:
            self._tokens += tokens
            self._seconds += (now_ns - self._since_ns) / 1e9
        self._since_ns = now_ns if has_more else None

    def _forget(self, now_ns: int) -> None:
        kept = math.exp((self._kept_ns - now_ns) / 1e9 / FORGET_S)
        self._tokens, self._seconds, self._kept_ns = self._tokens * kept, self._seconds * kept, now_ns

    def per_s(self, now_ns: int) -> float | None:
        """Returns None while too little was seen."""
        if self._since_ns is None:
            self._forget(now_ns)
        return self._tokens / self._seconds if self._seconds >= LEAST_SEEN_S else None


def retry_after_s(waiting_tokens: int, per_s: float | None) -> float:
    """Returns when to come back: when what waits of this tenant now has been served, as it is served now."""
    if per_s is None:
        return LEAST_RETRY_S
    return min(MOST_RETRY_S, max(LEAST_RETRY_S, waiting_tokens / per_s))


class Grant(Protocol):
    """A future, or what does as one where nothing is awaited."""

    def done(self) -> bool: ...

    def cancelled(self) -> bool: ...

    def exception(self) -> BaseException | None: ...

    def result(self) -> Routed: ...

    def set_result(self, result: Routed, /) -> None: ...

    def set_exception(self, exception: BaseException, /) -> None: ...


Lacking = Callable[[int], Collection[str]]  # by the time: a pause ends while a request waits


class QueuedRequest:
    """One request in the queue. tokens: prompt and answer, as estimated. weighed: those of them that count for the
    queue's bound. prefix: of its prompt, where that decides who
    gets it. granted: who gets it, or why nobody does. since_ns: when it came. avoided: who is not to have it while
    another may: who was tried, and who lacks its path, as it is by then. answers: it needs a place for each."""

    __slots__ = (
        "answers",
        "granted",
        "is_retry",
        "lacking",
        "model",
        "prefix",
        "since_ns",
        "tenant",
        "tokens",
        "tried",
        "weighed",
    )

    def __init__(
        self,
        tenant: str,
        model: str,
        tokens: int,
        tried: Collection[str],
        prefix: SeenPrefix | None,
        granted: Grant,
        since_ns: int,
        lacking: Lacking = lambda at_ns: (),
        answers: int = 1,
    ) -> None:
        self.tenant, self.model, self.tokens, self.prefix = tenant, model, tokens, prefix
        self.tried, self.lacking = tried, lacking
        self.is_retry, self.since_ns, self.granted = bool(tried), since_ns, granted
        self.weighed, self.answers = tokens, answers

    def avoided(self, at_ns: int) -> Collection[str]:
        return (*self.tried, *self.lacking(at_ns))


class TenantShare:
    """What one tenant has: of the queue now, of upstreams' tokens so far (by weight), and in flight."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.counter = 0.0
        self.requests = self.tokens = 0  # that wait
        self.in_flight = self.unsettled = 0  # requests, and tokens that were charged by an estimate
        self.by_model: dict[str, deque[QueuedRequest]] = {}
        self.rate = GrantRate()

    @property
    def is_active(self) -> bool:
        return self.requests > 0 or self.in_flight > 0

    @property
    def least_counter(self) -> float:
        """The counter if nothing of what is not settled were used: what is known."""
        return self.counter - self.unsettled / self.weight

    def latest(self) -> QueuedRequest | None:
        """Returns the request that came last, as far as the models' queues tell: of the longest one."""
        longest = max(self.by_model.values(), key=len, default=None)
        return longest[-1] if longest else None


def oldest_ns(line: deque[QueuedRequest]) -> int:
    """Returns since when whoever has waited longest waits. Those who try again stand in front, the newest first, and
    behind them the others in the order in which they came."""
    oldest_ns = line[0].since_ns
    for waiting in line:
        oldest_ns = min(oldest_ns, waiting.since_ns)
        if not waiting.is_retry:
            break
    return oldest_ns
