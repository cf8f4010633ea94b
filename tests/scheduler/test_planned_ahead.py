"""What is planned while the step before still runs, and what a request is told of its own past."""

import pytest
from test_draft_rows import planned
from test_scheduler import _with_prompt_logprobs, add, make_scheduler, shape, step

from splittime.core.errors import Conflict
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import PENDING, RowResult, StepPlan, StepResult, TokenLogprob
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.scheduler import Scheduler


def committed(scheduler: Scheduler, plan: StepPlan, now_ns: int) -> None:
    rows = tuple(RowResult(row.request_id, (7,) if row.num_samples else ()) for row in plan.rows)
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


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_who_runs_holds_the_blocks_of_what_is_computed_and_none_more(block_size: int) -> None:
    scheduler = make_scheduler(block_size=block_size, num_blocks=64)
    add(scheduler, "a", num_prompt=3)
    num_computed = 0
    while scheduler.has_requests:
        plan, _ = step(scheduler, 10 + num_computed)
        num_computed += len(plan.rows[0].token_ids)
        assert scheduler.cache.num_used == (scheduler.cache.blocks_for(num_computed) if scheduler.has_requests else 0)


def test_the_budget_is_told_before_the_blocks() -> None:
    """Nobody could be admitted, whatever it needs; who looks for blocks first would blame the one request."""
    scheduler = make_scheduler(num_blocks=16)
    for name in ("a", "b", "c"):
        add(scheduler, name, num_prompt=40)
    step(scheduler, 10)
    assert scheduler.queue.waiting_for() == {Cause.TOKEN_BUDGET: 2}


@pytest.mark.parametrize(("prompt_logprobs", "expected"), [(None, [0, 0]), (0, [16, 16, 7])])
def test_a_chunk_tells_its_prompts_logprobs_or_is_silent(prompt_logprobs: int | None, expected: list[int]) -> None:
    """Of three chunks the first begins a stage and the last samples: that is news. The one between has none of its
    own."""
    scheduler = make_scheduler()
    sampling = SamplingParams(max_tokens=1, seed=0, prompt_logprobs=prompt_logprobs)
    add(scheduler, "a", num_prompt=40, sampling=sampling)
    told: list[int] = []
    for now_ns in (10, 20, 30):
        plan = planned(scheduler, now_ns)
        (row,) = plan.rows
        result = _with_prompt_logprobs(row, num_prompt=40 if prompt_logprobs == 0 else 0)
        outputs = scheduler.commit(plan, StepResult(plan.step_id, (result,)), now_ns + 5)
        told += [len(output.prompt_logprobs) for output in outputs]
    assert told == expected


def test_a_token_and_its_logprobs_come_together() -> None:
    scheduler = make_scheduler()
    sampling = SamplingParams(max_tokens=2, seed=0, prompt_logprobs=0)
    add(scheduler, "a", num_prompt=3, sampling=sampling)
    for now_ns in (10, 20):
        plan = planned(scheduler, now_ns)
        entries = tuple(TokenLogprob(position, -1.0, 1) for position in ((1, 2) if now_ns == 10 else ()))
        row = RowResult("a", (now_ns,), (TokenLogprob(now_ns, -2.0, 1),), entries)
        (output,) = scheduler.commit(plan, StepResult(plan.step_id, (row,)), now_ns + 5)
        assert (output.token_ids, output.logprobs, output.prompt_logprobs) == ((now_ns,), row.logprobs, entries)
    assert not scheduler.has_requests


def test_a_preempted_request_is_forgotten_by_the_runner_once() -> None:
    """Ended while it waits to be admitted again, it is no more to be released."""
    scheduler = make_scheduler(num_blocks=16, enable_prefix_caching=False)
    for name in ("a", "b"):
        add(scheduler, name, num_prompt=16, max_tokens=40)
    released: list[str] = []
    now_ns = 0
    while not scheduler.victims:
        now_ns += 10
        released += step(scheduler, now_ns)[0].released
    scheduler.abort("b", now_ns + 6)
    for _ in range(3):
        now_ns += 10
        released += step(scheduler, now_ns)[0].released
    assert released == ["b"]


def test_a_name_in_flight_is_taken_and_a_name_of_one_that_ended_is_free() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a")
    with pytest.raises(Conflict, match="'a' is in flight"):
        add(scheduler, "a")
    assert (scheduler.num_waiting, scheduler.num_running) == (1, 0)
    step(scheduler, 10)
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 1)
    with pytest.raises(Conflict):
        add(scheduler, "a")
    scheduler.abort("a", 20)
    add(scheduler, "a", now_ns=20)
    assert scheduler.num_waiting == 1


def test_one_that_decodes_tells_its_tokens_and_nothing_that_was_told_before() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", max_tokens=4)
    outputs = [step(scheduler, now_ns)[1][0] for now_ns in (10, 20, 30, 40)]
    assert [output.num_cached_tokens for output in outputs] == [0, None, None, 0]
    assert [len(output.marks) for output in outputs] == [4, 0, 0, 1]
    assert [output.freed_ns for output in outputs] == [None, None, None, 45]


def test_who_asks_for_no_number_of_tokens_gets_what_the_model_holds() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", num_prompt=60, sampling=SamplingParams(seed=0))
    tokens: list[int] = []
    now_ns = 0
    while scheduler.has_requests:
        now_ns += 10
        tokens += [token for output in step(scheduler, now_ns)[1] for token in output.token_ids]
    assert len(tokens) == 4


def test_who_goes_before_it_was_admitted_has_found_nothing() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a")
    output = scheduler.abort("a", 10)
    assert output is not None
    assert (output.num_cached_tokens, output.num_host_tokens, output.num_preemptions) == (None, 0, 0)
