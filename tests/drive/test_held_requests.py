"""Requests that are held beside the queue, through a real crank: by messages in its loop, and by its own calls."""

import pytest

from benchmarks.fake_runner import FakeRunner
from benchmarks.timed_run import RequestOutcome, TimedRun
from splittime.core.clock import SystemClock, VirtualClock
from splittime.core.engine import Moved
from splittime.core.errors import Conflict
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import SamplingParams
from splittime.drive.crank import Crank, EngineParts, InlineDriver
from splittime.drive.messages import Abort, MaskFound, Release, StepOutput, Submit
from splittime.engine.engine import Engine
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import verify_steps
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

STEP_NS = 1000


def request_of(name: str, at_ns: int = 0, deadline_ns: int | None = None) -> Request:
    sampling = SamplingParams(max_tokens=2, seed=0)
    return Request(
        request_id=name, prompt_token_ids=(1, 2), sampling=sampling, submitted_ns=at_ns, deadline_ns=deadline_ns
    )


def crank_of(clock: VirtualClock, plans_ahead: bool = False) -> Crank:
    engine = Engine(Scheduler(SchedulerConfig(max_num_seqs=1)), plans_ahead)
    return Crank(EngineParts(engine, FakeRunner(step_ns=STEP_NS, clock=clock)), clock)


def timed_run(plans_ahead: bool = False) -> TimedRun:
    clock = VirtualClock()
    return TimedRun(crank_of(clock, plans_ahead), clock)


def submit_held(run: TimedRun, request: Request, cause: Cause) -> RequestOutcome:
    run.submit(request)  # makes the outcome and its account
    outcome = run.outcomes[request.request_id]
    run._timetable._coming.pop()
    run.at(request.submitted_ns, Submit(request, cause))
    return outcome


def causes(outcome: RequestOutcome) -> list[tuple[Cause | None, int]]:
    """The causes of its time in the queue or beside it."""
    intervals = outcome.account.intervals()
    return [(one.cause, one.duration_ns) for one in intervals if one.stage is Stage.QUEUE and one.duration_ns]


def check_nothing_is_left(crank: Crank) -> None:
    scheduler = crank.engine.scheduler
    scheduler.check()
    assert (scheduler.request_ids, len(scheduler.held), len(scheduler.queue), scheduler.cache.num_used) == ([], 0, 0, 0)


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_a_held_request_says_why_and_blocks_nobody_until_it_is_released(plans_ahead: bool) -> None:
    run = timed_run(plans_ahead)
    held = submit_held(run, request_of("held"), Cause.GRAMMAR)
    run.submit(request_of("other"))
    run.at(10 * STEP_NS, Release("held"))
    run.run()
    other = run.outcomes["other"]
    assert other.token_ready_ns == [STEP_NS, 2 * STEP_NS]
    assert causes(held) == [(Cause.GRAMMAR, 10 * STEP_NS)]
    assert held.token_ready_ns == [11 * STEP_NS, 12 * STEP_NS]
    assert [one.finish_reasons for one in (held, other)] == [[FinishReason.LENGTH]] * 2
    verify_steps(run.steps)
    assert [(step.host_gap_ns, step.idle_ns) for step in run.steps] == [(0, 0)] * 2 + [(0, 8 * STEP_NS), (0, 0)]
    check_nothing_is_left(run.crank)


def test_a_mask_that_was_found_is_not_what_a_held_request_waits_for() -> None:
    run = timed_run()
    held = submit_held(run, request_of("held"), Cause.GRAMMAR)
    run.at(3 * STEP_NS, MaskFound("held"))
    run.at(10 * STEP_NS, Release("held"))
    run.run()
    assert causes(held) == [(Cause.GRAMMAR, 10 * STEP_NS)]
    check_nothing_is_left(run.crank)


def test_a_deadline_ends_a_held_request_though_nothing_else_happens() -> None:
    run = timed_run()
    held = submit_held(run, request_of("held", deadline_ns=5 * STEP_NS), Cause.LORA_SLOTS)
    run.at(9 * STEP_NS, Release("held"))  # too late, and ignored
    run.run()
    assert held.finish_reasons == [FinishReason.DEADLINE]
    assert causes(held) == [(Cause.LORA_SLOTS, 5 * STEP_NS)]
    assert run.steps == []
    check_nothing_is_left(run.crank)


def test_an_abort_of_a_held_request_gives_back_everything() -> None:
    run = timed_run()
    held = submit_held(run, request_of("held"), Cause.KV_TRANSFER)
    run.at(3 * STEP_NS, Abort("held"))
    run.run()
    assert held.finish_reasons == [FinishReason.ABORT]
    assert causes(held) == [(Cause.KV_TRANSFER, 3 * STEP_NS)]
    check_nothing_is_left(run.crank)


def test_a_waiting_request_is_held_by_a_call_and_a_running_one_is_not() -> None:
    clock = VirtualClock()
    crank = crank_of(clock)
    for name in ("runs", "waits", "follows"):
        crank.submit(request_of(name), 0)
    crank.turn()
    assert not crank.hold("runs", Cause.GRAMMAR)
    assert crank.hold("waits", Cause.GRAMMAR)
    assert crank.stats().waiting_for == {Cause.GRAMMAR: 1, Cause.BATCH_SLOTS: 1}
    while crank.has_work:
        crank.turn()
    assert crank.engine.scheduler.request_ids == ["waits"]
    assert crank.release("waits", clock.now_ns())
    assert not crank.release("waits", clock.now_ns())
    while crank.has_work:
        crank.turn()
    check_nothing_is_left(crank)


def test_sleep_waits_for_a_held_request() -> None:
    crank = crank_of(VirtualClock())
    crank.submit(request_of("held"), 0, Cause.GRAMMAR)
    crank.turn()
    assert not crank.engine.is_empty
    assert not crank.has_work
    crank.abort("held")
    crank.turn()
    assert crank.engine.is_empty


def test_an_engine_in_this_process_does_not_wait_for_ever_to_sleep_while_a_request_is_held() -> None:
    class Sleeper:
        parks = False

        def sleep(self, level: int) -> Moved:
            raise AssertionError("a request is held")

        def wake(self) -> Moved:
            raise AssertionError("it never slept")

    clock, turns = SystemClock(), []
    engine = Engine(Scheduler(SchedulerConfig(max_num_seqs=1)))
    crank = Crank(EngineParts(engine, FakeRunner(clock=clock), sleeper=Sleeper()), clock)
    crank.submit(request_of("held"), clock.now_ns(), Cause.GRAMMAR)
    turn = crank.turn

    def counted() -> StepOutput | None:
        turns.append(1)
        assert len(turns) < 100, "it turns without end"
        return turn()

    crank.turn = counted  # type: ignore[method-assign]
    with pytest.raises(Conflict, match="stays awake"):
        InlineDriver(crank).sleep(1)
    assert crank.engine.scheduler.request_ids == ["held"]
    assert crank.residency.refusal() is None
