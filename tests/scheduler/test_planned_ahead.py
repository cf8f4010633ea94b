"""What is planned while the step before still runs, and what a request is told of its own past."""

import pytest
from test_scheduler import add, make_scheduler, shape, step

from splittime.core.plan import PENDING, RowResult, StepPlan, StepResult
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import SamplingParams
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.scheduler import Scheduler


def planned(scheduler: Scheduler, now_ns: int) -> StepPlan:
    plan = scheduler.plan(now_ns)
    assert plan is not None
    return plan


def committed(scheduler: Scheduler, plan: StepPlan, now_ns: int) -> None:
    rows = tuple(RowResult(row.request_id, (7,) if row.samples else ()) for row in plan.rows)
    scheduler.commit(plan, StepResult(plan.step_id, rows), now_ns)
    scheduler.check()


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(4, 1), (4, 2), (61, 8)])
def test_no_row_is_planned_behind_the_last_token(num_prompt: int, max_tokens: int) -> None:
    """Of what was asked for, or of what the model holds (64): each token has one row, the last one has none."""
    scheduler = make_scheduler(max_num_batched_tokens=64)
    add(scheduler, "a", num_prompt=num_prompt, max_tokens=max_tokens)
    num_outputs = min(max_tokens, 64 - num_prompt)
    flying = planned(scheduler, 10)
    for i in range(1, num_outputs):
        following = planned(scheduler, 10 + i)
        assert following.rows[0].token_ids == (PENDING,)
        assert following.rows[0].start == num_prompt + i - 1
        committed(scheduler, flying, 10 + i)
        flying = following
    assert scheduler.plan(100) is None
    committed(scheduler, flying, 100)
    assert not scheduler.has_requests


def test_who_is_computed_when_the_pause_begins_does_not_stand_still() -> None:
    """Two steps are known: one runs `a`. The one that it is paused for has no row of anybody."""
    scheduler = make_scheduler()
    add(scheduler, "a")
    step(scheduler, 10)
    flying = planned(scheduler, 20)
    scheduler.configure({"paused": True})
    assert scheduler.plan(30) is None
    state = scheduler._states["a"]
    assert state.account.stage is Stage.DECODE
    committed(scheduler, flying, 40)
    last = state.account.marks[-1]
    assert (last.stage, last.cause, last.begin_ns) == (Stage.DECODE_STALL, Cause.PAUSED, 40)


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3])
def test_a_stop_id_counts_from_the_last_of_the_min_tokens_on(min_tokens: int) -> None:
    scheduler = make_scheduler()
    sampling = SamplingParams(max_tokens=9, min_tokens=min_tokens, seed=0)
    add(scheduler, "a", eos_token_ids=(7,), sampling=sampling)
    tokens: list[int] = []
    now_ns = 0
    while scheduler.has_requests:
        now_ns += 10
        _, (output,) = step(scheduler, now_ns)
        tokens += output.token_ids
    assert output.finish_reason is FinishReason.STOP
    assert len(tokens) == max(min_tokens, 1)


def test_who_wants_the_prompts_logprobs_has_all_of_it_computed() -> None:
    """Whatever the cache holds: there are no logits of what is not computed."""
    scheduler = make_scheduler()
    for name, prompt_logprobs, num_tokens in (("a", None, 13), ("b", 0, 13), ("c", None, 1)):
        sampling = SamplingParams(max_tokens=1, seed=0, prompt_logprobs=prompt_logprobs)
        asked = Request(request_id=name, prompt_token_ids=tuple(range(13)), sampling=sampling, submitted_ns=0)
        scheduler.submit(asked, 0)
        plan, _ = step(scheduler, 10)
        assert shape(plan) == {name: num_tokens}


def test_who_comes_before_it_was_sent_by_its_clock_waits_from_its_sending_on() -> None:
    scheduler = make_scheduler()
    for name, submitted_ns, received_ns in (("a", 30, 20), ("b", 20, 30)):
        sampling = SamplingParams(max_tokens=1, seed=0)
        scheduler.submit(
            Request(request_id=name, prompt_token_ids=(1,), sampling=sampling, submitted_ns=submitted_ns), received_ns
        )
        assert scheduler._states[name].account.marks[-1].begin_ns == 30
