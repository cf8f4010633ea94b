"""The runner of a card. `launch` puts a step on the stream, `collect` waits for it; the engine plans meanwhile.

    launch = forget and learn requests -> batch -> copy blocks -> forward -> choose tokens -> copies to the host

Tokens stay on the device: each slot's latest lies in `latest`, where the next step's rows find it (`PENDING`), and the
host learns it when it collects. Steps run in the order of the stream, so a block that is given to another request, or
a place in `latest`, may be written by the step before without harm.

What does wait, because it is worked out on the host: penalties, biases and masks on logits, which need the tokens of
the step before, and prompt log-probabilities. A step with such a row is one step after the other.
"""

import time
from collections import deque
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from splittime.core.plan import PENDING, Row, RowResult, StepPlan, StepResult
from splittime.kernels.triton.logprobs import Logprobs, describe
from splittime.kernels.triton.ops import TritonOps
from splittime.models.decoder import Decoder
from splittime.models.layers import MixtureOfExperts
from splittime.runner import batch as batches
from splittime.runner import machine, penalties, sampler
from splittime.runner.batch import Batch
from splittime.runner.ceilings import Gauge
from splittime.runner.config import Resolved, RunnerConfig
from splittime.runner.cost import Cost
from splittime.runner.device import first_calls
from splittime.runner.device.ceilings import CardGauge
from splittime.runner.device.graphs import DecodeGraphs
from splittime.runner.device.launched import Launched, Outcome
from splittime.runner.device.marks import Mark, to_device, to_host
from splittime.runner.device.sizes import candidates
from splittime.runner.kv_store import KvStore
from splittime.runner.slots import Slot
from splittime.runner.torch_runner import NO_TOKEN, TorchRunner

MAX_SLOTS = 1 << 16


class DeviceRunner(TorchRunner):
    """A `TorchRunner` over `TritonOps`, and a `core.plan.AsyncRunner`. Made by `TorchRunner.load`.

    enforce_eager: capture nothing.
    """

    enforce_eager = False

    def __init__(self, decoder: Decoder, store: KvStore, resolved: Resolved, cost: Cost) -> None:
        super().__init__(decoder, store, resolved, cost)
        assert isinstance(decoder.ops, TritonOps)
        self.ops = decoder.ops
        self.latest = torch.zeros(MAX_SLOTS, dtype=torch.int64, device=self.ops.device)
        self.graphs: DecodeGraphs | None = None
        self._launched: deque[Launched] = deque()
        self._last_end: Mark | None = None  # of the step launched last

    def ahead(self, config: RunnerConfig) -> "DeviceRunner | None":  # type: ignore[override]
        return self if config.async_scheduling else None

    def gauge(self, config: RunnerConfig) -> Gauge:
        if not self.latest.is_cuda:
            return super().gauge(config)
        scheme = machine.choose_weights(config, self.resolved.dtype, self.resolved.kernels).layers
        folder = machine.packed_cache_folder(config.packed_cache)
        return CardGauge(self.ops, scheme, self.resolved.num_threads, folder)

    def warm_up(self) -> None:
        """And on a card compile what steps of other sizes will need, and capture decode steps."""
        super().warm_up()
        if self.latest.is_cuda:
            first_calls.make(self.decoder, self.store, self.resolved)
        if self.latest.is_cuda and not self.enforce_eager and not self.waits_for_experts:
            self.capture(candidates(self.resolved.max_num_seqs), keep_all=False)

    def drop_weights(self) -> None:
        super().drop_weights()
        self.ops.forget_experts()

    def drop_captured(self) -> tuple[int, ...]:
        graphs, self.graphs = self.graphs, None
        return () if graphs is None else graphs.sizes

    @property
    def waits_for_experts(self) -> bool:
        """There is no grouped product for some layer's experts: the host looks which were chosen."""
        return any(isinstance(getattr(layer, "mlp", None), MixtureOfExperts) for layer in self.decoder.layers)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], keep_all: bool = True) -> None:
        """Steps of so many decode rows, or fewer, are replayed from now on. keep_all: also those that save nothing."""
        graphs = DecodeGraphs(self.decoder, self.store, self.latest, self.resolved.max_model_len)
        graphs.capture(sizes)
        if not keep_all:
            graphs.drop_needless()
        self.graphs = graphs
        self.resolved = msgspec.structs.replace(self.resolved, graph_sizes=graphs.sizes)

    def run(self, plan: StepPlan) -> StepResult:
        self.launch(plan)
        return self.collect()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        self.slots.update(plan.released, plan.admitted)
        step = Launched(plan, {})
        rows = self._servable(plan, step.results)
        batch = batches.build(rows, self.slots, self.store.shape.block_size, self.store.zero_block) if rows else None
        began_ns, begin = time.monotonic_ns(), Mark(self.ops.device)
        step.moved = self.store.move(plan)
        if batch is not None:
            step.outcome = self._begin(batch, step, begin)
            step.outcome.enqueue_ns = time.monotonic_ns() - began_ns
            self._last_end = step.outcome.end
        elif step.moved is not None:
            self._last_end = step.moved.end
        self._launched.append(step)  # not if that failed: nobody would collect it

    @torch.inference_mode()
    def collect(self) -> StepResult:
        step = self._launched.popleft()
        step.fetch()
        for index in step.broken:  # whoever gets these blocks next must not find what it left there
            assert step.outcome is not None
            self.store.scrub(step.outcome.batch.slots[index].block_ids)
        return step.result()

    def _servable(self, plan: StepPlan, results: dict[str, RowResult]) -> list[Row]:
        """Its rows, but for those that cannot be computed, whose results are told."""
        rows, sampled = [], self._being_sampled()
        for row in plan.rows:
            slot = self.slots[row.request_id]
            error = slot.error
            if row.token_ids == (PENDING,) and row.start >= slot.num_known and row.request_id not in sampled:
                error = error or NO_TOKEN
            if error is None:
                rows.append(row)
            else:
                results[row.request_id] = RowResult(row.request_id, error=error)
        return rows

    def _being_sampled(self) -> set[str]:
        """The requests whose tokens come of the step before, where that was not fetched."""
        last = self._launched[-1] if self._launched else None
        return set() if last is None or last.is_fetched else {row.request_id for row in last.plan.rows}

    def _begin(self, batch: Batch, step: Launched, begin: Mark) -> Outcome:
        hidden, raw, padded_rows = self._computed(batch)
        if self.on_hidden is not None:
            self.on_hidden(batch, hidden)
        silent = [index for index, row in enumerate(batch.rows) if not row.samples]
        sampling = [index for index, row in enumerate(batch.rows) if row.samples]
        is_silent_finite = self._host_finite(batch.last_of(hidden, silent)) if silent else None
        if not sampling:
            raw = None  # a captured step has made logits of rows that only fill the cache
        elif raw is None:
            raw = self.decoder.logits(batch.last_of(hidden, sampling))
        else:
            raw = batch.last_of(raw, sampling)
        forward = Mark(self.ops.device)
        marks = (self._last_end, begin, forward, forward)
        outcome = Outcome(batch, silent, sampling, *marks, is_silent_finite, None, None, padded_rows)
        if raw is not None:
            self._choose_tokens(outcome, raw)
        self._score_prompts(batch, hidden, step)
        outcome.end = Mark(self.ops.device)
        return outcome

    def _computed(self, batch: Batch) -> tuple[Tensor, Tensor | None, int | None]:
        """Hidden states [T, hidden]; and where a captured step made them, logits float32 [rows, vocab], made on the
        way, and the number of rows that it was padded with."""
        if self.graphs is not None and self.graphs.has_room_for(batch):
            return self.graphs.run(batch)
        return self._forward(batch), None, None

    def _forward(self, batch: Batch) -> Tensor:
        """[T, hidden]."""
        device, store = self.ops.device, self.store
        token_ids, positions = to_device(batch.token_ids, device), to_device(batch.positions, device)
        if (batch.token_ids == PENDING).any():
            places = torch.tensor([slot.place for slot in batch.slots])
            lengths = torch.tensor(batch.attention.query_begins).diff()
            known = self.latest.index_select(0, to_device(places.repeat_interleave(lengths), device))
            token_ids = torch.where(token_ids == PENDING, known, token_ids)
        return self.decoder.forward(token_ids, positions, store.layers, batch.attention, store.shape)

    def _choose_tokens(self, outcome: Outcome, raw: Tensor) -> None:
        """raw: float32 [len(outcome.sampling), vocab]."""
        batch, device = outcome.batch, self.ops.device
        slots = [batch.slots[index] for index in outcome.sampling]
        counts = [batch.attention.context_lens[index] - batch.slots[index].prompt_len for index in outcome.sampling]
        draws = sampler.draws([slot.admitted.sampling for slot in slots], counts)
        tokens = self.ops.draw_tokens(self._adjusted(slots, raw, counts), draws)
        self.latest.index_copy_(0, to_device(torch.tensor([slot.place for slot in slots]), device), tokens)
        outcome.tokens, outcome.is_finite = to_host(tokens), self._host_finite(raw)
        lines = [line for line, slot in enumerate(slots) if slot.admitted.sampling.logprobs is not None]
        if lines:
            most = max(slots[line].admitted.sampling.logprobs or 0 for line in lines)
            there = to_device(torch.tensor(lines), device)
            told = describe(raw.index_select(0, there), tokens.index_select(0, there), most)
            outcome.described_lines = lines
            outcome.described = Logprobs(*(to_host(one) for one in (told.chosen, told.ranks, told.values, told.ids)))

    def _adjusted(self, slots: list[Slot], raw: Tensor, counts: list[int]) -> Tensor:
        """`penalties.adjusted`, for which the steps before are waited for."""
        if penalties.changed(slots, counts):
            for step in self._launched:
                step.fetch()
        return penalties.adjusted(raw, slots, counts)

    def _host_finite(self, computed: Tensor) -> Tensor:
        return to_host(self.ops.finite_flags(computed))

    def _score_prompts(self, batch: Batch, hidden: Tensor, step: Launched) -> None:
        for index, slot in enumerate(batch.slots):
            if slot.admitted.sampling.prompt_logprobs is not None:
                step.prompt_scores[batch.rows[index].request_id] = self._prompt_scores(batch, index, hidden)
