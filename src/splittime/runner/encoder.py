"""The runner of an encoder: a prompt whose embedding is asked for is computed whole, in the step that ends it.

Every token attends to every other, so that a prompt that came in chunks can be computed when its last one comes and not
before; it is short, as an encoder has positions for some hundred tokens. There is no KV cache: the blocks that a plan
hands out stand for nothing, and a prefix is never reused. Prompts of one step are computed together.

Texts of a step on several threads: with the native kernels each thread computes whole texts by itself.

Of an encoder's time products take two thirds, and only they are shared among the kernels' threads: attention, norms and
activations are torch's, which has one thread beside them, since two pools would fight for the same cores. Texts do not
depend on each other, so that threads which take parts of a step share all of it, and wait for each other once. The
vectors are the same to the last bit, as no kernel looks at what is beside a token.

A text that makes up most of its step is computed with the kernels' threads, and so are few tokens: each thread would
read all weights for its own.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from splittime.core import this_process
from splittime.core.errors import ConfigError
from splittime.core.facts import TokenCost
from splittime.core.sampling import SCORE
from splittime.core.step import Admitted, Row, RowResult, StepPlan, StepResult
from splittime.kernels.api import Ops, WeightScheme
from splittime.kernels.choose import make_backend
from splittime.kernels.native.library import LibraryMissing, library
from splittime.models.encoder import AnyEncoder, load_encoder
from splittime.models.encoder_config import EncoderConfig, load_encoder_config
from splittime.models.encoder_parts import DenseLayer, read_dense
from splittime.models.quant.plan import kept_bytes
from splittime.runner import machine
from splittime.runner.config import Resolved, RunnerConfig, speculative_config
from splittime.runner.load import OnPhase

NO_TOKENS = "this model is an encoder and generates nothing"
CORES = "one for each core"
PARTS = f"{CORES}: each computes texts of its own"  # native kernels
WARM_UP_TOKENS = 8
PRODUCT_TOKENS, PRODUCT_TRIES = 512, 5  # to choose kernels by
PART_TOKENS = 128  # of a part, about: products are as quick as of more, and threads end at about the same time
LEAST_TOKENS = 64  # of a part, on average: with fewer, reading the weights once more takes longer than is gained
PRODUCTS = 2 / 3  # of an encoder's time

Part = list[int]  # of a step's texts, by their places


@dataclass(eq=False)
class EncoderRunner:
    """Implements `core.step.Runner`. dense: layers behind the pooling."""

    config: RunnerConfig
    encoder: AnyEncoder
    dense: tuple[DenseLayer, ...]
    scheme: WeightScheme
    resolved: Resolved
    cost: TokenCost

    verifies_drafts = False

    def __post_init__(self) -> None:
        self._known: dict[str, Admitted] = {}
        self._parts = TextParts(self.encoder, self.resolved.num_threads)

    def warm_up(self) -> None:
        """Compute a short text on each thread, so that the first request does not pay for first calls."""
        self._parts.warm_up([0] * min(WARM_UP_TOKENS, self.resolved.max_model_len))

    def set_threads(self) -> None:
        """Sets the number of threads, for a thread of its own."""
        self.encoder.ops.set_threads(self.resolved.num_threads)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        for request_id in plan.released:
            self._known.pop(request_id, None)
        self._known |= {admitted.request_id: admitted for admitted in plan.admitted}
        begin_ns = time.monotonic_ns()
        ended = [row for row in plan.rows if self._ends(row) and not self._fault(row)]
        texts = [self._known[row.request_id].token_ids for row in ended]
        made = self._parts.forward(texts) if texts else ()
        pooled = {row.request_id: self._pooled(row, states) for row, states in zip(ended, made, strict=True)}
        results = tuple(self._result(row, pooled.get(row.request_id)) for row in plan.rows)
        return StepResult(plan.step_id, results, device_ns=time.monotonic_ns() - begin_ns)

    def _ends(self, row: Row) -> bool:
        return row.start + len(row.token_ids) == len(self._known[row.request_id].token_ids)

    def _fault(self, row: Row) -> str:
        """Returns why a row's request cannot be answered; "" if it can."""
        admitted, size = self._known[row.request_id], self.resolved.vocab_size
        if not admitted.sampling.pooling or row.num_samples:
            return NO_TOKENS
        if (admitted.sampling.pooling == SCORE) != (self.encoder.head is not None):
            return f"this model has no answer of the kind {admitted.sampling.pooling}"
        wrong = next((token for token in admitted.token_ids if not 0 <= token < size), None)
        return "" if wrong is None else f"the model has no token {wrong}: it has {size}"

    def _pooled(self, row: Row, states: Tensor) -> Tensor:
        """states: [tokens, hidden]."""
        match self._known[row.request_id].sampling.pooling:
            case "score":
                assert self.encoder.head is not None
                return self.encoder.head(states[:1])[0]
            case "cls":
                pooled = states[0]
            case "last":
                pooled = states[-1]
            case _:
                pooled = (states.double().sum(0) / len(states)).float()
        for layer in self.dense:
            pooled = layer(pooled)
        return pooled

    def _result(self, row: Row, pooled: Tensor | None) -> RowResult:
        if pooled is None:
            return RowResult(row.request_id, error=self._fault(row) or None)
        if not bool(torch.isfinite(pooled).all()):
            return RowResult(row.request_id, error="what the model computes for this text is not finite")
        return RowResult(row.request_id, pooled=pooled.contiguous().numpy().tobytes())


def load_encoder_runner(config: RunnerConfig, on_phase: OnPhase) -> EncoderRunner:
    """Raises `ConfigError` naming what cannot be honoured. Also sets the number of threads, for this process."""
    begin_ns = time.monotonic_ns()
    config.validate()
    folder = Path(config.model_path)
    model = load_encoder_config(folder)
    _refuse_unsupported(config)
    kernels, kernels_reason = _choose_kernels(config, model)
    if kernels == "triton":
        raise _no_place("kernels", kernels, "encoders are computed on the CPU: --kernels native, or torch")
    dtype, dtype_reason = machine.choose_dtype(config.dtype, model.checkpoint_dtype, kernels)
    name = str(dtype).removeprefix("torch.")
    ops, scheme = make_backend(kernels, dtype), machine.choose_weights(config, name, kernels).layers
    ops.set_threads(config.num_threads or this_process.num_cores())
    with torch.inference_mode():
        encoder, dense = load_encoder(folder, model, ops, scheme), read_dense(folder, model.hidden_size)
    on_phase("load weights", begin_ns, time.monotonic_ns())
    reasons = {"dtype": name, "because": dtype_reason, "kernels": kernels_reason}
    weights_bytes = _weights_bytes(model, ops, scheme)
    cost = TokenCost(
        weight_bytes=weights_bytes,
        kv_bytes_per_token=0,
        operations_per_token=2 * model.num_layers * model.layer_weights,
        operations_per_context_token=4 * model.num_layers * model.layer_products[1][1],  # the queries' width
    )
    resolved = _resolved(config, encoder, scheme, reasons, weights_bytes)
    ops.set_threads(resolved.num_threads)
    return EncoderRunner(config, encoder, dense, scheme, resolved, cost)


def _choose_kernels(config: RunnerConfig, model: EncoderConfig) -> tuple[str, str]:
    """Returns the backend and why. With "auto" it is one of the CPU's; the quicker one where weights are float32, of
    which the tokens of many texts are multiplied at once: there neither is the quicker one everywhere."""
    if config.kernels != "auto":
        return machine.choose_kernels(config.kernels)
    try:
        library()
    except LibraryMissing as error:
        return "torch", f"{error}"
    is_float32 = machine.choose_dtype(config.dtype, model.checkpoint_dtype, "native")[0] is torch.float32
    if config.quantization is not None or not is_float32:
        return "native", "they could be loaded"
    took_ms = {name: _product_ms(name, config, model) for name in ("native", "torch")}
    told = ", ".join(f"{name} {ms:.2f}" for name, ms in took_ms.items())
    quickest = min(took_ms, key=lambda name: took_ms[name])
    return quickest, f"ms for a product of {PRODUCT_TOKENS} tokens on one thread: {told}"


@torch.inference_mode()
def _product_ms(kernels: str, config: RunnerConfig, model: EncoderConfig) -> float:
    """Returns what a product takes on one thread: several would wait for each other, and for their cores."""
    ops, scheme = make_backend(kernels, torch.float32), machine.choose_weights(config, "float32", kernels).layers
    ops.set_threads(1)
    x = torch.ones(PRODUCT_TOKENS, model.hidden_size)
    packed = ops.pack_linear([torch.ones(model.inner_size, model.hidden_size)], None, scheme)
    took_ns = []
    for _ in range(PRODUCT_TRIES):
        begin_ns = time.perf_counter_ns()
        ops.linear(x, packed)
        took_ns.append(time.perf_counter_ns() - begin_ns)
    return min(took_ns) / 1e6


def _refuse_unsupported(config: RunnerConfig) -> None:
    """What is about tokens that follow, or needs several processes."""
    plain = {
        "tensor_parallel_size": 1,
        "kv_offload_memory_bytes": 0,
        "load_format": "auto",
        "enable_lora": False,
        "kv_cache_dtype": "auto",
    }
    asked = speculative_config(config.speculative_config)
    if asked is not None and asked.method != "auto":
        raise _no_place("speculative_config", config.speculative_config, "leave it out")
    for name, value in plain.items():
        if getattr(config, name) != value:
            raise _no_place(name, getattr(config, name), "leave it out")


def _no_place(param: str, value: object, hint: str) -> ConfigError:
    return ConfigError(f"{param} is {value}, which an encoder has no place for", param=param, value=value, hint=hint)


def _weights_bytes(model: EncoderConfig, ops: Ops, scheme: WeightScheme) -> int:
    each = (ops.packed_bytes(*shape, scheme) or kept_bytes(*shape, scheme) for shape in model.layer_products)
    return model.num_layers * sum(each)


def _num_threads(config: RunnerConfig, kernels: str) -> tuple[int, str]:
    """Returns how many threads there are, and why so many."""
    if config.num_threads:
        return config.num_threads, "as asked"
    return this_process.num_cores(), PARTS if kernels == "native" else CORES


def _resolved(
    config: RunnerConfig,
    encoder: AnyEncoder,
    scheme: WeightScheme,
    reasons: dict[str, str],
    weights_bytes: int,
) -> Resolved:
    model, ops = encoder.config, encoder.ops
    num_threads, threads_reason = _num_threads(config, ops.name)
    max_model_len = machine.choose_max_model_len(config, model)
    per_text = -(-max_model_len // config.block_size)
    return Resolved(
        architecture=model.architecture,
        model_path=config.model_path,
        num_parameters=encoder.num_parameters,
        kernels=ops.name,
        activation_dtype=str(ops.activation_dtype).removeprefix("torch."),
        products=f"weights x activations: layers {scheme.name} x {ops.product_dtype(scheme)}",
        layers="of an encoder, part by part",
        weights=f"layers {scheme.name}",
        weights_bytes=weights_bytes,
        embedding_bytes=encoder.words.nbytes,
        packed_cache="not of an encoder",
        kv_cache_dtype="none",
        linear_backend=ops.linear_name,
        attention_backend="torch",
        num_threads=num_threads,
        num_threads_reason=threads_reason,
        block_size=config.block_size,
        num_blocks=config.max_num_seqs * per_text,
        num_blocks_reason="an encoder keeps nothing in them",
        kv_bytes_per_block=0,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        vocab_size=model.vocab_size,
        eos_token_ids=(),
        context_length=model.max_position_embeddings,
        sliding_window=None,
        execution_reason=f"{ops.name} kernels compute while they are called",
        speculative_reason="an encoder generates nothing",
        unused_tensors=encoder.unused_tensors,
        pooling=model.pooling,
        dtype=reasons["dtype"],
        kernels_reason=reasons["kernels"],
        dtype_reason=reasons["because"],
        products_reason=machine.choose_rounding(config, reasons["dtype"], ops.name)[1],
    )


class TextParts:
    """Computes the texts of a step. num_threads: of the kernels."""

    def __init__(self, encoder: AnyEncoder, num_threads: int) -> None:
        self._encoder, self._num_threads = encoder, num_threads if encoder.ops.name == "native" else 1
        self._threads: ThreadPoolExecutor | None = None
        if self._num_threads > 1:
            self._threads = ThreadPoolExecutor(self._num_threads, "encoder", initializer=library().st_work_alone)

    def warm_up(self, text: Sequence[int]) -> None:
        """Computes this text with the kernels' threads, and on each thread that takes parts."""
        self._computed([text])
        if self._threads is not None:
            list(self._threads.map(self._computed, [[text]] * self._num_threads))

    def forward(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """texts: token ids, at least one each -> for each text the last layer's outputs, float32 [tokens, hidden].
        Where computing one fails, its error is raised when no thread computes any more."""
        parts = parts_of([len(text) for text in texts], self._num_threads)
        if self._threads is None or len(parts) == 1:
            return self._computed(texts)
        computing = [self._threads.submit(self._computed, [texts[place] for place in part]) for part in parts]
        wait(computing)
        made = [each.result() for each in computing]
        found = dict(zip(chain(*parts), chain(*made), strict=True))
        return tuple(found[place] for place in range(len(texts)))

    @torch.inference_mode()
    def _computed(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        return self._encoder.forward(texts, are_pairs=self._encoder.head is not None)


def parts_of(sizes: Sequence[int], num_threads: int) -> list[Part]:
    """sizes: tokens of each text -> parts of about as many tokens each, the largest first, which the threads take one
    after the other. There is a single one where all texts together are done sooner."""
    total, together = sum(sizes), [list(range(len(sizes)))]
    num_parts = min(num_threads * -(-total // (num_threads * PART_TOKENS)), total // LEAST_TOKENS)
    if num_threads == 1 or num_parts < 2:
        return together
    tokens, parts = [0] * num_parts, dict[int, Part]()
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        least = tokens.index(min(tokens))
        tokens[least] += sizes[place]
        parts.setdefault(least, []).append(place)
    if max(tokens) >= total * (1 - PRODUCTS + PRODUCTS / num_threads):
        return together
    return [parts[number] for number in sorted(parts, key=lambda number: -tokens[number])]
