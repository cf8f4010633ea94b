"""A GGUF file's metadata as the `ModelConfig` that a `config.json` becomes, by the same entries of `architectures`.

`FAMILIES` says which architecture a file's own name for it is, and what its keys are called in a `config.json`. What is
read is put under those names (`GgufFields`), with what such files leave unsaid because llama.cpp knows it; errors name
the file's own keys.

What a key cannot say is taken from the tensors that are there: whether the head is tied (no `output.weight`), which
projections have biases, which layers have experts, and what rotary frequencies are divided by (`rope_freqs.weight`, how
GGUF writes Llama 3.1's scaling; `rope_factors_short.weight` and `_long`, of longrope). A key that its family does not
read may change the arithmetic, so it is refused, unless it has the value that changes nothing (`NEUTRAL`).
"""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from splittime.kernels.layer import NO_ROPE, LayerSpec, MlpSpec
from splittime.models import parts
from splittime.models.architectures import ARCHITECTURES
from splittime.models.config import ModelConfig, advice, config_of
from splittime.models.fields import LIMITS, Bounds, Fields, in_words, is_whole
from splittime.models.gguf.file import GgufModel, open_model
from splittime.models.pooling import gguf_pooling

NAMES = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "partial_rotary_factor": "rope.dimension_count",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}
"""Of every family: names in config.json, and keys below the architecture's own name."""
ROPE = {
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
"""The same, within `rope_parameters`."""
WINDOW = {"sliding_window": "attention.sliding_window"}
PATTERN = {
    **WINDOW,
    **{"sliding_window_pattern": "attention.sliding_window_pattern", "rope_local_base_freq": "rope.freq_base_swa"},
}
EXPERTS = {
    **{"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    **{"moe_intermediate_size": "expert_feed_forward_length", "norm_topk_prob": "expert_weights_norm"},
}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
GROUPED = {
    **EXPERTS,
    **{"n_shared_experts": "expert_shared_count", "first_k_dense_replace": "leading_dense_block_count"},
    **{"n_group": "expert_group_count", "topk_group": "expert_group_used_count"},
    "routed_scaling_factor": "expert_weights_scale",
}
ERNIE = {
    **EXPERTS,
    **{"moe_num_shared_experts": "expert_shared_count", "moe_layer_start_index": "leading_dense_block_count"},
    "moe_layer_interval": "interleave_moe_layer_step",
}
FACTORS = {
    **{"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale"},
    **{"residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"},
}
COHERE = {"layer_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"}
CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
MISTRAL = {"llama_4_scaling_beta": "attention.temperature_scale", "mscale_all_dim": "rope.scaling.yarn_log_multiplier"}
STRETCH = {"attention_factor": "rope.scaling.attn_factor"}
FREQUENCIES = "rope_freqs.weight"
SIGMOID = 2
NEXT = "nextn_predict_layers"  # behind the others, for drafts; `block_count` counts them


@dataclass(frozen=True)
class Family:
    """name: in `architectures`; windowed, mixed: where a file has windows, or experts. reads: more names, as `NAMES`;
    in_rope: as `ROPE`, beside it. given: what its files leave unsaid, by the names of config.json.

    local_theta: layers with windows have a plain rotary embedding of this theta, where the file names none; 0: of that
    of the others. gating: the one `expert_gating_func`. by_width: in the size that has so many layers, scores are
    divided by the root of hidden_size / heads (llama.cpp tells it by that number too), not by that of head_dim.
    """

    name: str
    reads: dict[str, str] = field(default_factory=dict)
    windowed: str = ""
    mixed: str = ""
    given: dict[str, Any] = field(default_factory=dict)
    in_rope: dict[str, str] = field(default_factory=dict)
    local_theta: float | None = None
    gating: int = 1
    by_width: int = 0


FAMILIES = {
    "llama": Family("LlamaForCausalLM", {**WINDOW, **EXPERTS}, "MistralForCausalLM", "MixtralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM"),
    "qwen2moe": Family("Qwen2MoeForCausalLM", SHARED),
    "qwen3moe": Family("Qwen3MoeForCausalLM", EXPERTS, given={"norm_topk_prob": True}),
    "gemma": Family("GemmaForCausalLM"),
    "gemma2": Family("Gemma2ForCausalLM", {**WINDOW, **CAPS}, given={"sliding_window": 4096}, by_width=46),
    "gemma3": Family("Gemma3ForCausalLM", {**PATTERN, **CAPS}, local_theta=10_000.0, by_width=62),
    "smollm3": Family("SmolLM3ForCausalLM"),
    "phi3": Family("Phi3ForCausalLM", WINDOW, in_rope=STRETCH),
    "granite": Family("GraniteForCausalLM", FACTORS),
    "granitemoe": Family("GraniteMoeForCausalLM", {**FACTORS, **EXPERTS}),
    "olmo2": Family("Olmo2ForCausalLM", PATTERN, "Olmo3ForCausalLM", in_rope=STRETCH, local_theta=0.0),
    "olmoe": Family("OlmoeForCausalLM", EXPERTS),
    "ernie4_5": Family("Ernie4_5ForCausalLM"),
    "ernie4_5-moe": Family("Ernie4_5_MoeForCausalLM", ERNIE, given={"moe_layer_start_index": 0}),
    "seed_oss": Family("SeedOssForCausalLM"),
    "glm4": Family("Glm4ForCausalLM"),
    "glm4moe": Family("Glm4MoeForCausalLM", GROUPED, given={"norm_topk_prob": False}, gating=SIGMOID),
    "dots1": Family("Dots1ForCausalLM", GROUPED, gating=SIGMOID),
    "exaone4": Family("Exaone4ForCausalLM", PATTERN),
    "hunyuan-dense": Family("HunYuanDenseV1ForCausalLM"),
    "hunyuan-moe": Family("HunYuanMoEV1ForCausalLM", {**EXPERTS, "num_shared_expert": "expert_shared_count"}),
    "mistral3": Family("Ministral3ForCausalLM", in_rope=MISTRAL),
    "command-r": Family("CohereForCausalLM", COHERE),
    "cohere2": Family("Cohere2ForCausalLM", {**COHERE, **WINDOW}),
    "starcoder2": Family("Starcoder2ForCausalLM", {"norm_epsilon": COHERE["layer_norm_eps"], **WINDOW}),
    "gpt-oss": Family("GptOssForCausalLM", {**WINDOW, **EXPERTS}, given={"truncate": False}),
}
"""By `general.architecture`."""
READ = {NEXT, "attention.value_length", "rope.scale_linear", "vocab_size", *NAMES.values(), *ROPE.values()}
SILENT = {
    *("tensor_data_layout", "rope.scaling.finetuned", "expert_shared_feed_forward_length"),
    *("attention.layer_norm_epsilon", "pooling_type"),
}
"""These tell of the model's past, are read by no layer of it, or are told by the shapes of tensors too."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{"use_parallel_residual": (False,), "attention.causal": (True,)},
    **dict.fromkeys(("attention.max_alibi_bias", "attention.clamp_kqv", "attention.scale"), (0,)),
    **dict.fromkeys(("attention.sliding_window", "expert_count", "expert_used_count", "expert_shared_count"), (0,)),
    **{"leading_dense_block_count": (0,), "expert_group_count": (0, 1), "expert_group_used_count": (0, 1)},
    **dict.fromkeys(("expert_weights_scale", "logit_scale", "residual_scale", "embedding_scale"), (0, 1)),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor"), (1,)),
}
END_NAMES = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"),
    *("<EOT>", "< EOT >", "_<EOT>", "<｜end▁of▁sentence｜>", "</s>"),  # noqa: RUF001  (DeepSeek spells it so)
}
"""Names that model makers give a token that ends a turn; it counts where the file calls it a control token."""
CONTROL = 3

SAMPLING = {name: name for name in ("top_p", "top_k", "min_p")}
SAMPLING |= {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
"""Names behind `general.sampling.`, as llama.cpp writes them, and in `generation_config.json`."""
ADVISED = {("smollm2", "135M"): {"temperature": 0.2, "top_p": 0.9}}
"""By base name and size, from the makers' cards: what files without `general.sampling.` leave out."""


def load_gguf_config(path: Path, generation: str = "auto") -> ModelConfig:
    """Raises `ConfigError` naming the key, or the tensor, that cannot be served. generation: "auto" takes what the
    makers advise of sampling."""
    model = open_model(path)
    architecture = _below(model, "general.").text("architecture")
    if architecture not in FAMILIES:
        said = f"is {architecture!r}, which is not served; these are: {', '.join(FAMILIES)}"
        raise model.broken("general.architecture", said, architecture, list(FAMILIES))
    keys, family = _below(model, f"{architecture}."), FAMILIES[architecture]
    _refuse_unknown(model, keys, family)
    config = _config(model, keys, family)
    return msgspec.structs.replace(config, sampling=_sampling(model)) if generation == "auto" else config


def _below(model: GgufModel, prefix: str) -> Fields:
    """The keys that begin with `prefix`, by what follows it."""
    mine = {key.removeprefix(prefix): value for key, value in model.metadata.items() if key.startswith(prefix)}
    return Fields(mine, prefix, model.path.name)


class GgufFields(Fields):
    """What a file says, by the names of config.json; errors have the file's own, which `names` tells."""

    def __init__(self, values: dict[str, Any], keys: Fields, names: dict[str, str]) -> None:
        super().__init__(values, keys.prefix, keys.file)
        self._keys, self._names = keys, names

    def named(self, key: str) -> str:
        return self.prefix + self._names.get(key, key)

    def below(self, values: dict[str, Any], prefix: str) -> "GgufFields":
        return GgufFields(values, self._keys, self._names)


def _refuse_unknown(model: GgufModel, keys: Fields, family: Family) -> None:
    """Raises for a key that the family does not read, unless its value changes nothing."""
    known = {*READ, *SILENT, *family.reads.values(), *family.in_rope.values()}
    neutral = NEUTRAL | {"expert_gating_func": (family.gating,)}
    for key, value in keys.values.items():
        if key not in known and (key not in neutral or isinstance(value, np.ndarray) or value not in neutral[key]):
            said = f"is {value!r}: it may change what the model computes, and is not implemented"
            raise model.broken(f"{keys.prefix}{key}", said, str(value))


def _sampling(model: GgufModel) -> dict[str, float | int]:
    general = _below(model, "general.").values
    known = ADVISED.get((general.get("basename", ""), general.get("size_label", "")), {})
    said = {theirs: general[f"sampling.{ours}"] for ours, theirs in SAMPLING.items() if f"sampling.{ours}" in general}
    return advice(said or known, model.path.name)


def _config(model: GgufModel, keys: Fields, family: Family) -> ModelConfig:
    """An embedding's factor is not rounded, as llama.cpp does not."""
    said = _said(keys, {**NAMES, **family.reads})
    in_rope = {name: key for name, key in family.in_rope.items() if name not in ROPE or key in keys.values}
    names = {**NAMES, **family.reads, **ROPE, **in_rope, "layer_types": PATTERN["sliding_window_pattern"]}
    fields = GgufFields(said, keys, names)
    num_blocks, head_dim = fields.count("num_hidden_layers"), _head_dim(fields, keys)
    said["num_hidden_layers"] = num_layers = num_blocks - (_index(keys, NEXT, num_blocks) or 0)
    is_odd = num_layers == family.by_width
    width = fields.count("hidden_size") / fields.count("num_attention_heads") if is_odd else head_dim
    kinds = family.mixed if "num_experts" in said else "", family.windowed if "sliding_window" in said else ""
    name = next(filter(None, kinds), family.name)
    routers = {f"blk.{layer}.ffn_gate_inp.weight" for layer in range(num_layers)} & model.file_of.keys()
    assumed = {"rope_theta": 10_000.0, "sliding_window": None, "attention_multiplier": head_dim**-0.5}
    vocab_size = _vocab_size(model)
    told = {
        **{"query_pre_attn_scalar": width, "torch_dtype": "float32", "vocab_size": vocab_size},
        "rope_parameters": _ropes(model, keys, family, fields),
        "mlp_only_layers": [at for at in range(num_layers) if f"blk.{at}.ffn_gate_inp.weight" not in routers],
        "tie_word_embeddings": "output.weight" not in model.file_of,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in model.file_of,
        "eos_token_id": _eos_token_ids(model, vocab_size),
    }
    fields.values = {**ARCHITECTURES[name].defaults, **assumed, **family.given, **said, **told}
    config = config_of(name, fields)
    turns = not family.name.startswith("Granite") or keys.flag("rope.scaling.finetuned", True)
    return msgspec.structs.replace(
        config,
        layers=tuple(_as_stored(layer, model, turns) for layer in config.layers),
        checkpoint_dtype=_dtype(model),
        pooling=gguf_pooling(_index(keys, "pooling_type", 5), keys.named("pooling_type"), config.hidden_size),
    )


def _said(keys: Fields, names: dict[str, str]) -> dict[str, Any]:
    """What the keys say, by `names`. A 0 says nothing where a field has no 0; one value for each layer will do if they
    are all the same, but for the layers that have windows."""
    found: dict[str, Any] = {}
    for name, key in names.items():
        value = keys.values.get(key)
        if isinstance(value, np.ndarray) and value.dtype == bool and name == "sliding_window_pattern":
            found["layer_types"] = [parts.LAYER_KINDS[one] for one in value.tolist()]
            continue
        if isinstance(value, np.ndarray):
            if not len(value) or (value != value[0]).any():
                raise keys.bad(key, value, "the same for all layers")
            value = value[0].item()
        is_absent = value == 0 and name not in NAMES and name in LIMITS and LIMITS[name].least > 0
        if value is not None and not is_absent:
            found[name] = value
    return found


def _head_dim(fields: Fields, keys: Fields) -> int:
    """Puts it among the fields too, and the share of it that is turned."""
    said = fields.values
    said.setdefault("head_dim", fields.count("hidden_size") // fields.count("num_attention_heads"))
    head_dim = fields.count("head_dim")
    turned, length = said.pop("partial_rotary_factor", head_dim), keys.values.get("attention.value_length", head_dim)
    if length != head_dim:
        raise keys.bad("attention.value_length", length, f"the length of a key, {head_dim}")
    bounds = Bounds(1, head_dim)
    if not is_whole(turned, bounds):
        raise fields.bad("partial_rotary_factor", turned, in_words("an integer", bounds), list(bounds))
    is_whole_head = turned == head_dim
    said["partial_rotary_factor"] = 1.0 if is_whole_head else math.nextafter(turned / head_dim, 1.0)  # never below
    return head_dim


def _ropes(model: GgufModel, keys: Fields, family: Family, fields: GgufFields) -> dict[str, Any]:
    rope = _rope(model, keys, family, fields)
    if family.local_theta is None:
        return rope
    theta = family.local_theta or fields.number("rope_theta", 10_000.0)
    local = {"rope_type": "default", "rope_theta": fields.number("rope_local_base_freq", theta)}
    return {parts.FULL: rope, parts.SLIDING: local}


def _rope(model: GgufModel, keys: Fields, family: Family, fields: GgufFields) -> dict[str, Any]:
    """As `rope_parameters` has it."""
    short, own = "rope_factors_short.weight", dict[str, Any]()
    has_factors = short in model.file_of
    for name, key in (*ROPE.items(), *family.in_rope.items()):
        value = keys.values.get(key)
        if isinstance(value, np.ndarray):
            raise keys.bad(key, value, "one value")
        if value is None or (name == "attention_factor" and value == 1 and not has_factors):
            continue  # llama.cpp writes a 1 where nothing is said, and multiplies by it what it infers
        if own.setdefault(name, value) != value:
            raise keys.bad(key, value, f"{own[name]}, which {ROPE[name]} says")
    said = fields.below(own, "")
    kind = said.text("rope_type", "linear" if "rope.scale_linear" in keys.values else "none")
    factor = said.number("factor", keys.values.get("rope.scale_linear", 1.0)) if kind == "linear" else 1.0
    if factor != 1.0 and (has_factors or FREQUENCIES in model.file_of):
        raise said.bad("factor", factor, f"1 beside {short if has_factors else FREQUENCIES}")
    if kind == parts.YARN and not has_factors:  # llama.cpp takes the other mscale for 1
        return {"truncate": family.given.get("truncate", True), "mscale": 1.0, **own}
    if kind not in ("none", "linear", parts.LONGROPE if has_factors else "none"):
        raise said.bad("rope_type", kind, "none, linear or yarn; Llama 3.1's comes as rope_freqs.weight")
    if has_factors:
        pairs = int(fields.count("head_dim") * fields.number("partial_rotary_factor")) // 2
        factors = {
            f"{name}_factor": list(_divisors(model, f"rope_factors_{name}.weight", pairs)) for name in ("short", "long")
        }
        return {**own, **factors, "rope_type": parts.LONGROPE}
    for name in family.in_rope:
        if own.get(name):
            raise said.bad(name, own[name], f"left out where rope.scaling.type is {kind}: only yarn has it")
    return {"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _as_stored(layer: LayerSpec, model: GgufModel, turns: bool) -> LayerSpec:
    """Returns the layer with what the tensors say. turns: else it knows no positions."""
    mixer, mlp, there = layer.attention, layer.feed_forward, model.file_of
    position = mixer.position if turns else NO_ROPE
    pairs = position.turned_dims(mixer.head_dim) // 2
    if FREQUENCIES in there and pairs:
        position = replace(position, rope_type="divided", divisors=_divisors(model, FREQUENCIES, pairs))
    is_biased = bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & there.keys())
    mixer = replace(mixer, position=position, qkv_bias=is_biased, output_bias="blk.0.attn_output.bias" in there)
    if isinstance(mlp, MlpSpec):
        mlp = replace(mlp, has_bias="blk.0.ffn_up.bias" in there)
    return replace(layer, mixer=mixer, feed_forward=mlp)


def _vocab_size(model: GgufModel) -> int:
    file = model.file_of.get("token_embd.weight")
    if file is None:
        raise model.broken("tensor 'token_embd.weight'", "is missing")
    return file.tensors["token_embd.weight"].shape[0]


def _divisors(model: GgufModel, name: str, count: int) -> tuple[float, ...]:
    """What `count` frequencies are divided by."""
    file = model.file_of.get(name)
    if file is None:
        raise model.broken(f"tensor {name!r}", "is missing")
    place = file.tensors[name]
    if place.type.name != "F32" or place.shape != (count,):
        raise model.broken(f"tensor {name!r}", f"is {place.type.name} {list(place.shape)}, must be F32 [{count}]")
    values = file.bytes_of(name).view("<f4")
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise model.broken(f"tensor {name!r}", "has values that are not positive numbers")
    return tuple(values.tolist())


def _dtype(model: GgufModel) -> str:
    """The widest of the matrices that are multiplied and floats; beside integers alone nothing is gained by more than
    bfloat16. Routers, gates, norms and biases do not count: converters widen them to float32."""
    is_looked_up = "output.weight" in model.file_of
    kinds = {
        file.tensors[name].type
        for name, file in model.file_of.items()
        if len(file.tensors[name].shape) > 1 and name.endswith(".weight")
        if not (name.endswith("_norm.weight") or ".ffn_gate_inp" in name)
        if not (is_looked_up and name == "token_embd.weight")
    }
    names = {kind.name for kind in kinds if not kind.has_integers}
    return "float32" if "F32" in names else "float16" if "F16" in names else "bfloat16"


def _index(keys: Fields, key: str, size: int) -> int | None:
    """An int from 0 to below `size`, or nothing."""
    value, bounds = keys.values.get(key), Bounds(0, size - 1)
    if value is not None and not is_whole(value, bounds):
        raise keys.bad(key, value, in_words("an integer", bounds), list(bounds))
    return value


def _eos_token_ids(model: GgufModel, vocab_size: int) -> list[int]:
    """The ids that the file names, then control tokens that are known to end a turn."""
    keys = _below(model, "tokenizer.ggml.")
    named = [_index(keys, f"{kind}_token_id", vocab_size) for kind in ("eos", "eot", "eom")]
    tokens = model.metadata.get("tokenizer.ggml.tokens", [])
    kinds = model.metadata.get("tokenizer.ggml.token_type", ())
    known = [i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == CONTROL]
    ends = [number for number in known if number < vocab_size and tokens[number] in END_NAMES]
    return list(dict.fromkeys([number for number in named if number is not None] + ends))
