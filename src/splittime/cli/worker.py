"""The engine process: `python -m splittime.cli.worker TO_ENGINE FROM_ENGINE`, started by `engine.process` alone.

Here the two columns meet: the torch runner is put under the scheduler. Settings come as one line of JSON on standard
input (`WorkerSettings`).
"""

import os
import sys
import time

import msgspec

from splittime.core.clock import SystemClock
from splittime.engine.engine import Engine
from splittime.engine.worker import Tell, Timeline, work
from splittime.runner.config import RunnerConfig
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler


class WorkerSettings(msgspec.Struct, frozen=True):
    """What a worker needs; the scheduler's `num_blocks`, `block_size` and `max_model_len` are the runner's to say."""

    runner: RunnerConfig
    scheduler: SchedulerConfig


def build_engine(settings: bytes, timeline: Timeline, tell: Tell = lambda progress: None) -> tuple[Engine, dict]:
    """The engine, warmed up, and what the machine resolved. Raises ConfigError for what it cannot serve."""
    begin_ns = time.monotonic_ns()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin take the server process's core
    from splittime.runner.torch_runner import TorchRunner  # two seconds of torch: a phase of its own in the timeline

    timeline.append(("import torch", begin_ns, time.monotonic_ns()))
    config = msgspec.json.decode(settings, type=WorkerSettings)
    runner = TorchRunner.load(
        config.runner,
        lambda name, begin, end: timeline.append((name, begin, end)),
        lambda done, total, num_bytes: tell(f"layer {done} of {total}, {num_bytes / 1e6:.0f} MB"),
    )
    resolved = runner.resolved
    scheduler_config = msgspec.structs.replace(
        config.scheduler,
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        max_model_len=resolved.max_model_len,
    )
    begin_ns = time.monotonic_ns()
    runner.warm_up()
    timeline.append(("warm-up", begin_ns, time.monotonic_ns()))
    engine = Engine(Scheduler(scheduler_config), runner, SystemClock())
    return engine, {**msgspec.to_builtins(resolved), "scheduler": msgspec.to_builtins(scheduler_config)}


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], build_engine)
