"""A checkpoint's `config.json` as a frozen value: every question about the model's shape is settled here, once.

Both forms of rotary settings are read: `rope_theta` and `rope_scaling` (transformers 4) and `rope_parameters`
(transformers 5). Whatever would change the arithmetic and is not implemented is refused with its name and value.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from splittime.core.errors import ConfigError
from splittime.models import registry
from splittime.models.fields import Fields, bad
from splittime.models.registry import Architecture
from splittime.models.weights.formats import read as formats
from splittime.models.weights.formats.recipe import Recipe

ROPE_TYPES = ("default", "linear", "llama3")
DTYPES = ("float32", "bfloat16", "float16")


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


class MoeConfig(msgspec.Struct, frozen=True):
    """layers: for each layer, whether it is a mixture of experts (else it is a plain MLP)."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    normalises: bool
    layers: tuple[bool, ...]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """layer_windows: for each layer, its sliding window in tokens, or None. checkpoint_dtype: as config.json says, of
    what is not quantised; quantization: how the rest is stored."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]
    moe: MoeConfig | None
    checkpoint_dtype: str
    eos_token_ids: tuple[int, ...]
    quantization: Recipe | None = None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `ConfigError` when there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}", param="model_path", value=str(path)) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} does not hold a JSON object", param="model_path", value=str(path))
    return values


def load_config(folder: Path) -> ModelConfig:
    """Read `config.json`, and where they are there: the end-of-sequence ids of `generation_config.json`, and what
    AutoGPTQ and AutoAWQ once wrote into a file of its own (`SIDE_FILES`)."""
    values = read_json(folder / "config.json")
    for name, method in formats.SIDE_FILES.items():
        if not formats.is_quantised(values) and (folder / name).exists():
            values[formats.KEY] = {"quant_method": method, **read_json(folder / name)}
    generation = folder / "generation_config.json"
    extra = Fields(read_json(generation)).ints("eos_token_id") if generation.exists() else ()
    config = parse_config(values)
    return msgspec.structs.replace(config, eos_token_ids=tuple(dict.fromkeys(extra + config.eos_token_ids)))


def parse_config(values: dict[str, Any]) -> ModelConfig:
    """Raises `ConfigError` naming the key and the value that cannot be served."""
    name = _architecture_name(values)
    facts = registry.find(name)
    _refuse_unsupported(values)
    fields = Fields(values)
    num_heads = fields.count("num_attention_heads")
    num_layers = fields.count("num_hidden_layers")
    hidden_size = fields.count("hidden_size")
    max_positions = fields.count("max_position_embeddings")
    return ModelConfig(
        architecture=name,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_kv_heads(fields, num_heads),
        head_dim=_head_dim(fields, facts, hidden_size, num_heads),
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", facts.rms_norm_eps_default),
        rope=_rope(fields, facts, max_positions),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=_bias(facts.qkv_bias, fields),
        output_bias=_bias(facts.output_bias, fields),
        mlp_bias=facts.mlp_bias and fields.flag("mlp_bias", False),
        qk_norm=facts.qk_norm,
        layer_windows=_windows(fields, facts, num_layers),
        moe=_moe(fields, facts, num_layers),
        checkpoint_dtype=_dtype(fields),
        eos_token_ids=fields.ints("eos_token_id"),
        quantization=formats.parse(values),
    )


def _architecture_name(values: dict[str, Any]) -> str:
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise bad("architectures", names, "a list of one name")
    return names[0]


def _refuse_unsupported(values: dict[str, Any]) -> None:
    activation = values.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise bad("hidden_act", activation, "silu (the only activation implemented)")


def _kv_heads(fields: Fields, num_heads: int) -> int:
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise bad("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads, {num_heads}")
    return num_kv_heads


def _head_dim(fields: Fields, facts: Architecture, hidden_size: int, num_heads: int) -> int:
    given = fields.count_or_none("head_dim", facts.head_dim_default)
    if given is None and hidden_size % num_heads:
        raise bad("hidden_size", hidden_size, f"a multiple of num_attention_heads, {num_heads}, or head_dim given")
    head_dim = given or hidden_size // num_heads
    if head_dim % 2:
        raise bad("head_dim", head_dim, "even, for the rotary embedding")
    return head_dim


def _bias(rule: str, fields: Fields) -> bool:
    return rule == "always" or (rule == "attention_bias" and fields.flag("attention_bias", False))


def _rope(fields: Fields, facts: Architecture, max_positions: int) -> RopeConfig:
    new_style = fields.values.get("rope_parameters")
    given = new_style if new_style is not None else fields.values.get("rope_scaling")
    key = "rope_parameters" if new_style is not None else "rope_scaling"
    if given is not None and not isinstance(given, dict):
        raise bad(key, given, "an object")
    scaling = Fields(given or {}, f"{key}.")
    theta = scaling.number("rope_theta", fields.number("rope_theta", facts.rope_theta_default))
    partial = scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise bad("partial_rotary_factor", partial, "1 (partial rotary embedding is not implemented)")
    rope_type = scaling.text("rope_type", scaling.text("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise bad(f"{key}.rope_type", rope_type, f"one of {', '.join(ROPE_TYPES)}")
    if rope_type == "default":
        return RopeConfig("default", theta)
    factor = scaling.number("factor")
    if rope_type == "linear":
        return RopeConfig("linear", theta, factor)
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high <= low:
        raise bad(f"{key}.high_freq_factor", high, f"above low_freq_factor, {low}")
    original = scaling.count("original_max_position_embeddings", max_positions)
    return RopeConfig("llama3", theta, factor, low, high, original)


def _windows(fields: Fields, facts: Architecture, num_layers: int) -> tuple[int | None, ...]:
    if facts.window == "none":
        return (None,) * num_layers
    is_given = "sliding_window" in fields.values  # null means off; absent means the architecture's default
    window = fields.count_or_none("sliding_window", None if is_given else facts.sliding_window_default)
    if facts.window in ("by_layer", "all_if_used") and not fields.flag("use_sliding_window", False):
        window = None
    if facts.window != "by_layer":
        return (window,) * num_layers
    full_layers = fields.values.get("max_window_layers", 28)
    if isinstance(full_layers, bool) or not isinstance(full_layers, int):
        raise bad("max_window_layers", full_layers, "an integer")
    types = fields.values.get("layer_types")
    if types is None:
        return tuple(window if layer >= full_layers else None for layer in range(num_layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
        raise bad("layer_types", types, f"a list of {num_layers} names from {', '.join(known)}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _moe(fields: Fields, facts: Architecture, num_layers: int) -> MoeConfig | None:
    if facts.moe is None:
        return None
    num_experts = fields.count_or_none("num_experts") or fields.count("num_local_experts")
    chosen = fields.count("num_experts_per_tok", 8 if facts.qk_norm else 2)
    if chosen > num_experts:
        raise bad("num_experts_per_tok", chosen, f"at most the number of experts, {num_experts}")
    plain = fields.ints("mlp_only_layers")
    every = fields.count("decoder_sparse_step", 1)
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=chosen,
        intermediate_size=fields.count_or_none("moe_intermediate_size") or fields.count("intermediate_size"),
        normalises=facts.always_normalises_experts or fields.flag("norm_topk_prob", False),
        layers=tuple(layer not in plain and (layer + 1) % every == 0 for layer in range(num_layers)),
    )


def _dtype(fields: Fields) -> str:
    dtype = fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch.")
    if dtype not in DTYPES:
        raise bad("torch_dtype", dtype, f"one of {', '.join(DTYPES)}")
    return dtype
