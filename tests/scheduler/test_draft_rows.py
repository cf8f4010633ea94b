"""Drafts in the books: what they may take, what is kept of them, and how a request ends in the middle of some."""

from collections.abc import Sequence
from typing import Any

import pytest
from test_scheduler import add, make_scheduler, shape, step

from splittime.core.request import FinishReason
from splittime.core.sampling import SamplingParams
from splittime.core.step import PENDING, RowResult, StepPlan, StepResult
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.events import RequestOutput
from splittime.scheduler.scheduler import Scheduler

DRAFTS = (8, 9, 10)


def planned(scheduler: Scheduler, now_ns: int) -> StepPlan:
    plan = scheduler.plan(now_ns)
    assert plan is not None
    return plan


def committed(scheduler: Scheduler, plan: StepPlan, now_ns: int, *rows: RowResult) -> list[RequestOutput]:
    outputs = scheduler.commit(plan, StepResult(plan.step_id, rows), now_ns)
    scheduler.check()
    return outputs


def drafted(drafts: Sequence[int] = DRAFTS, num_prompt: int = 4, **changes: Any) -> Scheduler:
    """`a` has its first token, 7, and these drafts."""
    fields = {name: changes.pop(name) for name in ("max_tokens", "sampling", "eos_token_ids") if name in changes}
    scheduler = make_scheduler(**changes)
    add(scheduler, "a", num_prompt, **fields)
    committed(scheduler, planned(scheduler, 10), 15, RowResult("a", (7,), draft_token_ids=tuple(drafts)))
    return scheduler


@pytest.mark.parametrize("accepted", [(8, 9, 10, 11), (8, 9, 99), (99,)])
def test_the_next_row_verifies_and_the_one_after_it_goes_on_from_what_was_accepted(accepted: tuple[int, ...]) -> None:
    scheduler = drafted()
    plan = planned(scheduler, 20)
    (row,) = plan.rows
    assert (row.start, row.token_ids, row.draft_token_ids, row.num_samples) == (4, (7,), DRAFTS, 4)
    (output,) = committed(scheduler, plan, 25, RowResult("a", accepted))
    assert output.token_ids == accepted
    (row,) = planned(scheduler, 30).rows
    assert (row.start, row.token_ids, row.draft_token_ids) == (4 + len(accepted), (accepted[-1],), ())
    assert (scheduler.counts.draft_tokens, scheduler.counts.accepted_draft_tokens) == (3, len(accepted) - 1)


def test_blocks_of_drafts_that_were_wrong_go_back_and_the_runner_is_told_of_those_that_replace_them() -> None:
    scheduler = drafted(num_prompt=3, block_size=2)
    used = scheduler.cache.num_used
    plan = planned(scheduler, 20)
    assert (used, scheduler.cache.num_used, len(plan.rows[0].new_block_ids)) == (2, 4, 2)
    committed(scheduler, plan, 25, RowResult("a", (99,)))
    assert scheduler.cache.num_used == 2
    (row,) = planned(scheduler, 30).rows
    assert len(row.new_block_ids) == 1


def test_only_blocks_of_accepted_tokens_can_be_found_by_their_prefix() -> None:
    scheduler = drafted(num_prompt=3, block_size=2)
    committed(scheduler, planned(scheduler, 20), 25, RowResult("a", (8, 99)))  # known: 3 of prompt, 7, 8, 99
    scheduler.abort("a", 26)
    assert scheduler.cache.num_cached == 2  # of 5 computed tokens: two full blocks
    again = scheduler._states
    add(scheduler, "a", num_prompt=3, now_ns=30)
    again["a"].token_ids += [7, 8, 9, 10]
    assert scheduler.cache.match(again["a"].lease, again["a"].token_ids) == 4
    scheduler.cache.free(again["a"].lease)


@pytest.mark.parametrize(
    ("fields", "kept", "reason"),
    [
        ({"max_tokens": 3}, (8, 9), FinishReason.LENGTH),
        ({"eos_token_ids": (8,)}, (8,), FinishReason.STOP),
        ({"sampling": SamplingParams(max_tokens=9, seed=0, stop_token_ids=(9, 10))}, (8, 9), FinishReason.STOP),
        ({"sampling": SamplingParams(max_tokens=9, min_tokens=4, seed=0, stop_token_ids=(9, 10))}, DRAFTS, "stop"),
    ],
)
def test_what_ends_the_request_cuts_off_what_was_accepted_behind_it(fields, kept, reason) -> None:
    scheduler = drafted(**fields)
    plan = planned(scheduler, 20)
    (output,) = committed(scheduler, plan, 25, RowResult("a", (8, 9, 10, 11)[: plan.rows[0].num_samples]))
    assert (output.token_ids, output.finish_reason) == (kept, reason)
    assert output.stop_token_id == (kept[-1] if reason == "stop" else None)
    assert (scheduler.cache.num_used, scheduler.counts.output_tokens) == (0, 1 + len(kept))


@pytest.mark.parametrize(("max_tokens", "num_drafts"), [(2, 0), (3, 1), (5, 3)])
def test_no_draft_goes_beyond_the_last_token(max_tokens: int, num_drafts: int) -> None:
    (row,) = planned(drafted(max_tokens=max_tokens), 20).rows
    assert row.draft_token_ids == DRAFTS[:num_drafts]


def test_drafts_take_what_prompts_have_left_of_the_budget() -> None:
    for num_prompt, num_drafts in ((20, 0), (14, 1), (11, 3)):
        scheduler = drafted()
        add(scheduler, "b", num_prompt, now_ns=16)
        plan = planned(scheduler, 20)
        assert [len(row.draft_token_ids) for row in plan.rows] == [num_drafts, 0]
        assert sum(row.num_tokens for row in plan.rows) <= 16


def test_drafts_preempt_nobody_and_leave_a_block_for_each_that_runs() -> None:
    scheduler = drafted(num_prompt=6, num_blocks=16)  # 2 blocks, with one place behind 7
    add(scheduler, "big", num_prompt=50, now_ns=16)
    for now_ns in (20, 30, 40, 50):
        plan = planned(scheduler, now_ns)
        rows = [RowResult(r.request_id, (7,) if r.num_samples else (), draft_token_ids=DRAFTS) for r in plan.rows]
        committed(scheduler, plan, now_ns + 5, *rows)
    assert scheduler.cache.num_free < 4
    state = scheduler._states["a"]
    plan = planned(scheduler, 60)
    row = next(row for row in plan.rows if row.request_id == "a")
    assert row.start + row.num_tokens <= len(state.lease.block_ids) * 4
    assert (scheduler.victims, scheduler.counts.num_preemptions) == ([], 0)


def test_a_chunk_brings_no_drafts_into_use_and_old_drafts_are_dropped() -> None:
    scheduler = drafted(max_num_batched_tokens=8)
    add(scheduler, "long", num_prompt=30, now_ns=16)
    plan = planned(scheduler, 20)
    assert [row.draft_token_ids for row in plan.rows] == [(), ()]
    rows = (RowResult("a", (8,)), RowResult("long", draft_token_ids=DRAFTS))
    committed(scheduler, plan, 25, *rows)
    assert [row.draft_token_ids for row in planned(scheduler, 30).rows] == [(), ()]


def test_who_has_drafts_is_not_planned_ahead_and_its_account_says_what_that_costs() -> None:
    """Its row is in every second step. While its own row runs it decodes; while another's does, it stalls."""
    scheduler = make_scheduler()
    for name in ("a", "b"):
        add(scheduler, name, max_tokens=20)
    first = planned(scheduler, 10)
    second = planned(scheduler, 11)
    assert [row.token_ids for row in second.rows] == [(PENDING,), (PENDING,)]
    committed(scheduler, first, 20, RowResult("a", (7,), draft_token_ids=DRAFTS), RowResult("b", (7,)))
    third = planned(scheduler, 21)
    assert shape(third) == {"b": 1}
    committed(scheduler, second, 30, RowResult("a", (8,), draft_token_ids=(9,)), RowResult("b", (7,)))
    account = scheduler._states["a"].account
    assert (account.stage, account.cause) == (Stage.DECODE_STALL, Cause.STEP_IN_FLIGHT)
    fourth = planned(scheduler, 31)
    assert [(row.request_id, row.draft_token_ids) for row in fourth.rows] == [("a", (9,)), ("b", ())]
    assert account.stage is Stage.DECODE
    committed(scheduler, third, 40, RowResult("b", (7,)))
    assert shape(planned(scheduler, 41)) == {"b": 1}
    committed(scheduler, fourth, 50, RowResult("a", (9, 10)), RowResult("b", (7,)))
    assert scheduler._states["a"].token_ids[-4:] == [7, 8, 9, 10]


def test_one_that_is_preempted_while_its_drafts_are_verified_starts_from_what_it_knows() -> None:
    scheduler = drafted()
    flying = planned(scheduler, 20)
    state = scheduler._states["a"]
    scheduler._requests.preempt(state, 21)
    scheduler.check()
    committed(scheduler, flying, 25, RowResult("a", (8, 9, 10, 11), draft_token_ids=DRAFTS))
    assert (len(state.token_ids), state.num_promised, state.draft_token_ids) == (5, 0, ())
    plan, _ = step(scheduler, 30)
    (admitted,) = plan.admitted
    assert (len(admitted.token_ids), plan.rows[0].draft_token_ids, plan.released) == (5, (), ("a",))


def test_a_paused_scheduler_keeps_drafts_for_later() -> None:
    scheduler = drafted()
    scheduler.configure({"paused": True})
    assert scheduler.plan(20) is None
    scheduler.configure({"paused": False})
    assert planned(scheduler, 30).rows[0].draft_token_ids == DRAFTS
