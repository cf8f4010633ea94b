"""Adapters have places in the batch: who finds none waits for `lora_slots`, and nobody waits for ever."""

import random

import pytest
from test_scheduler import add, make_scheduler, shape, step

from splittime.core.errors import ConfigError
from splittime.ledger.stages import Cause
from splittime.scheduler.scheduler import Scheduler


def test_who_finds_no_place_waits_with_the_cause_and_keeps_nobody_else_waiting() -> None:
    scheduler = make_scheduler(max_loras=1)
    add(scheduler, "a1", adapter="a", max_tokens=2)
    add(scheduler, "b1", adapter="b", max_tokens=1)
    add(scheduler, "free", max_tokens=1)
    scheduler.check()
    assert scheduler.waiting_for()[Cause.LORA_SLOTS] == 1
    assert shape(step(scheduler, 10)[0]) == {"a1": 4, "free": 4}
    assert not scheduler.release("b1", 12)
    assert not scheduler.hold("b1", Cause.GRAMMAR, 12)
    step(scheduler, 20)  # ends a1
    plan, outputs = step(scheduler, 40)
    assert shape(plan) == {"b1": 4}
    waited = {mark.cause: mark.begin_ns for mark in outputs[0].marks if mark.cause is not None}
    assert waited == {Cause.LORA_SLOTS: 0, Cause.ENGINE_LOOP: 25}


def test_one_place_is_enough_for_all_requests_of_an_adapter() -> None:
    scheduler = make_scheduler(max_loras=1)
    for name in ("a1", "a2", "a3"):
        add(scheduler, name, adapter="a")
    assert set(shape(step(scheduler, 10)[0])) == {"a1", "a2", "a3"}


def test_newcomers_do_not_keep_another_adapter_from_its_turn() -> None:
    """One request of `a` is there whenever one ends; without turns `b` would never run."""
    scheduler = make_scheduler(max_loras=1)
    add(scheduler, "a0", adapter="a", max_tokens=2)
    step(scheduler, 10)
    add(scheduler, "b", adapter="b", max_tokens=1, now_ns=12)
    for number in range(1, 4):
        add(scheduler, f"a{number}", adapter="a", max_tokens=2, now_ns=12 + number)
    step(scheduler, 20)
    assert shape(step(scheduler, 30)[0]) == {"b": 4}
    assert set(shape(step(scheduler, 40)[0])) == {"a1", "a2", "a3"}


def test_what_need_not_close_any_more_opens() -> None:
    scheduler = make_scheduler(max_loras=2)
    for name in ("a", "b", "c", "d"):
        add(scheduler, name, adapter=name)
    add(scheduler, "late", adapter="b")
    assert scheduler.waiting_for()[Cause.LORA_SLOTS] == 3
    for name in ("c", "d"):
        scheduler.abort(name, 5)
        scheduler.check()
    assert set(shape(step(scheduler, 10)[0])) == {"a", "b", "late"}


def test_one_that_waits_for_a_grammar_takes_its_place_when_that_is_there() -> None:
    scheduler = make_scheduler(max_loras=1)
    add(scheduler, "a", adapter="a")
    scheduler.hold("a", Cause.GRAMMAR, 1)
    add(scheduler, "b", adapter="b")
    assert scheduler.waiting_for() == {Cause.GRAMMAR: 1, Cause.LORA_SLOTS: 1}
    scheduler.release("a", 5)
    assert shape(step(scheduler, 10)[0]) == {"a": 4}


def test_a_preempted_request_keeps_its_place() -> None:
    scheduler = make_scheduler(max_loras=1, num_blocks=16, max_num_seqs=2)
    add(scheduler, "a1", adapter="a", num_prompt=28, max_tokens=30)
    add(scheduler, "a2", adapter="a", num_prompt=28, max_tokens=30)
    add(scheduler, "b", adapter="b", max_tokens=1)
    for now_ns in range(10, 200, 10):
        step(scheduler, now_ns)
    assert scheduler.counts.num_preemptions > 0
    assert scheduler.waiting_for()[Cause.LORA_SLOTS] == 1


def test_no_step_has_more_adapters_than_places_and_all_requests_end() -> None:
    source, scheduler = random.Random(3), make_scheduler(max_loras=2, num_blocks=24)
    adapters: dict[str, str] = {}
    now_ns = 0
    while len(adapters) < 300 or scheduler.has_requests:
        now_ns += 10
        if len(adapters) < 300 and source.random() < 0.7:
            name, adapter = f"r{len(adapters)}", source.choice(["", "a", "a", "a", "b", "c", "d"])
            adapters[name] = adapter
            add(scheduler, name, adapter=adapter, now_ns=now_ns, max_tokens=source.randint(1, 6))
        if source.random() < 0.1 and scheduler.request_ids:
            scheduler.abort(source.choice(scheduler.request_ids), now_ns)
        if scheduler.has_work:
            plan, _ = step(scheduler, now_ns)
            assert len({adapters[row.request_id] for row in plan.rows} - {""}) <= 2
        scheduler.check()
        assert now_ns < 100_000, "somebody starves"


def test_prefixes_are_not_shared_between_adapters() -> None:
    scheduler = make_scheduler(max_loras=4)
    found: list[int | None] = []
    for number, adapter in enumerate(("", "", "a#1", "a#1", "a#2", "b#1")):
        add(scheduler, "same", num_prompt=9, adapter=adapter, max_tokens=1, now_ns=number)
        found.append(step(scheduler, 10 * number + 10)[1][0].num_cached_tokens)
    assert found == [0, 8, 0, 8, 0, 0]


def test_there_is_at_least_one_place() -> None:
    with pytest.raises(ConfigError, match="max_loras"):
        make_scheduler(max_loras=0)


def test_the_plan_says_which_adapter_computes_a_request() -> None:
    scheduler: Scheduler = make_scheduler()
    add(scheduler, "a", adapter="a#1")
    add(scheduler, "b")
    assert [one.adapter for one in step(scheduler, 10)[0].admitted] == ["a#1", ""]
