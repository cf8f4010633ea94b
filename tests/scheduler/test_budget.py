"""What one step may still compute, and what a change of knobs does to whoever is here."""

from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import add, make_scheduler, shape, step

from splittime.ledger.stages import Cause
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.prompt_pass import StepBudget


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 20), st.booleans(), st.lists(st.integers(1, 12), max_size=8))
def test_a_step_computes_no_more_than_it_may(tokens: int, chunks: bool, pending: list[int]) -> None:
    """But for one whole prompt that is longer than all of it. Who comes first takes what fits."""
    config = SchedulerConfig(max_num_batched_tokens=tokens, enable_chunked_prefill=chunks)
    budget = StepBudget(config, num_decodes=0)
    taken: list[int] = []
    for num_pending in pending:
        left = max(tokens - sum(taken), 0)
        whole = num_pending if num_pending <= left or (left and not taken) else 0
        assert budget.chunk(num_pending) == (min(num_pending, left) if chunks else whole)
        if budget.chunk(num_pending):
            taken.append(budget.chunk(num_pending))
            budget.spend(taken[-1])
        assert budget.tokens == max(tokens - sum(taken), 0)


def test_decodes_take_the_whole_budget_and_a_whole_prompt_waits_for_it() -> None:
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=4, enable_chunked_prefill=False)
    for i in range(4):
        add(scheduler, f"r{i}", num_prompt=1)
    step(scheduler, 10)
    scheduler.configure({"max_num_batched_tokens": 8, "max_num_seqs": 5})
    scheduler.configure({"max_prefill_tokens": 4})
    add(scheduler, "next", num_prompt=9, now_ns=15)
    assert shape(step(scheduler, 20)[0]) == {"r0": 1, "r1": 1, "r2": 1, "r3": 1, "next": 9}


def test_a_changed_policy_ranks_who_waits_and_who_runs() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name, priority in (("a", 2), ("b", 1), ("c", 5), ("d", 0)):
        add(scheduler, name, priority=priority)
    step(scheduler, 10)
    assert [state.request_id for state in scheduler.running] == ["a", "b"]
    knobs = scheduler.configure({"policy": "priority"})
    assert (knobs["policy"], knobs["max_num_seqs"]) == ("priority", 2)
    scheduler.check()
    assert [state.request_id for state in scheduler.running] == ["b", "a"]
    scheduler.abort("a", 20)
    plan, _ = step(scheduler, 30)
    assert [admitted.request_id for admitted in plan.admitted] == ["d"]


def test_who_was_overdue_keeps_that_rank_whatever_the_policy() -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=2, starvation_bound_ms=0.001)
    add(scheduler, "unloved", priority=100)
    step(scheduler, 2_000)
    add(scheduler, "loved", now_ns=2_000)
    step(scheduler, 2_010)
    for knobs in ({"max_num_seqs": 3}, {"policy": "shortest_prefill"}, {"policy": "fcfs"}, {"policy": "priority"}):
        scheduler.configure(knobs)
        assert [state.request_id for state in scheduler.running] == ["unloved", "loved"]


def test_caching_that_is_switched_off_forgets_at_once_and_other_knobs_do_not() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", num_prompt=13, max_tokens=1)
    step(scheduler, 10)
    assert scheduler.cache.num_cached == 3
    scheduler.configure({"max_num_seqs": 3})
    assert scheduler.cache.num_cached == 3
    scheduler.configure({"enable_prefix_caching": False})
    assert scheduler.cache.num_cached == 0


def test_who_was_preempted_goes_before_who_came_later() -> None:
    scheduler = make_scheduler(num_blocks=16, enable_prefix_caching=False)
    for name in ("a", "b"):
        add(scheduler, name, num_prompt=16, max_tokens=40)
    now_ns = 0
    while not scheduler.victims:
        now_ns += 10
        step(scheduler, now_ns)
        if scheduler.num_waiting == 0 and "c" not in scheduler._states and now_ns > 100:
            scheduler.configure({"max_num_seqs": 2})
            add(scheduler, "c", num_prompt=16, now_ns=now_ns)
    assert scheduler.victims == ["b"]
    assert scheduler.queue.waiting_for()[Cause.KV_BLOCKS] == 1
    order: list[str] = []
    while scheduler.has_requests:
        now_ns += 10
        order += [admitted.request_id for admitted in step(scheduler, now_ns)[0].admitted]
    assert order == ["b", "c"]


def test_what_a_row_that_is_taken_back_leaves() -> None:
    budget = StepBudget(SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=8), 2)
    budget.spend(6)
    assert budget.tokens == 0
    assert budget.has_tokens_without(6, is_decode=False)
    assert budget.has_tokens_without(1, is_decode=True)
    capped = StepBudget(SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=8, max_prefill_tokens=4), 2)
    capped.spend(4)
    assert capped.has_tokens_without(4, is_decode=False)
    assert not capped.has_tokens_without(1, is_decode=True)
