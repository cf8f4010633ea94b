"""What is asked of the runner (`RunnerConfig`) and what the machine made of it (`Resolved`). Both frozen.

What cannot be honoured is refused here, by name, before anything is loaded.
"""

from typing import Any

import msgspec

from splittime.core.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16")
KV_CACHE_DTYPES = (*DTYPES, "int8", "fp8")
BACKENDS = ("auto", "native", "torch", "reference", "triton")
COLLECTIVE_TIMEOUT_S = 30.0
GPU_MEMORY_UTILIZATION = 0.9
GENERATION_CONFIGS = ("auto", "vllm", "none")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
QUANTIZATIONS = ("int8", "int4", "w8a8", "fp8")


class RunnerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the runner.

    model_path: a local folder with config.json and safetensors, or a .gguf file.
    load_format: "auto" tells which of the two by the path, "safetensors" and "gguf" insist; "dummy" reads config.json
        alone and makes random weights.
    generation_config: what to take of the checkpoint's file of that name, see `models.generation`.
    dtype: of weights that are not quantised, and of activations with all kernels but the native ones. "auto":
        `runner.machine.choose_dtype`.
    activation_dtype: what activations are in products; what cannot be had is refused. "auto": with native kernels
        float32 where the weight is a float, int8 where it is an integer; with others dtype, unless the scheme rounds
        them. "bfloat16", with native kernels and weights of bfloat16: rounded before each product, on every processor
        alike, which those with instructions for it do in half the time.
    quantization: round the linear weights while loading, see `models.quant.plan`; None leaves them as they are. "w8a8"
        (int8) and "fp8" round activations too; "fp8" needs "triton", "w8a8" that or "native". A checkpoint that is
        quantised already is served as it is and refuses this.
    kv_cache_dtype: "auto" is as the weights' dtype. "fp8" is e4m3 with a scale for each token and head, of "triton".
    kernels: "auto" takes "triton" where there is a CUDA card, else "native", and "torch" where the native library is
        missing; "reference" is the slow oracle.
    packed_cache: the folder for quantised weights; "auto" is one below the user's cache folder, "off" keeps none.
    num_threads: None chooses by the size of the weights, and for small ones by measuring.
    remeasure: measure what earlier starts have remembered (`runner.start_memory`), and remember that.
    max_model_len: longest context in tokens; None takes the checkpoint's.
    gpu_memory_utilization: share of a card's memory that weights, steps and KV cache may take together.
    kv_cache_memory_bytes: None takes what `max_num_seqs` full contexts need, at most half of the free memory.
    kv_offload_memory_bytes: host memory, pinned at start, for copies of blocks that a card's KV cache has no room for;
        0: what is evicted is lost. Each rank takes as much.
    tensor_parallel_size: ranks that share the model, a process each (`runner.parallel`). The threads are divided among
        them; kv_cache_memory_bytes is what each of them takes.
    enforce_eager: on a card, launch every step's kernels one by one: capture no CUDA graphs.
    async_scheduling: plan the next step while one runs, in a thread of its own.
    collective_timeout_s: a rank that keeps the others waiting for longer is taken for hung, and ends them all.
    """

    model_path: str
    dtype: str = "auto"
    activation_dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    num_threads: int | None = None
    remeasure: bool = False
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    load_format: str = "auto"
    generation_config: str = "auto"
    quantization: str | None = None
    kernels: str = "auto"
    packed_cache: str = "auto"
    tensor_parallel_size: int = 1
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S
    async_scheduling: bool = False
    enforce_eager: bool = False
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION
    kv_offload_memory_bytes: int = 0

    def validate(self) -> None:
        """Raise `ConfigError` naming the first setting that is not honoured."""
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("activation_dtype", self.activation_dtype, DTYPES)
        _one_of("kernels", self.kernels, BACKENDS)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("generation_config", self.generation_config, GENERATION_CONFIGS)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.quantization is not None:
            _one_of("quantization", self.quantization, QUANTIZATIONS)
        if not self.packed_cache:
            raise ConfigError("packed_cache is empty", param="packed_cache", value="", hint="off, auto, or a folder")
        for name in ("num_threads", "max_model_len", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, must be at least 1", param=name, value=value)
        if self.kv_offload_memory_bytes < 0:
            message = f"kv_offload_memory_bytes is {self.kv_offload_memory_bytes}, must be at least 0, which is off"
            raise ConfigError(message, param="kv_offload_memory_bytes", value=self.kv_offload_memory_bytes)
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}, must be at least 1", param=name, value=value)
        if not 0 < self.gpu_memory_utilization <= 1:
            message = f"gpu_memory_utilization is {self.gpu_memory_utilization}, must be above 0 and at most 1"
            raise ConfigError(message, param="gpu_memory_utilization", value=self.gpu_memory_utilization)
        if not self.collective_timeout_s > 0:
            message = f"collective_timeout_s is {self.collective_timeout_s}, must be above 0"
            raise ConfigError(message, param="collective_timeout_s", value=self.collective_timeout_s)
        if self.tensor_parallel_size == 1 and self.collective_timeout_s != COLLECTIVE_TIMEOUT_S:
            message = "collective_timeout_s is how long ranks wait for each other, and there is one rank"
            hint = "leave it out, or share the model: --tensor-parallel-size 2"
            raise ConfigError(message, param="collective_timeout_s", value=self.collective_timeout_s, hint=hint)


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine decided; ints and strings only, so that it can be printed, sent and stored.

    kernels, linear_backend: which kernels, and with which instructions. activation_dtype: of what goes from one
        operation to the next. products: of weights by activations, as each is multiplied.
    weights: the schemes of the packed weights, with the format of a checkpoint that came in them. weights_bytes: what
        they take in memory. embedding_bytes: what the embedding table takes in the checkpoint's mapping; only rows that
        are looked up come into memory.
    packed_cache: what became of the cache of packed weights.
    prefill_ns_per_token: what a token of a prompt takes, measured at start, 0 where it was not; prefill_reason: how.
    unused_tensors: the first few that the checkpoint holds and the architecture has no place for.
    default_sampling: what the model's makers advise, for requests that do not say, by the names of `SamplingParams`.
    num_blocks: blocks that the scheduler may hand out, ids 0 to num_blocks - 1.
    num_host_slots: blocks of host memory for what is evicted; kv_offload: what that makes, in words.
    context_length: positions that the checkpoint was made for. sliding_window: the smallest of any layer, or None.
    graph_sizes: numbers of decode rows for which a step was captured.
    tensor_parallel_size: ranks that share the model. Where there are several, weights_bytes, kv_bytes_per_block and
        num_threads are the first one's; rank_weights_bytes and rank_pids are of all, by rank.
    """

    architecture: str
    model_path: str
    num_parameters: int
    kernels: str
    kernels_reason: str
    dtype: str
    dtype_reason: str
    activation_dtype: str
    products: str
    weights: str
    weights_bytes: int
    embedding_bytes: int
    packed_cache: str
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
    num_host_slots: int = 0
    prefill_ns_per_token: int = 0
    prefill_reason: str = ""
    kv_offload: str = ""
    graph_sizes: tuple[int, ...] = ()
    tensor_parallel_size: int = 1
    rank_weights_bytes: tuple[int, ...] = ()
    rank_pids: tuple[int, ...] = ()
    unused_tensors: tuple[str, ...] = ()
    default_sampling: dict[str, float | int] = {}


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        message = f"{name} is {value!r}, which is not supported; supported: {', '.join(allowed)}"
        raise ConfigError(message, param=name, value=value, limit=list(allowed))
