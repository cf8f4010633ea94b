"""The first rank: a `TorchRunner` of its part of the model that hands every plan on to the other ranks.

It is used like any runner. When a rank fails, the step raises an `EngineError` that names it, all ranks are ended, and
every later step raises the same: an engine dies of it and is started anew. Between steps `watch` tells.
"""

import logging
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec

from splittime.core.errors import ConfigError, EngineError, SplittimeError
from splittime.core.plan import PENDING, StepPlan, StepResult
from splittime.models.weights.load import OnLayer
from splittime.models.weights.shards import check
from splittime.models.weights.source import read_config
from splittime.runner import machine
from splittime.runner.config import RunnerConfig
from splittime.runner.load import OnPhase, load
from splittime.runner.parallel.cards import device_of
from splittime.runner.parallel.channel import encode
from splittime.runner.parallel.group import Group, RankLost
from splittime.runner.parallel.members import Members
from splittime.runner.torch_runner import TorchRunner

log = logging.getLogger("splittime.runner")


class ParallelRunner(TorchRunner):
    """Make it with `TorchRunner.load`, which does so where `tensor_parallel_size` is above 1."""

    members: Members
    group: Group
    failure: SplittimeError | None = None

    @classmethod
    def lead(cls, config: RunnerConfig, on_phase: OnPhase, on_layer: OnLayer | None) -> "ParallelRunner":
        """Start the other ranks, load with them, and meet them. Raises `ConfigError`; `EngineError` naming a rank."""
        check(read_config(Path(config.model_path)), config.tensor_parallel_size)
        config, reason = _divided(config)
        device = device_of(config, 0)
        begin_ns = time.monotonic_ns()
        members = Members(config)
        on_phase("start ranks", begin_ns, time.monotonic_ns())
        try:
            group = Group(
                0, config.tensor_parallel_size, members.folder, config.collective_timeout_s, members.meet, device
            )
            members.on_death(group.abort)
            runner = cls(*load(config, on_phase, _checking(members, on_layer), group))
            weights_bytes = group.each(runner.resolved.weights_bytes)
            members.forget_meeting()
        except RankLost as error:
            cause = members.cause()
            members.end()
            raise cause from error
        except BaseException:
            members.end()
            raise
        members.set_timeout(config.collective_timeout_s)
        if runner.decoder.ops.name == "triton":
            log.warning("ranks launch their kernels one by one and wait for each step: nothing is captured")
        runner.members, runner.group = members, group
        runner.resolved = msgspec.structs.replace(
            runner.resolved,
            num_threads_reason=reason,
            tensor_parallel_size=config.tensor_parallel_size,
            rank_weights_bytes=tuple(weights_bytes),
            rank_pids=(os.getpid(), *members.pids),
        )
        weakref.finalize(runner, members.end)
        return runner

    def run(self, plan: StepPlan) -> StepResult:
        if self.failure is not None:
            raise self.failure
        if self.on_hidden is not None:
            raise EngineError("hidden states are handed out by models of one rank alone", hint="tensor_parallel_size=1")
        try:
            plan = self._with_tokens(plan)
            self.members.send(encode(plan))
            result = super().run(plan)
            self.members.check()
            return msgspec.structs.replace(result, collective_ns=self.group.take_ns())
        except BaseException as error:  # an interrupt too: the others are in the middle of this step
            why = self._end(error)
            if why is error:
                raise
            raise why from error

    def _with_tokens(self, plan: StepPlan) -> StepPlan:
        """Where the plan could not know a token, the one that was chosen here: that is the one that counts."""
        if all(row.token_ids != (PENDING,) for row in plan.rows):
            return plan
        rows = (row if row.token_ids != (PENDING,) else self.slots[row.request_id].known(row) for row in plan.rows)
        known = tuple(new or row for new, row in zip(rows, plan.rows, strict=True))
        return msgspec.structs.replace(plan, rows=known)

    def sleeper(self, config: RunnerConfig) -> None:
        """Ranks do not sleep."""

    def watch(self, tell: Callable[[SplittimeError], None]) -> None:
        self.members.watch(tell)

    def close(self) -> None:
        """End the other ranks."""
        self.failure = self.failure or EngineError("this model has been closed")
        self.members.end()

    def _end(self, error: BaseException) -> BaseException:
        """End the other ranks; what to raise for `error`, and for every later step."""
        if isinstance(error, RankLost | OSError) or (isinstance(error, Exception) and self.members.has_dead):
            error = self.members.cause()
        why = error if isinstance(error, SplittimeError) else EngineError(f"a step was not finished: {error!r}")
        self.failure = why
        self.members.end()
        return error


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
    threads = asked or machine.num_cores()
    told = f"{threads} as asked" if asked is not None else f"{threads} cores"
    each = max(1, threads // count)
    return msgspec.structs.replace(config, num_threads=each), f"{told}, among {count} ranks"
