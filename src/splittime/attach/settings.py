"""The settings of vLLM's scheduler, as the facts of a ledger tell them, and which of them a simulation can change.

They have the names of vLLM's flags but for `num_blocks` (`--num-gpu-blocks-override`) and `policy`
(`--scheduling-policy`). Nothing here needs vLLM.
"""

from typing import Any, Literal

import msgspec

from splittime.core.errors import ConfigError
from splittime.ledger.facts import ServerFacts
from splittime.simulate.change import MAX_BLOCKS, Change

KNOBS = (
    *("max_num_seqs", "max_num_batched_tokens", "num_blocks", "policy", "enable_prefix_caching"),
    *("enable_chunked_prefill", "long_prefill_token_threshold"),
)
MOST = {"max_num_seqs": 65_536, "max_num_batched_tokens": 2**24, "num_blocks": MAX_BLOCKS}
MORE_THAN_ONE = ("pipeline_parallel_size", "data_parallel_size")


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """num_blocks: of the KV cache, without vLLM's null block. async_scheduling: it plans a step while one runs."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    policy: Literal["fcfs", "priority"] = "fcfs"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    max_num_active_seqs: int | None = None
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True
    async_scheduling: bool = False


def flag_of(name: str, value: Any) -> list[str]:
    """Returns a knob as it is typed for `vllm serve`. Its number of blocks counts the null block."""
    if name == "num_blocks":
        return ["--num-gpu-blocks-override", str(value + 1)]
    flag = "scheduling-policy" if name == "policy" else name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]


def setting_of(flag: str, value: Any) -> tuple[str, Any]:
    """Returns the knob that a flag of `vllm serve` sets (its name with underscores), and to what."""
    if flag == "num_gpu_blocks_override":
        return "num_blocks", value - 1
    return ("policy" if flag == "scheduling_policy" else flag), value


def settings_of(facts: ServerFacts) -> VllmSettings:
    """Raises ConfigError for facts that say too little, and for an engine that one scheduler alone does not explain."""
    _require_simple(facts.settings)
    known = {name: facts.settings[name] for name in VllmSettings.__struct_fields__ if name in facts.settings}
    try:
        return msgspec.convert(known, VllmSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the ledger's facts cannot be: {error}", param="ledger") from None


def changed(settings: VllmSettings, change: Change) -> VllmSettings:
    """Returns the settings with the change made. Raises ConfigError for one that vLLM has not, or that cannot be."""
    unknown = sorted(set(change.settings) - set(KNOBS))
    if unknown:
        hint = f"What can be changed of vLLM: {', '.join(KNOBS)}."
        raise ConfigError(f"vLLM's scheduler has no {unknown[0]!r} to change", param=unknown[0], hint=hint)
    if not 0.01 <= change.speed <= 100:
        raise ConfigError(f"speed is {change.speed:g}; it must be 0.01 to 100", param="speed", value=change.speed)
    if "max_num_seqs" in change.settings and settings.max_num_active_seqs is not None:
        hint = "Record a server without --max-num-active-seqs."
        raise ConfigError("max_num_active_seqs bounds who runs", param="max_num_seqs", hint=hint)
    try:
        settings = msgspec.convert({**msgspec.to_builtins(settings), **change.settings}, VllmSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"bad setting: {error}", value=str(change.settings)) from None
    _require_possible(settings)
    return settings


def _require_possible(settings: VllmSettings) -> None:
    for name, most in MOST.items():
        value = getattr(settings, name)
        if not 1 <= value <= most:
            raise ConfigError(f"{name} is {value}; it must be 1 to {most}", param=name, value=value, limit=most)
    budget = settings.max_num_batched_tokens
    if budget < settings.max_num_seqs:
        words = f"max_num_batched_tokens is {budget}; vLLM wants at least max_num_seqs ({settings.max_num_seqs})"
        raise ConfigError(words, param="max_num_batched_tokens", value=budget, limit=settings.max_num_seqs)
    if not settings.enable_chunked_prefill and budget < settings.max_model_len:
        words = f"max_num_batched_tokens is {budget}; without chunked prefill vLLM wants room for a whole prompt"
        raise ConfigError(words, param="max_num_batched_tokens", value=budget, limit=settings.max_model_len)
    if settings.num_blocks * settings.block_size < settings.max_model_len:
        words = f"num_blocks is {settings.num_blocks}; vLLM wants room for a request of max_model_len"
        least = -(-settings.max_model_len // settings.block_size)
        raise ConfigError(words, param="num_blocks", value=settings.num_blocks, limit=least)
    if settings.long_prefill_token_threshold < 0:
        value = settings.long_prefill_token_threshold
        raise ConfigError("it must be at least 0", param="long_prefill_token_threshold", value=value, limit=0)


def _require_simple(told: dict[str, Any]) -> None:
    """Raises ConfigError for what lies outside one scheduler over one group of full attention."""
    faults = {
        "num_speculative_tokens": bool(told.get("num_speculative_tokens")),
        "kv_connector": bool(told.get("kv_connector")),
        "kv_cache_groups": told.get("kv_cache_groups", ["FullAttentionSpec"]) != ["FullAttentionSpec"],
        **{name: told.get(name, 1) != 1 for name in MORE_THAN_ONE},
    }
    for name, is_fault in faults.items():
        if is_fault:
            words = f"a vLLM whose {name} is {told[name]} cannot be run again"
            hint = "Can be: one engine with full attention, without drafts or a KV connector."
            raise ConfigError(words, param=name, value=str(told[name]), hint=hint)
