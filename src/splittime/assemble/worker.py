"""The engine process: `python -m splittime.assemble.worker TO_ENGINE FROM_ENGINE`, started by `drive.process` alone.

Here the two columns meet: the torch runner is put under the scheduler. Settings come as one line of JSON on standard
input (`WorkerSettings`), while torch is imported or before.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec

from splittime import __version__
from splittime.assemble.model_source import load_tokenizer
from splittime.core.facts import PREFILL_SLICE_NS, Machine
from splittime.drive.crank import EngineParts
from splittime.drive.host_time import importing
from splittime.drive.kv_gate import BlockSharing, Peer
from splittime.drive.worker import Tell, Timeline, work
from splittime.engine.engine import Engine
from splittime.ledger.facts import ServerFacts
from splittime.runner.config import RunnerConfig, without_place
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from splittime.runner.config import Resolved
    from splittime.runner.encoder import EncoderRunner
    from splittime.runner.grammars import Grammars
    from splittime.runner.load import OnPhase
    from splittime.runner.torch_runner import TorchRunner


META_OPERATORS = "torch._meta_registrations"
MIN_PREFILL_TOKENS = 16
LOADED = 0.995  # share of a start whose layers are all read
NOT_TOLD = (  # where things lie is nobody's business
    *("model_path", "draft_model_path", "packed_cache"),
    *("kv_peers", "kv_peer_key"),
)
DECIDED = (
    *("dtype", "kv_cache_dtype", "kernels", "num_threads", "num_threads_reason", "linear_backend", "attention_backend"),
    *("weights", "weights_bytes", "activation_dtype", "products", "num_blocks", "kv_bytes_per_block", "num_parameters"),
    *("context_length", "sliding_window", "vocab_size", "architecture"),
    *("prefill_ns_per_token", "prefill_reason", "speculative_config", "speculative_reason"),
)


class WorkerSettings(msgspec.Struct, frozen=True):
    """What a worker needs; the scheduler's `num_blocks`, `block_size` and `max_model_len` are the runner's to say."""

    runner: RunnerConfig
    scheduler: SchedulerConfig


def import_parts(timeline: Timeline) -> None:
    """Import what `build_engine` builds of: a second or two of torch, a phase of its own in the timeline."""
    begin_ns = time.monotonic_ns()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin take the server process's core
    from splittime.runner import compose, draft_sources  # noqa: F401

    timeline.append(("import torch", begin_ns, time.monotonic_ns()))


def import_quickly(timeline: Timeline) -> None:
    """Import it in a process that is the engine's alone: without the operators of torch's "meta" device, a fifth of the
    time, since nothing is computed on it here."""
    with importing():
        with _without(META_OPERATORS):
            import_parts(timeline)
        import torch

        # `torch.Generator` needs it; `torch._prims.rng_prims`, which an import of all of torch ends with, does this
        bind = getattr(torch._C, "_set_generator_metaclass", None)  # versions without it need none
        if bind is not None:
            from torch._opaque_base import OpaqueBaseMeta

            bind(OpaqueBaseMeta)


@contextmanager
def _without(module: str) -> Iterator[None]:
    """Whoever imports this module within gets an empty one; whoever does afterwards, the real one."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = ModuleType(module)
    try:
        yield
    finally:
        del sys.modules[module]
        package, _, name = module.rpartition(".")
        vars(sys.modules.get(package, ModuleType(package))).pop(name, None)


def build_engine(settings: bytes, timeline: Timeline, tell: Tell = lambda progress, share: None) -> EngineParts:
    """The engine, warmed up, and what its driver needs beside it. Raises ConfigError for what it cannot serve.

    tell: called with what is being done and how far it has come; what follows the layers counts as one more."""
    from splittime.models.encoder_config import is_encoder
    from splittime.runner import compose, draft_sources

    config = msgspec.json.decode(settings, type=WorkerSettings)

    def note(name: str, begin_ns: int, end_ns: int) -> None:
        timeline.append((name, begin_ns, end_ns))

    if is_encoder(Path(config.runner.model_path)):
        return _encoder_parts(config, note)
    runner = compose.load_torch_runner(
        config.runner,
        note,
        lambda done, total, num_bytes: tell(f"layer {done} of {total}, {num_bytes / 1e6:.0f} MB", done / (total + 1)),
        lambda: tell("measuring how many threads are quickest", LOADED),
    )
    begin_ns = time.monotonic_ns()
    tell("warming up, and measuring what a prompt takes", LOADED)
    runner.warm_up()
    grammars = None if config.runner.tensor_parallel_size > 1 else _grammars(config, runner)
    scheduler_config = _fit(config.scheduler, runner)
    timeline.append(("warm-up", begin_ns, time.monotonic_ns()))
    ahead = compose.overlap_of(runner) if config.runner.async_scheduling else None
    gauge, answering = compose.gauge_of(runner), ahead or draft_sources.drafting_of(runner, note)
    return EngineParts(
        engine=Engine(Scheduler(scheduler_config), plans_ahead=ahead is not None),
        runner=answering,
        facts=_facts(config, scheduler_config, runner, gauge.known()),
        sleeper=compose.sleeper_of(runner, answering),
        measuring=gauge.measure() if gauge.is_due() else None,
        watch=runner.watch,
        grammars=grammars,
        sharing=_sharing(config.runner, runner, note),
        adapters=runner.slots.adapters,
        resolved={**msgspec.to_builtins(runner.resolved), "scheduler": msgspec.to_builtins(scheduler_config)},
    )


def _sharing(config: RunnerConfig, runner: "TorchRunner", note: Callable[[str, int, int], None]) -> BlockSharing | None:
    """Returns what gives blocks to other servers and takes them from there; None where neither is asked for."""
    from splittime.runner.kv_port import BlockPort

    if not (config.kv_peers or config.kv_export):
        return None
    begin_ns = time.monotonic_ns()
    port = BlockPort(runner)
    note("hash weights", begin_ns, time.monotonic_ns())
    peers = tuple(Peer(url, config.kv_peer_key) for url in config.kv_peers)
    return BlockSharing(port, peers, config.kv_export, runner.resolved.prefill_ns_per_token)


def _encoder_parts(config: WorkerSettings, note: "OnPhase") -> EngineParts:
    """The engine of a model that generates nothing. It does not sleep, and its machine is not measured."""
    from splittime.runner import compose, machine
    from splittime.runner.encoder import load_encoder_runner
    from splittime.runner.honoured import check_sharing

    check_sharing(config.runner, "encoder's")
    runner = load_encoder_runner(config.runner, note)
    begin_ns = time.monotonic_ns()
    runner.warm_up()
    note("warm-up", begin_ns, time.monotonic_ns())
    most = config.scheduler.max_prefill_tokens or config.scheduler.max_num_batched_tokens
    scheduler = msgspec.structs.replace(
        _sized(config.scheduler, runner.resolved, most), enable_prefix_caching=False, enable_chunked_prefill=False
    )
    ahead = compose.RunnerThread(runner.run, runner.set_threads) if config.runner.async_scheduling else None
    return EngineParts(
        engine=Engine(Scheduler(scheduler), plans_ahead=ahead is not None),
        runner=ahead or runner,
        facts=_facts(config, scheduler, runner, machine.without_ceilings(runner.resolved.num_threads)),
        resolved={**msgspec.to_builtins(runner.resolved), "scheduler": msgspec.to_builtins(scheduler)},
    )


def _grammars(config: WorkerSettings, runner: "TorchRunner") -> "Grammars":
    """Returns what answers can be held to. Nothing is read before the first request for it."""
    from splittime.runner.grammars import Grammars

    path = Path(config.runner.model_path)
    runner.slots.grammars = Grammars(
        lambda: load_tokenizer(path).to_json(), runner.resolved.vocab_size, is_ahead=config.runner.async_scheduling
    )
    return runner.slots.grammars


def _fit(config: SchedulerConfig, runner: "TorchRunner") -> SchedulerConfig:
    """The scheduler's settings, with what the runner found out about the model and the machine filled in."""
    from splittime.runner.start_memory import prefill_tokens_within

    resolved = runner.resolved
    prefill_tokens = config.max_prefill_tokens
    if prefill_tokens is None:
        measured = max(MIN_PREFILL_TOKENS, prefill_tokens_within(runner, PREFILL_SLICE_NS / 1e9))
        prefill_tokens = min(measured, config.max_num_batched_tokens)
    return _sized(config, resolved, prefill_tokens)


def _sized(config: SchedulerConfig, resolved: "Resolved", prefill_tokens: int) -> SchedulerConfig:
    return msgspec.structs.replace(
        config,
        num_blocks=resolved.num_blocks,
        num_host_slots=resolved.num_host_slots,
        num_state_slots=resolved.num_state_slots,
        block_size=resolved.block_size,
        max_model_len=resolved.max_model_len,
        max_prefill_tokens=prefill_tokens,
    )


def _facts(
    config: WorkerSettings, scheduler: SchedulerConfig, runner: "TorchRunner | EncoderRunner", known: Machine
) -> ServerFacts:
    """By their flags' names: what was asked, then what the machine decided, then what the scheduler goes by."""
    resolved = msgspec.structs.asdict(runner.resolved)
    guessing = {"speculative_config": without_place(resolved["speculative_config"])}
    decided = {name: resolved[name] for name in DECIDED} | guessing
    asked = {name: value for name, value in msgspec.structs.asdict(config.runner).items() if name not in NOT_TOLD}
    return ServerFacts(
        version=__version__,
        model=runner.resolved.architecture,
        max_model_len=runner.resolved.max_model_len,
        settings=asked | decided | msgspec.structs.asdict(scheduler),
        cost=runner.cost,
        machine=known,
        refuses=runner.resolved.refuses,
    )


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], build_engine, import_quickly)
