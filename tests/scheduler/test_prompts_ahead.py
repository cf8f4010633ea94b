"""Prompts that are computed ahead: they get what others leave, others get what they would have got, and who comes then
finds them in the prefix cache."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import add, make_scheduler, shape, step

from splittime.core.errors import RequestError
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import AHEAD, SamplingParams
from splittime.core.step import Row, RowResult, StepPlan, StepResult
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.requests import AHEAD_TOKENS
from splittime.scheduler.scheduler import Scheduler

WARM = SamplingParams(pooling=AHEAD, max_tokens=0, seed=0)
WIDE = {"max_num_batched_tokens": 256, "max_model_len": 256, "num_blocks": 128}


def test_it_ends_with_its_prompt_and_who_comes_then_finds_it() -> None:
    scheduler = make_scheduler(**WIDE)
    add(scheduler, "w", 100, sampling=WARM)
    assert shape(step(scheduler, 10)[0]) == {"w": AHEAD_TOKENS}
    plan, (output,) = step(scheduler, 20)
    assert shape(plan) == {"w": 100 - AHEAD_TOKENS}
    assert (output.finish_reason, output.token_ids) == (FinishReason.STOP, ())
    assert (scheduler.has_work, scheduler.has_requests, scheduler.cache.num_used) == (False, False, 0)
    add(scheduler, "w", 101, now_ns=30)
    plan, (output,) = step(scheduler, 40)
    assert (output.num_cached_tokens, shape(plan)) == (100, {"w": 1})


def test_it_makes_way_for_who_waits_and_goes_on_behind_it() -> None:
    scheduler = make_scheduler(**(WIDE | {"max_num_seqs": 1}))
    add(scheduler, "w", 150, sampling=WARM)
    told = step(scheduler, 10)[1]
    add(scheduler, "a", 4, now_ns=16, max_tokens=2)
    assert shape(step(scheduler, 20)[0]) == {"a": 4}
    assert scheduler.victims == ["w"]
    assert (scheduler.num_waiting, len(scheduler.prompts_ahead), scheduler.waiting_for()) == (1, 1, {})
    assert shape(step(scheduler, 30)[0]) == {"a": 1}
    plans = [step(scheduler, at_ns) for at_ns in (40, 50)]
    assert [plan.rows[0].start for plan, _ in plans] == [64, 128]
    told += plans[0][1] + plans[1][1]
    stages = [(mark.stage, mark.cause) for output in told for mark in output.marks]
    waited, computed = (Stage.QUEUE, Cause.POLICY), (Stage.PREFILL, None)  # and no recompute: it was found
    assert stages == [
        (Stage.HANDOFF, None),
        (Stage.QUEUE, Cause.POLICY),
        computed,
        waited,
        computed,
        (Stage.DELIVER, None),
    ]


def test_beside_who_fits_it_keeps_its_place_and_is_not_preempted() -> None:
    scheduler = make_scheduler(**WIDE)
    add(scheduler, "w", 150, sampling=WARM)
    step(scheduler, 10)
    add(scheduler, "a", 4, now_ns=16)
    plan, _ = step(scheduler, 20)
    assert (shape(plan), plan.released, scheduler.victims) == ({"a": 4, "w": AHEAD_TOKENS}, (), [])


def test_while_somebody_waits_for_the_budget_nothing_of_it_is_computed_and_it_counts_as_no_preemption() -> None:
    scheduler = make_scheduler(**(WIDE | {"max_num_batched_tokens": 70, "num_blocks": 64, "block_size": 4}))
    add(scheduler, "w", 150, sampling=WARM)
    step(scheduler, 10)
    for name in ("a", "b"):
        add(scheduler, name, 70, now_ns=16, max_tokens=1)
    shapes = [shape(step(scheduler, at_ns)[0]) for at_ns in (20, 30, 40, 50)]
    assert shapes == [{"a": 70}, {"b": 70}, {"w": 64}, {"w": 22}]
    assert scheduler.counts.num_preemptions == 0


def test_of_two_the_first_goes_first_and_one_at_a_time() -> None:
    scheduler = make_scheduler(**WIDE)
    add(scheduler, "v", 200, sampling=WARM)
    add(scheduler, "w", 10, sampling=WARM)
    seen = [shape(step(scheduler, at_ns)[0]) for at_ns in (10, 20, 30, 40, 50)]
    assert seen == [{"v": 64}, {"v": 64}, {"v": 64}, {"v": 8}, {"w": 10}]


def test_tenants_take_turns() -> None:
    scheduler = make_scheduler(**WIDE)
    for name in ("x1", "x2", "y1", "x3", "z1"):
        add(scheduler, name, 10, sampling=WARM, tenant=name[0])
    seen = [next(iter(shape(step(scheduler, at_ns)[0]))) for at_ns in (10, 20, 30, 40, 50)]
    assert seen == ["x1", "y1", "z1", "x2", "x3"]


def test_planned_ahead_nothing_follows_its_last_part() -> None:
    scheduler = make_scheduler(**WIDE)
    add(scheduler, "w", 10, sampling=WARM)
    plan = scheduler.plan(10)
    assert scheduler.plan(11) is None
    (output,) = scheduler.commit(plan, StepResult(plan.step_id, (RowResult("w"),)), 20)
    assert output.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("name", ["enable_prefix_caching", "enable_chunked_prefill"])
def test_where_nothing_would_be_left_of_it_it_is_refused(name: str) -> None:
    scheduler = make_scheduler(**{name: False})
    with pytest.raises(RequestError, match=name) as caught:
        add(scheduler, "w", 4, sampling=WARM)
    assert caught.value.info.code == f"no_{name}"
    assert not scheduler.has_requests


def test_for_an_adapter_it_is_refused() -> None:
    scheduler = make_scheduler()
    with pytest.raises(RequestError, match="not with an adapter"):
        add(scheduler, "w", 4, sampling=WARM, adapter="one#1")
    assert not scheduler.has_requests


def test_while_it_waits_it_can_be_aborted_and_expires_and_is_held_for_nothing() -> None:
    scheduler = make_scheduler(**WIDE)
    add(scheduler, "v", 10, sampling=WARM)
    add(scheduler, "w", 10, sampling=WARM, deadline_ns=50)
    assert not scheduler.hold("v", Cause.GRAMMAR, 5)
    assert scheduler.abort("v", 10).finish_reason is FinishReason.ABORT
    (late,) = scheduler.expire(60)
    assert late.finish_reason is FinishReason.DEADLINE
    scheduler.check()
    assert not scheduler.has_work


# ---- others

arrivals = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 40), st.integers(1, 12), st.booleans()), min_size=1, max_size=14
)


@settings(max_examples=150, deadline=None)
@given(arrivals, st.integers(1, 4), st.integers(48, 70), st.sampled_from([None, 20]))
def test_others_get_the_rows_that_they_would_get_without(
    script: list[tuple[int, int, int, bool]], max_num_seqs: int, num_blocks: int, max_prefill_tokens: int | None
) -> None:
    """Step for step, whatever blocks there are; and a step is longer by no more than `AHEAD_TOKENS`."""
    config = {"max_num_seqs": max_num_seqs, "num_blocks": num_blocks, "max_prefill_tokens": max_prefill_tokens}
    plain, mixed = (make_scheduler(**config, max_num_batched_tokens=96) for _ in range(2))
    for at in range(400):
        for number, (when, num_prompt, max_tokens, is_ahead) in enumerate(script):
            if when == at and is_ahead:
                submit(mixed, number, num_prompt, WARM)
            elif when == at:
                for scheduler in (plain, mixed):
                    submit(scheduler, number, num_prompt, SamplingParams(max_tokens=max_tokens, seed=0))
        wanted, got = turn(plain, at), turn(mixed, at)
        ahead = [row for row in got if script[int(row.request_id)][3]]
        assert [row for row in got if row not in ahead] == wanted
        assert len(ahead) <= 1
        assert sum(row.num_tokens for row in ahead) <= AHEAD_TOKENS
        assert not ahead or not len(mixed.queue)
    assert not plain.has_requests
    assert not mixed.has_requests


def submit(scheduler: Scheduler, number: int, num_prompt: int, sampling: SamplingParams) -> None:
    """A prompt of its own."""
    prompt = tuple(range(1000 * number, 1000 * number + num_prompt))
    scheduler.submit(Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling, submitted_ns=0), 0)


def turn(scheduler: Scheduler, at: int) -> list[Row]:
    """Rows as they are but for their blocks, which no two schedulers choose alike."""
    plan: StepPlan | None = scheduler.plan(10 * at)
    if plan is None:
        return []
    assert not {one.request_id for one in plan.admitted} & set(plan.released)
    results = tuple(RowResult(row.request_id, (7,) if row.num_samples else ()) for row in plan.rows)
    scheduler.commit(plan, StepResult(plan.step_id, results), 10 * at + 5)
    scheduler.check()
    told: list[Any] = [Row(row.request_id, row.start, row.token_ids, (), row.num_samples) for row in plan.rows]
    return told
