"""An engine process on a FakeRunner, for the tests of the process boundary. Settings: JSON of `Settings`."""

import gc
import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))  # it is started by its path
from benchmarks.fake_runner import FakeRunner
from splittime.core.errors import ConfigError
from splittime.core.facts import Machine
from splittime.core.step import StepPlan, StepResult
from splittime.drive.crank import EngineParts
from splittime.drive.worker import Tell, Timeline, work
from splittime.engine.engine import Engine
from splittime.ledger.facts import ServerFacts
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler


class Settings(msgspec.Struct):
    step_ns: int = 0
    refuse: bool = False
    fail_on_token: int = -1
    measures: bool = False
    collects_garbage: bool = False


class FailingRunner(FakeRunner):
    """Raises when it meets a certain token: a bug in a runner."""

    fail_on_token = -1

    collects_garbage = False

    def run(self, plan: StepPlan) -> StepResult:
        if self.collects_garbage:
            self.rubbish = [[] for _ in range(500_000)]
            gc.collect()
        if any(self.fail_on_token in row.token_ids for row in plan.rows):
            raise RuntimeError("the runner broke")
        return super().run(plan)


def build(settings: bytes, timeline: Timeline, tell: Tell) -> EngineParts:
    config = msgspec.json.decode(settings, type=Settings)
    if config.refuse:
        raise ConfigError("no such model")
    runner = FailingRunner(step_ns=config.step_ns)
    runner.fail_on_token, runner.collects_garbage = config.fail_on_token, config.collects_garbage
    timeline.append(("load", 1, 2))
    tell("layer 1 of 2, 3 MB", 0.25)
    tell("layer 2 of 2, 6 MB", 0.5)  # too soon after the first
    tell("warming up", 0.9)  # another thing to do is told at once
    settings_told = {"block_size": 16, "max_num_seqs": 0}
    pieces = iter([None, None, Machine(cpu="fake", threads=1, measured_at_unix_ns=7)])
    return EngineParts(
        engine=Engine(Scheduler(SchedulerConfig())),
        runner=runner,
        facts=ServerFacts(version="1", model="Fake", max_model_len=9, settings=settings_told),
        measuring=pieces if config.measures else None,
        resolved={"architecture": "fake"},
    )


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], build)
