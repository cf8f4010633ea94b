"""How a step's tensors are computed, and what becomes of them: the seam between the runner, which knows requests, and
what carries the work out.

`HostExecution` computes while it is called: what it returns is there. `device.execution.DeviceExecution` puts the same
on a card's stream and replays captured steps. Both leave the batch's figures as functions that are called once the
step's last mark is reached, so what becomes of its rows is written once: `Launched` is a step under way, and the one
place where rows become results, however they were computed. A part of a model whose other parts lie with other ranks is
computed by the host's way on any device.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from splittime.core.step import RowResult, StepPlan, StepResult, TokenLogprob
from splittime.kernels.api import Ops
from splittime.models.decoder import Decoder
from splittime.runner import sampler
from splittime.runner.batch import Batch
from splittime.runner.config import Resolved
from splittime.runner.kv_store import CopyMarks, KvStore
from splittime.runner.marks import StreamMark, to_device
from splittime.runner.sampler import Allowed, LineLogprobs, describe_lines
from splittime.runner.slot import Slot

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

    def choose(
        self, slots: Sequence[Slot], counts: Sequence[int], raw: Tensor, logits: Tensor, allowed: Allowed
    ) -> Chosen:
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
        return Forward(decoder.forward(token_ids, positions, store, batch.attention, batch.adapter_uses))

    def finite(self, computed: Tensor) -> Flags:
        flags = self._ops.finite(computed)
        return lambda: flags

    def choose(
        self, slots: Sequence[Slot], counts: Sequence[int], raw: Tensor, logits: Tensor, allowed: Allowed
    ) -> Chosen:
        params = [slot.admitted.sampling for slot in slots]
        if raw is logits and self._ops.tells_finite:  # both in one reading of what may be 20 MB
            tokens, is_finite = sampler.choose_telling(logits, params, counts, self._ops, allowed)
            return Chosen(lambda: is_finite, lambda: tokens, describe_lines(raw, tokens, params))
        is_finite = self._ops.finite(raw)
        if all(is_finite):
            tokens = sampler.choose(logits, params, counts, self._ops, allowed)
        else:
            tokens = [0] * len(params)
            good = [line for line, is_fine in enumerate(is_finite) if is_fine]
            some = logits[torch.tensor(good, dtype=torch.int64)]
            picked = [params[line] for line in good], [counts[line] for line in good], self._ops
            may = {place: allowed[line] for place, line in enumerate(good) if line in allowed}
            for line, token in zip(good, sampler.choose(some, *picked, may) if good else (), strict=True):
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


NOT_FINITE = "what the model computes for this request is not finite"


@dataclass(slots=True)
class ComputedRows:
    """What a batch leaves, on the host, once `end` is reached.

    silent, sampling: rows of the batch, by whether they sample; is_silent_finite and chosen are of these, None where
        there are none.
    pooled: by request, of the prompts that ended and are pooled: float32 [hidden].
    previous: the end of the step before, where that may have left the device idle. padded_rows: None for a step that
        was not captured. enqueue_ns: what the host took to launch it on a device apart from it.
    """

    batch: Batch
    silent: list[int]
    sampling: list[int]
    begin: StreamMark
    forward: StreamMark
    is_silent_finite: Flags | None
    chosen: Chosen | None
    prompt_scores: dict[str, tuple[TokenLogprob, ...]]
    pooled: dict[str, Tensor]
    end: StreamMark
    padded_rows: int | None
    mask_ns: int = 0
    previous: StreamMark | None = None
    enqueue_ns: int = 0


@dataclass(slots=True)
class Launched:
    """kind: `Execution.kind`. results: by request id; before `fetch`, of rows that failed before the launch. computed:
    None if all rows did. moved: copies of blocks to host memory and back, before the rows. broken: the blocks of each
    request for which something was computed that is not finite. look_ahead_ns: how long the host then looked for what
    forms and bounds of the reasoning allow next."""

    plan: StepPlan
    kind: str
    block_size: int
    results: dict[str, RowResult] = field(default_factory=dict)
    computed: ComputedRows | None = None
    moved: CopyMarks | None = None
    broken: list[list[int]] = field(default_factory=list)
    is_fetched: bool = False
    look_ahead_ns: int = 0

    def fetch(self) -> None:
        """Wait for it, and let its requests know their tokens. Once; then it does nothing."""
        if self.is_fetched:
            return
        self.is_fetched = True
        if self.moved is not None:
            self.moved.end.wait()
        if self.computed is not None:
            self.computed.end.wait()
            self._settle(self.computed)

    def tell_drafts(self, slot: Slot, token_ids: tuple[int, ...]) -> None:
        """After `fetch`: what will follow the tokens that this request got, whatever it is told as."""
        request_id = slot.admitted.request_id
        self.results[request_id] = msgspec.structs.replace(self.results[request_id], draft_token_ids=token_ids)

    def result(self) -> StepResult:
        """After `fetch`."""
        rows = tuple(self.results[row.request_id] for row in self.plan.rows)
        found = self.computed
        if found is None:
            result = StepResult(self.plan.step_id, rows, execution=self.kind)
        else:
            result = StepResult(
                self.plan.step_id,
                rows,
                device_ns=found.forward.ns_since(found.begin if self.moved is None else self.moved.end),
                sample_ns=found.end.ns_since(found.forward) + self.look_ahead_ns,
                execution=self.kind if found.padded_rows is None else "captured",
                padded_rows=found.padded_rows or 0,
                gap_ns=0 if found.previous is None else max(0, found.begin.ns_since(found.previous)),
                enqueue_ns=found.enqueue_ns,
                mask_ns=found.mask_ns + self.look_ahead_ns,
            )
        return result if self.moved is None else self.moved.added_to(result)

    def _settle(self, found: ComputedRows) -> None:
        if found.is_silent_finite is not None:
            for index, is_fine in zip(found.silent, found.is_silent_finite(), strict=True):
                if is_fine:
                    self._succeed(found, found.batch.slots[index], (), ())
                else:
                    self._fail(found.batch.slots[index])
        if found.chosen is not None:
            self._settle_sampling(found, found.chosen)

    def _settle_sampling(self, found: ComputedRows, chosen: Chosen) -> None:
        tokens, is_finite, batch = chosen.tokens(), chosen.is_finite(), found.batch
        logprobs = {} if chosen.logprobs is None else chosen.logprobs.by_line(tokens)
        lines: Sequence[int] = range(len(tokens))
        if not all(is_finite):
            for index, is_fine in zip(found.sampling, is_finite, strict=True):
                if not is_fine:
                    self._fail(batch.slots[index])
            lines = [line for line in lines if is_finite[line]]
        for slot, accepted in _accepted(found, lines, tokens, self.block_size):
            scores = tuple(logprobs[line] for line in accepted if line in logprobs) if logprobs else ()
            self._succeed(found, slot, tuple([tokens[line] for line in accepted]), scores)

    def _succeed(
        self, found: ComputedRows, slot: Slot, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> None:
        request_id = slot.admitted.request_id
        if slot.error is not None:
            self.results[request_id] = RowResult(request_id, error=slot.error)
            return
        if slot.is_late:
            self.results[request_id] = RowResult(
                request_id, prompt_logprobs=found.prompt_scores.get(request_id, ()), is_late=True
            )
            return
        pooled = found.pooled.get(request_id)
        vector, scores = b"" if pooled is None else pooled.numpy().tobytes(), found.prompt_scores.get(request_id, ())
        self.results[request_id] = RowResult(request_id, tokens, logprobs, scores, pooled=vector)

    def _fail(self, slot: Slot) -> None:
        request_id = slot.admitted.request_id
        self.results[request_id] = RowResult(request_id, error=NOT_FINITE)
        self.broken.append(list(slot.block_ids))  # of which drafts may lose some


def _accepted(
    found: ComputedRows, lines: Sequence[int], tokens: list[int], block_size: int
) -> Iterator[tuple[Slot, list[int]]]:
    """Yields each request with those of its `lines` whose tokens are accepted, once it has learnt these tokens.

    lines: indices of `found.sampling`. That of a draft is accepted only if the draft was right."""
    batch, sampling, contexts = found.batch, found.sampling, found.batch.attention.context_lens
    if not batch.has_drafts:
        for line in lines:
            index = sampling[line]
            if not batch.slots[index].is_late:
                batch.slots[index].learn_sampled(contexts[index], tokens[line])
            yield batch.slots[index], [line]
        return
    accepted: dict[Slot, list[int]] = {}
    for line in sorted(lines, key=lambda line: contexts[sampling[line]]):
        index = sampling[line]
        slot = batch.slots[index]
        if slot.is_late:
            accepted.setdefault(slot, [])
        elif slot.knows(contexts[index] - 1, batch.rows[index].token_ids[-1]):  # else a draft was wrong
            slot.learn_sampled(contexts[index], tokens[line])
            accepted.setdefault(slot, []).append(line)
    for slot, num_rows in Counter(batch.slots).items():
        if num_rows > 1:
            slot.drop_blocks(block_size)
    yield from accepted.items()
