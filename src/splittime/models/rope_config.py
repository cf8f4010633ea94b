"""The rotary settings of a `config.json`, in each form that transformers has given them.

    rope_theta, rope_scaling {..}                     transformers 4
    rope_parameters {rope_theta, rope_type, ..}       transformers 5
    rope_parameters {"full_attention": {..}, ..}      transformers 5, of models with several kinds of layers

Of the last form all kinds that the model's layers have must say the same: one table of turns serves every layer. A key
that is not known here may change the arithmetic, so it is refused by name; so are two forms that contradict each other.
"""

from collections.abc import Collection
from typing import Any

from splittime.core.errors import ConfigError
from splittime.kernels.layer import RopeSpec
from splittime.models.fields import Fields, bad

ROPE_TYPES = ("default", "linear", "llama3")
NEW, OLD = "rope_parameters", "rope_scaling"
KNOWN = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings",),
}
LAYER_KINDS = ("full_attention", "sliding_attention")


def parse_rope(fields: Fields, default_theta: float, max_positions: int, kinds: Collection[str]) -> RopeSpec:
    """kinds: of `LAYER_KINDS`, those that the model has. Raises `ConfigError` naming what is not carried out."""
    found = {
        where: _parse(values, where, fields, default_theta, max_positions)
        for key in (NEW, OLD)
        for where, values in _forms(key, fields.values.get(key), kinds).items()
    }
    if not found:
        return _parse({}, OLD, fields, default_theta, max_positions)
    (first, rope), *others = found.items()
    for where, other in others:
        if other != rope:
            raise ConfigError(
                f"config.json: {first} is {_shown(rope)}, {where} is {_shown(other)}; "
                "only one rotary embedding for all layers is implemented",
                param=where,
                value=_shown(other),
                limit=_shown(rope),
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


def _parse(values: dict[str, Any], where: str, fields: Fields, default_theta: float, max_positions: int) -> RopeSpec:
    for name in values:
        if name not in KNOWN and values[name] is not None:
            raise bad(f"{where}.{name}", values[name], f"absent: only {', '.join(sorted(KNOWN))} are implemented")
    own = Fields(values, f"{where}.")
    theta = own.number("rope_theta", fields.number("rope_theta", default_theta))
    partial = own.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise bad("partial_rotary_factor", partial, "1 (partial rotary embedding is not implemented)")
    rope_type = own.text("rope_type", own.text("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise bad(f"{where}.rope_type", rope_type, f"one of {', '.join(ROPE_TYPES)}")
    if rope_type == "default":
        return RopeSpec("default", theta)
    factor = own.number("factor")
    if rope_type == "linear":
        return RopeSpec("linear", theta, factor)
    low, high = own.number("low_freq_factor"), own.number("high_freq_factor")
    if high <= low:
        raise bad(f"{where}.high_freq_factor", high, f"above low_freq_factor, {low}")
    original = own.count("original_max_position_embeddings", max_positions)
    return RopeSpec("llama3", theta, factor, low, high, original)


def _shown(rope: RopeSpec) -> str:
    return f"{rope.rope_type} with theta {rope.theta:g} and factor {rope.factor:g}"
