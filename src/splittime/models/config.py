"""A checkpoint's `config.json` as a frozen value: every question about the model's shape is settled here, once.

Whatever would change the arithmetic and is not implemented is refused with its name and value, and so is a number that
is larger than `limits` allows, before anything is made of it. Rotary settings have forms of their own (`rope_config`).
"""

from pathlib import Path
from typing import Any

import msgspec

from splittime.models import registry
from splittime.models.fields import Fields, bad
from splittime.models.generation import read_generation
from splittime.models.json_file import read_json
from splittime.models.limits import LAYERS, Bounds
from splittime.models.registry import Architecture
from splittime.models.rope_config import LAYER_KINDS, RopeConfig, parse_rope
from splittime.models.weights.formats import read as formats
from splittime.models.weights.formats.recipe import Recipe

DTYPES = ("float32", "bfloat16", "float16")


class MoeConfig(msgspec.Struct, frozen=True):
    """layers: for each layer, whether it is a mixture of experts (else it is a plain MLP)."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    normalises: bool
    layers: tuple[bool, ...]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """layer_windows: for each layer, its sliding window in tokens, or None. checkpoint_dtype: as config.json says, of
    what is not quantised; quantization: how the rest is stored. sampling: what the model's makers advise, by the names
    of `SamplingParams`."""

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
    sampling: dict[str, float | int] = {}


def load_config(folder: Path, generation: str = "auto") -> ModelConfig:
    """Read `config.json`, and where they are there: `generation_config.json`, as `generation` says (see there),
    and what AutoGPTQ and AutoAWQ once wrote into a file of its own (`SIDE_FILES`)."""
    values = read_json(folder / "config.json")
    for name, method in formats.SIDE_FILES.items():
        if not formats.is_quantised(values) and (folder / name).exists():
            values[formats.KEY] = {"quant_method": method, **read_json(folder / name)}
    config = parse_config(values)
    said = read_generation(folder, generation, config.vocab_size)
    ends = tuple(dict.fromkeys(said.eos_token_ids + config.eos_token_ids))
    return msgspec.structs.replace(config, eos_token_ids=ends, sampling=said.sampling)


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
    vocab_size = fields.count("vocab_size")
    ids = Bounds(0, vocab_size - 1)
    fields.ints("bos_token_id", ids)
    windows = _windows(fields, facts, num_layers)
    return ModelConfig(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_kv_heads(fields, num_heads),
        head_dim=_head_dim(fields, facts, hidden_size, num_heads),
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", facts.rms_norm_eps_default),
        rope=parse_rope(fields, facts, max_positions, _kinds(fields, windows)),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=_bias(facts.qkv_bias, fields),
        output_bias=_bias(facts.output_bias, fields),
        mlp_bias=facts.mlp_bias and fields.flag("mlp_bias", False),
        qk_norm=facts.qk_norm,
        layer_windows=windows,
        moe=_moe(fields, facts, num_layers),
        checkpoint_dtype=_dtype(fields),
        eos_token_ids=fields.ints("eos_token_id", ids),
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


def _windows(fields: Fields, facts: Architecture, num_layers: int) -> tuple[int | None, ...]:
    if facts.window == "none":
        return (None,) * num_layers
    is_given = "sliding_window" in fields.values  # null means off; absent means the architecture's default
    window = fields.count_or_none("sliding_window", None if is_given else facts.sliding_window_default)
    if facts.window in ("by_layer", "all_if_used") and not fields.flag("use_sliding_window", False):
        window = None
    if facts.window != "by_layer":
        return (window,) * num_layers
    full_layers = fields.count("max_window_layers", 28)
    types = fields.values.get("layer_types")
    if types is None:
        return tuple(window if layer >= full_layers else None for layer in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in LAYER_KINDS for kind in types):
        raise bad("layer_types", types, f"a list of {num_layers} names from {', '.join(LAYER_KINDS)}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _kinds(fields: Fields, windows: tuple[int | None, ...]) -> tuple[str, ...]:
    """Returns those of `LAYER_KINDS` that the layers are."""
    types = fields.values.get("layer_types")
    named = [LAYER_KINDS[window is not None] for window in windows]
    if isinstance(types, list) and len(types) == len(windows) and all(kind in LAYER_KINDS for kind in types):
        named = types
    return tuple(kind for kind in LAYER_KINDS if kind in named)


def _moe(fields: Fields, facts: Architecture, num_layers: int) -> MoeConfig | None:
    if facts.moe is None:
        return None
    num_experts = fields.count_or_none("num_experts") or fields.count("num_local_experts")
    chosen = fields.count("num_experts_per_tok", 8 if facts.qk_norm else 2)
    if chosen > num_experts:
        raise bad("num_experts_per_tok", chosen, f"at most the number of experts, {num_experts}")
    plain = set(fields.ints("mlp_only_layers", Bounds(0, LAYERS.most)))
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
