"""Makes a runner of its parts, and what goes with it. `load_torch_runner` is the one way from a `RunnerConfig` to one.

    execution    the kernels of a card: on its stream, decode steps captured; all others: on the host's own time
    ranks        with tensor_parallel_size above 1: this process leads, the others are started and loaded first
    overlap      what carries out steps while the next are planned: the runner itself on a card, else a `RunnerThread`
    drafting     what guesses tokens for the runner to verify (`draft_sources`)
    sleeper      what gives its memory away and takes it back; ranks do not sleep
    gauge        what measures the machine's ceilings with its kernels and threads

`Resolved.execution` and `execution_reason` say what was chosen and why.
"""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import msgspec

from splittime.core import this_process
from splittime.core.errors import ConfigError, EngineError
from splittime.core.step import AsyncRunner, StepPlan, StepResult
from splittime.kernels.api import WeightScheme
from splittime.models.decoder import Decoder
from splittime.models.ranks import Ranks
from splittime.models.weights.load import OnLayer, read_config
from splittime.models.weights.shards import check
from splittime.runner import machine, start_memory
from splittime.runner.batch import Adapters
from splittime.runner.ceilings import CardGauge, Gauge
from splittime.runner.config import RunnerConfig
from splittime.runner.drafting import DraftingRunner
from splittime.runner.execution import Execution, HostExecution
from splittime.runner.honoured import settle_speculation
from splittime.runner.load import OnPhase, load
from splittime.runner.ranks.group import RankGroup, RankLost, device_of
from splittime.runner.ranks.members import Lead, Members
from splittime.runner.sleep import TorchSleeper
from splittime.runner.torch_runner import TorchRunner

Plans = SimpleQueue[StepPlan | None]  # None: end
Results = SimpleQueue[StepResult | BaseException]
END_PATIENCE_S = 10.0  # for the steps that were launched, when the process exits
_alive: "weakref.WeakSet[RunnerThread]" = weakref.WeakSet()


class RunnerThread:
    """prepare: called first in the thread, for what a library keeps by thread (its number of threads, say)."""

    def __init__(self, run: Callable[[StepPlan], StepResult], prepare: Callable[[], None] = lambda: None) -> None:
        self._plans: Plans = SimpleQueue()
        self._results: Results = SimpleQueue()
        self._failure: BaseException | None = None
        self.thread = threading.Thread(
            target=_work, args=(run, prepare, self._plans, self._results), name="runner", daemon=True
        )
        self.thread.start()
        weakref.finalize(self, self._plans.put, None).atexit = False
        _alive.add(self)

    def launch(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    def collect(self) -> StepResult:
        if self._failure is None:
            result = self._results.get()
            if not isinstance(result, BaseException):
                return result
            self._failure = result
        raise self._failure

    def end(self) -> None:
        """After what was launched; from now on `collect` raises."""
        self._plans.put(None)
        self._failure = self._failure or _ended()
        self.thread.join(END_PATIENCE_S)


@atexit.register
def _end_all() -> None:
    """The interpreter would freeze the threads where they are, and whoever waits for one would wait for ever."""
    for ahead in list(_alive):
        ahead.end()


def _ended() -> EngineError:
    return EngineError("the runner's thread has ended")


def _work(run: Callable[[StepPlan], StepResult], prepare: Callable[[], None], plans: Plans, results: Results) -> None:
    try:
        prepare()
        while (plan := plans.get()) is not None:
            results.put(run(plan))
        results.put(_ended())
    except BaseException as error:  # whoever waits in `collect` must hear of it, whatever it is
        results.put(error)


def load_torch_runner(
    config: RunnerConfig,
    on_phase: OnPhase | None = None,
    on_layer: OnLayer | None = None,
    on_measuring: Callable[[], None] = lambda: None,
) -> TorchRunner:
    """Read the checkpoint and allocate the KV cache; `on_phase(name, begin_ns, end_ns)` is told of each part,
    `on_layer(done, of, bytes)` of each layer, and `on_measuring()` before threads are measured.

    Raises `ConfigError` naming what cannot be honoured, `EngineError` naming a rank that failed.
    """
    on_phase = on_phase or (lambda name, begin_ns, end_ns: None)
    config.validate()
    if config.tensor_parallel_size > 1:
        return _load_with_ranks(config, on_phase, on_layer)
    runner = load_part(config, on_phase, on_layer)
    if start_memory.wants_threads(runner):
        begin_ns = time.monotonic_ns()
        on_measuring()
        start_memory.choose_threads(runner, this_process.num_cores())
        on_phase("measure threads", begin_ns, time.monotonic_ns())
    return runner


def load_part(
    config: RunnerConfig,
    on_phase: OnPhase,
    on_layer: OnLayer | None = None,
    ranks: Ranks | None = None,
    lead: Lead | None = None,
) -> TorchRunner:
    """The runner of one rank's part of a model, which without `ranks` is all of it."""
    decoder, store, resolved, cost, scheme = load(config, on_phase, on_layer, ranks)
    config, guessing = settle_speculation(config, decoder.ops.name, has_states=bool(store.states))
    execution, reason = _choose_execution(config, decoder)
    kind = "device" if execution.is_apart else "host"
    resolved = msgspec.structs.replace(resolved, execution=kind, execution_reason=reason, speculative_reason=guessing)
    runner = TorchRunner(config, decoder, store, resolved, cost, scheme, execution, lead)
    if config.enable_lora:
        runner.slots.adapters = Adapters(decoder, WeightScheme(resolved.dtype), config.max_lora_rank)
    return runner


def _choose_execution(config: RunnerConfig, decoder: Decoder) -> tuple[Execution, str]:
    """Returns how this model's steps are computed, and why."""
    ops = decoder.ops
    if ops.name != "triton":
        return HostExecution(ops), f"{ops.name} kernels compute while they are called"
    if decoder.ranks is not None:
        return HostExecution(ops), "ranks launch their kernels one by one and wait for each step: nothing is captured"
    from splittime.kernels.triton.ops import TritonOps  # there is no Triton where there is no card
    from splittime.runner.device.execution import DeviceExecution

    assert isinstance(ops, TritonOps)
    if config.enforce_eager:
        return DeviceExecution(ops, captures=False), "on its stream, kernel by kernel, as asked: enforce_eager"
    if any(layer.needs_host for layer in decoder.layers):
        reason = "on its stream, kernel by kernel: the host looks which experts are chosen, for which there is no"
        return DeviceExecution(ops, captures=False), f"{reason} grouped product in this scheme"
    return DeviceExecution(ops, captures=True), "on its stream, decode steps captured and replayed"


# ---- ranks


def _load_with_ranks(config: RunnerConfig, on_phase: OnPhase, on_layer: OnLayer | None) -> TorchRunner:
    """Start the other ranks, load with them, and meet them."""
    check(read_config(Path(config.model_path)), config.tensor_parallel_size)
    config, reason = _divided(config)
    device = device_of(config, 0)
    begin_ns = time.monotonic_ns()
    members = Members(config)
    on_phase("start ranks", begin_ns, time.monotonic_ns())
    with members.ended_on_failure(RankLost):
        group = RankGroup(
            0, config.tensor_parallel_size, members.folder, config.collective_timeout_s, members.meet, device
        )
        members.on_death(group.abort)
        runner = load_part(config, on_phase, _checking(members, on_layer), group, Lead(members, group))
        weights_bytes = group.each(runner.resolved.weights_bytes)
        members.forget_meeting()
    members.set_timeout(config.collective_timeout_s)
    runner.resolved = msgspec.structs.replace(
        runner.resolved,
        num_threads_reason=reason,
        tensor_parallel_size=config.tensor_parallel_size,
        rank_weights_bytes=tuple(weights_bytes),
        rank_pids=(os.getpid(), *members.pids),
    )
    weakref.finalize(runner, members.end)
    return runner


def _checking(members: Members, on_layer: OnLayer | None) -> OnLayer:
    """Between two layers, a rank that has ended while loading ends the start."""

    def note(done: int, total: int, num_bytes: int) -> None:
        members.check()
        if on_layer is not None:
            on_layer(done, total, num_bytes)

    return note


def _divided(config: RunnerConfig) -> tuple[RunnerConfig, str]:
    """The settings of each rank, and why it has so many threads."""
    count, asked = config.tensor_parallel_size, config.num_threads
    if asked is not None and asked < count:
        message = f"num_threads is {asked}, fewer than one for each of tensor_parallel_size={count} ranks"
        raise ConfigError(message, param="num_threads", value=asked, limit=count)
    threads = asked or this_process.num_cores()
    told = f"{threads} as asked" if asked is not None else f"{threads} cores"
    each = max(1, threads // count)
    return msgspec.structs.replace(config, num_threads=each), f"{told}, among {count} ranks"


# ---- what goes with a runner


def overlap_of(runner: TorchRunner) -> AsyncRunner:
    """Returns what carries out this runner's steps while the next are planned."""
    if runner.execution.is_apart:
        return runner
    return RunnerThread(runner.run, lambda: runner.decoder.ops.set_threads(runner.resolved.num_threads))


def sleeper_of(runner: TorchRunner, answering: object = None) -> TorchSleeper | None:
    """Returns what puts this runner to sleep and wakes it; None for ranks, which do not sleep. answering: what carries
    out its steps, of `drafting_of`."""
    forget = answering.forget if isinstance(answering, DraftingRunner) else None
    return TorchSleeper(runner, forget) if runner.lead is None else None


def gauge_of(runner: TorchRunner, remembers: bool = True) -> Gauge:
    """Returns what measures the machine for this runner. remembers: what was measured lately counts, and this is
    kept."""
    ops, folder = runner.decoder.ops, machine.packed_cache_folder(runner.config.packed_cache) if remembers else None
    scheme = replace(runner.scheme, has_zeros=False, has_minima=False, bits=0)  # what floats can be packed in
    given = (ops, scheme, runner.resolved.num_threads, folder)
    if ops.device.type == "cuda" and runner.lead is None:
        return CardGauge(*given)
    return Gauge(*given)
