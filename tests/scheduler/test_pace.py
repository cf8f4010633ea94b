"""The time of steps is shared among keys: rows sit out where they make another key's tokens late, and not where not."""

import pytest
from test_scheduler import add, make_scheduler, shape

from splittime.core.step import RowResult, StepPlan, StepResult
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.scheduler import Scheduler


def timed_step(scheduler: Scheduler, now_ns: int, base_ns: int, row_ns: int) -> tuple[StepPlan, int]:
    """Returns the plan and when it was committed: a step takes `base_ns`, and `row_ns` for each token."""
    plan = scheduler.plan(now_ns)
    assert plan is not None
    rows = tuple(RowResult(row.request_id, (7,) if row.num_samples else ()) for row in plan.rows)
    now_ns += base_ns + row_ns * sum(row.num_tokens for row in plan.rows)
    scheduler.commit(plan, StepResult(plan.step_id, rows), now_ns)
    scheduler.check()
    return plan, now_ns


def tokens_beside(base_ns: int, row_ns: int, weight: float = 1.0) -> tuple[float, float]:
    """Returns what a token of a request takes beside 15 rows of another key, in steps of its own alone, and what part
    of the steps those have."""
    scheduler = make_scheduler(max_num_seqs=16, max_model_len=4000, num_blocks=4000, max_num_batched_tokens=64)
    for number in range(15):
        add(scheduler, f"many{number}", 1, max_tokens=3000, tenant="many")
    _, now_ns = timed_step(scheduler, 10, base_ns, row_ns)
    add(scheduler, "one", 1, now_ns=now_ns, max_tokens=1000, tenant="one", weight=weight)
    began_ns, num_with_many, num_of_one = now_ns, 0, 0
    for _ in range(600):
        plan, now_ns = timed_step(scheduler, now_ns, base_ns, row_ns)
        num_with_many += "many0" in shape(plan)
        num_of_one += "one" in shape(plan)
    return (now_ns - began_ns) / num_of_one / (base_ns + row_ns), num_with_many / 600


def test_tokens_come_half_as_fast_beside_a_key_whose_rows_cost_much() -> None:
    slowed, part = tokens_beside(base_ns=0, row_ns=1000)
    assert slowed == pytest.approx(2.0, rel=0.15)
    assert 0.03 < part < 0.2


def test_by_weight() -> None:
    assert tokens_beside(base_ns=0, row_ns=1000, weight=3.0)[0] == pytest.approx(4 / 3, rel=0.15)


def test_nobody_sits_out_where_a_batch_costs_little_more_than_a_row() -> None:
    slowed, part = tokens_beside(base_ns=100_000, row_ns=1000)
    assert slowed < 1.2
    assert part > 0.9


def test_who_sits_out_stalls_for_the_policy_and_a_key_alone_never_does() -> None:
    scheduler = make_scheduler()
    for name in "abc":
        add(scheduler, name, 1, max_tokens=50, tenant="many")
    _, now_ns = timed_step(scheduler, 10, 0, 1000)
    add(scheduler, "one", 1, now_ns=now_ns, max_tokens=3, tenant="one")
    _, now_ns = timed_step(scheduler, now_ns, 0, 1000)
    plan, now_ns = timed_step(scheduler, now_ns, 0, 1000)
    assert shape(plan) == {"one": 1}
    account = scheduler._states["a"].account
    assert (account.stage, account.cause) == (Stage.DECODE_STALL, Cause.POLICY)
    scheduler.abort("one", now_ns)
    assert set(shape(timed_step(scheduler, now_ns, 0, 1000)[0])) == {"a", "b", "c"}
