"""The engine process: `python -m splittime.cli.worker TO_ENGINE FROM_ENGINE`, started by `engine.process` alone.

Here the two columns meet: the torch runner is put under the scheduler. Settings come as one line of JSON on standard
input (`WorkerSettings`).
"""

import os
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import msgspec

from splittime import __version__
from splittime.core.clock import SystemClock
from splittime.engine.engine import Engine
from splittime.engine.worker import Tell, Timeline, work
from splittime.ledger.facts import Machine, ServerFacts, TokenCost
from splittime.runner.config import RunnerConfig
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from splittime.runner.ceilings import Ceilings
    from splittime.runner.torch_runner import TorchRunner


MIN_PREFILL_TOKENS = 16
PREFILL_SLICE_S = 0.25
"""How long a step may compute prompts while others wait for their next token, unless `max_prefill_tokens` is set.
Products are as fast for some dozens of tokens as for thousands, so small slices cost little."""


NOT_TOLD = ("model_path", "packed_cache")  # where things lie is nobody's business
DECIDED = (
    *("dtype", "kv_cache_dtype", "kernels", "num_threads", "num_threads_reason", "linear_backend", "attention_backend"),
    *("weights", "weights_bytes", "activation_dtype", "products", "num_blocks", "kv_bytes_per_block", "num_parameters"),
    *("context_length", "sliding_window", "vocab_size", "architecture"),
    *("prefill_ns_per_token", "prefill_reason"),
)


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
    begin_ns = time.monotonic_ns()
    runner.warm_up()
    scheduler_config = _fit(config.scheduler, runner)
    timeline.append(("warm-up", begin_ns, time.monotonic_ns()))
    engine = Engine(Scheduler(scheduler_config), runner, SystemClock(), runner.ahead(config.runner))
    engine.watch = runner.watch
    engine.bed.sleeper = runner.sleeper(config.runner)
    gauge = runner.gauge(config.runner)
    known = gauge.known()
    engine.facts = _facts(config, scheduler_config, runner, _machine(known))
    if gauge.is_due():
        engine.measuring = (None if found is None else _machine(found) for found in gauge.measure())
    return engine, {**msgspec.to_builtins(runner.resolved), "scheduler": msgspec.to_builtins(scheduler_config)}


def _fit(config: SchedulerConfig, runner: "TorchRunner") -> SchedulerConfig:
    """The scheduler's settings, with what the runner found out about the model and the machine filled in."""
    resolved = runner.resolved
    prefill_tokens = config.max_prefill_tokens
    if prefill_tokens is None:
        measured = max(MIN_PREFILL_TOKENS, runner.prefill_tokens_within(PREFILL_SLICE_S))
        prefill_tokens = min(measured, config.max_num_batched_tokens)
    return msgspec.structs.replace(
        config,
        num_blocks=resolved.num_blocks,
        num_host_slots=resolved.num_host_slots,
        block_size=resolved.block_size,
        max_model_len=resolved.max_model_len,
        max_prefill_tokens=prefill_tokens,
    )


def _facts(config: WorkerSettings, scheduler: SchedulerConfig, runner: "TorchRunner", known: Machine) -> ServerFacts:
    """By their flags' names: what was asked, then what the machine decided, then what the scheduler goes by."""
    resolved = msgspec.structs.asdict(runner.resolved)
    decided = {name: resolved[name] for name in DECIDED}
    asked = {name: value for name, value in msgspec.structs.asdict(config.runner).items() if name not in NOT_TOLD}
    return ServerFacts(
        version=__version__,
        model=runner.resolved.architecture,
        max_model_len=runner.resolved.max_model_len,
        settings=asked | decided | msgspec.structs.asdict(scheduler),
        cost=TokenCost(**asdict(runner.cost)),
        machine=known,
    )


def _machine(found: "Ceilings") -> Machine:
    return Machine(**asdict(found))


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], build_engine)
