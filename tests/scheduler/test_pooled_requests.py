"""Requests of which no token is wanted: their prompts are computed behind decodes, and they end with the last chunk."""

import pytest
from test_scheduler import add, make_scheduler, shape, step

from splittime.core.errors import RequestError
from splittime.core.request import FinishReason
from splittime.core.sampling import SamplingParams
from splittime.core.step import RowResult, StepResult
from splittime.ledger.stages import Stage

LAST, MEAN = (SamplingParams(pooling=kind, seed=0) for kind in ("last", "mean"))


@pytest.mark.parametrize("num_prompt", [1, 4, 16])
def test_it_ends_with_its_prompt_and_samples_nothing(num_prompt: int) -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", num_prompt, sampling=LAST)
    plan = scheduler.plan(10)
    assert [row.num_samples for row in plan.rows] == [0]
    (output,) = scheduler.commit(plan, StepResult(plan.step_id, (RowResult("a", pooled=b"four"),)), 15)
    assert (output.finish_reason, output.token_ids, output.pooled) == (FinishReason.STOP, (), b"four")
    assert [mark.stage for mark in output.marks] == [Stage.HANDOFF, Stage.QUEUE, Stage.PREFILL, Stage.DELIVER]
    assert (output.freed_ns, scheduler.cache.num_used, scheduler.has_requests) == (15, 0, False)


def test_decodes_go_first_and_a_last_chunk_of_one_token_is_a_chunk() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, "d", 4)
    step(scheduler, 10)
    add(scheduler, "a", 15, now_ns=11, sampling=MEAN)
    seen = [step(scheduler, at_ns) for at_ns in (20, 30, 40)]
    assert [shape(plan) for plan, _ in seen] == [{"d": 1, "a": 7}, {"d": 1, "a": 7}, {"d": 1, "a": 1}]
    assert [plan.rows[1].num_samples for plan, _ in seen] == [0, 0, 0]
    assert seen[2][1][1].finish_reason is FinishReason.STOP


def test_planned_ahead_there_is_nothing_behind_it() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 5, sampling=LAST)
    plan = scheduler.plan(10)
    assert scheduler.plan(11) is None
    scheduler.commit(plan, StepResult(plan.step_id, (RowResult("a"),)), 20)
    scheduler.check()
    assert not scheduler.has_requests


def test_a_mean_is_of_what_is_computed_and_a_last_token_of_what_is_cached_too() -> None:
    scheduler = make_scheduler()
    for name, sampling, num_tokens in (("x", LAST, 13), ("y", MEAN, 13), ("z", LAST, 1)):
        add(scheduler, "same", 13, sampling=sampling)
        assert shape(step(scheduler, 10)[0]) == {"same": num_tokens}, name


def test_a_preempted_one_begins_again_and_says_so() -> None:
    scheduler = make_scheduler(num_blocks=8, max_model_len=32, max_prefill_tokens=2)
    add(scheduler, "d", 2, max_tokens=20)
    step(scheduler, 10)
    add(scheduler, "a", 24, now_ns=11, sampling=MEAN)
    outputs = []
    for at_ns in range(20, 900, 10):
        if not scheduler.has_requests:
            break
        outputs += [output for output in step(scheduler, at_ns)[1] if output.request_id == "a"]
    seen = [mark.stage for output in outputs for mark in output.marks]
    assert (outputs[-1].finish_reason, outputs[-1].num_preemptions) == (FinishReason.STOP, 1)
    assert seen[2:] == [Stage.PREFILL, Stage.PREEMPTED, Stage.RECOMPUTE, Stage.PREFILL, Stage.DELIVER]


def test_it_may_fill_the_context() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    add(scheduler, "a", 64, sampling=LAST)
    assert step(scheduler, 10)[1][0].finish_reason is FinishReason.STOP
    with pytest.raises(RequestError, match=r"65 tokens; the model takes at most 64$"):
        add(scheduler, "b", 65, sampling=LAST)


def test_other_kinds_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match="pooling is 'max', and can be last, cls, mean, logits"):
        SamplingParams(pooling="max").validate()
    with pytest.raises(RequestError, match="needs allowed_token_ids"):
        SamplingParams(pooling="logits").validate()
