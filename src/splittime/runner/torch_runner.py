"""The runner that computes with torch: turns each `StepPlan` into a `StepResult`. `compose` makes it of its parts.

    launch   forget and learn requests -> batch -> copy blocks -> forward (device_ns) -> choose tokens (sample_ns)
    collect  wait for it -> its rows' results (`execution.Launched`)

Its parts: `slots`, what it remembers of requests; `store`, the KV cache; `execution`, which computes on the host's own
time or on a card's stream; `ranks.members`, where other ranks have parts of the model too.

Only rows that sample get logits. A row fails alone, with `RowResult.error`: when its request holds ids that the model
does not have, or when what the model computes for it is not finite (what it left in its blocks is then scrubbed, so
that nobody inherits it).
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from splittime.core.errors import EngineError, SplittimeError
from splittime.core.facts import TokenCost
from splittime.core.sampling import AHEAD, LOGITS
from splittime.core.step import Row, RowResult, StepPlan, StepResult, TokenLogprob
from splittime.kernels.api import WeightScheme
from splittime.models.decoder import Decoder
from splittime.runner import batch as batches
from splittime.runner import penalties, sampler
from splittime.runner.batch import Batch, Slots
from splittime.runner.config import Resolved, RunnerConfig
from splittime.runner.execution import Chosen, ComputedRows, Execution, Launched
from splittime.runner.kv_store import KvStore
from splittime.runner.marks import StreamMark, to_device, to_host
from splittime.runner.penalties import has_bounds, hold_to_bounds, must_come
from splittime.runner.ranks.members import Lead
from splittime.runner.slot import Slot
from splittime.runner.warm_up import warm_up_plans

if TYPE_CHECKING:  # its library is not needed where no answer is held to a form
    from splittime.runner.grammars import FormMasks

NO_TOKEN = "the step before gave this request no token"
OnHidden = Callable[[Batch, Tensor], None]


@dataclass(eq=False)
class TorchRunner:
    """Implements `core.step.Runner` and `core.step.AsyncRunner`; of the latter there is something to gain where
    `execution.is_apart`, else a step is done when `launch` returns.

    decoder: set by who puts the runner to sleep (`runner.sleep`), and by nobody else.
    on_hidden: told of each step's batch and hidden states [T, hidden], of which `decoder.logits` makes the logits of
        every position; for those who measure a model's predictions (`splittime quality`). None: nobody.
    scheme: that most bytes of the layers' weights were found in.
    """

    config: RunnerConfig
    decoder: Decoder
    store: KvStore
    resolved: Resolved
    cost: TokenCost
    scheme: WeightScheme
    execution: Execution
    lead: Lead | None = None
    on_hidden: OnHidden | None = None

    def __post_init__(self) -> None:
        self.slots = Slots(self.resolved.max_model_len, self.resolved.vocab_size)
        self._launched: deque[Launched] = deque()
        self._drafts_forced = self.verifies_drafts and not self.config.drafts_obstacles(self.decoder.ops.name)
        self._last_end: StreamMark | None = None  # of the step launched last, where steps run apart from the host

    @property
    def verifies_drafts(self) -> bool:
        """Rows may bring drafts. Otherwise one that does is refused with an `EngineError`. A state cannot be cut back
        to the tokens that were accepted."""
        return self.execution.verifies_drafts and self.lead is None and not self.store.states

    def watch(self, tell: Callable[[SplittimeError], None]) -> None:
        """Calls `tell`, in another thread, if the runner fails for good between two steps. One process never does."""
        if self.lead is not None:
            self.lead.watch(tell)

    def close(self) -> None:
        """End the other ranks, if there are any: nothing can be run afterwards."""
        if self.lead is not None:
            self.lead.close()

    def warm_up(self) -> None:
        """Run a few steps over the empty cache, so that the first request does not pay for first calls."""
        for plan in warm_up_plans(self.resolved):
            self.run(plan)
        self._note_captured(self.execution.prepare(self.decoder, self.store, self.resolved))

    def capture(self, sizes: Sequence[int], keep_all: bool = True) -> None:
        """Replay decode steps of so many rows, or fewer, from now on. keep_all: also those that save nothing."""
        self._note_captured(self.execution.capture(self.decoder, self.store, self.resolved, sizes, keep_all))

    def _note_captured(self, sizes: tuple[int, ...]) -> None:
        self.resolved = msgspec.structs.replace(self.resolved, graph_sizes=sizes)

    # ---- a step

    def run(self, plan: StepPlan) -> StepResult:
        if self.lead is None:
            return self._run_here(plan)
        if self.on_hidden is not None:
            raise EngineError("hidden states are handed out by models of one rank alone", hint="tensor_parallel_size=1")
        return self.lead.run(plan, self.slots, self._run_here)

    def _run_here(self, plan: StepPlan) -> StepResult:
        self.launch(plan)
        return self.collect()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        self.slots.update(plan.released, plan.admitted)
        step = Launched(plan, self.execution.kind, self.store.block_size)
        rows = self._servable(plan, step.results)
        batch = self._batch(rows) if rows else None
        began_ns, begin = time.monotonic_ns(), StreamMark(self.execution.device)
        step.moved = self.store.move(plan)
        if batch is not None:
            step.computed = self._compute(batch, begin)
        if self.execution.is_apart:
            self._note_launch(step, began_ns)
        else:
            step.fetch()
            self._look_ahead(step)
        self._launched.append(step)  # not if that failed: nobody would collect it

    def collect(self) -> StepResult:
        step = self._launched.popleft()
        if step.broken or not step.is_fetched:
            self._finish(step)
        return step.result()

    @torch.inference_mode()
    def _finish(self, step: Launched) -> None:
        step.fetch()
        for block_ids in step.broken:  # whoever gets these blocks next must not find what it left there
            self.store.scrub(block_ids)

    def _look_ahead(self, step: Launched) -> None:
        """Tell what must follow the tokens that came, and start to look what may, where answers are held to forms or to
        bounds of their reasoning."""
        if step.computed is None:
            return
        batch, masks = step.computed.batch, self.slots.masks
        if masks is None and not has_bounds(batch.slots):
            return
        begin_ns = time.monotonic_ns()
        slots = dict.fromkeys([batch.slots[index] for index in step.computed.sampling])
        held = [slot for slot in slots if slot.grammar is not None and slot.goes_on and not slot.is_late]
        forced = masks.look_ahead(held, self._drafts_forced) if masks is not None and held else ()
        told = dict(zip(held, forced, strict=True))
        for slot in slots:
            if slot.reasoning_bound is not None and slot.goes_on and not slot.is_late:
                told[slot] = must_come(slot, slot.num_known - slot.prompt_len) or told.get(slot, ())
        for slot, token_ids in told.items():
            if token_ids and self._drafts_forced:
                step.tell_drafts(slot, token_ids)
        step.look_ahead_ns = time.monotonic_ns() - begin_ns

    def _batch(self, rows: list[Row]) -> Batch:
        sizes = self.store.block_size, self.store.zero_block
        return batches.build(rows, self.slots, *sizes, self.verifies_drafts, bool(self.store.states))

    def _note_launch(self, step: Launched, began_ns: int) -> None:
        if step.computed is not None:
            step.computed.previous, self._last_end = self._last_end, step.computed.end
            step.computed.enqueue_ns = time.monotonic_ns() - began_ns
        elif step.moved is not None:
            self._last_end = step.moved.end

    def _servable(self, plan: StepPlan, results: dict[str, RowResult]) -> list[Row]:
        """The plan's rows that can be computed, with the tokens that the plan could not know and the host does by now.
        The others' errors go into `results`."""
        rows, sampled = [], self._being_sampled()
        for row in plan.rows:
            slot = self.slots[row.request_id]
            known = slot.known(row) or (row if row.request_id in sampled else None)
            if slot.error is None and known is not None:
                rows.append(known)
            else:
                results[row.request_id] = RowResult(row.request_id, error=slot.error or NO_TOKEN)
        return rows

    def _being_sampled(self) -> set[str]:
        """The requests whose tokens come of the step before, where that was not fetched."""
        last = self._launched[-1] if self._launched else None
        return set() if last is None or last.is_fetched else {row.request_id for row in last.plan.rows}

    def _compute(self, batch: Batch, begin: StreamMark) -> ComputedRows:
        sampling = [index for index, row in enumerate(batch.rows) if row.num_samples]
        masks = self._masks_of(batch)
        if masks is not None and not self.execution.is_apart:  # else the host knows no last tokens yet
            masks.begin(*_sampled(batch, sampling))
        made = self.execution.forward(self.decoder, self.store, batch)
        if self.on_hidden is not None:
            self.on_hidden(batch, made.hidden)
        silent = [index for index, row in enumerate(batch.rows) if not row.num_samples]
        raw = None
        if sampling:  # a captured step has made logits of rows that only fill the cache, too
            raw = None if made.logits is None else batch.last_of(made.logits, sampling)
            raw = self.decoder.logits(batch.last_of(made.hidden, sampling)) if raw is None else raw
        return ComputedRows(
            batch,
            silent,
            sampling,
            begin,
            forward=StreamMark(self.execution.device),  # what follows is in the order in which it is computed
            is_silent_finite=self.execution.finite(batch.last_of(made.hidden, silent)) if silent else None,
            chosen=None if raw is None else self._choose(batch, sampling, raw, masks),
            prompt_scores={
                slot.admitted.request_id: self._prompt_scores(batch, index, made.hidden)
                for index, slot in enumerate(batch.slots)
                if slot.admitted.sampling.prompt_logprobs is not None and batch.rows[index].start < slot.prompt_len
            },
            pooled=_pool(self.decoder, batch, made.hidden),
            end=StreamMark(self.execution.device),
            padded_rows=made.padded_rows,
            mask_ns=0 if masks is None else masks.take_waited_ns(),
        )

    def _masks_of(self, batch: Batch) -> "FormMasks | None":
        """Returns the masks where an answer of the batch is held to a form; elsewhere nobody takes what they found
        ahead, for answers that may have ended, and they forget it."""
        masks = self.slots.masks
        if masks is None or any(slot.grammar is not None for slot in batch.slots):
            return masks
        masks.forget()
        return None

    def _choose(self, batch: Batch, sampling: list[int], raw: Tensor, masks: "FormMasks | None") -> Chosen:
        """raw: float32 [len(sampling), vocab], the logits of these rows of the batch. masks: those of its forms."""
        slots, counts = _sampled(batch, sampling)
        if self._launched and penalties.changed(slots, counts):  # which need the tokens of the steps before
            for step in self._launched:
                step.fetch()
        allowed = sampler.EVERYTHING if masks is None else masks.take(slots, counts)
        allowed = hold_to_bounds(slots, counts, self.resolved.vocab_size, allowed)
        logits = penalties.adjusted(raw, slots, counts, allowed)
        return self.execution.choose(slots, counts, raw, logits, allowed)

    def _prompt_scores(self, batch: Batch, index: int, hidden: Tensor) -> tuple[TokenLogprob, ...]:
        row, slot = batch.rows[index], batch.slots[index]
        end = min(row.start + len(row.token_ids) + 1, slot.prompt_len)
        following = slot.tokens[row.start + 1 : end].tolist()
        begin = batch.attention.query_begins[index]
        wanted = hidden[begin : begin + len(following)]
        num_top = slot.admitted.sampling.prompt_logprobs or 0
        vocab_size = self.resolved.vocab_size
        return tuple(sampler.score_prompt(self.decoder.logits, wanted, following, num_top, vocab_size))


def _sampled(batch: Batch, sampling: list[int]) -> tuple[list[Slot], list[int]]:
    """Returns the requests of these rows of the batch, and how many outputs each has before what the row samples."""
    slots, contexts = [batch.slots[index] for index in sampling], batch.attention.context_lens
    return slots, [contexts[index] - slot.prompt_len for index, slot in zip(sampling, slots, strict=True)]


# ---- what is answered of a prompt behind which no token is wanted (`sampling.pooling`)
# An embedding is the last layer's normed output of one token, or the mean of all. Of a chunk the slot keeps the first
# token's output (`cls`), or the sum so far (`mean`) in float64, so that the mean is the same, but for the last bit,
# however the prompt was cut. Of `logits` it is what the model says of some tokens behind the prompt, in their order.


def _pool(decoder: Decoder, batch: Batch, hidden: Tensor) -> dict[str, Tensor]:
    """Returns what the prompts that end in this batch are answered with, by request: float32, of the host, complete
    when a mark after this is reached. hidden: [T, hidden], the last layer's output, not normed."""
    wanted = [index for index, slot in enumerate(batch.slots) if slot.admitted.sampling.pooling not in ("", AHEAD)]
    if not wanted:
        return {}
    scored = [index for index in wanted if _kind(batch, index) == LOGITS]
    embedded = [index for index in wanted if _kind(batch, index) != LOGITS]
    made = _embeddings(decoder, batch, hidden, embedded) if embedded else {}
    ended = [index for index in scored if _ends(batch, index)]
    return made | _logits(decoder, batch, hidden, ended) if ended else made


def _kind(batch: Batch, index: int) -> str:
    return batch.slots[index].admitted.sampling.pooling


def _ends(batch: Batch, index: int) -> bool:
    return batch.attention.context_lens[index] == batch.slots[index].prompt_len


def _logits(decoder: Decoder, batch: Batch, hidden: Tensor, rows: list[int]) -> dict[str, Tensor]:
    lines, found = decoder.logits(batch.last_of(hidden, rows)), {}
    for line, index in zip(lines, rows, strict=True):
        admitted = batch.slots[index].admitted
        token_ids = to_device(torch.tensor(admitted.sampling.allowed_token_ids), line.device)
        found[admitted.request_id] = to_host(line[token_ids])
    return found


def _embeddings(decoder: Decoder, batch: Batch, hidden: Tensor, rows: list[int]) -> dict[str, Tensor]:
    spans = [_span(batch, index) for index in rows]
    places = to_device(torch.cat([torch.arange(begin, end) for begin, end in spans]), hidden.device)
    parts = decoder.normed(hidden[places]).split([end - begin for begin, end in spans])
    for index, part in zip(rows, parts, strict=True):
        _take(batch.slots[index], part)
    ended = [batch.slots[index] for index in rows if _ends(batch, index)]
    return {slot.admitted.request_id: to_host(_embedding(slot)) for slot in ended}


def _span(batch: Batch, index: int) -> tuple[int, int]:
    """Returns which of the batch's tokens a row's embedding needs, if any: [begin, end)."""
    begin, end = batch.attention.query_begins[index : index + 2]
    kind = _kind(batch, index)
    if kind == "cls":
        return begin, begin + (batch.rows[index].start == 0)
    if kind == "last":
        return end - _ends(batch, index), end
    return begin, end


def _take(slot: Slot, part: Tensor) -> None:
    """part: [tokens, hidden], of a row; of `last` and `cls` of one token, or none."""
    if not len(part):
        return
    total = part.double().sum(0)
    slot.pooled = total if slot.pooled is None else slot.pooled + total


def _embedding(slot: Slot) -> Tensor:
    assert slot.pooled is not None, "a prompt ended without any of its tokens"
    count = slot.prompt_len if slot.admitted.sampling.pooling == "mean" else 1
    return (slot.pooled / count).float()
