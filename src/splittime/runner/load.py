"""From a `RunnerConfig` to a decoder, an empty KV cache, and the record of what the machine decided."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from splittime.kernels.api import KvShape, Ops, resolve
from splittime.models.config import ModelConfig, load_config
from splittime.models.decoder import Decoder
from splittime.models.weights.load import load_decoder
from splittime.runner import machine
from splittime.runner.config import Resolved, RunnerConfig
from splittime.runner.kv_store import KvStore, bytes_per_block

OnPhase = Callable[[str, int, int], None]


def load(config: RunnerConfig, on_phase: OnPhase) -> tuple[Decoder, KvStore, Resolved]:
    """Raises `ConfigError` for what cannot be honoured, before the weights are read where that is possible.

    Also sets torch's number of threads, for this process.
    """
    begin_ns = time.monotonic_ns()
    config.validate()
    folder = Path(config.model_path)
    model = load_config(folder)
    dtype, dtype_reason = machine.choose_dtype(config.dtype, model.checkpoint_dtype)
    config.check_kv_cache_dtype(str(dtype).removeprefix("torch."))
    max_model_len = machine.choose_max_model_len(config, model)
    ops = resolve("cpu" if config.kernels == "auto" else config.kernels, dtype)
    _choose_num_blocks(config, model, dtype, max_model_len)  # here only to refuse a context far beyond the memory
    config_ns = time.monotonic_ns()
    on_phase("read config", begin_ns, config_ns)
    with torch.inference_mode():
        decoder, num_parameters = load_decoder(folder, model, ops, dtype, max_model_len)
    weights_ns = time.monotonic_ns()
    on_phase("load weights", config_ns, weights_ns)
    store, blocks_reason = _allocate(config, model, dtype, max_model_len)
    on_phase("allocate kv cache", weights_ns, time.monotonic_ns())
    num_threads, threads_reason = machine.choose_num_threads(config.num_threads, num_parameters * dtype.itemsize)
    torch.set_num_threads(num_threads)
    reasons = {
        "dtype_reason": dtype_reason,
        "num_blocks_reason": blocks_reason,
        "num_threads_reason": threads_reason,
    }
    resolved = _resolved(config, model, ops, dtype, max_model_len, num_parameters, store, num_threads, reasons)
    return decoder, store, resolved


def _allocate(config: RunnerConfig, model: ModelConfig, dtype: torch.dtype, max_model_len: int) -> tuple[KvStore, str]:
    """The cache, and why it has so many blocks."""
    num_blocks, reason = _choose_num_blocks(config, model, dtype, max_model_len)
    shape = KvShape(num_blocks, config.block_size, model.num_kv_heads, model.head_dim)
    with torch.inference_mode():
        return KvStore(shape, model.num_layers, dtype), reason


def _choose_num_blocks(
    config: RunnerConfig, model: ModelConfig, dtype: torch.dtype, max_model_len: int
) -> tuple[int, str]:
    shape = KvShape(0, config.block_size, model.num_kv_heads, model.head_dim)
    return machine.choose_num_blocks(config, max_model_len, bytes_per_block(shape, model.num_layers, dtype))


def _resolved(
    config: RunnerConfig,
    model: ModelConfig,
    ops: Ops,
    dtype: torch.dtype,
    max_model_len: int,
    num_parameters: int,
    store: KvStore,
    num_threads: int,
    reasons: dict[str, str],
) -> Resolved:
    dtype_name = str(dtype).removeprefix("torch.")
    windows = [window for window in model.layer_windows if window is not None]
    return msgspec.convert(
        {
            "architecture": model.architecture,
            "model_path": config.model_path,
            "num_parameters": num_parameters,
            "weights_bytes": num_parameters * dtype.itemsize,
            "dtype": dtype_name,
            "kv_cache_dtype": dtype_name,
            "linear_backend": ops.linear_name,
            "attention_backend": ops.attention_name,
            "num_threads": num_threads,
            "block_size": config.block_size,
            "num_blocks": store.shape.num_blocks,
            "kv_bytes_per_block": bytes_per_block(store.shape, model.num_layers, dtype),
            "max_model_len": max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "vocab_size": model.vocab_size,
            "eos_token_ids": model.eos_token_ids,
            "context_length": model.max_position_embeddings,
            "sliding_window": min(windows) if windows else None,
            **reasons,
        },
        Resolved,
    )
