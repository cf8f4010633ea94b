"""Whether these kernels and this checkpoint can honour a setting. Each check raises `ConfigError` if they cannot."""

import logging
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import msgspec

from splittime.core.errors import ConfigError
from splittime.core.facts import RefusedValues
from splittime.kernels.api import Ops
from splittime.kernels.choose import BACKENDS
from splittime.kernels.layer import MixtureSpec, state_floats
from splittime.models.config import ModelConfig
from splittime.models.quant.plan import WeightPlan
from splittime.models.weights.load import is_gguf, read_config
from splittime.models.weights.source import PLAIN
from splittime.runner.config import (
    FIELDS,
    GPU_MEMORY_UTILIZATION,
    NONE,
    OWN_BITS,
    QUANTIZATIONS,
    Dtype,
    KVCacheDtype,
    RunnerConfig,
    speculative_config,
)

log = logging.getLogger("splittime.runner")
TRIED: dict[str, tuple[str | bool, ...]] = {
    "quantization": QUANTIZATIONS,
    "dtype": get_args(Dtype),
    "kv_cache_dtype": get_args(KVCacheDtype),
    "kernels": ("native",),
    "async_scheduling": (True,),
    "enable_lora": (True,),
    "speculative_config": tuple(
        f'{{"method":"{method}"}}' for method in FIELDS if method not in ("draft_model", "mtp")
    ),
}
HOST = ("native", "torch", "reference")
EIGHT_BITS = {"fp8": ("triton", "reference"), "w8a8": ("triton", "reference", "native")}


def refused(config: RunnerConfig, check: Callable[[RunnerConfig], object]) -> Iterator[RefusedValues]:
    """Yields what would be refused if one of these settings were changed on this server. check: raises ConfigError."""
    for name, value in ((name, value) for name, values in TRIED.items() for value in values):
        try:
            check(msgspec.structs.replace(config, **{name: value}))
        except ConfigError as error:
            yield RefusedValues(name=name, value=str(value).rstrip("}"), why=error.info.message)


def check_eight_bits(asked: str | None, kernels: str) -> None:
    if kernels not in EIGHT_BITS.get(asked or "", BACKENDS):
        message = f"quantization is {asked!r}, which the {kernels} kernels do not multiply"
        raise ConfigError(message, param="quantization", value=asked, hint="int8, or kernels=triton on a card")


def check_adapters(config: RunnerConfig, kernels: str) -> None:
    if config.enable_lora and kernels == "triton":
        message = "enable_lora does not go with the triton kernels: adapters are served on a CPU"
        hint = "kernels=native, or leave --enable-lora out"
        raise ConfigError(message, param="enable_lora", value=kernels, hint=hint)


def _parts_of(model: ModelConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields what its layers compute and not all kernels do, with those that do; the first are the quickest."""
    if any(mixer.score_cap for mixer in model.attention):
        yield "caps the scores of attention", HOST
    if any(mixer.has_sinks for mixer in model.attention):
        yield "gives heads sinks", HOST
    if state_floats(model.layers):
        yield "keeps states", HOST


def settle_kernels(asked: str, model: ModelConfig, kernels: str, reason: str) -> tuple[str, str]:
    """Returns the kernels and why: with "auto" some that compute what the model does. Raises `ConfigError` for others
    that were asked for by name. kernels, reason: what this machine chooses."""
    for words, having in _parts_of(model):
        if kernels not in having:
            message = f"{model.architecture} {words}, which the {kernels} kernels do not"
            if asked != "auto":
                hint = f"kernels={having[0]}"
                raise ConfigError(message, param="kernels", value=kernels, limit=list(having), hint=hint)
            _tell(f"computing with the {having[0]} kernels, which is slower: {message}")
            return having[0], message
    return kernels, reason


@cache
def _tell(words: str) -> None:
    """Warn once: settings that nobody has made are tried too."""
    log.warning(words)


def check_ranks(config: RunnerConfig, model: ModelConfig) -> None:
    first = model.layers[0]
    norms = {
        "the queries of all heads together": model.attention[0].normed == "all",
        "the queries of all heads by scales of their own": model.attention[0].normed == "apart",
        "inputs that each layer has of its own": model.layer_input_size > 0,
        "what all experts add together": isinstance(first.feed_forward, MixtureSpec) and first.feed_forward.is_apart,
    }
    what = next((words for words, is_so in norms.items() if is_so), None)
    if config.tensor_parallel_size > 1 and what is not None:
        message = f"{model.architecture} norms {what}, which ranks do not share"
        hint = "leave tensor_parallel_size out"
        raise ConfigError(message, param="tensor_parallel_size", value=config.tensor_parallel_size, limit=1, hint=hint)


def check_states(config: RunnerConfig, model: ModelConfig) -> None:
    """Raises `ConfigError` for a setting that layers with states do not go with."""
    if not state_floats(model.layers):
        return
    drafts = speculative_config(config.speculative_config)
    settings: dict[str, tuple[object, bool]] = {
        "tensor_parallel_size": (config.tensor_parallel_size, config.tensor_parallel_size > 1),
        "enable_lora": (config.enable_lora, config.enable_lora),
        "kv_peers": (list(config.kv_peers), bool(config.kv_peers)),
        "kv_export": (config.kv_export, config.kv_export),
        "speculative_config": (config.speculative_config, drafts is not None and drafts.method != "auto"),
    }
    for name, (value, is_asked) in settings.items():
        if is_asked:
            message = f"{name} does not go with {model.architecture}, whose layers keep a state of each sequence"
            raise ConfigError(message, param=name, value=value, hint=f"leave {name} out")


def settle_speculation(config: RunnerConfig, kernels: str, *, has_states: bool) -> tuple[RunnerConfig, str]:
    """Returns these settings, in which nothing is guessed where "auto" cannot, and why in words."""
    asked = speculative_config(config.speculative_config)
    if asked is None or asked.method != "auto":
        return config, "as asked"
    found = ", ".join([*config.drafts_obstacles(kernels), *["layers with states"] * has_states])
    if not found:
        return config, ""
    return msgspec.structs.replace(config, speculative_config=NONE), f"auto: drafts do not go with {found}"


def check_speculation(config: RunnerConfig, model: ModelConfig, kernels: str) -> None:
    """Drafts could change an answer where a token is not computed alike in every batch, to the last bit. A draft model
    must have the vocabulary, and the model's own copy fewer bits."""
    asked = speculative_config(config.speculative_config)
    if asked is None or asked.method == "auto":
        return
    if kernels != "native":
        message = f"speculative_config needs the native kernels, and these are {kernels}"
        hint = "Install with a C++ compiler and serve on a CPU, or leave --speculative-config out."
        raise ConfigError(message, param="speculative_config", value=kernels, hint=hint)
    if asked.method == "draft_model" and config.draft_model_path is not None:  # a head's is checked with its sizes
        _check_vocabulary(read_config(Path(config.draft_model_path)), model, config.draft_model_path)
    if asked.method == "self":
        _check_fewer_bits(asked.quantization or OWN_BITS, config, model)


def _check_vocabulary(drafting: ModelConfig, model: ModelConfig, path: str) -> None:
    found, wanted = drafting.vocab_size, model.vocab_size
    if found != wanted:
        message = f"the draft model {path} has {found} tokens, and the model has {wanted}"
        hint = "a draft model needs the model's tokenizer: a smaller one of the same family"
        raise ConfigError(message, param="speculative_config", value=found, limit=wanted, hint=hint)


def _check_fewer_bits(asked: str, config: RunnerConfig, model: ModelConfig) -> None:
    """A checkpoint that is quantised already cannot be rounded once more (`check_rounding`)."""
    kept = "quantised in the checkpoint" if model.quantization is not None else config.quantization
    if kept is not None and not (asked == "int4" and kept in ("int8", "w8a8")):
        message = f"speculative_config: drafts of the model itself in {asked}, whose weights are {kept} already"
        raise ConfigError(message, param="speculative_config", value=asked, hint='{"method": "suffix"} needs no model')


def check_activations(asked: str, plan: WeightPlan, ops: Ops) -> None:
    """The router's activations are never rounded, so nothing is asked of them."""
    for kind, scheme in (("layers", plan.layers), ("values and down", plan.finer), ("head", plan.head)):
        found = ops.product_dtype(scheme)
        if asked not in ("auto", found):
            raise ConfigError(
                f"activation_dtype is {asked!r}; the {ops.name} kernels multiply {kind} of {scheme.name} by {found}",
                param="activation_dtype",
                value=asked,
                limit=["auto", found],
                hint="activation_dtype=auto; bfloat16 is for the native kernels and weights of bfloat16",
            )


def check_share_of_card(config: RunnerConfig, ops: Ops) -> None:
    share, name = config.gpu_memory_utilization, "gpu_memory_utilization"
    if ops.device.type == "cpu" and share != GPU_MEMORY_UTILIZATION:
        message = f"{name} is {share}, but the {ops.name} kernels run on the CPU"
        raise ConfigError(message, param=name, value=share, hint="kv_cache_memory_bytes bounds the KV cache here")


def check_load_format(asked: str, path: Path, model: ModelConfig) -> None:
    if asked == "dummy" and model.quantization is None and not is_gguf(path):
        return
    found = "gguf" if is_gguf(path) else "safetensors"
    if asked not in ("auto", found):
        message = f"load_format is {asked!r}, but {path} is read as {found}"
        raise ConfigError(message, param="load_format", value=asked, hint="load_format=auto")


def check_rounding(config: RunnerConfig, model: ModelConfig, held_in: Callable[[], str]) -> None:
    """Integers that stand for a model's weights are served as they are: to round them again would only lose more.
    held_in: tells the format of the checkpoint."""
    if config.quantization is None:
        return
    held = held_in()
    if held != PLAIN:
        bits = "" if model.quantization is None else f", {model.quantization.bits} bits"
        raise ConfigError(
            f"quantization is {config.quantization!r}, but the checkpoint is already quantised ({held}{bits}) and is "
            "served as it is",
            param="quantization",
            value=config.quantization,
            hint="leave --quantization out, or take the unquantised model",
        )


def check_sharing(config: RunnerConfig, kernels: str) -> None:
    """Raises `ConfigError` where blocks cannot be shared with other servers."""
    obstacles = config.sharing_obstacles(kernels) if config.kv_peers or config.kv_export else []
    if obstacles:
        message = f"blocks of KV cache are not shared with {obstacles[0]}"
        hint = "leave kv_peers and kv_export out"
        raise ConfigError(message, param="kv_peers", value=list(config.kv_peers), hint=hint)
