"""Reading the parts of layers out of a `config.json`: what an architecture's entry composes (`architectures`).

Windows, mixers and feed-forwards come as one value for each layer, so that layers may differ.

The rotary settings come in each form that transformers has given them.

    rope_theta, rope_scaling {..}                     transformers 4
    rope_parameters {rope_theta, rope_type, ..}       transformers 5
    rope_parameters {"full_attention": {..}, ..}      transformers 5, of models with several kinds of layers

Of the last form all kinds that the model's layers have must say the same: one table of turns serves every layer. A key
that is not known here may change the arithmetic, so it is refused by name; so are two forms that contradict each other.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from splittime.core.errors import ConfigError
from splittime.kernels.layer import AttentionSpec, LayerSpec, MixtureSpec, MlpSpec, NormSpec, RopeSpec, RouterSpec
from splittime.models.fields import LAYERS, Bounds, Fields, bad

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


Windows = tuple[int | None, ...]  # of each layer, in tokens


def layers(
    norm: NormSpec, mixers: Iterable[AttentionSpec], feed_forwards: Iterable[MlpSpec | MixtureSpec]
) -> tuple[LayerSpec, ...]:
    pairs = zip(mixers, feed_forwards, strict=True)
    return tuple(LayerSpec(norm, mixer, feed_forward) for mixer, feed_forward in pairs)


def norm(fields: Fields, eps: float = 1e-6) -> NormSpec:
    """eps: where the config names none."""
    return NormSpec(fields.number("rms_norm_eps", eps))


def no_windows(fields: Fields) -> Windows:
    return (None,) * fields.count("num_hidden_layers")


def same_windows(fields: Fields, default: int | None = None) -> Windows:
    """The config's `sliding_window` for every layer. A null means that there is none, an absent key the default."""
    is_given = "sliding_window" in fields.values
    window = fields.count_or_none("sliding_window", None if is_given else default)
    return (window,) * fields.count("num_hidden_layers")


def windows_by_layer(fields: Fields, default: int) -> Windows:
    """The window for the layers that `layer_types` or `max_window_layers` say, if `use_sliding_window` is set."""
    windows = same_windows(fields, default)
    if not fields.flag("use_sliding_window", False):
        windows = no_windows(fields)
    full_layers = fields.count("max_window_layers", 28)
    types = fields.values.get("layer_types")
    if types is None:
        return tuple(window if layer >= full_layers else None for layer, window in enumerate(windows))
    if not isinstance(types, list) or len(types) != len(windows) or any(kind not in LAYER_KINDS for kind in types):
        raise bad("layer_types", types, f"a list of {len(windows)} names from {', '.join(LAYER_KINDS)}")
    pairs = zip(types, windows, strict=True)
    return tuple(window if kind == "sliding_attention" else None for kind, window in pairs)


def attention(
    fields: Fields,
    windows: Windows,
    *,
    head_dim: int | None = None,
    theta: float = 10_000.0,
    head_norm: NormSpec | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
) -> list[AttentionSpec]:
    """head_dim, theta: where the config names none; without either, hidden_size is divided among the heads."""
    num_heads = fields.count("num_attention_heads")
    max_positions = fields.count("max_position_embeddings")
    alike = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=_kv_heads(fields, num_heads),
        head_dim=_head_dim(fields, head_dim, num_heads),
        position=parse_rope(fields, theta, max_positions, _kinds(fields, windows)),
        head_norm=head_norm,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
    )
    return [replace(alike, window_tokens=window) for window in windows]


def mlps(fields: Fields, has_bias: bool = False) -> list[MlpSpec]:
    return [MlpSpec(fields.count("intermediate_size"), has_bias)] * fields.count("num_hidden_layers")


def mixtures(fields: Fields, num_chosen: int, normalises: bool) -> list[MlpSpec | MixtureSpec]:
    """Every layer's experts, but for the layers that the config makes plain. num_chosen: where it names none."""
    num_experts = fields.count_or_none("num_experts") or fields.count("num_local_experts")
    chosen = fields.count("num_experts_per_tok", num_chosen)
    if chosen > num_experts:
        raise bad("num_experts_per_tok", chosen, f"at most the number of experts, {num_experts}")
    inner = fields.count_or_none("moe_intermediate_size") or fields.count("intermediate_size")
    experts = MixtureSpec(RouterSpec(num_experts, chosen, normalises), MlpSpec(inner))
    plain = set(fields.ints("mlp_only_layers", Bounds(0, LAYERS.most)))
    every = fields.count("decoder_sparse_step", 1)
    return [mlp if layer in plain or (layer + 1) % every else experts for layer, mlp in enumerate(mlps(fields))]


def _kv_heads(fields: Fields, num_heads: int) -> int:
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise bad("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads, {num_heads}")
    return num_kv_heads


def _head_dim(fields: Fields, default: int | None, num_heads: int) -> int:
    hidden_size = fields.count("hidden_size")
    given = fields.count_or_none("head_dim", default)
    if given is None and hidden_size % num_heads:
        raise bad("hidden_size", hidden_size, f"a multiple of num_attention_heads, {num_heads}, or head_dim given")
    head_dim = given or hidden_size // num_heads
    if head_dim % 2:
        raise bad("head_dim", head_dim, "even, for the rotary embedding")
    return head_dim


def _kinds(fields: Fields, windows: Sequence[int | None]) -> tuple[str, ...]:
    """Returns those of `LAYER_KINDS` that the layers are."""
    types = fields.values.get("layer_types")
    named = [LAYER_KINDS[window is not None] for window in windows]
    if isinstance(types, list) and len(types) == len(windows) and all(kind in LAYER_KINDS for kind in types):
        named = types
    return tuple(kind for kind in LAYER_KINDS if kind in named)
