"""`LLM` over an engine that plans ahead: every step is in its book, and no interrupt cuts a step in two."""

import gc
import threading

import pytest

from benchmarks.fake_runner import FakeRunner, expected_tokens
from splittime.core.sampling import SamplingParams
from splittime.core.step import StepResult
from splittime.drive.crank import EngineParts
from splittime.engine.engine import Engine
from splittime.ledger.steps import verify_steps
from splittime.llm import LLM
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler
from splittime.text.tokenizer import Tokenizer


class Watched(FakeRunner):
    """Knows who waits for its steps."""

    def __init__(self) -> None:
        super().__init__(vocab_size=256, step_ns=200_000)
        self.waiting: set[threading.Thread] = set()

    def collect(self) -> StepResult:
        self.waiting.add(threading.current_thread())
        return super().collect()


@pytest.fixture
def runner():
    return Watched()


@pytest.fixture
def llm(model_folder, runner):
    config = SchedulerConfig(max_model_len=128, num_blocks=64)
    parts = EngineParts(Engine(Scheduler(config), plans_ahead=True), runner)
    return LLM.from_parts(parts, Tokenizer.load(model_folder))


def test_every_step_is_in_the_ledger_however_it_ends(llm):
    (whole,) = llm.generate("stop here", SamplingParams(max_tokens=20))
    assert list(whole.token_ids) == expected_tokens(whole.prompt_token_ids, 20, 256)
    llm.generate("stop here", SamplingParams(max_tokens=20, stop_token_ids=(whole.token_ids[9],)))  # one row too many
    pieces = llm.stream(["a", "b"], SamplingParams(max_tokens=100))
    next(pieces)
    pieces.close()
    steps = llm.ledger.steps()
    assert [step.step_id for step in steps] == list(range(1, llm.crank.stats().num_steps + 1))
    verify_steps(steps)
    assert llm.crank.stats().blocks_used == 0


def test_the_callers_thread_waits_for_no_step(llm, runner):
    """Ctrl-C is raised in the main thread, between any two of its instructions."""
    llm.generate(["one", "two"], SamplingParams(max_tokens=8))
    assert runner.waiting
    assert threading.current_thread() not in runner.waiting


def test_an_interrupted_call_ends_its_requests_and_the_next_one_is_right(llm, monkeypatch):
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm, "_close", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["one", "two"], SamplingParams(max_tokens=8))
    gc.collect()
    assert not llm.crank.has_work
    (output,) = llm.generate("again", SamplingParams(max_tokens=8))
    assert list(output.token_ids) == expected_tokens(output.prompt_token_ids, 8, 256)
