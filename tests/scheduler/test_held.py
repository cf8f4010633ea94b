"""Who waits for something of its own is held beside the queue: it keeps nobody waiting, and is forgotten by nobody."""

import pytest
from test_scheduler import add, make_scheduler, shape, step

from splittime.core.request import FinishReason, Request
from splittime.core.sampling import SamplingParams
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.scheduler import Scheduler


def causes(scheduler: Scheduler, name: str) -> list[tuple[Cause | None, int]]:
    """Of its time in the queue or beside it, once it has ended or runs."""
    marks = scheduler._states[name].account.intervals(10**6)
    return [(i.cause, i.duration_ns) for i in marks if i.stage in (Stage.QUEUE, Stage.PREEMPTED) and i.duration_ns]


def test_one_that_is_held_keeps_nobody_from_being_admitted_and_goes_first_when_it_is_released() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name in ("held", "second", "third"):
        add(scheduler, name, max_tokens=1)
    assert scheduler.hold("held", Cause.GRAMMAR, 5)
    assert shape(step(scheduler, 10)[0]) == {"second": 4}
    assert scheduler.waiting_for() == {Cause.GRAMMAR: 1, Cause.BATCH_SLOTS: 1}
    assert scheduler.release("held", 18)
    scheduler.check()
    assert shape(step(scheduler, 20)[0]) == {"held": 4}
    assert shape(step(scheduler, 30)[0]) == {"third": 4}


def test_its_account_says_what_it_waited_for() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a")
    scheduler.hold("a", Cause.GRAMMAR, 10)
    scheduler.hold("a", Cause.LORA_SLOTS, 30)
    scheduler.check()
    scheduler.release("a", 60)
    step(scheduler, 100)
    assert causes(scheduler, "a") == [
        (Cause.ENGINE_LOOP, 10),
        (Cause.GRAMMAR, 20),
        (Cause.LORA_SLOTS, 30),
        (Cause.ENGINE_LOOP, 40),
    ]


def test_one_can_be_held_from_the_start() -> None:
    scheduler = make_scheduler()
    sampling = SamplingParams(max_tokens=1, seed=0)
    request = Request(request_id="a", prompt_token_ids=(1, 2, 3), sampling=sampling, submitted_ns=0)
    scheduler.submit(request, 10, held_for=Cause.KV_TRANSFER)
    scheduler.check()
    assert (scheduler.plan(20), scheduler.has_requests, scheduler.has_work) == (None, True, False)
    scheduler.release("a", 30)
    assert scheduler.has_work
    step(scheduler, 40)
    assert not scheduler.has_requests


def test_stats_and_limits_count_the_held() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", num_prompt=7)
    add(scheduler, "b", num_prompt=5)
    scheduler.hold("a", Cause.GRAMMAR, 5)
    assert (scheduler.num_waiting, scheduler.num_waiting_tokens, scheduler.request_ids) == (2, 12, ["a", "b"])
    scheduler.release("a", 6)
    assert (scheduler.num_waiting, scheduler.num_waiting_tokens, len(scheduler.held)) == (2, 12, 0)


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.DEADLINE])
def test_one_that_is_held_ends_like_any_other(reason: FinishReason) -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", deadline_ns=50)
    scheduler.hold("a", Cause.GRAMMAR, 5)
    assert scheduler.next_deadline_ns() == 50
    output = scheduler.abort("a", 60) if reason is FinishReason.ABORT else scheduler.expire(60)[0]
    assert output is not None
    assert output.finish_reason is reason
    assert [mark.cause for mark in output.marks if mark.stage is Stage.QUEUE] == [Cause.ENGINE_LOOP, Cause.GRAMMAR]
    if reason is FinishReason.DEADLINE:
        assert output.error is not None
        assert "while it waited" in output.error.message
    scheduler.check()
    assert not scheduler.has_requests
    assert not scheduler.release("a", 70)


def test_one_that_runs_or_is_not_here_is_not_held_and_one_in_the_queue_is_not_released() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "runs")
    add(scheduler, "waits")
    step(scheduler, 10)
    assert not scheduler.hold("runs", Cause.GRAMMAR, 20)
    assert not scheduler.hold("nobody", Cause.GRAMMAR, 20)
    assert not scheduler.release("waits", 20)
    with pytest.raises(AssertionError, match="not a cause to be held for"):
        scheduler.hold("waits", Cause.POLICY, 20)


def test_one_that_was_preempted_can_be_held_and_is_recomputed_after_it() -> None:
    scheduler = make_scheduler(num_blocks=16, enable_prefix_caching=False)
    for name in ("a", "b"):
        add(scheduler, name, num_prompt=16, max_tokens=40)
    now_ns = 0
    while not scheduler.victims:
        now_ns += 10
        step(scheduler, now_ns)
    assert scheduler.hold("b", Cause.GRAMMAR, now_ns + 6)
    assert scheduler._states["b"].account.stage is Stage.PREEMPTED
    while "a" in scheduler._states:
        now_ns += 10
        step(scheduler, now_ns)
    assert scheduler.release("b", now_ns + 6)
    step(scheduler, now_ns + 10)
    assert scheduler._states["b"].account.stage in (Stage.RECOMPUTE, Stage.DECODE)
    assert Cause.GRAMMAR in [cause for cause, _ in causes(scheduler, "b")]


def test_a_wait_beside_the_queue_makes_nobody_overdue() -> None:
    """The starvation bound counts from the release on."""
    scheduler = make_scheduler(policy="priority", max_num_seqs=1, starvation_bound_ms=0.001)
    add(scheduler, "held", priority=5)
    scheduler.hold("held", Cause.GRAMMAR, 1)
    scheduler.release("held", 5_000)
    add(scheduler, "loved", priority=-5, now_ns=5_000)
    assert shape(step(scheduler, 5_500)[0]) == {"loved": 4}


def test_a_changed_policy_ranks_the_held() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "low", priority=5)
    add(scheduler, "high", priority=-5, now_ns=1)
    scheduler.hold("low", Cause.GRAMMAR, 2)
    scheduler.configure({"policy": "priority"})
    scheduler.release("low", 3)
    assert shape(step(scheduler, 10)[0]) == {"high": 4}


def test_one_held_and_released_between_two_plans_is_counted_once() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "first")
    step(scheduler, 10)
    add(scheduler, "a", now_ns=16)
    for now_ns in (17, 18):
        scheduler.hold("a", Cause.GRAMMAR, now_ns)
        scheduler.release("a", now_ns)
        scheduler.check()
    assert scheduler.waiting_for() == {Cause.ENGINE_LOOP: 1}
