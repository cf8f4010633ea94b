"""Steps carried out in a thread of their own."""

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from splittime.core.errors import EngineError
from splittime.core.step import StepPlan, StepResult
from splittime.runner.compose import RunnerThread


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
    thread.join(60)
    assert not thread.is_alive()
    gc.collect()
    assert kept() is None


def test_nobody_waits_for_a_thread_that_was_ended() -> None:
    ahead = RunnerThread(Steps().run)
    ahead.end()
    assert not ahead.thread.is_alive()
    ahead.launch(StepPlan(1, ()))
    with pytest.raises(EngineError, match="has ended"):
        ahead.collect()


def test_whoever_waits_when_it_is_ended_is_told() -> None:
    ahead, told = RunnerThread(Steps().run), []

    def wait() -> None:
        with pytest.raises(EngineError, match="has ended") as error:
            ahead.collect()
        told.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    ahead.end()
    waiting.join(60)
    assert told


EXITS = """
import atexit
held = []

@atexit.register
def last():
    held[0].launch(StepPlan(2, ()))
    held[0].collect()

from splittime.core.step import StepPlan, StepResult
from splittime.runner.compose import RunnerThread
held.append(RunnerThread(lambda plan: StepResult(plan.step_id, ())))
"""


def test_who_takes_a_step_while_the_process_exits_does_not_wait_for_ever() -> None:
    done = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, timeout=60, text=True, check=False)
    assert "the runner's thread has ended" in done.stderr
