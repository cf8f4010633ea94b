"""An engine process on a FakeRunner that takes real settings, for the tests of `splittime serve`."""

import sys
import time
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))  # it is started by its path
from benchmarks.fake_runner import FakeRunner
from splittime.drive.crank import EngineParts
from splittime.drive.worker import work
from splittime.engine.engine import Engine
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

MODEL = {"vocab_size": 256, "eos_token_ids": [], "default_sampling": {"temperature": 0.5}, "pooling": {}}
RESOLVED = {"max_model_len": 2048, **MODEL}


def build(settings, timeline, tell):
    begin_ns = time.monotonic_ns()
    config = msgspec.convert(msgspec.json.decode(settings)["scheduler"], SchedulerConfig)
    config = msgspec.structs.replace(config, num_blocks=512)
    runner = FakeRunner(config.block_size, vocab_size=256, step_ns=2_000_000)
    timeline.append(("load", begin_ns, time.monotonic_ns()))
    return EngineParts(Engine(Scheduler(config)), runner, resolved=RESOLVED)


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], build)
