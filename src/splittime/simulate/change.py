"""A change to a server whose effect is asked: which settings it may touch, the settings with it made, what it does."""

from collections.abc import Mapping
from typing import Any

import msgspec

from splittime.core.errors import ConfigError
from splittime.core.settings import parse_bytes
from splittime.scheduler.admission import MAX_BOUND, QueueLimits
from splittime.scheduler.config import LIVE_KNOBS, SchedulerConfig

SIMULATED_KNOBS = (*(knob for knob in LIVE_KNOBS if knob != "paused"), "num_blocks")
LIMITS = ("max_queued_requests", "max_queued_prompt_tokens")
MAX_BLOCKS = 2**22  # a simulated cache has some fifty bytes for each, and is made anew for every run
CACHE = ("kv_cache_dtype", "kv_cache_memory_bytes")  # simulated by the blocks that they come to
SIMULATED = (*SIMULATED_KNOBS, *LIMITS, *CACHE)
UNSIMULATED = (
    *("block_size", "dtype", "quantization", "num_threads", "kernels", "enforce_eager", "async_scheduling"),
    *("speculative_config", "tensor_parallel_size", "kv_offload_memory_bytes", "enable_lora", "max_loras"),
    *("max_model_len", "gpu_memory_utilization"),
)
_NUMBER_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1 + 4 / 64, "fp8": 1 + 4 / 64}
"""Of the KV cache; those of one byte with a scale for a head's numbers, 64 as a rule."""


def require_simulated(settings: Mapping[str, Any]) -> None:
    """Raises ConfigError for a setting of which only a measurement can tell what it does."""
    name = next((name for name in settings if name in UNSIMULATED), None)
    if name is not None:
        flag, *able = (f"--{each.replace('_', '-')}" for each in (name, *SIMULATED))
        message = f"{flag} cannot be simulated: what its steps take is in no record of a server without it"
        hint = (
            f"Measure it: a server with it, and splittime bench; tune does. What can be simulated: {', '.join(able)}."
        )
        raise ConfigError(message, param=name, value=settings[name], hint=hint)


def in_blocks(settings: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings with what changes the KV cache told as so many blocks, `num_blocks`. now: all that the
    server says of itself. Raises ConfigError where that does not say how large a block is, and for both `num_blocks`
    and what it would follow from."""
    of_cache = {name: settings[name] for name in CACHE if name in settings}
    rest = {name: value for name, value in settings.items() if name not in CACHE}
    if not of_cache:
        return rest
    dtype, block_bytes, num_blocks = (now.get(name) for name in ("kv_cache_dtype", "kv_bytes_per_block", "num_blocks"))
    wanted = of_cache.get("kv_cache_dtype", dtype)
    wanted = now.get("dtype") if wanted == "auto" else wanted
    if dtype not in _NUMBER_BYTES or wanted not in _NUMBER_BYTES or not block_bytes or not num_blocks:
        name, value = next(iter(of_cache.items()))
        message = f"nobody knows how many blocks of the KV cache {name} {value} comes to: this server's is {dtype}"
        raise ConfigError(message, param=name, value=value, hint="Say --num-blocks, of the cache that you mean.")
    if "num_blocks" in rest:
        raise ConfigError("num_blocks says the cache's size too", param="num_blocks", hint="Give one of them.")
    try:
        memory_bytes = parse_bytes(str(of_cache.get("kv_cache_memory_bytes", num_blocks * block_bytes)))
    except ValueError as error:
        raise ConfigError(f"{error} is no size", param="kv_cache_memory_bytes", hint="For example 64MiB.") from None
    return {**rest, "num_blocks": int(memory_bytes / (block_bytes * _NUMBER_BYTES[wanted] / _NUMBER_BYTES[dtype]))}


class Change(msgspec.Struct, frozen=True):
    """settings: values by name, of `SIMULATED_KNOBS` and `LIMITS`; for a vLLM of its own (`attach.settings`). speed:
    requests come so many times as fast."""

    settings: dict[str, Any] = {}
    speed: float = 1.0

    def __str__(self) -> str:
        told = [f"{name} {value}" for name, value in self.settings.items()]
        return ", ".join([*told, *([f"{self.speed:g} times the requests a second"] if self.speed != 1 else [])])


def changed(config: SchedulerConfig, limits: QueueLimits, change: Change) -> tuple[SchedulerConfig, QueueLimits]:
    """Returns the settings with the change made. Raises ConfigError for one that there is not, or that cannot be."""
    unknown = sorted(set(change.settings) - {*SIMULATED_KNOBS, *LIMITS})
    if unknown:
        hint = f"What can be changed: {', '.join((*SIMULATED_KNOBS, *LIMITS))}."
        raise ConfigError(f"{unknown[0]!r} cannot be simulated", param=unknown[0], hint=hint)
    if not 0.01 <= change.speed <= 100:
        raise ConfigError(f"speed is {change.speed:g}; it must be 0.01 to 100", param="speed", value=change.speed)
    knobs = {name: value for name, value in change.settings.items() if name in SIMULATED_KNOBS}
    bounds = {name: change.settings.get(name, getattr(limits, name)) for name in LIMITS}
    for name, value in bounds.items():
        _require_whole(name, value, MAX_BOUND)
    try:
        config = msgspec.convert({**msgspec.to_builtins(config), **knobs}, SchedulerConfig).validate()
    except msgspec.ValidationError as error:
        raise ConfigError(f"bad setting: {error}", value=str(knobs)) from None
    _require_whole("num_blocks", config.num_blocks, MAX_BLOCKS)
    return config, QueueLimits(**bounds)


def refusal(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> str | None:
    """Returns why a scheduler would refuse these changes of what it is told, by its own checks; None if it would not,
    or has no part in them."""
    fields = SchedulerConfig.__struct_fields__
    if not any(name in fields for name in changes):
        return None
    told = {name: value for name, value in {**settings, **changes}.items() if name in fields}
    if "block_size" in changes and {"block_size", "num_blocks"} <= settings.keys():  # of the same memory
        told["num_blocks"] = settings["num_blocks"] * settings["block_size"] // changes["block_size"]
    try:
        msgspec.convert(told, SchedulerConfig).validate()
    except msgspec.ValidationError as error:
        return str(error)
    except ConfigError as error:
        return error.info.message
    return None


def _require_whole(name: str, value: Any, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"{name} is {value}; it must be a whole number, 1 to {most}", param=name, value=value)


class PredictedFigure(msgspec.Struct, frozen=True):
    """A figure. recorded: of the real run. before: simulated with the recorded settings, the median of the draws.
    ratio: with the changed settings over without. after: what is to be expected with the change, the recorded figure
    times the ratio; where none is recorded, as simulated. low, high: of the ratio, and after_low, after_high of the
    figure: where a run with the change would have it, made in another hour. own_low, own_high: of the ratio in the
    very hour, which is the change's own part of it."""

    name: str
    recorded: float | None
    before: float | None
    after: float | None
    ratio: float | None
    low: float | None = None
    high: float | None = None
    after_low: float | None = None
    after_high: float | None = None
    own_low: float | None = None
    own_high: float | None = None
