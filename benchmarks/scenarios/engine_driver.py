"""Runs a list of timed requests through an engine in this process, in real time, and keeps every account.

One engine serves all arms of a comparison: knobs are changed between arms, the model, the memory and the minute are the
same. The prefix cache is emptied between arms.
"""

import time
from dataclasses import dataclass

import msgspec

from benchmarks.timed_run import RequestOutcome, TimedRun
from splittime.core.clock import SystemClock
from splittime.core.engine import Sleeper
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.drive.crank import Crank, EngineParts
from splittime.engine.engine import Engine
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord, verify_steps
from splittime.runner.compose import load_torch_runner, overlap_of
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
class Run:
    outcomes: list[RequestOutcome]
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


def build_crank(model_path: str, scheduler: SchedulerConfig, **runner_settings: object) -> Crank:
    """An engine on the torch runner, warmed up."""
    runner, asked = load_runner(model_path, scheduler, **runner_settings)
    return crank_over(runner, scheduler, asked)


def load_runner(
    model_path: str, scheduler: SchedulerConfig, **runner_settings: object
) -> tuple[TorchRunner, RunnerConfig]:
    """A runner, warmed up, with room for what the scheduler may plan; and what was asked of it."""
    limits = {
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
    }
    asked = RunnerConfig(model_path=model_path, **limits, **runner_settings)  # type: ignore[arg-type]
    runner = load_torch_runner(asked)
    runner.warm_up()
    return runner, asked


def crank_over(
    runner: TorchRunner,
    scheduler: SchedulerConfig,
    asked: RunnerConfig,
    num_blocks: int | None = None,
    sleeper: Sleeper | None = None,
) -> Crank:
    """One at a time may be used: it takes all of the runner's blocks for free, or so many of them."""
    resolved = runner.resolved
    config = msgspec.structs.replace(
        scheduler,
        num_blocks=min(num_blocks or resolved.num_blocks, resolved.num_blocks),
        block_size=resolved.block_size,
        max_model_len=resolved.max_model_len,
    )
    ahead = overlap_of(runner) if asked.async_scheduling else None
    engine = Engine(Scheduler(config), plans_ahead=ahead is not None)
    return Crank(EngineParts(engine, ahead or runner, sleeper=sleeper), SystemClock())


def drive(crank: Crank, arrivals: list[Arrival]) -> Run:
    """Submit each request at its time, turn until all have ended. Raises if an account does not verify."""
    begin_ns = time.monotonic_ns()
    played = TimedRun(crank, SystemClock(), wait_until=_wait_until)
    for number, arrival in enumerate(sorted(arrivals, key=lambda arrival: arrival.at_s)):
        played.submit(_request(f"request-{number}", arrival, begin_ns))
    played.run()
    wall_s = (time.monotonic_ns() - begin_ns) / 1e9
    for outcome in played.outcomes.values():
        outcome.account.verify()
    verify_steps(played.steps)
    crank.configure({"enable_prefix_caching": False})  # forget what is cached
    return Run(list(played.outcomes.values()), played.steps, wall_s)


def _request(name: str, arrival: Arrival, begin_ns: int) -> Request:
    """Its account begins at the intended arrival, so that a late submission is not hidden (coordinated omission)."""
    sampling = SamplingParams(
        max_tokens=arrival.output_tokens, temperature=arrival.temperature, ignore_eos=True, seed=arrival.seed
    )
    intended_ns = begin_ns + int(arrival.at_s * 1e9)
    return Request(request_id=name, prompt_token_ids=tuple(arrival.prompt), sampling=sampling, submitted_ns=intended_ns)


def _wait_until(at_ns: int) -> None:
    time.sleep(max(0, at_ns - time.monotonic_ns()) / 1e9)
