"""What waits for an upstream: one request, and what one tenant has of the queue and of the upstreams."""

from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

from splittime.gateway.routing.prefix_table import SeenPrefix
from splittime.gateway.shedding import GrantRate
from splittime.gateway.upstreams import Routed


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
