"""The runner that computes with torch: loads a model, then turns each `StepPlan` into a `StepResult`.

    run = forget and learn requests -> copy blocks -> batch -> forward (device_ns) -> choose tokens (sample_ns)

Only rows that sample get logits. A row fails alone, with `RowResult.error`: when its request holds ids that the model
does not have, or when what the model computes for it is not finite (what it left in its blocks is then scrubbed, so
that nobody inherits it). The clock is read at the two borders of the step's own split and nowhere else in a step.
"""

import time
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from splittime.core.errors import SplittimeError
from splittime.core.plan import RowResult, StepPlan, StepResult, TokenLogprob
from splittime.core.sampling import SamplingParams
from splittime.models.decoder import Decoder
from splittime.models.weights.load import OnLayer
from splittime.runner import batch as batches
from splittime.runner import logprobs, machine, penalties, prefill_rate, sampler, start_memory, threads
from splittime.runner.ahead import RunnerThread
from splittime.runner.batch import Batch
from splittime.runner.ceilings import Gauge
from splittime.runner.config import Resolved, RunnerConfig
from splittime.runner.cost import Cost
from splittime.runner.kv_store import KvStore
from splittime.runner.load import OnPhase, load
from splittime.runner.sleep import Sleeper, without_weights
from splittime.runner.slots import Slots
from splittime.runner.start_memory import StartMemory
from splittime.runner.warm_up import Probe, warm_up_plans

NO_TOKEN = "the step before gave this request no token"
NOT_FINITE = "what the model computes for this request is not finite"
Results = dict[str, RowResult]  # by request id
OnHidden = Callable[[Batch, Tensor], None]


class TorchRunner:
    """Implements `core.plan.Runner`. Make it with `TorchRunner.load`.

    on_hidden: told of each step's batch and hidden states [T, hidden], of which `decoder.logits` makes the logits of
        every position; for those who measure a model's predictions (`splittime quality`). None: nobody.
    """

    def __init__(self, decoder: Decoder, store: KvStore, resolved: Resolved, cost: Cost) -> None:
        self.decoder = decoder
        self.cost = cost
        self.store = store
        self.resolved = resolved
        self.slots = Slots(resolved.max_model_len, resolved.vocab_size)
        self.on_hidden: OnHidden | None = None
        self.memory = StartMemory(None, ())  # of what is measured at start; `load` gives one that lasts

    @staticmethod
    def load(config: RunnerConfig, on_phase: OnPhase | None = None, on_layer: OnLayer | None = None) -> "TorchRunner":
        """Read the checkpoint and allocate the KV cache; `on_phase(name, begin_ns, end_ns)` is told of each part, and
        `on_layer(done, of, bytes)` of each layer.

        Raises `ConfigError` naming what cannot be honoured.
        """
        if config.tensor_parallel_size > 1:
            from splittime.runner.parallel.runner import ParallelRunner  # which is a TorchRunner

            config.validate()
            return ParallelRunner.lead(config, on_phase or (lambda name, begin_ns, end_ns: None), on_layer)
        runner = _made(config, *load(config, on_phase or (lambda name, begin_ns, end_ns: None), on_layer))
        runner.memory = start_memory.of(config, runner.resolved, runner.decoder)
        is_small = runner.resolved.weights_bytes <= threads.LARGE_BYTES
        if config.num_threads is None and runner.decoder.ops.name == "native" and is_small:
            begin_ns = time.monotonic_ns()
            runner.choose_threads(machine.num_cores())
            if on_phase is not None:
                on_phase("measure threads", begin_ns, time.monotonic_ns())
        return runner

    def watch(self, tell: Callable[[SplittimeError], None]) -> None:
        """Be told, in another thread, when this runner can run no more: of one process, never."""

    def ahead(self, config: RunnerConfig) -> RunnerThread | None:
        """What carries out steps while the next are planned; None where `config` does not ask for it."""
        if not config.async_scheduling:
            return None
        return RunnerThread(self.run, lambda: self.decoder.ops.set_threads(self.resolved.num_threads))

    def sleeper(self, config: RunnerConfig) -> Sleeper | None:
        """What puts this runner, made with `config`, to sleep and wakes it; None where nothing can."""
        return Sleeper(self, config)

    def drop_weights(self) -> None:
        """Nothing can be run before `decoder` is set again."""
        self.decoder = without_weights(self.decoder)

    def drop_captured(self) -> tuple[int, ...]:
        """Forget captured steps, which hold addresses; their sizes, for `capture`. Here there are none."""
        return ()

    def capture(self, sizes: Sequence[int]) -> None:
        """Where steps can be captured: those of so many decode rows, or fewer, are replayed from now on."""

    def warm_up(self) -> None:
        """Run a few steps over the empty cache, so that the first request does not pay for first calls."""
        for plan in warm_up_plans(self.resolved):
            self.run(plan)

    def choose_threads(self, cores: int) -> None:
        """Keep the number of threads that this model wants, remembered or measured, and note it in `resolved`."""
        set_threads = self.decoder.ops.set_threads

        def measure() -> threads.Chosen:
            with Probe(self.run, self.resolved) as probe:
                return threads.choose(probe.steps(), set_threads, cores)

        found, told = self.memory.get("threads", (cores,), threads.Chosen, measure)
        set_threads(found.threads)
        reason = f"{found.reason}; {told}"
        self.resolved = msgspec.structs.replace(self.resolved, num_threads=found.threads, num_threads_reason=reason)

    def prefill_tokens_within(self, seconds: float) -> int:
        """How many prompt tokens a step computes in this time, at least 1; remembered, or measured by running some.
        Notes in `resolved` what one takes."""
        is_alone = self.decoder.ops.name == "native" and self.resolved.tensor_parallel_size == 1
        num_threads = self.resolved.num_threads

        def measure() -> prefill_rate.Rate:
            with Probe(self.run, self.resolved) as probe:
                return prefill_rate.measure(probe, num_threads if is_alone else None)

        found, told = self.memory.get("prefill", (num_threads,), prefill_rate.Rate, measure)
        ns, reason = round(found.ns_per_token), f"measured, {found.evidence}; {told}"
        self.resolved = msgspec.structs.replace(self.resolved, prefill_ns_per_token=ns, prefill_reason=reason)
        return max(1, int(seconds * 1e9 / found.ns_per_token))

    def gauge(self, config: RunnerConfig) -> Gauge:
        """What measures the machine for this runner, made with `config`."""
        scheme = machine.choose_weights(config, self.resolved.dtype, self.resolved.kernels).layers
        folder = machine.packed_cache_folder(config.packed_cache)
        return Gauge(self.decoder.ops, scheme, self.resolved.num_threads, folder)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        self.slots.update(plan.released, plan.admitted)
        moved = self.store.move(plan)
        if moved is None:
            return self._run_rows(plan)
        moved.end.wait()
        return moved.told(self._run_rows(plan))

    def _run_rows(self, plan: StepPlan) -> StepResult:
        results: Results = {}
        rows = []
        for row in plan.rows:
            slot = self.slots[row.request_id]
            known = slot.known(row)
            if slot.error is None and known is not None:
                rows.append(known)
            else:
                results[row.request_id] = RowResult(row.request_id, error=slot.error or NO_TOKEN)
        if not rows:
            return StepResult(plan.step_id, tuple(results.values()))
        batch = batches.build(rows, self.slots, self.store.shape.block_size, self.store.zero_block)
        begin_ns = time.monotonic_ns()
        hidden = self._forward(batch)
        if self.on_hidden is not None:
            self.on_hidden(batch, hidden)
        sampling = [index for index, row in enumerate(batch.rows) if row.samples]
        logits = self.decoder.logits(batch.last_of(hidden, sampling)) if sampling else None
        forward_ns = time.monotonic_ns()
        self._finish_rows(batch, hidden, sampling, logits, results)
        in_order = tuple(results[row.request_id] for row in plan.rows)
        return StepResult(plan.step_id, in_order, forward_ns - begin_ns, time.monotonic_ns() - forward_ns)

    def _forward(self, batch: Batch) -> Tensor:
        """[T, hidden]."""
        store, device = self.store, self.decoder.ops.device
        token_ids, positions = batch.token_ids.to(device), batch.positions.to(device)
        return self.decoder.forward(token_ids, positions, store.layers, batch.attention, store.shape)

    def _finish_rows(
        self, batch: Batch, hidden: Tensor, sampling: list[int], logits: Tensor | None, results: Results
    ) -> None:
        """Put each row's result into `results`."""
        silent = [index for index, row in enumerate(batch.rows) if not row.samples]
        if silent:
            good, _ = self._drop_broken(batch, silent, batch.last_of(hidden, silent), results)
            for index in good:
                results[batch.rows[index].request_id] = RowResult(batch.rows[index].request_id)
        if logits is not None:
            good, logits = self._drop_broken(batch, sampling, logits, results)
            if good:
                self._choose(batch, good, logits, results)
        for index, slot in enumerate(batch.slots):
            if slot.admitted.sampling.prompt_logprobs is not None:
                self._add_prompt_logprobs(batch, index, hidden, results)

    def _drop_broken(
        self, batch: Batch, rows: list[int], computed: Tensor, results: Results
    ) -> tuple[list[int], Tensor]:
        """Fail the rows whose line of `computed` [len(rows), any] is not finite; return the others and their lines."""
        is_finite = self.decoder.ops.finite(computed)
        if all(is_finite):
            return rows, computed
        for index, fine in zip(rows, is_finite, strict=True):
            if not fine:
                request_id = batch.rows[index].request_id
                results[request_id] = RowResult(request_id, error=NOT_FINITE)
                self.store.scrub(batch.slots[index].block_ids)
        good = [index for index, fine in zip(rows, is_finite, strict=True) if fine]
        return good, computed[torch.tensor(is_finite)]

    def _choose(self, batch: Batch, rows: list[int], raw: Tensor, results: Results) -> None:
        """raw: float32 [len(rows), vocab], the logits of these rows of the batch."""
        slots = [batch.slots[index] for index in rows]
        params = [slot.admitted.sampling for slot in slots]
        contexts = batch.attention.context_lens
        output_indices = [contexts[index] - slot.prompt_len for index, slot in zip(rows, slots, strict=True)]
        logits = penalties.adjusted(raw, slots, output_indices)
        chosen = sampler.choose(logits, params, output_indices, self.decoder.ops)
        described = _chosen_logprobs(raw, chosen, params)
        for line, index in enumerate(rows):
            request_id = batch.rows[index].request_id
            batch.slots[index].learn_sampled(contexts[index], chosen[line])
            results[request_id] = RowResult(request_id, (chosen[line],), described.get(line, ()))

    def _add_prompt_logprobs(self, batch: Batch, index: int, hidden: Tensor, results: Results) -> None:
        result = results[batch.rows[index].request_id]
        if result.error is None:
            scores = self._prompt_scores(batch, index, hidden)
            results[result.request_id] = RowResult(result.request_id, result.token_ids, result.logprobs, scores)

    def _prompt_scores(self, batch: Batch, index: int, hidden: Tensor) -> tuple[TokenLogprob, ...]:
        """Of the prompt's tokens that follow those of this row. hidden: of the whole batch."""
        row, slot = batch.rows[index], batch.slots[index]
        end = min(row.start + len(row.token_ids) + 1, slot.prompt_len)
        following = slot.tokens[row.start + 1 : end].tolist()
        begin = batch.attention.query_begins[index]
        wanted = hidden[begin : begin + len(following)]
        num_top = slot.admitted.sampling.prompt_logprobs or 0
        vocab_size = self.resolved.vocab_size
        return tuple(logprobs.score_prompt(self.decoder.logits, wanted, following, num_top, vocab_size))


def _made(config: RunnerConfig, decoder: Decoder, store: KvStore, resolved: Resolved, cost: Cost) -> TorchRunner:
    if decoder.ops.name == "triton":
        from splittime.runner.device.runner import DeviceRunner  # which is a TorchRunner

        runner = DeviceRunner(decoder, store, resolved, cost)
        runner.enforce_eager = config.enforce_eager
        return runner
    return TorchRunner(decoder, store, resolved, cost)


def _chosen_logprobs(
    raw: Tensor, chosen: list[int], params: list[SamplingParams]
) -> dict[int, tuple[TokenLogprob, ...]]:
    """By line of `raw`, for the lines whose request wants them."""
    lines = [line for line, one in enumerate(params) if one.logprobs is not None]
    if not lines:
        return {}
    counts = [params[line].logprobs or 0 for line in lines]
    described = logprobs.describe(raw[torch.tensor(lines)], [chosen[line] for line in lines], counts)
    return {line: (one,) for line, one in zip(lines, described, strict=True)}
