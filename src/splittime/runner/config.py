"""What is asked of the runner (`RunnerConfig`) and what the machine made of it (`Resolved`). Both frozen.

What cannot be honoured is refused here, by name, before anything is loaded.

What `speculative_config` says, in JSON as vLLM's flag of that name has it: which drafts, and how many at most.

    {"method": "auto"}                                       "suffix", where that costs nothing that could be measured
    {"method": "none"}                                       nothing is guessed
    {"method": "suffix"}                                     the request's own text, and past answers to its tenant
    {"method": "ngram", "num_speculative_tokens": 8}         the request's own text alone
    {"method": "ngram", "prompt_lookup_min": 4}              only behind so many tokens that stood there before
    {"method": "draft_model", "model": "code-draft"}         a smaller model with the same vocabulary
    {"method": "self", "quantization": "int4"}               the model itself, in fewer bits
    {"method": "mtp", "model": "./head"}                     a head on the model; without `model` the checkpoint's own

How many of the drafts a step really verifies, the scheduler decides (`scheduler.speculation`).
"""

from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from splittime.core.errors import ConfigError
from splittime.core.facts import Pooling, RefusedValues
from splittime.core.settings import Doc, StepLimits, check
from splittime.kernels.choose import Backend

MOST_DRAFTS, DEFAULT_DRAFTS = 64, 16
CORPUS_TOKENS = 2**18  # of a tenant's past answers
MOST_TOKENS = 2**21  # of all tenants' together
MOST_TENANTS = 1024  # of whom answers are kept
TOKEN_BYTES = 104  # at most, with its place in the tables: those in use and larger ones that are being filled
LEAST_LOOKUP = 2
AUTO, NONE = '{"method": "auto"}', '{"method": "none"}'
LEAST_STEP_MS = 4.0  # of one request: guessing where nothing can be guessed takes some ten microseconds of a step
OWN_BITS: Literal["int4"] = "int4"  # of the model's copy, unless another quantization is asked for
FIELDS: dict[str, set[str]] = {  # beside num_speculative_tokens, which every method has
    "auto": set(),
    "none": set(),
    "suffix": {"prompt_lookup_min"},
    "ngram": {"prompt_lookup_min"},
    "draft_model": {"model", "quantization"},
    "self": {"quantization"},
    "mtp": {"model", "quantization"},
}
Dtype = Literal["auto", "float32", "bfloat16"]
KVCacheDtype = Literal["auto", "float32", "bfloat16", "int8", "fp8"]
Kernels = Literal["auto", Backend]
Quantization = Literal["int8", "int4", "w8a8", "fp8"]
QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)
COLLECTIVE_TIMEOUT_S = 30.0
GPU_MEMORY_UTILIZATION = 0.9


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """num_speculative_tokens: drafts of a row, at most. prompt_lookup_min: matching tokens that drafts need. model: of
    drafts, as `--model` takes it, or the folder of a head. quantization: of its weights, "int8" or "int4"; None is the
    model's own, and "int4" for the method "self"."""

    method: Literal["auto", "none", "suffix", "ngram", "draft_model", "self", "mtp"]
    num_speculative_tokens: int = DEFAULT_DRAFTS
    prompt_lookup_min: int | None = None
    model: str | None = None
    quantization: Literal["int8", "int4"] | None = None

    def check(self) -> None:
        """Raises ConfigError for a number out of its bounds, and for a field that the method has no use for."""
        for name, least, most in (("num_speculative_tokens", 1, MOST_DRAFTS), ("prompt_lookup_min", LEAST_LOOKUP, 64)):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                message = f"{name} = {value} of speculative_config is not in {least} to {most}"
                raise ConfigError(message, param="speculative_config", value=value, limit=most)
        if self.method == "none" and self.num_speculative_tokens != DEFAULT_DRAFTS:
            message = "speculative_config: the method 'none' has no use for num_speculative_tokens"
            value = self.num_speculative_tokens
            raise ConfigError(message, param="speculative_config", value=value, hint="leave it out")
        for name in ("prompt_lookup_min", "model", "quantization"):
            if getattr(self, name) is not None and name not in FIELDS[self.method]:
                message = f"speculative_config: the method {self.method!r} has no use for {name}"
                raise ConfigError(message, param="speculative_config", value=getattr(self, name), hint="leave it out")
        if self.method == "draft_model" and self.model is None:
            hint = '{"method": "draft_model", "model": "code-draft"}: a folder, a GGUF file or an id, as --model takes'
            raise ConfigError("speculative_config names no model", param="speculative_config", hint=hint)

    @property
    def has_model(self) -> bool:
        """Returns whether a model, or a head, makes the drafts."""
        return self.method in ("draft_model", "self", "mtp")

    @property
    def memory_bytes(self) -> int:
        """Returns what past answers may come to take."""
        return MOST_TOKENS * TOKEN_BYTES if self.method in ("auto", "suffix") else 0


def speculative_config(text: str | None) -> SpeculativeConfig | None:
    """Returns what a setting's text says; None where nothing is to be guessed. Raises ConfigError."""
    if text is None:
        return None
    try:
        config = msgspec.json.decode(text, type=SpeculativeConfig)
    except msgspec.DecodeError as error:
        message = f"speculative_config is not understood: {error}"
        hint = f"Can be: {AUTO}, {NONE}, "
        hint += '{"method": "suffix"}, {"method": "ngram"}, {"method": "self"}, {"method": "draft_model", "model": '
        hint += 'NAME} or {"method": "mtp", "model": FOLDER}, with num_speculative_tokens.'
        raise ConfigError(message, param="speculative_config", value=text, hint=hint) from error
    config.check()
    return None if config.method == "none" else config


def without_place(text: str | None) -> str | None:
    """Returns such a text as anybody may read it: of a model that lies in a folder here, no more than its name."""
    config = speculative_config(text)
    if config is None or config.model is None or not Path(config.model).expanduser().exists():
        return text
    name = Path(config.model).expanduser().resolve().name
    return msgspec.json.encode(msgspec.structs.replace(config, model=name)).decode()


class RunnerConfig(StepLimits, frozen=True, kw_only=True):
    """Settings of the runner; each says what it does, and the following more of some.

    model_path: a local folder with config.json and safetensors, or a .gguf file.
    dtype: "auto" is `runner.machine.choose_dtype`.
    activation_dtype: "bfloat16" rounds activations before each product with weights of bfloat16, "float32" never does,
        "auto" where that is much faster (`runner.machine.choose_rounding`). What the kernels do not support is refused.
    quantization: see `models.quant.plan`. "w8a8" (int8) and "fp8" round activations too; "fp8" needs "triton", "w8a8"
        that or "native". A checkpoint that is quantised already is served as it is and refuses this.
    kv_cache_dtype: "fp8" is e4m3 with a scale for each token and head.
    kv_cache_memory_bytes: None takes what `max_num_seqs` full contexts need, at most half of the free memory.
    kv_offload_memory_bytes: pinned at start; each rank takes as much.
    draft_model_path: of the model that speculative_config names, where it names one; as model_path.
    tensor_parallel_size: a process for each rank (`runner.ranks`); kv_cache_memory_bytes is what each rank takes.
    """

    model_path: str
    dtype: Annotated[Dtype, Doc("Weights that are not quantised; of other than native kernels activations too.")] = (
        "auto"
    )
    activation_dtype: Annotated[
        Dtype,
        Doc(
            "Activations in products. auto, native kernels: int8 by integers; float32 by float weights, but rounded to "
            "bfloat16 by those of bfloat16 on AMX and Zen 4; torch: as dtype, but int8 by int8 with a scale a row."
        ),
    ] = "auto"
    quantization: Annotated[
        Quantization | None,
        Doc(
            "Round linear weights while loading: int8, int4 (groups of 64; head int8, and on a CPU values and down), "
            "w8a8 (int8, and activations), fp8 (a card; and activations); default: not."
        ),
    ] = None
    kv_cache_dtype: Annotated[KVCacheDtype, Doc("KV cache; auto is as dtype; fp8 needs a card.")] = "auto"
    max_model_len: Annotated[int | None, Doc("Longest prompt plus output, in tokens; default: the model's.", 1)] = None
    kv_cache_memory_bytes: Annotated[
        int | None, Doc("KV cache, as 512MiB or 4GiB; default: for max_num_seqs contexts, on a card what is free.", 1)
    ] = None
    kv_offload_memory_bytes: Annotated[
        int, Doc("On a card: host memory for copies of blocks that the KV cache has no room for, as 16GiB; 0: none.", 0)
    ] = 0
    num_threads: Annotated[
        int | None,
        Doc(
            "CPU threads; default: one a core. Small models that generate: native kernels measure it at start (up to "
            "256 MiB of weights), the others take one (up to 128 MiB).",
            1,
            1024,
        ),
    ] = None
    remeasure: Annotated[
        bool,
        Doc("Measure threads and prompt tokens a step again, rather than take what an earlier start has remembered."),
    ] = False
    kernels: Annotated[
        Kernels,
        Doc("auto is triton with a card, else native, or torch (slower) without its library; reference is slow."),
    ] = "auto"
    packed_cache: Annotated[
        str,
        Doc(
            "Folder that keeps quantised weights, or off; auto: splittime/packed in your cache folder. Delete to clear."
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"],
        Doc("auto tells safetensors and gguf apart by the path; dummy makes random weights, to measure speed by."),
    ] = "auto"
    generation_config: Annotated[
        Literal["auto", "vllm", "none"],
        Doc(
            "What applies of generation_config.json, or of what a GGUF file advises: auto all of it, where a request "
            "says nothing; vllm its ends of sequence, not its sampling; none nothing."
        ),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float, Doc("Share of a card's memory for weights, steps and KV cache together.", 0.01, 1.0)
    ] = GPU_MEMORY_UTILIZATION
    enforce_eager: Annotated[bool, Doc("On a card, capture no CUDA graphs: kernels are launched one by one.")] = False
    async_scheduling: Annotated[
        bool, Doc("Plan the next step while one runs; a new request may wait for one step more.")
    ] = False
    speculative_config: Annotated[
        str,
        Doc(
            'Guess tokens and verify several in a step, native kernels: {"method": "suffix"} from the text and past '
            'answers, {"method": "ngram"} from the text, {"method": "self"} by the model in 4 bits, {"method": '
            '"draft_model", "model": NAME} by another, {"method": "mtp", "model": FOLDER} by a head, {"method": '
            '"none"} not; "auto": suffix unless steps are short; num_speculative_tokens: at most, 16.'
        ),
    ] = AUTO
    draft_model_path: str | None = None
    kv_peers: Annotated[
        tuple[str, ...],
        Doc(
            "Servers of the same model, as http://127.0.0.1:8001, whose cached blocks are fetched where that is faster."
        ),
    ] = ()
    kv_peer_key: Annotated[str | None, Doc("The operator's key of the kv_peers.", is_secret=True)] = None
    kv_export: Annotated[bool, Doc("Give cached blocks to servers that ask with the operator's key.")] = False
    enable_lora: Annotated[bool, Doc("Serve adapters (LoRA, PEFT's format) beside the model, on a CPU.")] = False
    max_lora_rank: Annotated[int, Doc("Largest r of an adapter.", 1, 512)] = 16
    tensor_parallel_size: Annotated[
        int, Doc("Processes that share the model, each with its part of every layer; they divide num_threads.", 1, 64)
    ] = 1
    collective_timeout_s: Annotated[
        float,
        Doc("Seconds that such a process may keep the others waiting before all are ended and started anew.", 0.001),
    ] = COLLECTIVE_TIMEOUT_S

    def validate(self) -> None:
        """Raises `ConfigError` that names the first setting that cannot be honoured."""
        check(self)
        if not self.packed_cache:
            raise ConfigError("packed_cache is empty", param="packed_cache", value="", hint="off, auto, or a folder")
        if self.tensor_parallel_size == 1 and self.collective_timeout_s != COLLECTIVE_TIMEOUT_S:
            message = "collective_timeout_s is how long ranks wait for each other, and there is one rank"
            hint = "leave it out, or share the model: --tensor-parallel-size 2"
            raise ConfigError(message, param="collective_timeout_s", value=self.collective_timeout_s, hint=hint)
        if self.enable_lora and self.tensor_parallel_size > 1:
            message = f"enable_lora does not go with tensor_parallel_size = {self.tensor_parallel_size}"
            hint = "Leave one of the two out: adapters are served by one process."
            raise ConfigError(message, param="enable_lora", value=True, hint=hint)
        self._check_speculation()

    def _check_speculation(self) -> None:
        asked = speculative_config(self.speculative_config)
        if asked is None or asked.method == "auto":
            return
        if asked.model is not None and self.draft_model_path is None:
            message = f"speculative_config names {asked.model!r}, and draft_model_path does not say where it lies"
            raise ConfigError(message, param="draft_model_path", value=None, hint="the folder, or the GGUF file")
        obstacles = self.drafts_obstacles()
        if obstacles:
            message = f"speculative_config does not go with {obstacles[0]}"
            hint = "Leave one of the two out: drafts are verified by one process, a step at a time."
            raise ConfigError(message, param="speculative_config", value=self.speculative_config, hint=hint)
        if asked.method == "mtp" and self.kv_offload_memory_bytes:
            message = f"a head does not go with kv_offload_memory_bytes = {self.kv_offload_memory_bytes}"
            hint = "Leave one of the two out: what a head reads of a prefix is not kept in host memory."
            raise ConfigError(message, param="speculative_config", value=self.speculative_config, hint=hint)

    def drafts_obstacles(self, kernels: str = "native") -> list[str]:
        """Returns what drafts do not go with, in words: a row whose drafts are verified cannot be planned ahead, ranks
        verify none, and other kernels do not compute a token alike as a draft and alone, to the last bit."""
        return _present(
            {
                f"async_scheduling = {self.async_scheduling}": self.async_scheduling,
                f"tensor_parallel_size = {self.tensor_parallel_size}": self.tensor_parallel_size > 1,
                f"{kernels} kernels": kernels != "native",
            }
        )

    def sharing_obstacles(self, kernels: str) -> list[str]:
        """Returns, in words, what keeps this server from sharing blocks of KV cache with others. It is also asked
        before there is a server, by whoever starts some."""
        drafts, are_native = speculative_config(self.speculative_config), kernels == "native"
        return _present(
            {
                f"the {kernels} kernels: it takes the native ones, whose sums depend on no neighbour": not are_native,
                f"tensor_parallel_size = {self.tensor_parallel_size}": self.tensor_parallel_size > 1,
                f"load_format = {self.load_format}": self.load_format == "dummy",
                "a model that makes drafts, which keeps blocks of its own": drafts is not None and drafts.has_model,
                "adapters (enable_lora), whose names do not say what they hold": self.enable_lora,
            }
        )


def _present(obstacles: dict[str, bool]) -> list[str]:
    return [words for words, is_there in obstacles.items() if is_there]


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine decided; ints and strings only, so that it can be printed, sent and stored.

    kernels, linear_backend: which kernels, and with which instructions. activation_dtype: of what goes from one
        operation to the next. products: of weights by activations, as each is multiplied.
    layers: whether the kernels compute each in one call, or part by part and why.
    weights: the schemes of the packed weights, with the format of a checkpoint that came in them. weights_bytes: what
        they take in memory. embedding_bytes: what the embedding table takes in the checkpoint's mapping; only rows that
        are looked up come into memory.
    packed_cache: what became of the cache of packed weights.
    execution: how steps are computed, by the "host" while it waits or on a "device" beside it; execution_reason: why.
    prefill_ns_per_token: what a token of a prompt takes, measured at start, 0 where it was not; prefill_reason: how.
    speculative_config: what tokens are guessed with, None where none are; speculative_reason: why.
    unused_tensors: the first few that the checkpoint holds and the architecture has no place for.
    default_sampling: what the model's makers advise, for requests that do not say, by the names of `SamplingParams`.
    pooling: how embeddings are made, as the model's files say.
    num_blocks: blocks that the scheduler may hand out, ids 0 to num_blocks - 1.
    num_host_slots: blocks of host memory for what is evicted; kv_offload: what that makes, in words.
    num_state_slots: states of sequences that are kept, of `state_bytes` each; 0: the model's layers have none.
    context_length: positions that the checkpoint was made for. sliding_window: the smallest of any layer, or None.
    graph_sizes: numbers of decode rows for which a step was captured.
    tensor_parallel_size: ranks that share the model. Where there are several, weights_bytes, kv_bytes_per_block and
        num_threads are the first one's; rank_weights_bytes and rank_pids are of all, by rank.
    refuses: what this model on this machine would not start with.
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
    products_reason: str
    layers: str
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
    execution: str = "host"
    execution_reason: str = ""
    num_host_slots: int = 0
    num_state_slots: int = 0
    state_bytes: int = 0
    prefill_ns_per_token: int = 0
    prefill_reason: str = ""
    speculative_config: str | None = None
    speculative_reason: str = ""
    kv_offload: str = ""
    graph_sizes: tuple[int, ...] = ()
    tensor_parallel_size: int = 1
    rank_weights_bytes: tuple[int, ...] = ()
    rank_pids: tuple[int, ...] = ()
    unused_tensors: tuple[str, ...] = ()
    default_sampling: dict[str, float | int] = {}
    pooling: Pooling = Pooling()
    refuses: tuple[RefusedValues, ...] = ()
