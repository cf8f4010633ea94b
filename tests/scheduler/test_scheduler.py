"""The scheduler, decision by decision: who gets a row, who waits, and the cause it states."""

from typing import Any

import pytest

from splittime.core.errors import ConfigError, RequestError
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import Row, RowResult, StepPlan, StepResult, TokenLogprob
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.events import RequestOutput
from splittime.scheduler.scheduler import Scheduler


def make_scheduler(**changes: Any) -> Scheduler:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "block_size": 4, "num_blocks": 32}
    return Scheduler(SchedulerConfig(**(settings | changes)))


def add(
    scheduler: Scheduler, name: str, num_prompt: int = 4, now_ns: int = 0, max_tokens: int = 8, **fields: Any
) -> None:
    """Submit a request with a prompt of its own."""
    first = sum(name.encode())
    request = Request(
        request_id=name,
        prompt_token_ids=tuple(range(first, first + num_prompt)),
        sampling=fields.pop("sampling", SamplingParams(max_tokens=max_tokens, seed=0)),
        submitted_ns=now_ns,
        **fields,
    )
    scheduler.submit(request, now_ns)


def step(scheduler: Scheduler, now_ns: int, token: int = 7) -> tuple[StepPlan, list[RequestOutput]]:
    """Plan at `now_ns`, commit 5 ns later."""
    plan = scheduler.plan(now_ns)
    assert plan is not None
    rows = tuple(RowResult(row.request_id, (token,) if row.num_samples else ()) for row in plan.rows)
    outputs = scheduler.commit(plan, StepResult(plan.step_id, rows), now_ns + 5)
    scheduler.check()
    return plan, outputs


def shape(plan: StepPlan) -> dict[str, int]:
    return {row.request_id: len(row.token_ids) for row in plan.rows}


def waits(scheduler: Scheduler, name: str, until_ns: int) -> list[tuple[Stage, Cause | None, int]]:
    """A live request's stages so far, with their lengths."""
    scheduler_state = scheduler._states[name]
    if scheduler_state.pushed:
        scheduler.queue.leave(scheduler_state, is_admitted=False)
    return [(i.stage, i.cause, i.duration_ns) for i in scheduler_state.account.intervals(until_ns)]


def test_long_prompt_is_chunked_and_decodes_go_on() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a")
    step(scheduler, 10)
    add(scheduler, "long", num_prompt=40, now_ns=16)
    assert shape(step(scheduler, 20)[0]) == {"a": 1, "long": 15}
    assert shape(step(scheduler, 30)[0]) == {"a": 1, "long": 15}
    plan, outputs = step(scheduler, 40)
    assert shape(plan) == {"a": 1, "long": 10}
    assert {output.request_id for output in outputs} == {"a", "long"}


def test_without_chunking_a_prompt_goes_whole_even_over_the_budget() -> None:
    scheduler = make_scheduler(enable_chunked_prefill=False)
    add(scheduler, "a")
    add(scheduler, "long", num_prompt=40)
    add(scheduler, "b")
    assert shape(step(scheduler, 10)[0]) == {"a": 4}
    assert shape(step(scheduler, 20)[0]) == {"a": 1, "long": 40}
    assert shape(step(scheduler, 30)[0]) == {"a": 1, "long": 1, "b": 4}


def test_causes_of_waiting_are_stated() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=8)
    add(scheduler, "a", num_prompt=12)
    add(scheduler, "b", num_prompt=2)
    add(scheduler, "c", num_prompt=2)
    step(scheduler, 10)  # a gets 8 tokens, nothing is left
    step(scheduler, 20)  # a gets 4, b 2; c finds no slot
    step(scheduler, 30)
    assert waits(scheduler, "c", 37) == [
        (Stage.HANDOFF, None, 0),
        (Stage.QUEUE, Cause.ENGINE_LOOP, 10),
        (Stage.QUEUE, Cause.TOKEN_BUDGET, 10),
        (Stage.QUEUE, Cause.BATCH_SLOTS, 17),
    ]


@pytest.mark.parametrize(
    ("received_ns", "measured_ns", "cause"),
    [
        (20, 30, Cause.MEASURING),
        (30, 30, Cause.ENGINE_LOOP),  # it came as the piece had ended
        (10, 12, Cause.STEP_IN_FLIGHT),  # the step ended after the piece
    ],
)
def test_who_comes_while_the_machine_is_measured_waits_for_that(received_ns, measured_ns, cause) -> None:
    scheduler = make_scheduler()
    add(scheduler, "a")
    step(scheduler, 10)  # commits at 15
    sampling = SamplingParams(max_tokens=2, seed=0)
    request = Request(request_id="b", prompt_token_ids=(1, 2), sampling=sampling, submitted_ns=received_ns)
    scheduler.submit(request, received_ns, measured_ns)
    scheduler.check()
    assert scheduler.queue.waiting_for()[cause] == 1


def test_arrival_during_a_step_waits_for_it() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a")
    step(scheduler, 10)  # commits at 15
    add(scheduler, "b", now_ns=12)
    step(scheduler, 20)
    stages = waits(scheduler, "b", 25)
    assert stages == [
        (Stage.HANDOFF, None, 0),
        (Stage.QUEUE, Cause.STEP_IN_FLIGHT, 8),
        (Stage.PREFILL, None, 5),
        (Stage.DECODE, None, 0),
    ]


def test_blocked_by_memory_the_first_says_so_and_the_rest_wait_for_it() -> None:
    scheduler = make_scheduler(num_blocks=16)
    add(scheduler, "a", num_prompt=40, max_tokens=20)
    for now_ns in (10, 20, 30):
        step(scheduler, now_ns)
    add(scheduler, "big", num_prompt=30, now_ns=36)
    add(scheduler, "small", num_prompt=2, now_ns=36)
    step(scheduler, 40)
    step(scheduler, 50)
    assert waits(scheduler, "big", 60)[-1] == (Stage.QUEUE, Cause.KV_BLOCKS, 20)
    assert waits(scheduler, "small", 60)[-1] == (Stage.QUEUE, Cause.POLICY, 20)


def test_the_latest_is_preempted_and_recomputes_what_it_lost() -> None:
    scheduler = make_scheduler(num_blocks=16, enable_prefix_caching=False)
    add(scheduler, "a", num_prompt=16, max_tokens=40)
    add(scheduler, "b", num_prompt=16, max_tokens=40)
    now_ns, preempted_at = 0, 0
    while not preempted_at:
        now_ns += 10
        plan, _ = step(scheduler, now_ns)
        preempted_at = now_ns if scheduler.victims else 0
    assert scheduler.victims == ["b"]
    assert "b" not in shape(plan)
    assert plan.released == plan.preempted == ("b",)
    state = scheduler._states["b"]
    assert state.account.stage is Stage.PREEMPTED
    released: list[tuple[str, ...]] = []
    while "b" in scheduler._states:
        now_ns += 10
        plan, _ = step(scheduler, now_ns)
        assert plan.preempted == ()
        released.append(plan.released)
    assert ("a",) in released
    stages = [interval.stage for interval in state.account.intervals()]
    assert stages[-5:] == [Stage.DECODE, Stage.PREEMPTED, Stage.RECOMPUTE, Stage.DECODE, Stage.DELIVER]
    state.account.verify()


def test_priority_goes_first_and_its_victims_are_the_others() -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    add(scheduler, "first", max_tokens=2)
    add(scheduler, "low", priority=5)
    add(scheduler, "high", priority=-5)
    assert shape(step(scheduler, 10)[0]) == {"high": 4}


@pytest.mark.parametrize("policy", ["priority", "shortest_prefill", "deadline"])
def test_nobody_starves_beyond_the_bound(policy: str) -> None:
    """A request that the policy likes least, behind an endless stream of better ones, is next once it is overdue."""
    scheduler = make_scheduler(policy=policy, max_num_seqs=1, starvation_bound_ms=0.001)
    add(scheduler, "unloved", num_prompt=20, priority=100)
    admitted_at = None
    for i in range(300):
        now_ns = 10 * i
        add(scheduler, f"loved-{i}", num_prompt=1, now_ns=now_ns, max_tokens=1, priority=0, deadline_ns=now_ns + 10**9)
        plan, _ = step(scheduler, now_ns)
        if "unloved" in shape(plan):
            admitted_at = now_ns
            break
    assert admitted_at is not None
    assert 1000 < admitted_at <= 1020  # the bound, and the one request that ran when it passed


def test_static_batch_runs_to_its_end_before_the_next() -> None:
    scheduler = make_scheduler(batching="static", max_num_seqs=2)
    for name, max_tokens in (("a", 1), ("b", 3), ("c", 1)):
        add(scheduler, name, max_tokens=max_tokens)
    assert shape(step(scheduler, 10)[0]) == {"a": 4, "b": 4}
    assert shape(step(scheduler, 20)[0]) == {"b": 1}
    assert waits(scheduler, "b", 25)[-1][0] is Stage.DECODE
    assert shape(step(scheduler, 30)[0]) == {"b": 1}
    assert shape(step(scheduler, 40)[0]) == {"c": 4}


def test_prefix_hit_computes_the_rest_only() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", num_prompt=13, max_tokens=1)
    step(scheduler, 10)
    request = Request(
        request_id="again",
        prompt_token_ids=tuple(range(sum(b"a"), sum(b"a") + 13)),
        sampling=SamplingParams(max_tokens=1, seed=0),
        submitted_ns=20,
    )
    scheduler.submit(request, 20)
    plan, outputs = step(scheduler, 20)
    assert shape(plan) == {"again": 1}
    assert plan.rows[0].start == 12
    assert outputs[0].num_cached_tokens == 12
    assert scheduler.counts.prefix_hit_tokens == 12


def test_stop_ids_end_a_request_unless_told_to_ignore() -> None:
    scheduler = make_scheduler()
    add(scheduler, "stops", eos_token_ids=(7,))
    add(scheduler, "ignores", eos_token_ids=(7,), sampling=SamplingParams(max_tokens=3, seed=0, ignore_eos=True))
    add(scheduler, "own", sampling=SamplingParams(max_tokens=3, seed=0, ignore_eos=True, stop_token_ids=(7,)))
    _, outputs = step(scheduler, 10)
    ends = {output.request_id: output.finish_reason for output in outputs}
    assert ends == {"stops": FinishReason.STOP, "ignores": None, "own": FinishReason.STOP}


def test_a_failed_row_ends_its_request_alone() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a")
    add(scheduler, "b")
    plan = scheduler.plan(10)
    assert plan is not None
    rows = (RowResult("a", error="logits are not finite"), RowResult("b", (7,)))
    outputs = scheduler.commit(plan, StepResult(plan.step_id, rows), 15)
    scheduler.check()
    assert [output.finish_reason for output in outputs] == [FinishReason.ERROR, None]
    assert "not finite" in (outputs[0].error.message if outputs[0].error else "")


def test_impossible_requests_and_knobs_are_refused_by_name() -> None:
    scheduler = make_scheduler()
    with pytest.raises(RequestError, match="64 tokens") as caught:
        add(scheduler, "long", num_prompt=64)
    assert caught.value.info.limit == 63
    with pytest.raises(RequestError, match="no tokens"):
        add(scheduler, "empty", num_prompt=0)
    with pytest.raises(ConfigError) as unknown:
        scheduler.configure({"max_num_seq": 3})
    assert "max_num_seqs" in (unknown.value.info.hint or "")
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        scheduler.configure({"max_num_seqs": 17})
    with pytest.raises(ConfigError):
        scheduler.configure({"policy": "random"})
    with pytest.raises(ConfigError, match="num_blocks"):
        make_scheduler(num_blocks=15)


def test_queue_causes_cost_nothing_per_waiting_request() -> None:
    """The log of causes is dropped once nobody needs it: 2,000 changes leave a handful of entries behind."""
    scheduler = make_scheduler(max_num_seqs=1, max_num_batched_tokens=4)
    for i in range(500):
        add(scheduler, f"r{i}", num_prompt=6, max_tokens=2)
    now_ns = 0
    while scheduler.has_requests:
        now_ns += 10
        step(scheduler, now_ns)
    assert len(scheduler.queue._log._entries) <= 1


def test_prompt_logprobs_come_once_despite_a_preemption() -> None:
    scheduler = make_scheduler(num_blocks=16, enable_prefix_caching=False)
    add(scheduler, "a", num_prompt=16, max_tokens=40)
    add(scheduler, "b", num_prompt=16, sampling=SamplingParams(max_tokens=40, seed=0, prompt_logprobs=0))
    seen: list[int] = []
    now_ns = 0
    while scheduler.has_requests:
        now_ns += 10
        plan = scheduler.plan(now_ns)
        assert plan is not None
        rows = tuple(_with_prompt_logprobs(row, num_prompt=16) for row in plan.rows)
        for output in scheduler.commit(plan, StepResult(plan.step_id, rows), now_ns + 5):
            seen += [entry.token_id for entry in output.prompt_logprobs if output.request_id == "b"]
    assert scheduler.counts.num_preemptions > 0
    assert seen == list(range(1, 16))


def _with_prompt_logprobs(row: Row, num_prompt: int) -> RowResult:
    """Entries that are named after the positions they are for."""
    positions = range(row.start + 1, min(row.start + len(row.token_ids) + 1, num_prompt))
    entries = tuple(TokenLogprob(position, -1.0, 1) for position in positions)
    return RowResult(row.request_id, (7,) if row.num_samples else (), prompt_logprobs=entries)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_what_has_ended_is_forgotten(policy: str) -> None:
    """Neither a queue that is always empty, nor one that never is, remembers the requests that went through it."""
    scheduler = make_scheduler(policy=policy, max_num_seqs=1, starvation_bound_ms=1e-5)
    add(scheduler, "held", max_tokens=8, now_ns=0)
    for i in range(300):
        add(scheduler, f"r{i}", max_tokens=1, now_ns=i * 20, priority=-i, deadline_ns=10**15)
        if policy == "fcfs":  # the queue is empty after each step
            while scheduler.has_requests:
                step(scheduler, i * 20 + 1)
        elif i > 0:  # two wait at each step, and the overdue goes first: its entry stays at the bottom of the heap
            step(scheduler, i * 20 + 1)
    queue = scheduler.queue
    lines = [heap for line in queue._lines.values() for heap in (line.by_rank, line.by_age)]
    kept = [heap.num_kept for heap in (*lines, scheduler._deadlines)]
    assert max(*kept, len(queue._fresh), len(queue._log._entries)) < 200, kept
