"""Who waits for an upstream, and who is next: a bounded queue, fair among tenants by tokens.

Each tenant has a counter of the tokens that it was served, divided by its weight; whoever has the least is next: the
virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). A request is charged
by its estimate when it goes to an upstream, and corrected when its tokens are known. A tenant that comes back after a
pause begins where the least of the active ones is, so nobody saves up; charges in flight are left out there.

Within a tenant the order is that of arrival, for each model: full upstreams of one model keep none of another waiting.
A request with several answers gets places for all of them together. Within its tenant's part nobody is given a place
before it at its tenant's turn; one that is larger than that part is passed by others for as long as they come.

The queue is bounded in requests and in tokens; one request counts `MOST_OF_QUEUE` of the bound at most. When it is full
a newcomer is refused, unless its tenant has less of the queue, by weight, than another: then that other's latest is.
Before that, each active tenant has a part by its weight. From `shed_from` of it on its newcomers are refused with a
chance that rises evenly to one at the whole part: random early detection (Floyd and Jacobson 1993), for each tenant.
That is decided once, when a head has been read, and takes nobody's place.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Protocol

from splittime.core.errors import Refused
from splittime.gateway.config import QueueConfig
from splittime.gateway.routing.affinity import SeenPrefix
from splittime.gateway.upstreams import Routed, Router

FORGET_S = 10.0  # in which a rate forgets all but 1/e
LEAST_SEEN_S = 0.5  # for a rate to be told
LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0
now_ns = time.monotonic_ns
NEVER_SHED = 1.0  # a draw
MOST_OF_QUEUE = 1 / 16
QUEUE_TIMEOUT = "queue_timeout"  # the reason of a refusal


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


class FairQueue:
    """weights: by tenant; one that is not named has 1. clock: what time it is, in ns. shares: by tenant, what each has.

    `enter` is for those who can await; `line_up` and `abandon` are what it does."""

    def __init__(
        self,
        config: QueueConfig,
        router: Router,
        weights: Mapping[str, float] | None = None,
        clock: Callable[[], int] = now_ns,
    ) -> None:
        self._config, self._router, self._now_ns = config, router, clock
        self._weights = dict(weights or {})
        self.shares: dict[str, TenantShare] = {}
        self._least = 0.0  # the counter of whoever was served last
        self.requests = self.tokens = 0  # that wait
        self._num_wide = 0  # of those, with several answers: they may keep others waiting where there is room
        self.on_leave: Callable[[], None] = lambda: None  # where others wait for places at the same upstreams

    def lead_to(self, router: Router) -> None:
        """Who waits, and whoever comes, gets an upstream of this router from now on."""
        self._router = router
        self.dispatch()

    async def enter(
        self,
        tenant: str,
        model: str,
        tokens: int,
        *,
        until_ns: int,
        tried: Collection[str] = (),
        lacking: Lacking = lambda at_ns: (),
        prefix: SeenPrefix | None = None,
        draw: float = NEVER_SHED,
        answers: int = 1,
        on_wait: Callable[[], None] = lambda: None,
    ) -> Routed:
        """Returns who gets the request, with its places there taken: `leave` gives them back.

        until_ns: when whoever waits is refused. tried: upstreams that failed this request already. lacking: returns
        those that do not have its path now. prefix: of its prompt, for affinity. draw: from 0 to 1, the request's own;
        the lower, the sooner it is refused by chance. answers: it needs a place for each. on_wait: called if nobody has
        room now.
        Raises `Refused`: 429 where there are upstreams and no room, 503 where no upstream may be asked.
        """
        granted: asyncio.Future[Routed] = asyncio.get_running_loop().create_future()
        waiting = QueuedRequest(tenant, model, tokens, tried, prefix, granted, self._now_ns(), lacking, answers)
        self.line_up(waiting, until_ns=until_ns, draw=draw)
        if granted.done():
            return granted.result()
        on_wait()
        coming = self._granted_by(granted, waiting, until_ns)
        del granted, waiting  # their error would have this frame: no circle is left for the garbage collector
        routed = await coming
        if routed is None:
            raise self.too_late(tenant)
        return routed

    async def _granted_by(self, granted: Awaitable[Routed], waiting: QueuedRequest, until_ns: int) -> Routed | None:
        """Returns None for one that waited too long. Raises `Refused` where the request of another tenant has taken its
        place in the queue, or no upstream may be asked any more."""
        try:
            async with asyncio.timeout(max(0.0, (until_ns - self._now_ns()) / 1e9)):
                return await granted
        except TimeoutError:
            self.abandon(waiting)
            return None
        except asyncio.CancelledError:
            self.abandon(waiting)
            raise
        finally:
            del granted, waiting

    def line_up(self, waiting: QueuedRequest, *, until_ns: int, draw: float = NEVER_SHED) -> None:
        """Have it wait, or give it a place at once. Raises as `enter` does."""
        self._router.require_one(waiting.model, waiting.tenant, self._now_ns())
        self._make_room(waiting, draw, until_ns)
        self._add(waiting)
        self.dispatch()

    def abandon(self, waiting: QueuedRequest) -> None:
        """Take one that was cancelled or waited too long out of its line, or give back a place granted just then."""
        granted = waiting.granted
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            if not waiting.is_retry:
                self.settle(waiting.tenant, waiting.tokens, 0)
            self.leave(granted.result(), waiting.tenant, waiting.tokens)
        elif waiting in self.shares[waiting.tenant].by_model.get(waiting.model, ()):
            self._remove(waiting)
            self.dispatch()

    def too_late(self, tenant: str) -> Refused:
        return self._refused(QUEUE_TIMEOUT, "it waited for as long as it may", tenant)

    def place_now(self, tenant: str, model: str, tokens: int, answers: int = 1) -> Routed | None:
        """Returns a place for a request that waits for none; None if nobody has room. Whoever waits comes first."""
        self.dispatch()
        routed = self._router.choose(model, self._now_ns(), answers=answers, tenant=tenant)
        if routed is not None:
            self._take(self._share(tenant), routed, tokens, is_charged=True)
        return routed

    def leave(self, routed: Routed, tenant: str, tokens: int) -> None:
        """A request that had a place at an upstream gives it back, used or not."""
        routed.leave(tokens)
        self._share(tenant).in_flight -= 1
        self.dispatch()
        self.on_leave()

    def settle(self, tenant: str, charged: int, used: int) -> None:
        """A request that had a place is over: of the tokens that it was charged, so many were used."""
        share = self._share(tenant)
        share.unsettled -= charged
        share.counter += (used - charged) / share.weight

    def require_room(self, tenant: str, draw: float = NEVER_SHED) -> None:
        """Raises `Refused` if any request of this tenant would be refused now, however short, and of whatever model."""
        if not self.requests or self._router.has_room(self._now_ns()):
            return
        if self._is_full(1) and self._most_over(tenant, 1) is None:
            raise self._queue_full(tenant)
        self._shed(tenant, draw)

    def longest_wait_ns(self, at_ns: int) -> int:
        """Returns how long whoever has waited longest has waited; 0 if nobody waits."""
        lines = (line for share in self.shares.values() for line in share.by_model.values())
        since = min((oldest_ns(line) for line in lines), default=at_ns)
        return at_ns - since

    def dispatch(self) -> None:
        """Give free places to whoever is next, until nobody who waits can have one."""
        while self.requests and self._grant_one():
            pass

    # ---- in

    def _share(self, tenant: str) -> TenantShare:
        if tenant not in self.shares:
            self.shares[tenant] = TenantShare(self._weights.get(tenant, 1.0))
        return self.shares[tenant]

    def _is_full(self, tokens: int) -> bool:
        is_long = self.requests > 0 and self.tokens + tokens > self._config.max_tokens
        return self.requests >= self._config.max_requests or is_long

    def _shed(self, tenant: str, draw: float) -> None:
        """Raises `Refused` if chance says so, by how much of its part of the queue the tenant has."""
        share, config = self._share(tenant), self._config
        if share.requests:
            waiting = share.requests + 0.5  # with half of a newcomer, which is taken to be as long as the others
            held = waiting * max(1 / config.max_requests, share.tokens / share.requests / config.max_tokens)
            filled = held / part_of(share, self.shares.values())
            if draw < chance(filled, config.shed_from):
                raise self._refused("shed", f"this key has {min(filled, 1):.0%} of its part of the queue", tenant)

    def _require_time(self, tenant: str, until_ns: int) -> None:
        """Raises `Refused` if what its tenant has waiting will take longer than the request may wait."""
        share = self._share(tenant)
        at_ns = self._now_ns()
        per_s, left_s = share.rate.per_s(at_ns), (until_ns - at_ns) / 1e9
        if per_s is not None and share.tokens / per_s > left_s:
            words = f"it would wait longer than {max(0.0, left_s):.1f} s, which is as long as it may"
            raise self._refused("predicted_wait", words, tenant)

    def _make_room(self, newcomer: QueuedRequest, draw: float, until_ns: int) -> None:
        """Raises `Refused` if there is none, or refuses the latest of whoever has more than its share."""
        newcomer.weighed = min(newcomer.tokens, max(1, int(self._config.max_tokens * MOST_OF_QUEUE)))
        at_ns = self._now_ns()
        asked = newcomer.avoided(at_ns), newcomer.answers, newcomer.tenant
        has_room = self._router.has_room_for(newcomer.model, at_ns, *asked)
        if has_room and not self._num_wide:
            return  # whoever waits waits for others
        if not newcomer.is_retry:
            self._shed(newcomer.tenant, draw)
            self._require_time(newcomer.tenant, until_ns)
        while self._is_full(newcomer.weighed):
            over = self._most_over(newcomer.tenant, newcomer.weighed)
            if over is None:
                raise self._queue_full(newcomer.tenant)
            self._refuse(over, self._queue_full(over.tenant))

    def _most_over(self, tenant: str, tokens: int) -> QueuedRequest | None:
        """Returns the latest of the tenant with most of the queue by weight, if more than the newcomer's would have."""
        own = self._share(tenant)
        others = [share for name, share in self.shares.items() if name != tenant and share.requests]
        most = max(others, key=lambda share: share.tokens / share.weight, default=None)
        if most is None or most.tokens / most.weight <= (own.tokens + tokens) / own.weight:
            return None
        return most.latest()

    def _add(self, waiting: QueuedRequest) -> None:
        share = self._share(waiting.tenant)
        if not share.is_active:
            active = [other.least_counter for other in self.shares.values() if other.is_active]
            share.counter = max(share.counter, min(active, default=self._least))
        line = share.by_model.setdefault(waiting.model, deque())
        line.appendleft(waiting) if waiting.is_retry else line.append(waiting)
        self._count(share, waiting, 1)

    def _count(self, share: TenantShare, waiting: QueuedRequest, sign: int) -> None:
        share.requests += sign
        share.tokens += sign * waiting.weighed
        self.requests += sign
        self.tokens += sign * waiting.weighed
        self._num_wide += sign * (waiting.answers > 1)

    def _remove(self, waiting: QueuedRequest) -> None:
        share = self.shares[waiting.tenant]
        line = share.by_model[waiting.model]
        line.remove(waiting)
        if not line:
            del share.by_model[waiting.model]
        self._count(share, waiting, -1)

    # ---- out

    def _grant_one(self) -> bool:
        shares = sorted((share for share in self.shares.values() if share.requests), key=lambda share: share.counter)
        kept: set[str] = set()  # models of whose places the next are somebody's who needs several
        return any(self._grant_first(share, kept) for share in shares)

    def _grant_first(self, share: TenantShare, kept: set[str]) -> bool:
        at_ns = self._now_ns()
        lines = sorted(share.by_model.items(), key=lambda item: (not item[1][0].is_retry, item[1][0].since_ns))
        for model, line in lines:  # the longest wait first: a line that never empties would starve the others
            waiting = line[0]
            if waiting.granted.done():  # cancelled, and its task does not know yet
                self._remove(waiting)
                return True
            try:
                self._router.require_one(model, waiting.tenant, at_ns)
            except Refused as refused:
                self._refuse(waiting, refused)
                return True
            if model in kept:
                continue
            asked = waiting.avoided(at_ns), waiting.prefix, waiting.answers, waiting.tenant
            routed = self._router.choose(model, at_ns, *asked)
            if routed is not None:
                self._grant(share, waiting, routed)
                return True
            if waiting.answers > 1 and self._is_within_its_part(share, waiting, at_ns):
                kept.add(model)
        return False

    def _is_within_its_part(self, share: TenantShare, waiting: QueuedRequest, at_ns: int) -> bool:
        places = max((one.limit for one in self._router.allowed(waiting.model, at_ns)), default=0)
        return waiting.answers <= places * part_of(share, self.shares.values())

    def _grant(self, share: TenantShare, waiting: QueuedRequest, routed: Routed) -> None:
        self._remove(waiting)
        self._least = share.least_counter
        share.rate.note(waiting.weighed, self._now_ns(), has_more=share.requests > 0)
        self._take(share, routed, waiting.tokens, is_charged=not waiting.is_retry)
        waiting.granted.set_result(routed)

    def _take(self, share: TenantShare, routed: Routed, tokens: int, *, is_charged: bool) -> None:
        routed.enter(tokens)
        share.in_flight += 1
        if is_charged:
            share.counter += tokens / share.weight
            share.unsettled += tokens

    def _refuse(self, waiting: QueuedRequest, error: Refused) -> None:
        self._remove(waiting)
        if not waiting.granted.done():
            waiting.granted.set_exception(error)

    # ---- what who gets nothing is told

    def _refused(self, reason: str, why: str, tenant: str, limit: int | None = None) -> Refused:
        """Its `Retry-After` is how long what this tenant has in the queue will take, as it is being served."""
        share = self._share(tenant)
        per_s = share.rate.per_s(self._now_ns())
        return Refused(
            f"the upstreams are full: {why}",
            reason=reason,
            queued=self.requests,
            limit=limit,
            predicted_wait_s=None if per_s is None else share.tokens / per_s,
            wait_estimate=None if per_s is None else "grants",
            retry_after_s=retry_after_s(share.tokens, per_s),
        )

    def _queue_full(self, tenant: str) -> Refused:
        if self.requests >= self._config.max_requests:
            return self._refused("queue_full", "as many requests wait as may", tenant, self._config.max_requests)
        return self._refused("queue_full", "as many tokens wait as may", tenant, self._config.max_tokens)
