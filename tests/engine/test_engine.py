"""The engine by itself: its caller says what time it is and what came of a step."""

import pytest

from benchmarks.fake_runner import FakeRunner, expected_tokens
from splittime.core.errors import EngineError
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import StepPlan, StepResult
from splittime.engine.engine import Engine
from splittime.engine.recorder import StepTimes, ThreadTime
from splittime.ledger.steps import verify_steps
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=20, max_model_len=40, block_size=16, num_blocks=10)
PROMPT = (1, 2, 3)


def asked(name: str, at_ns: int, max_tokens: int = 2, prompt: tuple[int, ...] = PROMPT) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    return Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, submitted_ns=at_ns)


def answered(plan: StepPlan | None, runner: FakeRunner) -> StepResult:
    assert plan is not None
    return runner.run(plan)


def test_a_step_is_made_of_the_times_it_is_told() -> None:
    engine, runner = Engine(Scheduler(CONFIG)), FakeRunner()
    engine.submit(asked("a", 90), 95, 100)
    result = answered(engine.begin(1_000), runner)
    engine.end(result, 1_700)
    record = engine.close(StepTimes(planned_ns=1_010, waiting_ns=0, ready_ns=1_700, end_ns=1_730))
    (output,) = engine.take_outputs()
    assert list(output.token_ids) == expected_tokens(PROMPT, 1)
    assert (record.begin_ns, record.end_ns) == (1_000, 1_730)
    assert (record.plan_ns, record.launch_ns, record.commit_ns) == (10, 690, 30)
    assert (record.cpu_wait_ns, record.off_cpu_ns) == (None, None)
    assert engine.take_outputs() == ()


def test_an_overlapped_step_begins_where_the_one_before_ended() -> None:
    engine, runner = Engine(Scheduler(CONFIG), plans_ahead=True), FakeRunner()
    engine.submit(asked("a", 0, max_tokens=3), 0, 0)
    first, second = engine.begin(100), engine.begin(120)
    assert engine.num_in_flight == 2
    assert not engine.may_begin
    engine.end(answered(first, runner), 500)
    records = [engine.close(StepTimes(110, 130, 500, 510))]
    third = engine.begin(520)
    engine.end(answered(second, runner), 900)
    records.append(engine.close(StepTimes(125, 540, 900, 910)))
    verify_steps(records)
    assert [(record.begin_ns, record.end_ns, record.hidden_ns) for record in records] == [
        (100, 500, 20),
        (500, 900, 40),
    ]
    assert third is not None
    assert third.step_id == 3


def test_no_step_begins_while_one_is_in_flight_unless_it_plans_ahead() -> None:
    engine = Engine(Scheduler(CONFIG))
    engine.submit(asked("a", 0), 0, 0)
    assert engine.begin(1) is not None
    with pytest.raises(AssertionError, match="in flight"):
        engine.begin(2)


def test_what_was_slept_and_what_the_thread_was_given_are_told_by_the_driver() -> None:
    engine, runner = Engine(Scheduler(CONFIG)), FakeRunner()
    for name, at_ns in (("a", 0), ("b", 10_000)):
        engine.submit(asked(name, at_ns, max_tokens=1), at_ns, at_ns)
        engine.end(answered(engine.begin(at_ns), runner), at_ns + 100)
        times = StepTimes(
            at_ns, 0, at_ns + 100, at_ns + 100, slept_ns=5_000, thread=ThreadTime(ran_ns=60, waited_ns=30)
        )
        record = engine.close(times)
        assert engine.is_idle
    assert (record.idle_ns, record.asleep_ns) == (9_900, 5_000)
    assert (record.cpu_wait_ns, record.off_cpu_ns) == (30, 10)


def test_what_cannot_be_served_ends_at_once_and_once() -> None:
    engine = Engine(Scheduler(CONFIG))
    engine.submit(asked("long", 5, prompt=tuple(range(1, 60))), 9, 10)
    engine.refuse(asked("late", 20), 15, EngineError("not now", code="asleep"))
    assert engine.has_work
    long, late = engine.take_outputs()
    assert (long.finish_reason, late.finish_reason) == (FinishReason.ERROR, FinishReason.ERROR)
    assert (long.freed_ns, late.freed_ns) == (9, 20)
    assert late.error is not None
    assert late.error.code == "asleep"
    assert engine.is_empty
    assert not engine.has_work


def test_all_that_wait_and_run_end_with_the_same_error() -> None:
    engine, runner = Engine(Scheduler(CONFIG)), FakeRunner()
    engine.submit(asked("runs", 0, max_tokens=9), 0, 0)
    engine.end(answered(engine.begin(1), runner), 2)
    engine.close(StepTimes(1, 0, 2, 2))
    engine.submit(asked("waits", 3), 3, 3)
    engine.take_outputs()
    error = EngineError("it is over").info
    assert engine.fail_all(error, 7) == 2
    ends = engine.take_outputs()
    assert {end.request_id: (end.finish_reason, end.error, end.freed_ns) for end in ends} == {
        "runs": (FinishReason.ERROR, error, 7),
        "waits": (FinishReason.ERROR, error, 7),
    }
    assert engine.is_empty
    assert engine.scheduler.cache.num_used == 0


def test_a_step_that_is_called_off_leaves_nothing_in_flight() -> None:
    engine, runner = Engine(Scheduler(CONFIG)), FakeRunner()
    engine.submit(asked("a", 0), 0, 0)
    answered(engine.begin(1), runner)  # and is lost
    engine.call_off()
    engine.abort("a", 2)
    assert engine.num_in_flight == 0
    assert [output.finish_reason for output in engine.take_outputs()] == [FinishReason.ABORT]
    assert engine.begin(3) is None
    engine.submit(asked("b", 4, max_tokens=1), 4, 4)
    engine.end(answered(engine.begin(5), runner), 6)
    assert list(engine.take_outputs()[0].token_ids) == expected_tokens(PROMPT, 1)


def test_it_is_idle_from_the_end_of_its_last_step_though_nothing_could_be_planned_before() -> None:
    engine, runner = Engine(Scheduler(CONFIG), plans_ahead=True), FakeRunner()
    engine.submit(asked("a", 0, max_tokens=1), 0, 0)
    plan = engine.begin(100)
    assert engine.begin(120) is None
    engine.end(answered(plan, runner), 500)
    engine.close(StepTimes(110, 130, 500, 500))
    engine.submit(asked("b", 700, max_tokens=1), 700, 700)
    engine.end(answered(engine.begin(710), runner), 900)
    record = engine.close(StepTimes(720, 730, 900, 900))
    assert (record.idle_ns, record.host_gap_ns) == (200, 10)


def test_stats_tell_the_knobs_of_now() -> None:
    engine = Engine(Scheduler(CONFIG))
    assert engine.stats(1).knobs["max_num_seqs"] == 4
    engine.scheduler.configure({"max_num_seqs": 2})
    assert engine.stats(2).knobs["max_num_seqs"] == 2
