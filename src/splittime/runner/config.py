"""What is asked of the runner (`RunnerConfig`) and what the machine made of it (`Resolved`). Both frozen.

What cannot be honoured is refused here, by name, before anything is loaded.
"""

from typing import Any

import msgspec

from splittime.core.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16")
BACKENDS = ("auto", "cpu", "reference")


class RunnerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the runner.

    model_path: a local folder with config.json and safetensors.
    dtype: of weights and activations; "auto" takes bfloat16 only where the CPU multiplies it and the weights have it.
    kv_cache_dtype: "auto" (the same as dtype), or dtype's own name.
    num_threads: of torch; None chooses by the size of the weights.
    max_model_len: longest context in tokens; None takes the checkpoint's.
    kv_cache_memory_bytes: None takes what `max_num_seqs` full contexts need, at most half of the free memory.
    kernels: "auto" (cpu), or "reference" to run the slow oracle.
    """

    model_path: str
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    num_threads: int | None = None
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    load_format: str = "auto"
    quantization: str | None = None
    kernels: str = "auto"

    def validate(self) -> None:
        """Raise `ConfigError` naming the first setting that is not honoured."""
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kernels", self.kernels, BACKENDS)
        _one_of("load_format", self.load_format, ("auto", "safetensors"))
        _one_of("kv_cache_dtype", self.kv_cache_dtype, DTYPES)
        if self.quantization is not None:
            _one_of("quantization", self.quantization, ("None",))
        for name in ("num_threads", "max_model_len", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, must be at least 1", param=name, value=value)
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}, must be at least 1", param=name, value=value)

    def check_kv_cache_dtype(self, dtype: str) -> None:
        """The cache is kept in the dtype of the activations; raise `ConfigError` when another was asked."""
        _one_of("kv_cache_dtype", self.kv_cache_dtype, ("auto", dtype))


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine decided; ints and strings only, so that it can be printed, sent and stored.

    weights_bytes: num_parameters in this dtype (a layout for the CPU may hold some weights twice).
    num_blocks: blocks that the scheduler may hand out, ids 0 to num_blocks - 1.
    context_length: positions that the checkpoint was made for. sliding_window: the smallest of any layer, or None.
    """

    architecture: str
    model_path: str
    num_parameters: int
    weights_bytes: int
    dtype: str
    dtype_reason: str
    kv_cache_dtype: str
    linear_backend: str
    attention_backend: str
    num_threads: int
    num_threads_reason: str
    block_size: int
    num_blocks: int
    num_blocks_reason: str
    kv_bytes_per_block: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    context_length: int
    sliding_window: int | None


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        message = f"{name} is {value!r}, which is not supported; supported: {', '.join(allowed)}"
        raise ConfigError(message, param=name, value=value, limit=list(allowed))
