"""An engine process on a FakeRunner that can sleep, for the tests of the process boundary. Settings: JSON."""

import os
import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))  # it is started by its path
from fake_sleeper import FakeSleeper

from benchmarks.fake_runner import FakeRunner
from splittime.core.errors import ConfigError
from splittime.drive.crank import EngineParts
from splittime.drive.worker import Tell, Timeline, work
from splittime.engine.engine import Engine
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler


class Settings(msgspec.Struct):
    """folder: must be there at every start, as a model's. dies_waking: the process ends in the middle of it."""

    step_ns: int = 0
    folder: str = "."
    dies_waking: bool = False


def build(settings: bytes, timeline: Timeline, tell: Tell) -> EngineParts:
    config = msgspec.json.decode(settings, type=Settings)
    if not Path(config.folder).is_dir():
        raise ConfigError(f"{config.folder} is no folder", param="model", value=config.folder)
    timeline.append(("load", 1, 2))
    runner = FakeRunner(step_ns=config.step_ns)
    engine = Engine(Scheduler(SchedulerConfig()))

    def look_around() -> None:
        if sleeper.level and config.dies_waking:
            os._exit(7)

    sleeper = FakeSleeper(runner, in_order=look_around)
    return EngineParts(engine, runner, sleeper=sleeper, resolved={"architecture": "fake"})


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], build)
