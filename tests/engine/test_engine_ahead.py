"""An engine that plans ahead: pauses, interrupts and the books of what was in flight at the time."""

from collections import Counter

import pytest

from benchmarks.fake_runner import FakeRunner, expected_tokens
from splittime.core.clock import VirtualClock
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import StepResult
from splittime.drive.crank import Crank, EngineParts
from splittime.drive.messages import StepOutput
from splittime.engine.engine import Engine
from splittime.ledger.account import Account
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import verify_steps
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

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


def _ask(crank: Crank, clock: VirtualClock, name: str, prompt: tuple[int, ...], max_tokens: int) -> Account:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True)
    account = Account(name, clock.now_ns(), Stage.HANDOFF)
    request = Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, submitted_ns=clock.now_ns())
    crank.submit(request, clock.now_ns())
    return account


def _crank(runner_type: type[FakeRunner] = FakeRunner, is_ahead: bool = True) -> tuple[Crank, FakeRunner, VirtualClock]:
    clock = VirtualClock()
    runner = runner_type(CONFIG.block_size, 50, step_ns=STEP_NS, clock=clock)
    return Crank(EngineParts(Engine(Scheduler(CONFIG), plans_ahead=is_ahead), runner), clock), runner, clock


def _run_dry(crank: Crank) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    for _ in range(200):
        if not crank.has_work:
            return outputs
        output = crank.turn()
        crank.engine.scheduler.check()
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
    crank, _, clock = _crank()
    account = _ask(crank, clock, "a", (1, 2, 3), 12)
    outputs = [output for _ in range(4) if (output := crank.turn()) is not None]
    crank.configure({"paused": True})
    outputs += _run_dry(crank)
    clock.advance(PAUSE_NS)
    crank.configure({"paused": False})
    outputs += _run_dry(crank)
    assert _spent_ns(account, outputs)[Stage.DECODE_STALL, Cause.PAUSED] == PAUSE_NS
    records = [output.record for output in outputs if output.record is not None]
    verify_steps(records)
    assert sum(record.idle_ns for record in records) == PAUSE_NS


def test_the_last_token_of_a_prompt_is_no_stall_while_it_is_computed() -> None:
    crank, _, clock = _crank(is_ahead=False)
    account = _ask(crank, clock, "a", tuple(range(1, CONFIG.max_num_batched_tokens + 2)), 1)
    outputs = [crank.turn()]
    crank.configure({"paused": True})
    outputs.append(crank.turn())
    clock.advance(PAUSE_NS)
    crank.configure({"paused": False})
    outputs += _run_dry(crank)
    spent_ns = _spent_ns(account, [output for output in outputs if output is not None])
    assert spent_ns[Stage.PREFILL_STALL, Cause.PAUSED] == PAUSE_NS
    assert spent_ns[Stage.PREFILL, None] == 2 * STEP_NS


def test_an_interrupt_leaves_both_steps_in_flight() -> None:
    crank, runner, clock = _crank(Interrupted)
    assert isinstance(runner, Interrupted)
    _ask(crank, clock, "a", (1, 2, 3), 8)
    outputs = [output for _ in range(3) if (output := crank.turn()) is not None]
    runner.is_due = True
    with pytest.raises(KeyboardInterrupt):
        crank.turn()
    outputs += _run_dry(crank)
    assert _tokens(outputs, "a") == expected_tokens((1, 2, 3), 8, 50)


def test_a_victim_of_a_plan_that_came_to_nothing_is_in_the_books() -> None:
    """The worse one needs a block, while the better one waits for its last token and is planned no more."""
    crank, _, clock = _crank()
    _ask(crank, clock, "best", tuple(range(1, 11)), 6)
    _ask(crank, clock, "worst", tuple(range(20, 40)), 19)
    outputs = _run_dry(crank)
    victims = [victim for output in outputs if output.record for victim in output.record.victims]
    assert len(victims) == crank.engine.scheduler.counts.num_preemptions > 0
    assert _tokens(outputs, "worst") == expected_tokens(tuple(range(20, 40)), 19, 50)
