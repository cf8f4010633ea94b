"""Runs a list of timed requests through an engine in this process, in real time, and keeps every account.

One engine serves all arms of a comparison: knobs are changed between arms, the model, the memory and the minute are the
same. The prefix cache is emptied between arms.
"""

import time
from dataclasses import dataclass, field

import msgspec
import numpy

from splittime.core.clock import SystemClock
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.engine.engine import Engine
from splittime.ledger.account import Account
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord, verify_steps
from splittime.runner.config import RunnerConfig
from splittime.runner.torch_runner import TorchRunner
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler


@dataclass
class Arrival:
    """A request `at_s` seconds after the start. The prompt's tokens are given, the output's length is exact. Greedy
    unless it has a temperature."""

    at_s: float
    prompt: list[int]
    output_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass
class Outcome:
    """What became of one request; instants in ns of the monotonic clock."""

    account: Account
    num_prompt_tokens: int
    token_ready_ns: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0

    @property
    def e2e_ms(self) -> float:
        return sum(i.duration_ns for i in self.account.intervals()) / 1e6

    @property
    def ttft_ms(self) -> float:
        return (self.token_ready_ns[0] - self.account.start_ns) / 1e6

    @property
    def max_gap_ms(self) -> float:
        gaps = numpy.diff(self.token_ready_ns)
        return float(gaps.max()) / 1e6 if len(gaps) else 0.0


@dataclass
class Run:
    outcomes: list[Outcome]
    steps: list[StepRecord]
    wall_s: float

    @property
    def output_tokens_per_s(self) -> float:
        return sum(len(outcome.token_ready_ns) for outcome in self.outcomes) / self.wall_s

    def mean_s(self, stage: Stage, cause: Cause | None = None) -> float:
        """A request's, in this stage for this cause; None for any."""
        spent_ns = (
            interval.duration_ns
            for outcome in self.outcomes
            for interval in outcome.account.intervals()
            if interval.stage is stage and cause in (None, interval.cause)
        )
        return sum(spent_ns) / len(self.outcomes) / 1e9


def build_engine(model_path: str, scheduler: SchedulerConfig, **runner_settings: object) -> Engine:
    """An engine on the torch runner, warmed up."""
    runner, asked = load_runner(model_path, scheduler, **runner_settings)
    return engine_over(runner, scheduler, asked)


def load_runner(
    model_path: str, scheduler: SchedulerConfig, **runner_settings: object
) -> tuple[TorchRunner, RunnerConfig]:
    """A runner, warmed up, with room for what the scheduler may plan; and what was asked of it."""
    limits = {
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
    }
    asked = RunnerConfig(model_path=model_path, **limits, **runner_settings)  # type: ignore[arg-type]
    runner = TorchRunner.load(asked)
    runner.warm_up()
    return runner, asked


def engine_over(
    runner: TorchRunner, scheduler: SchedulerConfig, asked: RunnerConfig, num_blocks: int | None = None
) -> Engine:
    """One at a time may be used: it takes all of the runner's blocks for free, or so many of them."""
    resolved = runner.resolved
    config = msgspec.structs.replace(
        scheduler,
        num_blocks=min(num_blocks or resolved.num_blocks, resolved.num_blocks),
        block_size=resolved.block_size,
        max_model_len=resolved.max_model_len,
    )
    return Engine(Scheduler(config), runner, SystemClock(), runner.ahead(asked))


def drive(engine: Engine, arrivals: list[Arrival]) -> Run:
    """Submit each request at its time, step until all have ended. Raises if an account does not verify."""
    arrivals = sorted(arrivals, key=lambda arrival: arrival.at_s)
    outcomes: dict[str, Outcome] = {}
    steps: list[StepRecord] = []
    begin_ns = time.monotonic_ns()
    next_arrival = 0
    while next_arrival < len(arrivals) or engine.has_work:
        now_ns = time.monotonic_ns()
        while next_arrival < len(arrivals) and begin_ns + int(arrivals[next_arrival].at_s * 1e9) <= now_ns:
            _submit(engine, f"request-{next_arrival}", arrivals[next_arrival], begin_ns, outcomes)
            next_arrival += 1
        if not engine.has_work:
            time.sleep(max(0.0, arrivals[next_arrival].at_s - (now_ns - begin_ns) / 1e9))
            continue
        output = engine.step()
        if output is None:
            continue
        if output.record is not None:
            steps.append(output.record)
        for news in output.outputs:
            _take(outcomes[news.request_id], news, output.ready_ns)
    wall_s = (time.monotonic_ns() - begin_ns) / 1e9
    for outcome in outcomes.values():
        outcome.account.verify()
    verify_steps(steps)
    engine.configure({"enable_prefix_caching": False})  # forget what is cached
    return Run(list(outcomes.values()), steps, wall_s)


def _submit(engine: Engine, name: str, arrival: Arrival, begin_ns: int, outcomes: dict[str, Outcome]) -> None:
    """The account begins at the intended arrival, so that a late submission is not hidden (coordinated omission)."""
    intended_ns = begin_ns + int(arrival.at_s * 1e9)
    sampling = SamplingParams(
        max_tokens=arrival.output_tokens, temperature=arrival.temperature, ignore_eos=True, seed=arrival.seed
    )
    request = Request(
        request_id=name, prompt_token_ids=tuple(arrival.prompt), sampling=sampling, submitted_ns=intended_ns
    )
    outcomes[name] = Outcome(Account(name, intended_ns, Stage.HANDOFF), len(arrival.prompt))
    engine.submit(request, time.monotonic_ns())


def _take(outcome: Outcome, news, ready_ns: int) -> None:
    outcome.account.extend(news.marks)
    outcome.token_ready_ns.extend([ready_ns] * len(news.token_ids))
    outcome.token_ids.extend(news.token_ids)
    if news.num_cached_tokens is not None:
        outcome.num_cached_tokens = news.num_cached_tokens
    if news.finish_reason is not None:
        outcome.account.close(news.freed_ns)
