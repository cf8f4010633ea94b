"""How a step's tensors are computed: the seam between the runner, which knows requests, and what carries the work out.

`HostExecution` computes while it is called: what it returns is there. `device.execution.DeviceExecution` puts the same
on a card's stream and replays captured steps. Both leave the batch's figures as functions that are called once the
step's last mark is reached, so what becomes of its rows is written once (`launched`). A part of a model whose other
parts lie with other ranks is computed by the host's way on any device.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from splittime.kernels.api import Ops
from splittime.models.decoder import Decoder
from splittime.runner import sampler
from splittime.runner.batch import Batch
from splittime.runner.config import Resolved
from splittime.runner.kv_store import KvStore
from splittime.runner.logprobs import LineLogprobs, describe_lines
from splittime.runner.marks import to_device
from splittime.runner.slots import Slot

Flags = Callable[[], list[bool]]  # both are to be called once the step's last mark is reached
Tokens = Callable[[], list[int]]


class Forward(NamedTuple):
    """hidden: [T, hidden]. logits: float32 [rows, vocab] where a captured step made them on the way, with the number of
    rows that it was padded with; both None for others."""

    hidden: Tensor
    logits: Tensor | None = None
    padded_rows: int | None = None


class Chosen(NamedTuple):
    """What was chosen from some lines of logits. tokens: any token for a line that is not finite."""

    is_finite: Flags
    tokens: Tokens
    logprobs: LineLogprobs | None


class Execution(Protocol):
    """kind: what `StepResult.execution` says of a step that was not captured. is_apart: it computes beside the host,
    which may launch the next step before it is done with this one."""

    kind: str
    is_apart: bool
    verifies_drafts: bool
    device: torch.device

    def forward(self, decoder: Decoder, store: KvStore, batch: Batch) -> Forward: ...

    def finite(self, computed: Tensor) -> Flags:
        """computed: [N, any]."""

    def choose(self, slots: Sequence[Slot], counts: Sequence[int], raw: Tensor, logits: Tensor) -> Chosen:
        """A token for each line of `logits`, float32 [N, vocab]; raw: the same before penalties, biases and masks.
        counts: of the outputs before."""

    def prepare(self, decoder: Decoder, store: KvStore, resolved: Resolved) -> tuple[int, ...]:
        """After the warm-up's steps: make what later steps need. Returns the sizes of captured steps."""

    def capture(
        self, decoder: Decoder, store: KvStore, resolved: Resolved, sizes: Sequence[int], keep_all: bool
    ) -> tuple[int, ...]:
        """Replay decode steps of so many rows, or fewer, from now on; without `keep_all` only of sizes that save time.
        Returns the sizes that are kept."""

    def drop_captured(self) -> tuple[int, ...]:
        """Forget captured steps, which hold addresses; returns their sizes."""

    def forget_weights(self) -> None:
        """Let go of what is kept of weights that are dropped."""


class HostExecution:
    """An `Execution` that is done when it returns."""

    kind = "host"
    is_apart = False
    verifies_drafts = True

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.device = ops.device

    def forward(self, decoder: Decoder, store: KvStore, batch: Batch) -> Forward:
        token_ids, positions = to_device(batch.token_ids, self.device), to_device(batch.positions, self.device)
        return Forward(decoder.forward(token_ids, positions, store, batch.attention))

    def finite(self, computed: Tensor) -> Flags:
        flags = self._ops.finite(computed)
        return lambda: flags

    def choose(self, slots: Sequence[Slot], counts: Sequence[int], raw: Tensor, logits: Tensor) -> Chosen:
        is_finite = self._ops.finite(raw)
        params = [slot.admitted.sampling for slot in slots]
        if all(is_finite):
            tokens = sampler.choose(logits, params, counts, self._ops)
        else:
            tokens = [0] * len(params)
            good = [line for line, is_fine in enumerate(is_finite) if is_fine]
            some = logits[torch.tensor(good, dtype=torch.int64)]
            picked = [params[line] for line in good], [counts[line] for line in good]
            for line, token in zip(good, sampler.choose(some, *picked, self._ops) if good else (), strict=True):
                tokens[line] = token
        return Chosen(lambda: is_finite, lambda: tokens, describe_lines(raw, tokens, params))

    def prepare(self, decoder: Decoder, store: KvStore, resolved: Resolved) -> tuple[int, ...]:
        return ()

    def capture(
        self, decoder: Decoder, store: KvStore, resolved: Resolved, sizes: Sequence[int], keep_all: bool
    ) -> tuple[int, ...]:
        return ()

    def drop_captured(self) -> tuple[int, ...]:
        return ()

    def forget_weights(self) -> None:
        pass
