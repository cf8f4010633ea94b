"""Steps carried out in a thread of their own."""

import gc
import weakref

import pytest

from splittime.core.plan import StepPlan, StepResult
from splittime.runner.ahead import RunnerThread


class Steps:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def run(self, plan: StepPlan) -> StepResult:
        if plan.step_id == 0:
            raise ValueError("no such step")
        self.seen.append(plan.step_id)
        return StepResult(plan.step_id, ())


def test_steps_are_carried_out_in_order() -> None:
    steps = Steps()
    ahead = RunnerThread(steps.run)
    for number in (3, 1, 2):
        ahead.launch(StepPlan(number, ()))
    assert [ahead.collect().step_id for _ in range(3)] == steps.seen == [3, 1, 2]


def test_what_a_step_raises_comes_out_of_collect() -> None:
    ahead = RunnerThread(Steps().run)
    ahead.launch(StepPlan(0, ()))
    with pytest.raises(ValueError, match="no such step"):
        ahead.collect()


def test_a_thread_that_failed_is_not_waited_for() -> None:
    ahead = RunnerThread(Steps().run)
    ahead.launch(StepPlan(0, ()))
    ahead.launch(StepPlan(1, ()))
    for _ in range(2):
        with pytest.raises(ValueError, match="no such step"):
            ahead.collect()


def test_what_the_preparation_raises_comes_out_of_collect() -> None:
    def fail() -> None:
        raise OSError("no threads left")

    with pytest.raises(OSError, match="no threads left"):
        RunnerThread(Steps().run, fail).collect()


def test_a_forgotten_thread_ends_and_lets_go_of_the_runner() -> None:
    steps = Steps()
    ahead, kept = RunnerThread(steps.run), weakref.ref(steps)
    thread = ahead.thread
    del ahead, steps
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    gc.collect()
    assert kept() is None
