"""An engine that plans ahead: pauses, interrupts and the books of what was in flight at the time."""

from collections import Counter

import pytest

from splittime.core.clock import VirtualClock
from splittime.core.plan import StepResult
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.engine.engine import Engine
from splittime.engine.messages import StepOutput
from splittime.ledger.account import Account
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import verify_steps
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler
from splittime.simulate.fake import FakeRunner, expected_tokens

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=20, max_model_len=40, block_size=4, num_blocks=10)
PAUSE_NS = 10_000_000
STEP_NS = 1000


class Interrupted(FakeRunner):
    """Whoever waits for a step is interrupted once."""

    is_due = False

    def collect(self) -> StepResult:
        if self.is_due:
            self.is_due = False
            raise KeyboardInterrupt
        return super().collect()


def _ask(engine: Engine, clock: VirtualClock, name: str, prompt: tuple[int, ...], max_tokens: int) -> Account:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True)
    account = Account(name, clock.now_ns(), Stage.HANDOFF)
    request = Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, submitted_ns=clock.now_ns())
    engine.submit(request, clock.now_ns())
    return account


def _engine(
    runner_type: type[FakeRunner] = FakeRunner, is_ahead: bool = True
) -> tuple[Engine, FakeRunner, VirtualClock]:
    clock = VirtualClock()
    runner = runner_type(CONFIG.block_size, 50, step_ns=STEP_NS, clock=clock)
    return Engine(Scheduler(CONFIG), runner, clock, runner if is_ahead else None), runner, clock


def _run_dry(engine: Engine) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    for _ in range(200):
        if not engine.has_work:
            return outputs
        output = engine.step()
        engine.scheduler.check()
        if output is not None:
            outputs.append(output)
    raise AssertionError("the engine makes no progress")


def _tokens(outputs: list[StepOutput], name: str) -> list[int]:
    return [
        token for output in outputs for news in output.outputs if news.request_id == name for token in news.token_ids
    ]


def _spent_ns(account: Account, outputs: list[StepOutput]) -> Counter[tuple[Stage, str | None]]:
    for output in outputs:
        for news in output.outputs:
            account.extend(news.marks)
            if news.freed_ns is not None:
                account.close(news.freed_ns)
    spent_ns: Counter[tuple[Stage, str | None]] = Counter()
    for interval in account.intervals():
        spent_ns[interval.stage, interval.cause] += interval.duration_ns
    return spent_ns


def test_a_pause_is_a_stall_of_whoever_was_in_flight_and_idle_time_of_the_engine() -> None:
    engine, _, clock = _engine()
    account = _ask(engine, clock, "a", (1, 2, 3), 12)
    outputs = [output for _ in range(4) if (output := engine.step()) is not None]
    engine.configure({"paused": True})
    outputs += _run_dry(engine)
    clock.advance(PAUSE_NS)
    engine.configure({"paused": False})
    outputs += _run_dry(engine)
    assert _spent_ns(account, outputs)[Stage.DECODE_STALL, Cause.PAUSED] == PAUSE_NS
    records = [output.record for output in outputs if output.record is not None]
    verify_steps(records)
    assert sum(record.idle_ns for record in records) == PAUSE_NS


def test_the_last_token_of_a_prompt_is_no_stall_while_it_is_computed() -> None:
    engine, _, clock = _engine(is_ahead=False)
    account = _ask(engine, clock, "a", tuple(range(1, CONFIG.max_num_batched_tokens + 2)), 1)
    outputs = [engine.step()]
    engine.configure({"paused": True})
    outputs.append(engine.step())
    clock.advance(PAUSE_NS)
    engine.configure({"paused": False})
    outputs += _run_dry(engine)
    spent_ns = _spent_ns(account, [output for output in outputs if output is not None])
    assert spent_ns[Stage.PREFILL_STALL, Cause.PAUSED] == PAUSE_NS
    assert spent_ns[Stage.PREFILL, None] == 2 * STEP_NS


def test_an_interrupt_leaves_both_steps_in_flight() -> None:
    engine, runner, clock = _engine(Interrupted)
    assert isinstance(runner, Interrupted)
    _ask(engine, clock, "a", (1, 2, 3), 8)
    outputs = [output for _ in range(3) if (output := engine.step()) is not None]
    runner.is_due = True
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    outputs += _run_dry(engine)
    assert _tokens(outputs, "a") == expected_tokens((1, 2, 3), 8, 50)


def test_a_victim_of_a_plan_that_came_to_nothing_is_in_the_books() -> None:
    """The worse one needs a block, while the better one waits for its last token and is planned no more."""
    engine, _, clock = _engine()
    _ask(engine, clock, "best", tuple(range(1, 11)), 6)
    _ask(engine, clock, "worst", tuple(range(20, 40)), 19)
    outputs = _run_dry(engine)
    victims = [victim for output in outputs if output.record for victim in output.record.victims]
    assert len(victims) == engine.scheduler.num_preemptions > 0
    assert _tokens(outputs, "worst") == expected_tokens(tuple(range(20, 40)), 19, 50)
