"""From a `RunnerConfig` to a decoder, an empty KV cache, the record of what the machine decided, and a step's cost.

How much of a card's memory the KV cache may have: what is free once the weights are there, less what the largest
step takes beside them, which is measured by running it.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import torch

from splittime.core import this_process
from splittime.core.errors import ConfigError
from splittime.core.facts import RefusedValues, TokenCost
from splittime.kernels.api import AttentionBatch, Ops, WeightScheme
from splittime.kernels.choose import make_backend
from splittime.kernels.layer import kv_groups, state_floats
from splittime.kernels.low_rank import inner_bytes
from splittime.models.config import ModelConfig
from splittime.models.decoder import Decoder
from splittime.models.head import DTYPE as FEATURES_DTYPE
from splittime.models.quant.plan import WeightPlan
from splittime.models.ranks import Ranks
from splittime.models.weights.head import head_config
from splittime.models.weights.load import Loaded, OnLayer, load_decoder, open_source, read_config
from splittime.models.weights.shards import counted, own_config
from splittime.runner import honoured, machine
from splittime.runner.config import Resolved, RunnerConfig, speculative_config
from splittime.runner.config_sizes import cost
from splittime.runner.kv_store import KvStore, bytes_per_block, num_host_slots, staging_bytes, story


def room_bytes(device: torch.device, utilization: float, step_bytes: int) -> int:
    """utilization: the share of all memory that this process may have, with what others have taken counted as ours.
    What torch keeps of freed memory, the largest step's above all, is given back first: it is in `step_bytes`."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - int(total * (1.0 - utilization)) - step_bytes)


@torch.inference_mode()
def largest_step_bytes(decoder: Decoder, config: RunnerConfig, kv_dtype: torch.dtype, max_model_len: int) -> int:
    """Peak of what is allocated beside weights and cache by a step of `max_num_batched_tokens` prompt tokens and logits
    of `max_num_seqs` rows; 0 where torch does not count (no card)."""
    device = decoder.ops.device
    lengths = _lengths(config.max_num_batched_tokens, max_model_len)
    blocks = [-(-length // config.block_size) for length in lengths]
    store = KvStore(decoder.kv_groups, sum(blocks), config.block_size, kv_dtype, device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    hidden = decoder.forward(torch.zeros_like(positions), positions, store, _batch(lengths, blocks, store))
    decoder.logits(hidden[: config.max_num_seqs])
    return (torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0) - before


def _lengths(tokens: int, max_model_len: int) -> list[int]:
    """Returns the lengths of prompts that are so many tokens together."""
    count = math.ceil(tokens / max_model_len)
    return [tokens // count + (1 if place < tokens % count else 0) for place in range(count)]


def _batch(lengths: list[int], blocks: list[int], store: KvStore) -> AttentionBatch:
    tables = torch.full((len(lengths), max(blocks)), store.zero_block)
    first = 0
    for line, count in zip(tables, blocks, strict=True):
        line[:count] = torch.arange(first, first + count)
        first += count
    places = torch.cat([torch.arange(length) for length in lengths])
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return AttentionBatch(
        query_begins=[0, *torch.tensor(lengths).cumsum(0).tolist()],
        context_lens=lengths,
        block_tables=tables,
        token_blocks=tables[rows, places // store.block_size],
        token_offsets=places % store.block_size,
        num_decode_rows=0,
    )


OnPhase = Callable[[str, int, int], None]
TURN_BYTES = 12  # of an element of a head at one position, while the rotary turns are made (`models.rope.turns`)
SURE_LAYERS = 4  # some models begin with layers of another size


def load(
    config: RunnerConfig, on_phase: OnPhase, on_layer: OnLayer | None = None, ranks: Ranks | None = None
) -> tuple[Decoder, KvStore, Resolved, TokenCost, WeightScheme]:
    """Returns the scheme too that most of the layers are in. Raises `ConfigError` for what cannot be honoured, before
    the weights are read where that is possible.

    Also sets the number of threads, for this process. ranks: those that share the model; all of this is then of one
    rank's part, but for the number of blocks, which is the smallest of any.
    """
    begin_ns = time.monotonic_ns()
    path = Path(config.model_path)
    model = read_config(path, config.generation_config)
    held_in = cache(lambda: open_source(path, model).format)
    choices = _Choices.make(config, model, held_in, ranks)
    _refuse_beyond_memory(config, choices)
    _choose_num_blocks(config, choices)  # here only to refuse a context far beyond the memory
    config_ns = time.monotonic_ns()
    on_phase("read config", begin_ns, config_ns)
    choices.ops.set_threads(config.num_threads or this_process.num_cores())
    loaded = _load_weights(config, choices, on_layer or (lambda done, total, num_bytes: None), ranks)
    honoured.check_activations(config.activation_dtype, loaded.plan, choices.ops)
    weights_ns = time.monotonic_ns()
    on_phase("load weights", config_ns, weights_ns)
    if ranks is not None:
        ranks.each(0)  # answers when all have theirs
        config_ns, weights_ns = weights_ns, time.monotonic_ns()
        on_phase("wait for ranks", config_ns, weights_ns)
    store, choices.reasons["num_blocks_reason"] = _allocate(config, choices, loaded.decoder, ranks)
    on_phase("allocate kv cache", weights_ns, time.monotonic_ns())
    num_threads, choices.reasons["num_threads_reason"] = machine.choose_num_threads(
        config.num_threads, loaded.weights_bytes
    )
    choices.ops.set_threads(num_threads)
    refuses = honoured.refused(config, lambda other: _Choices.make(other, model, held_in, ranks))
    resolved = _resolved(config, choices, loaded, store, num_threads)
    resolved = msgspec.structs.replace(resolved, refuses=(*refuses, *_bounds(config, resolved)))
    kv_bytes_per_token = resolved.kv_bytes_per_block // resolved.block_size
    computed = choices.model if ranks is None else counted(choices.model, ranks)
    least = cost(computed, loaded.plan, choices.ops, loaded.weights_bytes, kv_bytes_per_token)
    return loaded.decoder, store, resolved, least, loaded.plan.layers


@torch.inference_mode()
def _load_weights(config: RunnerConfig, choices: "_Choices", on_layer: OnLayer, ranks: Ranks | None) -> Loaded:
    return load_decoder(
        Path(config.model_path),
        choices.whole,
        choices.ops,
        choices.plan,
        choices.max_model_len,
        machine.packed_cache_folder(config.packed_cache),
        _fitting(config, choices.ops, on_layer),
        ranks,
        config.load_format == "dummy",
    )


@dataclass(frozen=True)
class _Choices:
    """What is decided before anything large is read. whole: the checkpoint's model; model: the part of it that this
    rank has, the same where there is but one."""

    whole: ModelConfig
    model: ModelConfig
    ops: Ops
    plan: WeightPlan
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    max_model_len: int
    num_host_slots: int
    reasons: dict[str, str]

    @staticmethod
    def make(config: RunnerConfig, model: ModelConfig, held_in: Callable[[], str], ranks: Ranks | None) -> "_Choices":
        """model, held_in: of the checkpoint, the second its format. Raises `ConfigError` for what cannot be honoured;
        it is also asked of settings that nobody has made."""
        config.validate()
        path = Path(config.model_path)
        honoured.check_load_format(config.load_format, path, model)
        if config.load_format != "dummy":
            honoured.check_rounding(config, model, held_in)
        chosen = machine.choose_kernels(config.kernels)
        kernels, kernels_reason = honoured.settle_kernels(config.kernels, model, *chosen)
        honoured.check_ranks(config, model)
        honoured.check_eight_bits(config.quantization, kernels)
        honoured.check_speculation(config, model, kernels)
        honoured.check_sharing(config, kernels)
        honoured.check_adapters(config, kernels)
        honoured.check_states(config, model)
        dtype, dtype_reason = machine.choose_dtype(config.dtype, model.checkpoint_dtype, kernels)
        kv_cache_dtype = machine.choose_kv_cache_dtype(config.kv_cache_dtype, dtype, kernels)
        machine.packed_cache_folder(config.packed_cache)
        own = model if ranks is None else own_config(model, ranks)
        choices = _Choices(
            whole=model,
            model=own,
            ops=make_backend(kernels, dtype),
            plan=machine.choose_weights(config, _name(dtype), kernels),
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=machine.choose_max_model_len(config, model),
            num_host_slots=num_host_slots(config, kernels, _bytes_per_block(config, own, kv_cache_dtype)),
            reasons={
                "kernels_reason": kernels_reason,
                "dtype_reason": dtype_reason,
                "products_reason": machine.choose_rounding(config, _name(dtype), kernels)[1],
            },
        )
        if choices.ops.isa_reason:
            choices.reasons["kernels_reason"] += f"; {choices.ops.isa_reason}"
        honoured.check_activations(config.activation_dtype, choices.plan, choices.ops)
        honoured.check_share_of_card(config, choices.ops)
        return choices


def _fitting(config: RunnerConfig, ops: Ops, on_layer: OnLayer) -> OnLayer:
    """Random weights have no file whose size could warn: the start ends before the first layer that does not fit into
    this machine's free memory, and after `SURE_LAYERS` as soon as it is clear that they all will not."""
    if config.load_format != "dummy" or ops.device.type != "cpu":
        return on_layer
    room, first_bytes = this_process.free_memory_bytes() // config.tensor_parallel_size, 0

    def note(done: int, total: int, num_bytes: int) -> None:
        nonlocal first_bytes
        first_bytes = first_bytes or num_bytes
        each = (num_bytes - first_bytes) // (done - 1) if done > 1 else 0
        needed = num_bytes + each * min(total - done, 1 if done < SURE_LAYERS else total)
        if needed > room:
            message = f"{done} of {total} layers take {num_bytes} bytes; with the rest more than is free, {room}"
            raise ConfigError(message, param="model", value=config.model_path, limit=room, hint="--quantization int4")
        on_layer(done, total, num_bytes)

    return note


def _products(plan: WeightPlan, ops: Ops, has_experts: bool) -> str:
    """Returns what is multiplied with what, such as "layers bfloat16 x float32, head int8 x int8"."""
    finer = {} if plan.finer == plan.layers else {"values and down": plan.finer}
    kinds = {"layers": plan.layers, **finer, "head": plan.head} | ({"router": plan.router} if has_experts else {})
    told = ", ".join(f"{kind} {scheme.name} x {ops.product_dtype(scheme)}" for kind, scheme in kinds.items())
    return f"weights x activations: {told}"


def _refuse_beyond_memory(config: RunnerConfig, choices: _Choices) -> None:
    """What is made of the config's numbers alone, with no file's size to warn: a turn of each position, and of random
    weights the largest matrix. Raises `ConfigError` where either is more than this machine's free memory."""
    model, room = choices.model, this_process.free_memory_bytes()
    widest = max(model.vocab_size, *(layer.widest for layer in model.layers))
    matrix_bytes = widest * model.hidden_size * choices.dtype.itemsize if config.load_format == "dummy" else 0
    needed = {
        "max_model_len": choices.max_model_len * max(mixer.head_dim for mixer in model.attention) * TURN_BYTES,
        "model": matrix_bytes + max((2 * mixer.channels * mixer.conv_width * 4 for mixer in model.deltas), default=0),
    }
    for param, num_bytes in needed.items():
        if num_bytes > room:
            message = f"{param} needs {num_bytes} bytes, more than is free, {room}"
            hint = "lower --max-model-len" if param == "max_model_len" else "the sizes in config.json are too large"
            raise ConfigError(message, param=param, value=num_bytes, limit=room, hint=hint)


def _allocate(config: RunnerConfig, choices: _Choices, decoder: Decoder, ranks: Ranks | None) -> tuple[KvStore, str]:
    """The cache, and why it has so many blocks."""
    step_bytes = 0
    if choices.ops.device.type == "cuda":
        step_bytes = largest_step_bytes(decoder, config, choices.kv_cache_dtype, choices.max_model_len)
    num_slots = choices.num_host_slots
    if num_slots:
        step_bytes += staging_bytes(_bytes_per_block(config, choices.model, choices.kv_cache_dtype))
    floats, num_states = state_floats(choices.model.layers), _num_state_slots(config, choices)
    num_blocks, reason = _choose_num_blocks(config, choices, step_bytes, num_states)
    if ranks is not None:
        num_blocks, num_slots = min(ranks.each(num_blocks)), min(ranks.each(num_slots))
    sizes = (num_blocks, config.block_size, choices.kv_cache_dtype, choices.ops.device, num_slots)
    with torch.inference_mode():
        store = KvStore(decoder.kv_groups, *sizes, floats, num_states)
    if floats:
        reason += f"; beside them {num_states} states of {_state_bytes(choices.model)} bytes"
    return store, reason


def _bytes_per_block(config: RunnerConfig, model: ModelConfig, kv_cache_dtype: torch.dtype) -> int:
    return bytes_per_block(kv_groups(model.layers), config.block_size, kv_cache_dtype)


def _num_state_slots(config: RunnerConfig, choices: _Choices) -> int:
    state_bytes = _state_bytes(choices.model)
    return machine.choose_num_state_slots(config, state_bytes) if state_bytes else 0


def _state_bytes(model: ModelConfig) -> int:
    """Returns the size of a sequence's state in all layers, which keep them in float32."""
    return torch.float32.itemsize * sum(state_floats(model.layers))


def draft_bytes_per_block(config: RunnerConfig, model: ModelConfig, kv_cache_dtype: torch.dtype) -> int:
    """Returns the bytes of a block in the cache of the model that makes drafts, which has as many as the model's; 0
    where no model does."""
    asked = speculative_config(config.speculative_config)
    if asked is None or not asked.has_model:
        return 0
    path = config.draft_model_path
    if asked.method == "mtp":
        one = head_config(model if path is None else read_config(Path(path)), model)
        features_bytes = config.block_size * model.hidden_size * FEATURES_DTYPE.itemsize
        return _bytes_per_block(config, one, kv_cache_dtype) + features_bytes
    return _bytes_per_block(config, model if path is None else read_config(Path(path)), kv_cache_dtype)


def adapter_bytes(config: RunnerConfig, kernels: str) -> int:
    """Returns what a step's adapters may come to take: of the native kernels alone."""
    if not config.enable_lora or kernels != "native":
        return 0
    return inner_bytes(config.max_num_batched_tokens, config.max_lora_rank)


def _choose_num_blocks(
    config: RunnerConfig, choices: _Choices, step_bytes: int = 0, num_states: int | None = None
) -> tuple[int, str]:
    """step_bytes: what the largest step takes of a card's memory. num_states: beside the blocks, if known."""
    block_bytes = _bytes_per_block(config, choices.model, choices.kv_cache_dtype)
    block_bytes += draft_bytes_per_block(config, choices.model, choices.kv_cache_dtype)
    device = choices.ops.device
    if device.type == "cuda":
        room = room_bytes(device, config.gpu_memory_utilization, step_bytes)
        told = f"{room / 2**30:.1f} GiB of the card: gpu_memory_utilization={config.gpu_memory_utilization:g}"
        return machine.choose_num_blocks(config, choices.max_model_len, block_bytes, (room, told))
    step_bytes, state_bytes = adapter_bytes(config, choices.ops.name), _state_bytes(choices.model)
    states_bytes = state_bytes * (_num_state_slots(config, choices) if num_states is None else num_states)
    return machine.choose_num_blocks(config, choices.max_model_len, block_bytes, None, step_bytes, states_bytes)


def _resolved(config: RunnerConfig, choices: _Choices, loaded: Loaded, store: KvStore, num_threads: int) -> Resolved:
    model, ops = choices.model, choices.ops
    block_bytes = _bytes_per_block(config, model, choices.kv_cache_dtype)
    values: dict[str, object] = {
        "architecture": model.architecture,
        "model_path": config.model_path,
        "num_parameters": loaded.num_parameters,
        "kernels": ops.name,
        "dtype": _name(choices.dtype),
        "activation_dtype": _name(ops.activation_dtype),
        "products": _products(loaded.plan, ops, model.has_routers),
        "layers": loaded.layers,
        "weights": loaded.weights,
        "weights_bytes": loaded.weights_bytes,
        "embedding_bytes": loaded.embedding_bytes,
        "packed_cache": loaded.cache_story,
        "unused_tensors": loaded.unused_tensors,
        "kv_cache_dtype": _name(choices.kv_cache_dtype),
        "linear_backend": ops.linear_name,
        "attention_backend": ops.attention_name,
        "num_threads": num_threads,
        "block_size": config.block_size,
        "num_blocks": store.num_blocks,
        "kv_bytes_per_block": block_bytes,
        "max_model_len": choices.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "vocab_size": model.vocab_size,
        "eos_token_ids": model.eos_token_ids,
        "default_sampling": model.sampling,
        "pooling": model.pooling,
        "context_length": model.max_position_embeddings,
        "sliding_window": min(model.windows, default=None),
        "num_host_slots": store.num_host_slots,
        "num_state_slots": store.num_state_slots,
        "state_bytes": _state_bytes(model),
        "kv_offload": story(store.num_host_slots, config.block_size, block_bytes),
    }
    return msgspec.convert(values | choices.reasons, Resolved)


def _bounds(config: RunnerConfig, resolved: Resolved) -> tuple[RefusedValues, ...]:
    """Returns the numbers that would be refused: fewer threads than ranks, and a cache of less than one context or of
    more than the machine's memory."""
    context_bytes = -(-resolved.max_model_len // resolved.block_size) * resolved.kv_bytes_per_block
    threads, blocks = "each rank needs a thread", "a context must fit into the KV cache, and that into the memory"
    return (
        RefusedValues(name="num_threads", why=threads, least=config.tensor_parallel_size),
        RefusedValues(name="kv_cache_memory_bytes", why=blocks, least=context_bytes, most=machine.memory_bytes()),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
