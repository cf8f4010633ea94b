"""One update after the other: windows, loss, gradients, optimiser.

Two worker threads each compute whole micro-batches on one core. On a small CPU this beats splitting every matrix
product over two cores, and a core that is busy with something else delays a micro-batch, not every operation.
Gradients are added in the order of the micro-batches, whichever is done first.

How the weights are changed: Muon for the matrices of the layers, AdamW for the embedding, the head and the norms.

Owns the split of the weights between the two, and the learning-rate schedule. A Muon update is the momentum of the
gradient made near-orthogonal by a Newton-Schulz iteration, so that every direction of a matrix learns at one rate
(Jordan et al. 2024, Muon: an optimizer for hidden layers in neural networks; AdamW: Loshchilov and Hutter 2019,
arXiv:1711.05101).

`torch.optim.Muon` computes the same updates, but one matrix after the other and in bfloat16, which processors without
instructions for it emulate. On two cores it took 2.6 and 9 times as long, in two runs, for the layers of a small Llama.

Windows of a stream, longer ones later, say which tokens come when (`Windows`): the windows depend on the stream,
the seed and the number of tokens that were seen, and on nothing else, so a run that goes on after a kill sees what it
would have seen (`tests/lab/distill/test_distill_resume.py`).
"""

import math
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from splittime.core.errors import ConfigError
from splittime.lab.distill.loss import LossParts, Objective

MICRO_BATCH_TOKENS = 1024
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ADAM_BETAS = (0.9, 0.95)
MUON_MOMENTUM = 0.95
WARM_UP, FLOOR = 0.03, 0.01  # of the learning rate: shares of the run, and of its peak
LAYERS = ("model.layers.", "model.mtp_layers.")
# (share of the budget from which it holds, context in tokens): short windows are cheapest to learn the syntax from. The
# last stage teaches the positions up to the model's limit, and starts while the learning rate is high enough to.
STAGES = ((0.0, 256), (0.3, 512), (0.6, 2048))
LONGEST = STAGES[-1][1]


def context_at(progress: float, limit: int = LONGEST) -> int:
    """Context length of the stage that `progress` is in, at most `limit`."""
    return min(limit, max(context for start, context in STAGES if progress >= start))


def refuse_short(num_tokens: int, context: int) -> None:
    """Raises `ConfigError` where a text is too short for one pass over windows of this length from any offset."""
    limit = 2 * context + 1
    if num_tokens < limit:
        said = f"the text has {num_tokens:,} tokens, too few for windows of {context:,}"
        raise ConfigError(said, param="text", value=num_tokens, limit=limit, hint="give more text")


class Windows:
    """Windows of context + 1 tokens, each token once per pass, from a fresh offset and in a fresh order every pass.

    A pass is over windows of one context; the stages of a run draw their orders independently of each other.
    """

    def __init__(self, tokens: np.ndarray, seed: int) -> None:
        self.tokens, self.seed = tokens, seed
        self._key: tuple[int, int] | None = None
        self._starts = np.zeros(0, dtype=np.int64)

    def starts(self, context: int, epoch: int) -> np.ndarray:
        """Returns where the windows of one pass begin."""
        random = np.random.default_rng((self.seed, context, epoch))
        offset = int(random.integers(context))
        count = (len(self.tokens) - offset - 1) // context
        return random.permutation(count) * context + offset

    def batch(self, context: int, first: int, count: int) -> Tensor:
        """Windows number `first` and on, [count, context + 1]; the numbering runs on over the passes."""
        refuse_short(len(self.tokens), context)
        per_pass = (len(self.tokens) - context - 1) // context
        rows = []
        for number in range(first, first + count):
            start = self._starts_of(context, number // per_pass)[number % per_pass]
            rows.append(self.tokens[start : start + context + 1].astype(np.int64))
        return torch.from_numpy(np.stack(rows))

    def _starts_of(self, context: int, epoch: int) -> np.ndarray:
        """`starts`, remembered for the pass in use."""
        if self._key != (context, epoch):
            self._key, self._starts = (context, epoch), self.starts(context, epoch)
        return self._starts


def learning_rate_scale(progress: float) -> float:
    """Factor on the peak learning rate at `progress` in [0, 1]: linear warm-up, then a cosine down to `FLOOR`."""
    if progress < WARM_UP:
        return max(progress / WARM_UP, 0.01)
    share = min((progress - WARM_UP) / (1 - WARM_UP), 1.0)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * share))


def orthogonalise(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Nearly the closest orthogonal matrix to each of [count, rows, columns]."""
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonalise(matrices.mT, iterations).mT
    a, b, c = NEWTON_SCHULZ
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon:
    """Muon over matrices; those of one shape are updated together, and the shapes in parallel."""

    def __init__(self, weights: Iterable[Tensor], learning_rate: float, weight_decay: float) -> None:
        self.groups: dict[tuple[int, ...], list[Tensor]] = {}
        for weight in weights:
            self.groups.setdefault(tuple(weight.shape), []).append(weight)
        self.momentum = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}
        self.learning_rate, self.weight_decay = learning_rate, weight_decay

    @torch.no_grad()
    def step_group(self, shape: tuple[int, ...], scale: float) -> None:
        """Update the matrices of one shape."""
        gradient = torch.stack([weight.grad for weight in self.groups[shape] if weight.grad is not None])
        momentum = self.momentum[shape].mul_(MUON_MOMENTUM).add_(gradient)
        update = orthogonalise(gradient.add_(momentum, alpha=MUON_MOMENTUM))
        rate = self.learning_rate * scale
        for weight, change in zip(self.groups[shape], update, strict=True):
            weight.mul_(1 - rate * self.weight_decay)
            weight.add_(change, alpha=-rate * max(1.0, shape[0] / shape[1]) ** 0.5)

    def step(self, scale: float, workers: Executor) -> None:
        """Update every matrix, at `scale` times the peak learning rate."""
        list(workers.map(lambda shape: self.step_group(shape, scale), self.groups))


class Optimizer:
    """Both optimisers behind one step; `kind` is `muon` or, for comparison, `adamw` for every weight."""

    def __init__(self, model: nn.Module, kind: str, matrix_rate: float, other_rate: float) -> None:
        weights = dict(model.named_parameters())
        muon_names = {n for n, w in weights.items() if kind == "muon" and w.ndim == 2 and n.startswith(LAYERS)}
        self.weights = list(weights.values())
        self.muon = Muon((weights[name] for name in muon_names_in_order(weights, muon_names)), matrix_rate, 0.05)
        others = [weight for name, weight in weights.items() if name not in muon_names]
        decay = [{"params": [w for w in others if w.ndim == 2], "weight_decay": 0.1}]
        no_decay = [{"params": [w for w in others if w.ndim < 2], "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(decay + no_decay, lr=other_rate, betas=ADAM_BETAS, eps=1e-10)
        self.other_rate = other_rate

    def step(self, scale: float, workers: Executor, clip: float = 1.0) -> float:
        """Clip the gradients, update every weight, and return the gradients' norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self.weights, clip)
        for group in self.adam.param_groups:
            group["lr"] = self.other_rate * scale
        self.adam.step()
        self.muon.step(scale, workers)
        return float(norm)

    def state_dict(self) -> dict[str, object]:
        """Returns what a resumed run needs."""
        return {"adam": self.adam.state_dict(), "momentum": self.muon.momentum}

    def load_state_dict(self, state: dict) -> None:
        """Take up the state of a stopped run."""
        self.adam.load_state_dict(state["adam"])
        self.muon.momentum = state["momentum"]


def muon_names_in_order(weights: Mapping[str, Tensor], chosen: set[str]) -> list[str]:
    """The chosen names in the model's order, so that the saved momentum lines up when a run resumes."""
    return [name for name in weights if name in chosen]


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
