"""Refusals before the queue is full: by chance, by how much of its own part a tenant has; and when to come back."""

import asyncio
import itertools
import random
from collections import Counter

import pytest

from splittime.core.errors import Refused
from splittime.gateway.config import QueueConfig
from splittime.gateway.fair_queue import MOST_RETRY_S, FairQueue, GrantRate, QueuedRequest, chance, retry_after_s

from .test_fair_queue import FAR_NS, router_of, wait_in

S = 1_000_000_000


def test_the_chance_rises_evenly_and_has_no_step():
    assert [chance(filled, 0.5) for filled in (0.0, 0.5, 0.75, 1.0, 3.0)] == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert [chance(filled, 1.0) for filled in (0.0, 0.99, 1.0)] == [0.0, 0.0, 1.0]
    steps = [chance(i / 1000, 0.5) for i in range(1001)]
    assert max(after - before for before, after in itertools.pairwise(steps)) < 0.003


async def shed_of(queue, tenant, draws=400) -> float:
    """Returns the part of newcomers that would be refused now, by drawing evenly."""
    refused = 0
    for i in range(draws):
        try:
            queue.require_room(tenant, (i + 0.5) / draws)
        except Refused as caught:
            refused += caught.reason == "shed"
    return refused / draws


async def test_a_tenant_is_shed_by_its_own_part_of_the_queue():
    queue = FairQueue(QueueConfig(max_requests=70), router_of(2), {"a": 1.0, "b": 2.0, "c": 4.0})
    held = [await queue.enter(tenant, "m", 10, until_ns=FAR_NS) for tenant in ("b", "c")]
    tasks = [await wait_in(queue, "a", 10) for _ in range(7)]
    tasks += [await wait_in(queue, "b", 10) for _ in range(7)]
    assert await shed_of(queue, "a") == pytest.approx(0.5, abs=0.01)  # 7.5 of its 10
    assert await shed_of(queue, "b") == 0  # 7.5 of its 20
    assert await shed_of(queue, "c") == 0  # has nothing there
    for routed, tenant in zip(held, ("b", "c"), strict=True):
        queue.settle(tenant, 10, 10)
        queue.leave(routed, tenant, 10)  # c is not active any more, and the others' parts are larger
    assert await shed_of(queue, "a") == 0
    for task in tasks:
        task.cancel()


async def test_ten_times_overload_fills_no_queue_and_takes_nobodys_place():
    """Each tenant's waiting stays within its part; none of those who wait is refused for a newcomer."""
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    queue = FairQueue(QueueConfig(max_requests=140, max_tokens=10**6), router_of(4), weights)
    draw, in_flight, served, refused, evicted = random.Random(3), [], Counter(), Counter(), 0

    async def ask(tenant):
        nonlocal evicted
        lot = draw.random()
        try:
            queue.require_room(tenant, lot)
            waited = asyncio.ensure_future(queue.enter(tenant, "m", 10, until_ns=FAR_NS, draw=lot))
            routed = await waited
        except Refused as caught:
            refused[caught.reason] += 1
            return
        in_flight.append((tenant, routed))

    tasks = []
    for _ in range(1500):
        tasks += [asyncio.ensure_future(ask(draw.choice("abc"))) for _ in range(10)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if in_flight:
            tenant, routed = in_flight.pop(0)
            served[tenant] += 10
            queue.settle(tenant, 10, 10)
            queue.leave(routed, tenant, 10)
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert set(refused) == {"shed"}
    assert refused["shed"] > 12_000
    for tenant, weight in (("a", 1), ("b", 2), ("c", 4)):
        assert served[tenant] / served.total() == pytest.approx(weight / 7, rel=0.05)


async def test_a_retry_is_not_shed():
    router = router_of(1, 1)
    queue = FairQueue(QueueConfig(max_requests=2), router)
    first = await queue.enter("a", "m", 10, until_ns=FAR_NS)
    await queue.enter("a", "m", 10, until_ns=FAR_NS)
    tasks = [await wait_in(queue, "a", 10)]
    with pytest.raises(Refused) as caught:
        await queue.enter("a", "m", 10, until_ns=FAR_NS, draw=0.0)
    assert caught.value.reason == "shed"
    retry = queue.enter("a", "m", 10, until_ns=FAR_NS, draw=0.0, tried=[first.upstream.name])
    tasks.append(asyncio.ensure_future(retry))
    await asyncio.sleep(0)
    assert queue.requests == 2
    for task in tasks:
        task.cancel()


async def test_an_upstream_that_is_broken_has_no_room():
    """One that nobody may ask keeps no refusal from being given at once."""
    router = router_of(1, 1)
    queue = FairQueue(QueueConfig(max_requests=1), router)
    router.upstreams[0].breaker.note_failure(1 << 62)
    await queue.enter("a", "m", 10, until_ns=FAR_NS)
    waiting = await wait_in(queue, "a", 10)
    with pytest.raises(Refused):
        queue.require_room("a")
    waiting.cancel()


def test_a_rate_is_of_late_and_of_the_time_with_more_to_give():
    rate = GrantRate()
    assert rate.per_s(0) is None
    rate.note(10**6, 0, has_more=True)  # what began the queue was not waited for
    for i in range(1, 11):
        rate.note(20, i * S // 10, has_more=True)
    assert rate.per_s(S) == pytest.approx(200, rel=0.01)
    rate.note(20, 11 * S // 10, has_more=False)
    rate.note(5, 5 * S, has_more=True)  # a pause is not slowness
    assert rate.per_s(5 * S) == pytest.approx(200, rel=0.01)
    for i in range(1, 601):
        rate.note(10, 5 * S + i * S // 10, has_more=True)
    assert rate.per_s(65 * S) == pytest.approx(100, rel=0.01)
    assert rate.per_s(200 * S) == pytest.approx(100, rel=0.01)  # of a wait that still lasts it is all that is known
    rate.note(10, 200 * S, has_more=False)
    assert rate.per_s(220 * S) is not None
    assert rate.per_s(260 * S) is None


def test_when_to_come_back_is_when_what_waits_is_served():
    assert retry_after_s(1000, None) == 1.0
    assert retry_after_s(1000, 100.0) == 10.0
    assert retry_after_s(10, 100.0) == 1.0
    assert retry_after_s(10**9, 100.0) == MOST_RETRY_S


class Turned:
    """A clock that a test turns."""

    at_ns = 1000 * S

    def __call__(self) -> int:
        return self.at_ns


async def test_a_rate_of_long_ago_refuses_nobody():
    """It was slow once; since then there was always a place before a second had to wait, and nothing corrected it."""
    clock = Turned()
    queue = FairQueue(QueueConfig(), router_of(1), clock=clock)
    place = await queue.enter("a", "m", 100, until_ns=FAR_NS)
    waiting = [QueuedRequest("a", "m", 100, (), None, asyncio.Future(), clock()) for _ in range(3)]
    for one in waiting:
        queue.line_up(one, until_ns=FAR_NS)
    for one in waiting:
        clock.at_ns += 60 * S
        queue.leave(place, "a", 100)
        place = one.granted.result()
    clock.at_ns += S
    soon_ns = clock() + 30 * S
    queue.line_up(QueuedRequest("a", "m", 100, (), None, asyncio.Future(), clock()), until_ns=soon_ns)
    late = QueuedRequest("a", "m", 100, (), None, asyncio.Future(), clock())
    with pytest.raises(Refused, match="it would wait longer"):
        queue.line_up(late, until_ns=soon_ns)
    queue.leave(place, "a", 100)
    clock.at_ns += 3600 * S
    for _ in range(3):
        one = QueuedRequest("a", "m", 100, (), None, asyncio.Future(), clock())
        queue.line_up(one, until_ns=clock() + 30 * S)
    assert queue.requests == 3


async def test_a_refusal_says_how_long_its_tenants_queue_will_take():
    clock = Turned()
    queue = FairQueue(QueueConfig(max_requests=30), router_of(1), clock=clock)
    tasks = [asyncio.ensure_future(queue.enter("a", "m", 20, until_ns=FAR_NS)) for _ in range(50)]
    await asyncio.sleep(0)
    for i in range(20):  # one each tenth of a second: 200 tokens a second
        clock.at_ns += S // 10
        queue.leave(await tasks[i], "a", 20)
    await asyncio.sleep(0)
    waiting_s = queue.tokens / 200
    with pytest.raises(Refused) as caught:
        await queue.enter("a", "m", 20, until_ns=clock.at_ns + int((waiting_s - 0.1) * 1e9))
    assert caught.value.reason == "predicted_wait"
    assert caught.value.facts["predicted_wait_ms"] == pytest.approx(waiting_s * 1e3, rel=0.05)
    assert caught.value.info.retry_after_s == pytest.approx(max(1.0, waiting_s), rel=0.05)
    may_wait = await wait_in(queue, "a", 20, until_ns=clock.at_ns + int((waiting_s + 0.2) * 1e9))
    assert not may_wait.done()
    other = await wait_in(queue, "b", 20, until_ns=clock.at_ns + S // 100)  # its own queue is empty
    assert not other.done()
    for task in (*tasks, may_wait, other):
        task.cancel()
    await asyncio.gather(*tasks, may_wait, other, return_exceptions=True)
