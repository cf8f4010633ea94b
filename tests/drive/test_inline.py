"""An engine in a thread of the caller's process: what its steps say comes out, whatever ends them."""

import threading

import pytest

from benchmarks.fake_runner import FakeRunner, expected_tokens
from splittime.core.clock import SystemClock
from splittime.core.errors import ConfigError, EngineError
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import StepPlan, StepResult
from splittime.drive.crank import Crank, EngineParts, EngineThread
from splittime.drive.messages import StepOutput
from splittime.engine.engine import Engine
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

PATIENCE_S = 60


class Gated(FakeRunner):
    """Each step waits until the test lets it go, or breaks with what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.broken: Exception | None = None
        self.threads: set[str] = set()

    def run(self, plan: StepPlan) -> StepResult:
        self.threads.add(threading.current_thread().name)
        self.begun.release()
        assert self.may_end.acquire(timeout=PATIENCE_S)
        if self.broken is not None:
            raise self.broken
        return super().run(plan)


@pytest.fixture
def runner() -> Gated:
    return Gated()


@pytest.fixture
def crank(runner: Gated) -> Crank:
    crank = Crank(EngineParts(Engine(Scheduler(SchedulerConfig())), runner), SystemClock())
    for name in ("a", "b"):
        sampling = SamplingParams(max_tokens=4, seed=0)
        crank.submit(Request(request_id=name, prompt_token_ids=(1, 2), sampling=sampling, submitted_ns=0), 0)
    return crank


def tokens_of(outputs: list[StepOutput], name: str) -> list[int]:
    return [token for step in outputs for news in step.outputs if news.request_id == name for token in news.token_ids]


def ends_of(outputs: list[StepOutput]) -> dict[str, FinishReason]:
    return {news.request_id: news.finish_reason for step in outputs for news in step.outputs if news.finish_reason}


def test_all_that_the_steps_say_comes_out_and_then_it_is_over(crank: Crank, runner: Gated) -> None:
    runner.may_end.release(100)
    outputs = list(EngineThread(crank).outputs())
    for name in ("a", "b"):
        assert tokens_of(outputs, name) == expected_tokens((1, 2), 4)
    assert ends_of(outputs) == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
    assert runner.threads == {"engine"}


def test_what_is_aborted_in_a_step_has_no_row_in_the_next(crank: Crank, runner: Gated) -> None:
    thread = EngineThread(crank)
    assert runner.begun.acquire(timeout=PATIENCE_S)
    thread.abort("a")
    thread.abort("never heard of")
    runner.may_end.release(100)
    outputs = list(thread.outputs())
    assert tokens_of(outputs, "a") == expected_tokens((1, 2), 1)
    assert tokens_of(outputs, "b") == expected_tokens((1, 2), 4)
    assert ends_of(outputs) == {"a": FinishReason.ABORT, "b": FinishReason.LENGTH}


def test_stopping_waits_for_the_step_in_flight_and_hands_over_what_nobody_took(crank: Crank, runner: Gated) -> None:
    thread = EngineThread(crank)
    runner.may_end.release(2)
    for _ in range(3):
        assert runner.begun.acquire(timeout=PATIENCE_S)  # two are over, the third runs
    left: list[StepOutput] = []
    stopping = threading.Thread(target=lambda: left.extend(thread.stop()))
    stopping.start()
    while not thread._is_stopping:
        pass
    assert stopping.is_alive()
    runner.may_end.release(100)
    stopping.join(PATIENCE_S)
    assert len(left) == 3
    assert tokens_of(left, "a") == expected_tokens((1, 2), 3)
    assert crank.has_work, "they are not over: who stopped it says what becomes of them"


@pytest.mark.parametrize(
    ("broken", "kind"), [(ConfigError("no such thing"), ConfigError), (ValueError("a bug"), EngineError)]
)
def test_what_breaks_a_step_is_raised_where_its_outputs_are_read(
    crank: Crank, runner: Gated, broken: Exception, kind: type[Exception]
) -> None:
    thread = EngineThread(crank)
    runner.may_end.release()
    assert runner.begun.acquire(timeout=PATIENCE_S)
    assert runner.begun.acquire(timeout=PATIENCE_S)
    runner.broken = broken
    runner.may_end.release()
    outputs = thread.outputs()
    assert tokens_of([next(outputs)], "a") == expected_tokens((1, 2), 1)
    with pytest.raises(kind, match=str(broken)) as caught:
        next(outputs)
    assert broken in (caught.value, caught.value.__cause__)


def test_an_error_that_nobody_read_is_no_output(crank: Crank, runner: Gated) -> None:
    runner.broken = ValueError("a bug")
    thread = EngineThread(crank)
    runner.may_end.release()
    assert thread.stop() == []
