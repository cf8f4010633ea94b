"""What a student is trained to make small.

With the teacher's distribution p, the student's q, both over the whole vocabulary, at temperature T:

    task    -log q(next token of the text), at temperature 1
    kl      T^2 KL(p_T || q_T), p_T = softmax(logits / T): forward, so that the student covers what the teacher says;
            T^2 keeps its gradient's size the same for all T (Hinton, Vinyals and Dean 2015, arXiv:1503.02531)
    loss    alpha kl + (1 - alpha) task

all of them means over tokens, in nats. On the teacher's own outputs the same loss is, by its task part, the
sequence-level distillation of Kim and Rush (2016, arXiv:1606.07947), with samples in place of their beam.

Logits are made for a few rows at a time and made again for the backward pass, so that a large vocabulary takes
`CHUNK_ELEMENTS` of memory rather than a whole window's. `tests/lab/distill/test_distill_loss.py` compares with
torch's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from splittime.lab.distill.llama import Llama

CHUNK_ELEMENTS = 1 << 23


@dataclass(frozen=True)
class LossParts:
    """Means in nats per token; `kl` is 0 where there is no teacher."""

    loss: float
    task: float
    kl: float

    @staticmethod
    def mean(parts: "list[LossParts]") -> "LossParts":
        count = len(parts)
        return LossParts(*(sum(getattr(one, name) for one in parts) / count for name in ("loss", "task", "kl")))


class Objective(Protocol):
    def before(self, windows: Tensor) -> Tensor | None:
        """Returns what is computed once for the windows [count, context + 1] of an update; the first dimension is
        theirs."""

    def __call__(self, model: Any, windows: Tensor, beside: Tensor | None) -> tuple[Tensor, LossParts]:
        """The loss over some of them with their share of what `before` gave; from any thread."""


class Teaching(Protocol):
    """A teacher, see `distill.teacher`."""

    def hidden(self, tokens: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class TextLoss:
    """Plain training: the text's own tokens."""

    def before(self, windows: Tensor) -> None:
        return None

    def __call__(self, model: Llama, windows: Tensor, beside: Tensor | None) -> tuple[Tensor, LossParts]:
        hidden, targets = model.hidden(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()

        def of(rows: slice) -> Tensor:
            return F.cross_entropy(model.logits(hidden[rows]), targets[rows])[None]

        loss = over_rows(model.shape.vocab_size, of, hidden)
        return loss[0], LossParts(loss[0].item(), loss[0].item(), 0.0)


class Distillation:
    """The teacher's distribution and the text's own tokens."""

    def __init__(self, teacher: Teaching, alpha: float, temperature: float) -> None:
        self.teacher, self.alpha, self.temperature = teacher, alpha, temperature

    def before(self, windows: Tensor) -> Tensor:
        """The teacher's hidden states [count, context, hidden]: its logits would be larger by far."""
        return self.teacher.hidden(windows[:, :-1])

    def __call__(self, model: Llama, windows: Tensor, beside: Tensor | None) -> tuple[Tensor, LossParts]:
        assert beside is not None
        hidden, targets = model.hidden(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()
        theirs = beside.flatten(0, 1)

        def of(rows: slice) -> Tensor:
            ours, taught = model.logits(hidden[rows]), self.teacher.logits(theirs[rows])
            return task_and_divergence(ours, taught, targets[rows], self.temperature)

        task, kl = over_rows(model.shape.vocab_size, of, hidden)
        loss = self.alpha * kl + (1 - self.alpha) * task
        return loss, LossParts(loss.item(), task.item(), kl.item())


def task_and_divergence(logits: Tensor, teacher_logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """[2]: task and kl, means over the rows of logits [n, vocab]."""
    logprobs = F.log_softmax(logits, dim=-1)
    softened = logprobs if temperature == 1 else F.log_softmax(logits / temperature, dim=-1)
    teacher = F.log_softmax(teacher_logits / temperature, dim=-1)
    kl = (teacher.exp() * (teacher - softened)).sum() / len(logits)
    return torch.stack((F.nll_loss(logprobs, targets), kl * temperature**2))


def over_rows(vocab_size: int, mean_of: Callable[[slice], Tensor], hidden: Tensor) -> Tensor:
    """The mean over all rows of `hidden` of what `mean_of` says of some; in chunks where the vocabulary is large."""
    count, size = len(hidden), max(1, CHUNK_ELEMENTS // vocab_size)
    if count <= size:
        return mean_of(slice(0, count))
    chunks = [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]
    weighted = [
        checkpoint(mean_of, rows, use_reentrant=False, preserve_rng_state=False) * ((rows.stop - rows.start) / count)
        for rows in chunks
    ]
    return torch.stack(weighted).sum(0)
