"""The instants that a crank gives its engine: each step has its own, whatever else is in flight or was broken off."""

import pytest

from benchmarks.fake_runner import FakeRunner
from splittime.core.clock import VirtualClock
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import StepPlan, StepResult
from splittime.drive.crank import Crank, EngineParts
from splittime.engine.engine import Engine
from splittime.ledger.steps import StepRecord, verify_steps
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

STEP_NS = 1000


class Ticking(VirtualClock):
    """Each look at it costs a nanosecond."""

    def now_ns(self) -> int:
        self.advance(1)
        return super().now_ns()


class Broken(FakeRunner):
    """Is interrupted once."""

    is_due = True

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        if self.is_due:
            self.is_due = False
            raise KeyboardInterrupt
        return result


def ask(crank: Crank, clock: VirtualClock, name: str) -> None:
    now_ns, sampling = clock.now_ns(), SamplingParams(max_tokens=3, seed=0)
    crank.submit(Request(request_id=name, prompt_token_ids=(1, 2), sampling=sampling, submitted_ns=now_ns), now_ns)


def records_of(crank: Crank) -> list[StepRecord]:
    outputs = [crank.turn() for _ in range(3)]
    return [output.record for output in outputs if output is not None and output.record is not None]


def test_the_next_plan_is_not_this_steps() -> None:
    clock = Ticking()
    crank = Crank(EngineParts(Engine(Scheduler(SchedulerConfig()), plans_ahead=True), FakeRunner(clock=clock)), clock)
    ask(crank, clock, "a")
    records = records_of(crank)
    verify_steps(records)
    assert [record.plan_ns for record in records] == [1, 0, 0]


def test_a_step_that_was_broken_off_leaves_no_instant_behind() -> None:
    clock = Ticking()
    crank = Crank(EngineParts(Engine(Scheduler(SchedulerConfig())), Broken(step_ns=STEP_NS, clock=clock)), clock)
    ask(crank, clock, "a")
    with pytest.raises(KeyboardInterrupt):
        crank.turn()
    crank.abort("a")
    crank.turn()
    ask(crank, clock, "b")
    records = records_of(crank)
    verify_steps(records)
    assert [(record.plan_ns, record.device_ns) for record in records] == [(1, STEP_NS)] * 3
