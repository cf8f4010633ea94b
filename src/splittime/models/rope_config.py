"""The rotary settings of a `config.json`, in each form that transformers has given them.

    rope_theta, rope_scaling {..}                     transformers 4
    rope_parameters {rope_theta, rope_type, ..}       transformers 5
    rope_parameters {"full_attention": {..}, ..}      transformers 5, of models with several kinds of layers

Of the last form all kinds that the model's layers have must say the same: one table of turns serves every layer. A key
that is not known here may change the arithmetic, so it is refused by name; so are two forms that contradict each other.
"""

from collections.abc import Collection
from typing import Any

import msgspec

from splittime.core.errors import ConfigError
from splittime.models.fields import Fields, bad
from splittime.models.registry import Architecture

ROPE_TYPES = ("default", "linear", "llama3")
NEW, OLD = "rope_parameters", "rope_scaling"
KNOWN = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings",),
}
LAYER_KINDS = ("full_attention", "sliding_attention")


class RopeConfig(msgspec.Struct, frozen=True):
    """Rotary embedding; all after `theta` are read only by the types that use them.

    divisors: of type "divided", which is how GGUF files say what they do: each pair's frequency is divided by its own.
    """

    rope_type: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    divisors: tuple[float, ...] = ()


def parse_rope(fields: Fields, facts: Architecture, max_positions: int, kinds: Collection[str]) -> RopeConfig:
    """kinds: of `LAYER_KINDS`, those that the model has. Raises `ConfigError` naming what is not carried out."""
    found = {
        told: _parse(values, told, fields, facts, max_positions)
        for key in (NEW, OLD)
        for told, values in _forms(key, fields.values.get(key), kinds).items()
    }
    if not found:
        return _parse({}, OLD, fields, facts, max_positions)
    (first, rope), *others = found.items()
    for told, other in others:
        if other != rope:
            raise ConfigError(
                f"config.json: {first} is {_told(rope)}, {told} is {_told(other)}; only one rotary embedding for all "
                "layers is implemented",
                param=told,
                value=_told(other),
                limit=_told(rope),
            )
    return rope


def _forms(key: str, given: Any, kinds: Collection[str]) -> dict[str, dict[str, Any]]:
    """The objects that hold settings, by where they stand."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise bad(key, given, "an object")
    if not any(isinstance(value, dict) for value in given.values()):
        return {key: given}
    missing = [kind for kind in kinds if not isinstance(given.get(kind), dict)]
    if missing or set(given) - set(LAYER_KINDS):
        raise bad(key, given, f"flat, or an object for each of {', '.join(LAYER_KINDS)} that the layers are")
    return {f"{key}.{kind}": given[kind] for kind in kinds}


def _parse(values: dict[str, Any], told: str, fields: Fields, facts: Architecture, max_positions: int) -> RopeConfig:
    for name in values:
        if name not in KNOWN and values[name] is not None:
            raise bad(f"{told}.{name}", values[name], f"absent: only {', '.join(sorted(KNOWN))} are implemented")
    own = Fields(values, f"{told}.")
    theta = own.number("rope_theta", fields.number("rope_theta", facts.rope_theta_default))
    partial = own.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise bad("partial_rotary_factor", partial, "1 (partial rotary embedding is not implemented)")
    rope_type = own.text("rope_type", own.text("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise bad(f"{told}.rope_type", rope_type, f"one of {', '.join(ROPE_TYPES)}")
    if rope_type == "default":
        return RopeConfig("default", theta)
    factor = own.number("factor")
    if rope_type == "linear":
        return RopeConfig("linear", theta, factor)
    low, high = own.number("low_freq_factor"), own.number("high_freq_factor")
    if high <= low:
        raise bad(f"{told}.high_freq_factor", high, f"above low_freq_factor, {low}")
    original = own.count("original_max_position_embeddings", max_positions)
    return RopeConfig("llama3", theta, factor, low, high, original)


def _told(rope: RopeConfig) -> str:
    return f"{rope.rope_type} with theta {rope.theta:g} and factor {rope.factor:g}"
