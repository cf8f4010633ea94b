"""Who is next: shares by tokens and weights, bounds of the queue, and places that never leak."""

import asyncio
import random
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.core.errors import Refused
from splittime.gateway.config import BreakerConfig, QueueConfig, UpstreamConfig
from splittime.gateway.fair_queue import FairQueue, now_ns
from splittime.gateway.upstreams import DRAWN, MANY, Router, Upstream

FAR_NS = 10**18


def router_of(*rooms: int, models=("m",), failures=1) -> Router:
    upstreams = [
        UpstreamConfig(name=f"u{i}", url="http://127.0.0.1:1", models=models, max_in_flight=room)
        for i, room in enumerate(rooms)
    ]
    return Router([Upstream(one, BreakerConfig(failures=failures)) for one in upstreams], random.Random(7))


def overload(weights: dict[str, float], lengths: dict[str, tuple[int, int]], *, num_served: int) -> Counter:
    """All tenants have 20 requests waiting at any time; returns the tokens that each was served."""

    async def run() -> Counter:
        queue, served = FairQueue(QueueConfig(), router_of(2, 2), weights), Counter()
        draw, in_flight = random.Random(1), deque()

        def ask(tenant):
            tokens = draw.randint(*lengths[tenant])
            task = asyncio.ensure_future(queue.enter(tenant, "m", tokens, until_ns=FAR_NS))
            task.add_done_callback(lambda done: done.cancelled() or in_flight.append((tenant, tokens, done.result())))
            return task

        tasks = [ask(tenant) for tenant in weights for _ in range(20)]
        await asyncio.sleep(0.001)
        for _ in range(num_served):
            tenant, tokens, routed = in_flight.popleft()
            served[tenant] += tokens
            queue.settle(tenant, tokens, tokens)
            queue.leave(routed, tenant, tokens)
            tasks.append(ask(tenant))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return served

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("weights", "lengths"),
    [
        ({"a": 1, "b": 2, "c": 5}, dict.fromkeys("abc", (100, 100))),
        ({"a": 1, "b": 1}, {"a": (10, 50), "b": (500, 900)}),
        ({"a": 3, "b": 1, "c": 1}, {"a": (300, 400), "b": (10, 20), "c": (900, 1000)}),
    ],
)
def test_under_overload_shares_by_tokens_are_the_weights(weights, lengths):
    served = overload(weights, lengths, num_served=3000)
    for tenant, weight in weights.items():
        share = served[tenant] / served.total()
        assert share == pytest.approx(weight / sum(weights.values()), rel=0.05)


async def test_nobody_saves_up():
    """A tenant that asks for nothing while another is served has no claim to what it missed."""
    queue, order = FairQueue(QueueConfig(), router_of(1)), []
    for _ in range(50):
        queue.leave(await queue.enter("busy", "m", 100, until_ns=FAR_NS), "busy", 100)
        queue.settle("busy", 100, 100)
    holder = await queue.enter("busy", "m", 100, until_ns=FAR_NS)

    async def ask(tenant):
        routed = await queue.enter(tenant, "m", 100, until_ns=FAR_NS)
        order.append(tenant)
        queue.settle(tenant, 100, 100)
        queue.leave(routed, tenant, 100)

    tasks = [asyncio.ensure_future(ask(tenant)) for tenant in ["late"] * 6 + ["busy"] * 6]
    await asyncio.sleep(0)
    queue.leave(holder, "busy", 100)
    await asyncio.gather(*tasks)
    assert 3 <= order[:6].count("late") <= 4


async def wait_in(queue, tenant, tokens, model="m", until_ns=FAR_NS, draw=1.0):
    task = asyncio.ensure_future(queue.enter(tenant, model, tokens, until_ns=until_ns, draw=draw))
    await asyncio.sleep(0)
    return task


async def test_a_full_queue_refuses_and_says_which_bound():
    queue = FairQueue(QueueConfig(max_requests=17, max_tokens=160), router_of(1))
    await queue.enter("a", "m", 5, until_ns=FAR_NS)
    tasks = [await wait_in(queue, "a", 10) for _ in range(15)]
    tasks.append(await wait_in(queue, "a", 9))
    with pytest.raises(Refused) as caught:
        await queue.enter("a", "m", 2, until_ns=FAR_NS)
    assert (caught.value.reason, caught.value.info.status, caught.value.info.limit) == ("queue_full", 429, 160)
    tasks.append(await wait_in(queue, "a", 1))
    with pytest.raises(Refused) as caught:
        await queue.enter("a", "m", 1, until_ns=FAR_NS)
    assert caught.value.info.limit == 17
    with pytest.raises(Refused):
        queue.require_room("a")
    queue.require_room("b")  # has nothing of it
    for task in tasks:
        task.cancel()


async def test_one_estimate_however_large_fills_no_queue():
    """One that waits with 500,000 tokens had all others refused, by the bound or by chance."""
    queue = FairQueue(QueueConfig(), router_of(1))
    holder = await queue.enter("a", "m", 5, until_ns=FAR_NS)
    tasks = [await wait_in(queue, "a", tokens, draw=0.2) for tokens in (10**6, *[10] * 20)]
    assert not any(task.done() for task in tasks)
    assert queue.tokens == QueueConfig().max_tokens // 16 + 200
    queue.leave(holder, "a", 5)
    for task in tasks:
        queue.leave(await task, "a", 1)
    assert (queue.tokens, queue.requests) == (0, 0)


async def test_a_tenant_that_fills_the_queue_keeps_nobody_out():
    queue = FairQueue(QueueConfig(max_requests=4), router_of(1))
    holder = await queue.enter("greedy", "m", 10, until_ns=FAR_NS)
    greedy = [await wait_in(queue, "greedy", 10) for _ in range(4)]
    modest = await wait_in(queue, "modest", 10)
    await asyncio.sleep(0)
    assert not modest.done()
    assert isinstance(greedy[3].exception(), Refused)  # its latest gives way
    assert [task.done() for task in greedy] == [False, False, False, True]
    queue.leave(holder, "greedy", 10)
    for task in (*greedy[:3], modest):
        task.cancel()


async def test_an_equal_share_takes_nobodys_place():
    queue = FairQueue(QueueConfig(max_requests=2), router_of(1), {"heavy": 2.0})
    await queue.enter("a", "m", 10, until_ns=FAR_NS)
    tasks = [await wait_in(queue, tenant, 10) for tenant in "ab"]
    with pytest.raises(Refused):
        await queue.enter("c", "m", 10, until_ns=FAR_NS)
    tasks.append(await wait_in(queue, "heavy", 10))  # by weight it has less
    await asyncio.sleep(0)
    assert sum(task.done() for task in tasks) == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_estimate_of_one_is_not_held_against_another():
    """Whoever comes while a request is in flight that may use 10,000 tokens begins where that one's tenant was."""
    queue = FairQueue(QueueConfig(), router_of(1))
    large = await queue.enter("a", "m", 10_000, until_ns=FAR_NS)
    of_b = [await wait_in(queue, "b", 10) for _ in range(2)]
    queue.settle("a", 10_000, 100)
    of_a = await wait_in(queue, "a", 10)
    queue.leave(large, "a", 10_000)
    await asyncio.sleep(0)
    assert of_b[0].done()
    assert not of_a.done()
    for task in (of_a, of_b[1]):
        task.cancel()


async def test_who_comes_when_nobody_is_there_begins_where_the_last_was():
    queue = FairQueue(QueueConfig(), router_of(2))
    for routed in [await queue.enter("a", "m", 10_000, until_ns=FAR_NS) for _ in range(2)]:
        queue.settle("a", 10_000, 100)
        queue.leave(routed, "a", 10_000)
    held = await queue.enter("b", "m", 10, until_ns=FAR_NS)
    await queue.enter("a", "m", 10, until_ns=FAR_NS)
    of_a, of_b = await wait_in(queue, "a", 10), await wait_in(queue, "b", 10)
    queue.leave(held, "b", 10)
    await asyncio.sleep(0)
    assert of_b.done()  # the 10,000 that were feared, and not used, are nothing that it begins with
    assert not of_a.done()
    of_a.cancel()


async def test_a_place_granted_to_who_has_just_left_is_given_on():
    queue = FairQueue(QueueConfig(), router_of(1))
    held = await queue.enter("a", "m", 10, until_ns=FAR_NS)
    leaver, of_a, of_b = [await wait_in(queue, *asked) for asked in (("b", 5000), ("a", 10), ("b", 10))]
    queue.leave(held, "a", 10)
    leaver.cancel()
    await asyncio.gather(leaver, return_exceptions=True)
    await asyncio.sleep(0)
    assert leaver.cancelled()
    assert of_b.done()  # its tenant pays nothing for what was not served
    assert not of_a.done()
    of_a.cancel()


async def test_a_tenant_with_requests_in_flight_keeps_its_count():
    queue = FairQueue(QueueConfig(), router_of(2))
    queue.settle("b", 0, 0)  # known first: it would win a tie
    await queue.enter("a", "m", 10, until_ns=FAR_NS)
    large = await queue.enter("b", "m", 1000, until_ns=FAR_NS)
    queue.settle("b", 1000, 1000)
    of_b, of_a = await wait_in(queue, "b", 10), await wait_in(queue, "a", 10)
    queue.leave(large, "b", 1000)
    await asyncio.sleep(0)
    assert of_a.done()
    assert not of_b.done()
    of_b.cancel()


async def test_who_waits_too_long_is_refused_and_leaves_nothing():
    queue = FairQueue(QueueConfig(), router_of(1))
    await queue.enter("a", "m", 10, until_ns=FAR_NS)
    with pytest.raises(Refused) as caught:
        await queue.enter("a", "m", 10, until_ns=now_ns() + 20_000_000)
    assert caught.value.reason == "queue_timeout"
    assert (queue.requests, queue.tokens) == (0, 0)


async def test_where_no_upstream_answers_nobody_waits():
    router = router_of(1, 1)
    queue = FairQueue(QueueConfig(), router)
    first, second = [await queue.enter("a", "m", 10, until_ns=FAR_NS) for _ in range(2)]
    waiting = await wait_in(queue, "a", 10)
    for routed in (first, second):
        routed.upstream.breaker.note_failure(now_ns())
        queue.leave(routed, "a", 10)
    with pytest.raises(Refused) as caught:
        await waiting
    assert (caught.value.reason, caught.value.info.status) == ("no_upstream", 503)
    with pytest.raises(Refused):
        await queue.enter("a", "m", 10, until_ns=FAR_NS)
    router.upstreams[0].breaker.note_success()
    router.upstreams[0].breaker.note_busy(now_ns(), 9)
    with pytest.raises(Refused) as caught:
        await queue.enter("a", "m", 10, until_ns=FAR_NS)
    assert (caught.value.reason, caught.value.info.status) == ("upstreams_busy", 429)
    assert caught.value.info.retry_after_s == pytest.approx(9, abs=0.1)


@pytest.mark.parametrize("rooms", [(1,), (1, 0)], ids=str)
async def test_who_waits_is_not_sent_into_its_tenants_pause(rooms):
    router = router_of(*rooms)
    queue = FairQueue(QueueConfig(), router)
    first = await queue.enter("a", "m", 10, until_ns=FAR_NS)
    of_a = [await wait_in(queue, "a", 10) for _ in range(5)]
    of_b = await wait_in(queue, "b", 10)
    first.upstream.breaker.note_busy(now_ns(), 30.0, "a")
    queue.leave(first, "a", 10)
    told = await asyncio.gather(*of_a, return_exceptions=True)
    assert [one.reason for one in told] == ["upstreams_busy"] * 5
    assert [one.info.retry_after_s for one in told] == pytest.approx([30.0] * 5, abs=0.5)
    assert (await of_b).upstream is first.upstream  # it is no pause of b
    assert queue.requests == 0


@pytest.mark.parametrize("tried", [(), ("u1",)], ids=str)
async def test_room_that_a_pause_keeps_is_none_when_the_queue_is_full(tried):
    router = router_of(1, 1)
    queue = FairQueue(QueueConfig(max_requests=1), router)
    router.upstreams[0].breaker.note_busy(now_ns(), 30.0, "a")
    assert (await queue.enter("a", "m", 10, until_ns=FAR_NS)).upstream.name == "u1"
    waiting = await wait_in(queue, "a", 10)
    with pytest.raises(Refused) as caught:
        await queue.enter("a", "m", 10, until_ns=FAR_NS, tried=tried)
    assert caught.value.reason == "queue_full"
    waiting.cancel()


def test_who_waits_for_no_place_is_not_sent_into_its_tenants_pause():
    router = router_of(1)
    queue = FairQueue(QueueConfig(), router)
    router.upstreams[0].breaker.note_busy(now_ns(), 30.0, "a")
    assert queue.place_now("a", "m", 10) is None
    assert queue.place_now("b", "m", 10) is not None


async def test_a_full_model_keeps_no_other_waiting():
    configs = [UpstreamConfig(name=name, url="http://127.0.0.1:1", models=(name,), max_in_flight=1) for name in "xy"]
    queue = FairQueue(QueueConfig(max_requests=1), Router([Upstream(one, BreakerConfig()) for one in configs]))
    await queue.enter("a", "x", 10, until_ns=FAR_NS)
    waiting = await wait_in(queue, "a", 10, "x")
    queue.require_room("a")  # the queue is full, and nobody knows yet of which model the next is
    assert (await queue.enter("a", "y", 10, until_ns=FAR_NS)).upstream.name == "y"
    with pytest.raises(Refused):
        queue.require_room("a")
    waiting.cancel()


async def test_a_retry_goes_elsewhere_and_to_the_front():
    router = router_of(1, 1)
    queue = FairQueue(QueueConfig(), router)
    first, second = [await queue.enter("a", "m", 10, until_ns=FAR_NS) for _ in range(2)]
    other = await wait_in(queue, "a", 10)
    retried = asyncio.ensure_future(queue.enter("a", "m", 10, until_ns=FAR_NS, tried=[first.upstream.name]))
    await asyncio.sleep(0)
    queue.leave(second, "a", 10)
    await asyncio.sleep(0)
    assert retried.result().upstream is second.upstream
    assert not other.done()
    other.cancel()


def test_who_has_least_before_a_first_byte_is_chosen():
    router = router_of(9, 9, 9)
    first, second, third = router.upstreams
    first.waits.sent(100, now_ns())  # its prompts are in the way; those of the others are not
    second.enter(2000)
    third.enter(3000)
    for _ in range(20):
        routed = router.choose("m", now_ns())
        assert routed.upstream is second
        assert [one.upstream for one in routed.considered] == ["u1", "u2", "u0"]
    second.waits.sent(200, now_ns())
    third.waits.sent(300, now_ns())
    assert router.choose("m", now_ns()).upstream is first
    assert {router.choose("m", now_ns(), ["u0", "u1"]).upstream.name for _ in range(20)} == {"u2"}


def test_some_are_drawn_of_several_and_of_many():
    few, many = router_of(*[9] * 20), router_of(*[9] * (MANY + 1))
    for router in (few, many):
        router.upstreams[0].enter(1)  # the others are alike
        routed = [router.choose("m", now_ns()) for _ in range(400)]
        assert {len(one.considered) for one in routed} == {DRAWN}
        assert len({one.upstream.name for one in routed}) > 18
    for upstream in many.upstreams[1:]:
        for _ in range(9):
            upstream.enter(1)
    assert many.choose("m", now_ns()).upstream is many.upstreams[0]  # the only one with room is found


@settings(max_examples=60, deadline=None)
@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from(["ask", "ask", "leave", "cancel", "fail"]), st.sampled_from("abc"), st.integers(1, 400)
        ),
        max_size=60,
    )
)
def test_places_and_counts_never_leak(moves):
    async def run():
        router = router_of(1, 2, failures=3)
        queue = FairQueue(QueueConfig(max_requests=5, max_tokens=1000), router)
        tasks, held = [], []
        for move, tenant, tokens in moves:
            if move == "ask":
                task = asyncio.ensure_future(queue.enter(tenant, "m", tokens, until_ns=FAR_NS))
                task.asked = (tenant, tokens)
                tasks.append(task)
            elif move == "cancel" and tasks:
                tasks[tokens % len(tasks)].cancel()
            elif move in ("leave", "fail") and held:
                routed, *asked = held.pop(0)
                routed.upstream.breaker.note_failure(now_ns()) if move == "fail" else None
                queue.leave(routed, *asked)
            if tokens % 3:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            for task in [one for one in tasks if one.done()]:
                tasks.remove(task)
                if not task.cancelled() and task.exception() is None:
                    held.append((task.result(), *task.asked))
            assert all(0 <= one.requests <= one.config.max_in_flight for one in router.upstreams)
            assert queue.requests <= 5 + len(tasks)
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        held += [
            (one, *task.asked) for one, task in zip(done, tasks, strict=True) if not isinstance(one, BaseException)
        ]
        for routed, *asked in held:
            queue.leave(routed, *asked)
        assert [(one.requests, one.tokens) for one in router.upstreams] == [(0, 0), (0, 0)]
        assert (queue.requests, queue.tokens) == (0, 0)

    asyncio.run(run())


async def test_a_retry_does_not_hide_who_has_waited_longest():
    """It stands in front, and came last."""
    queue = FairQueue(QueueConfig(), router_of(1), {})
    await queue.enter("a", "m", 1, until_ns=FAR_NS)
    begin_ns = now_ns()
    waiting = [asyncio.ensure_future(queue.enter("a", "m", 1, until_ns=FAR_NS))]
    await asyncio.sleep(0.02)
    waiting += [asyncio.ensure_future(queue.enter("a", "m", 1, until_ns=FAR_NS, tried=["u0"])) for _ in range(2)]
    waiting.append(asyncio.ensure_future(queue.enter("a", "m", 1, until_ns=FAR_NS)))
    await asyncio.sleep(0)
    at_ns = begin_ns + 10**9
    assert 0.98e9 < queue.longest_wait_ns(at_ns) <= 1e9
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert queue.longest_wait_ns(at_ns) == 0


def test_a_place_that_is_not_waited_for_is_paid_for():
    queue = FairQueue(QueueConfig(), router_of(1), {"a": 2.0})
    first = queue.place_now("a", "m", 100)
    share = queue.shares["a"]
    assert (share.counter, share.unsettled, share.in_flight) == (50.0, 100, 1)
    assert queue.place_now("a", "m", 100) is None
    queue.leave(first, "a", 100)
    queue.settle("a", 100, 40)
    assert (share.counter, share.unsettled, share.in_flight) == (20.0, 0, 0)


def test_of_many_upstreams_one_that_does_not_lack_the_path_is_found():
    """Whoever is drawn may all lack it; then the others are looked at."""
    router = router_of(*([4] * (MANY + 8)))
    lacking = [one.name for one in router.upstreams[:-1]]
    for _ in range(20):
        assert router.choose("m", 1, lacking).upstream is router.upstreams[-1]
    assert router.choose("m", 1, [*lacking, router.upstreams[-1].name]) is not None
