"""A body takes a place at an upstream for each answer: how many fit, who waits for them, and who passes."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.core.errors import Refused
from splittime.gateway.config import BreakerConfig, QueueConfig, UpstreamConfig
from splittime.gateway.fair_queue import FairQueue
from splittime.gateway.upstreams import Upstream

from .test_fair_queue import FAR_NS, router_of
from .test_learnt_use import asked


@pytest.mark.parametrize(
    ("limit", "answers", "places"),
    [(64, 1, 1), (64, 60, 60), (64, 61, 60), (64, 128, 60), (16, 15, 15), (16, 16, 15), (2, 2, 1), (1, 5, 1)],
)
def test_a_body_takes_a_place_for_each_answer_but_not_the_last_ones(limit, answers, places):
    router = router_of(limit)
    routed = router.choose("m", 1, answers=answers)
    assert (routed.answers, routed.places) == (answers, places)
    routed.enter(5)
    (one,) = router.upstreams
    assert (one.requests, one.in_flight.places, one.tokens) == (answers, places, 5)
    assert one.has_room is (places < limit)  # others are not shut out
    routed.leave(5)
    assert (one.requests, one.in_flight.places, one.tokens) == (0, 0, 0)


def test_one_that_is_too_large_begins_alone_and_another_waits_for_room():
    router = router_of(32)
    (one,) = router.upstreams
    router.choose("m", 1).enter(1)
    assert router.choose("m", 1, answers=31) is None  # has to be alone
    assert router.choose("m", 1, answers=30) is None  # the last two are not for it
    assert router.choose("m", 1, answers=29) is not None
    one.leave(1)
    assert router.choose("m", 1, answers=31) is not None
    assert router.has_room_for("m", 1, (), 31)
    assert router_of(0).choose("m", 1, answers=5) is None


@given(st.lists(st.tuples(st.integers(1, 80), st.integers(1, 64), st.booleans()), max_size=60))
def test_places_given_are_places_taken_back_and_never_more_than_there_are(steps):
    """Whatever the limit becomes meanwhile: it is found from the upstream's queue."""
    told = UpstreamConfig(name="u", url="http://127.0.0.1:1", models=("m",), max_in_flight=64, queue_wait_s=0.1)
    one, held = Upstream(told, BreakerConfig()), list[tuple[int, int]]()
    for answers, limit, leaves in steps:
        one.in_flight_limit.now = limit
        if one.has_room_for(answers):
            places = one.places_of(answers)
            assert places == answers or not held
            assert one.in_flight.places + places <= limit
            one.enter(3, answers, places)
            held.append((answers, places))
        if leaves and held:
            one.leave(3, *held.pop(0))
        assert one.in_flight.places == sum(places for _, places in held)
        assert one.requests == sum(answers for answers, _ in held)
    for each in held:
        one.leave(3, *each)
    assert (one.requests, one.in_flight.places, one.tokens) == (0, 0, 0)


def test_the_limit_is_reached_where_no_other_like_it_has_room():
    told = UpstreamConfig(name="u", url="http://127.0.0.1:1", models=("m",), max_in_flight=64, queue_wait_s=0.1)
    one = Upstream(told, BreakerConfig())
    one.in_flight_limit.now = 12
    one.enter(1, 8, 8)
    one.in_flight_limit._raise(5)
    assert one.in_flight_limit.now == 13


async def come(queue: FairQueue, tenant: str, answers: int = 1, tokens: int = 10) -> asyncio.Task:
    task = asyncio.ensure_future(queue.enter(tenant, "m", tokens, until_ns=FAR_NS, answers=answers))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def end(*tasks: asyncio.Task) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_nobody_is_given_a_place_before_one_within_its_part_whose_turn_it_is():
    """Of eight places four are free: a body of four, whose tenant has had nothing, is not passed until it has them."""
    queue = FairQueue(QueueConfig(), router_of(8))
    held = [await (await come(queue, "busy", tokens=100)) for _ in range(8)]
    busy, wide = await come(queue, "busy", tokens=100), await come(queue, "few", answers=4)
    for routed in held[:4]:
        queue.leave(routed, "busy", 100)
    assert (wide.done(), busy.done()) == (
        False,
        False,
    )  # the last place is not for it, and is kept until it has come in
    queue.leave(held[4], "busy", 100)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert wide.done()
    assert busy.done()
    assert queue._num_wide == 0


async def test_one_beyond_its_part_is_passed():
    """It may wait for as long as others come: who asks for everything keeps nobody waiting."""
    queue = FairQueue(QueueConfig(), router_of(8))
    held = [await (await come(queue, "busy", tokens=100)) for _ in range(8)]
    wide, busy = await come(queue, "greedy", answers=5), await come(queue, "busy", tokens=100)
    queue.leave(held[0], "busy", 100)
    await asyncio.sleep(0)
    assert (busy.done(), wide.done()) == (True, False)
    for routed in [*held[1:], busy.result()]:
        queue.leave(routed, "busy", 100)
    await asyncio.sleep(0)
    assert wide.done()


async def test_what_waits_behind_a_body_of_several_is_bounded():
    """There is room for one, but not for who comes behind the body: the queue grew without bound."""
    queue = FairQueue(QueueConfig(max_requests=5, shed_from=1.0), router_of(8))
    await (await come(queue, "t"))
    tasks = [await come(queue, "t", answers=8) for _ in range(5)]
    with pytest.raises(Refused):
        async with asyncio.timeout(5):
            await queue.enter("t", "m", 1, until_ns=FAR_NS)
    assert queue.requests == 5
    await end(*tasks)


async def test_one_that_gives_up_gives_all_its_places_back():
    router = router_of(8)
    queue = FairQueue(QueueConfig(), router)
    granted = asyncio.ensure_future(queue.enter("t", "m", 10, until_ns=FAR_NS, answers=5))
    routed = await granted
    assert router.upstreams[0].requests == 5
    waiting = await come(queue, "t", answers=5)
    await end(waiting)
    queue.leave(routed, "t", 10)
    place = queue.place_now("t", "m", 10, answers=7)
    queue.leave(place, "t", 10)
    assert (router.upstreams[0].requests, router.upstreams[0].in_flight.places) == (0, 0)
    assert (queue.requests, queue._num_wide) == (0, 0)


def test_texts_that_are_ranked_take_one_place_and_answers_one_each():
    assert asked("/v1/rerank", query="q", documents=["x"] * 50).places == 1
    assert asked("/v1/completions", prompt=["x"] * 5, n=2).places == 10
