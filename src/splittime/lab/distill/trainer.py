"""One update after the other: windows, loss, gradients, optimiser.

Two worker threads each compute whole micro-batches on one core. On a small CPU this beats splitting every matrix
product over two cores, and a core that is busy with something else delays a micro-batch, not every operation.
Gradients are added in the order of the micro-batches, whichever is done first.
"""

import time
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from splittime.lab.distill.loss import LossParts, Objective
from splittime.lab.distill.optimizer import Optimizer, learning_rate_scale
from splittime.lab.distill.windows import Windows

MICRO_BATCH_TOKENS = 1024


class Budget(Protocol):
    @property
    def minutes(self) -> float | None: ...

    @property
    def tokens(self) -> int | None: ...


@dataclass
class State:
    """How far a run is; saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def progress(self, budget: Budget) -> float:
        """Share of the budget that is spent; the scarcer of the two budgets counts."""
        by_time = self.seconds / (budget.minutes * 60) if budget.minutes else 0.0
        by_tokens = self.tokens / budget.tokens if budget.tokens else 0.0
        return max(by_time, by_tokens)


@dataclass(frozen=True)
class Update:
    """What an update was: `norm` is that of the gradients before clipping, `scale` the factor on the learning rate."""

    parts: LossParts
    norm: float
    scale: float
    context: int
    progress: float


def make_workers(count: int) -> ThreadPoolExecutor:
    """Threads that each compute on one core."""
    return ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))


def gradients(
    model: nn.Module, objective: Objective, windows: Tensor, beside: Tensor | None
) -> tuple[LossParts, tuple[Tensor, ...]]:
    """Mean loss and its gradients over windows [count, context + 1]."""
    loss, parts = objective(model, windows, beside)
    return parts, torch.autograd.grad(loss, list(model.parameters()))


def accumulate(model: nn.Module, objective: Objective, windows: Tensor, workers: Executor) -> LossParts:
    """Leave the mean gradient over all windows in `.grad`, the micro-batches shared among the workers."""
    size = max(1, MICRO_BATCH_TOKENS // (windows.shape[1] - 1))
    cut = windows.split(size)
    whole = objective.before(windows)
    beside = [None] * len(cut) if whole is None else whole.split(size)
    results = list(workers.map(lambda pair: gradients(model, objective, *pair), zip(cut, beside, strict=True)))
    for weight, *parts in zip(model.parameters(), *(part for _, part in results), strict=True):
        weight.grad = torch.stack(parts).mean(0)
    return LossParts.mean([parts for parts, _ in results])


@dataclass
class Trainer:
    """What an update needs. At least one window for each worker goes into each."""

    model: nn.Module
    optimizer: Optimizer
    windows: Windows
    objective: Objective
    workers: Executor
    num_workers: int
    step_tokens: int

    def step(self, state: State, progress: float, context: int) -> Update:
        """One update, which `state` has counted afterwards."""
        began = time.monotonic()
        count = max(self.num_workers, self.step_tokens // context)
        # The window number is counted in tokens, so that a longer context goes on where the shorter one stopped.
        batch = self.windows.batch(context, state.tokens // context, count)
        parts = accumulate(self.model, self.objective, batch, self.workers)
        scale = learning_rate_scale(progress)
        norm = self.optimizer.step(scale, self.workers)
        state.step += 1
        state.tokens += count * context
        state.seconds += time.monotonic() - began
        return Update(parts, norm, scale, context, progress)
