"""The architectures that are served: each entry composes its layers from the parts in `parts`, and names its tensors.

To add one, write a function that composes its layers and enter it in `ARCHITECTURES`. What `config.json` leaves out is
filled with the default that transformers gives that architecture. What the parts cannot say (another norm, another
activation) is not supported and is refused by name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from splittime.core.errors import ConfigError
from splittime.kernels.layer import (
    AttentionSpec,
    Clamped,
    LayerSpec,
    MixtureSpec,
    MlpSpec,
    NormSpec,
    Places,
    RouterSpec,
)
from splittime.models import parts
from splittime.models.fields import Bounds, Fields, bad
from splittime.models.names import DeltaNames, LayerNames, MlpNames, Stacked

SLIDING_WINDOW = 4096  # of Mistral, Qwen2 and Qwen3 where the config names none
FeedForwards = Sequence[MlpSpec | MixtureSpec]  # of each layer


class Ends(NamedTuple):
    """What is done before the layers and behind the head: embeddings and logits are multiplied, then a logit z becomes
    logits_cap * tanh(z / logits_cap), unless that is 0. layer_input_size: of `layer_inputs`; 0: there are none."""

    embedding_factor: float = 1.0
    logits_factor: float = 1.0
    logits_cap: float = 0.0
    layer_input_size: int = 0


PLAIN = LayerNames()


@dataclass(frozen=True)
class Architecture:
    """compose: from the config's fields to the layers. defaults: of transformers, for what the config leaves out, where
    they are others than those of `parts`. has_head: else the model was saved without one, as embedders are; the table
    of embeddings takes its place."""

    compose: Callable[[Fields], tuple[LayerSpec, ...]]
    names: LayerNames = PLAIN
    ends: Callable[[Fields], Ends] = lambda fields: Ends()
    defaults: Mapping[str, object] = field(default_factory=dict)
    has_head: bool = True


def _llama(fields: Fields) -> tuple[LayerSpec, ...]:
    mixers = parts.attention(fields, parts.no_windows(fields), **_biases(fields))
    return parts.layers(parts.norm(fields), mixers, parts.mlps(fields, has_bias=fields.flag("mlp_bias", False)))


def _mistral(fields: Fields, partial: float | None = None) -> tuple[LayerSpec, ...]:
    mixers = parts.attention(fields, parts.same_windows(fields), partial=partial)
    return parts.layers(parts.norm(fields), mixers, parts.mlps(fields))


def _mixtral(fields: Fields) -> tuple[LayerSpec, ...]:
    mixers = parts.attention(fields, parts.same_windows(fields), theta=1_000_000.0)
    experts = parts.mixtures(fields, parts.router(fields, num_chosen=2, normalises=True))
    return parts.layers(parts.norm(fields, 1e-5), mixers, experts)


def _qwen2(fields: Fields) -> tuple[LayerSpec, ...]:
    mixers = parts.attention(fields, parts.windows_by_layer(fields, SLIDING_WINDOW), qkv_bias=True)
    return parts.layers(parts.norm(fields), mixers, parts.mlps(fields))


def _qwen3(fields: Fields) -> tuple[LayerSpec, ...]:
    norm, windows = parts.norm(fields), parts.windows_by_layer(fields, SLIDING_WINDOW)
    mixers = parts.attention(fields, windows, head_dim=128, head_norm=norm, **_biases(fields))
    return parts.layers(norm, mixers, parts.mlps(fields))


def _qwen3_moe(fields: Fields, windows: parts.Windows | None = None, normalises: bool = False) -> tuple[LayerSpec, ...]:
    norm, same = parts.norm(fields), parts.same_windows(fields, SLIDING_WINDOW)
    windows = windows or (same if fields.flag("use_sliding_window", False) else parts.no_windows(fields))
    mixers = parts.attention(fields, windows, head_norm=norm, **_biases(fields))
    router = parts.router(fields, num_chosen=8, normalises=fields.flag("norm_topk_prob", normalises))
    return parts.layers(norm, mixers, parts.mixtures(fields, router))


def _qwen3_5(fields: Fields, feed_forwards: FeedForwards | None = None) -> tuple[LayerSpec, ...]:
    if not fields.flag("attn_output_gate", True):
        raise fields.bad("attn_output_gate", False, "true (attention without a gate is another architecture's)")
    norm, alike, windows = parts.norm(fields), {"is_gated": True, **_biases(fields)}, parts.no_windows(fields)
    mixers = parts.attention(parts.without_axes(fields), windows, head_dim=256, partial=0.25, head_norm=norm, **alike)
    return parts.layers(norm, parts.deltas(fields, mixers), feed_forwards or parts.mlps(fields))


def _qwen3_5_moe(fields: Fields, num_chosen: int = 8, normalises: bool = True) -> tuple[LayerSpec, ...]:
    router = parts.router(fields, num_chosen=num_chosen, normalises=normalises)
    shared = fields.count("shared_expert_intermediate_size", 512)
    return _qwen3_5(fields, parts.mixtures(fields, router, shared, gates_shared=True))


def _qwen2_moe(fields: Fields) -> tuple[LayerSpec, ...]:
    has_windows = fields.flag("use_sliding_window", False)
    windows = parts.same_windows(fields, SLIDING_WINDOW) if has_windows else parts.no_windows(fields)
    last = fields.count("max_window_layers", 28)
    kinds = [has_windows and layer % 2 == 0 and layer < last for layer in range(len(windows))]
    windows = parts.windows_of_kinds(fields, windows, kinds)
    mixers = parts.attention(fields, windows, qkv_bias=fields.flag("qkv_bias", True))
    router = parts.router(fields, num_chosen=4, normalises=fields.flag("norm_topk_prob", False))
    shared = fields.count("shared_expert_intermediate_size", 5632)
    return parts.layers(parts.norm(fields), mixers, parts.mixtures(fields, router, shared, gates_shared=True))


def _gpt_oss(fields: Fields) -> tuple[LayerSpec, ...]:
    """Its softmax of the chosen logits alone is what `normalises` comes to."""
    windows, biases = parts.same_windows(fields, 128), _biases(fields, True)
    windows = parts.windows_of_kinds(fields, windows, [layer % 2 == 0 for layer in range(len(windows))])
    mixers = parts.attention(fields, windows, has_sinks=True, **biases)
    router = replace(parts.router(fields, num_chosen=4, normalises=True), has_bias=True)
    clamped = Clamped(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0))
    experts = parts.mixtures(fields, router, has_bias=True, clamped=clamped)
    return parts.layers(parts.norm(fields), mixers, experts)


def _ernie_moe(fields: Fields) -> tuple[LayerSpec, ...]:
    if fields.flag("use_bias", False):
        raise fields.bad("use_bias", True, "false (a head with a bias is not implemented)")
    num_layers, mixers = fields.count("num_hidden_layers"), parts.attention(fields, parts.no_windows(fields))
    router = parts.router(fields, num_chosen=6, normalises=True)
    router = replace(router, is_corrected=True, least_sum=fields.number("moe_norm_min", 1e-12))
    first, last = fields.count("moe_layer_start_index", 1), fields.count("moe_layer_end_index", -1)
    every, beyond = fields.count("moe_layer_interval", 1), num_layers if last == -1 else last + 1
    plain = [layer for layer in range(num_layers) if not first <= layer < beyond or (layer + 1) % every]
    shared = fields.count("moe_num_shared_experts", 2) * fields.count("moe_intermediate_size", 1536)
    return parts.layers(parts.norm(fields), mixers, parts.mixtures(fields, router, shared, plain=plain))


def _glm_moe(fields: Fields) -> tuple[LayerSpec, ...]:
    norm, biases = parts.norm(fields), {"qkv_bias": fields.flag("attention_bias", False)}
    head_norm = norm if fields.flag("use_qk_norm", False) else None
    mixers = parts.attention(fields, parts.no_windows(fields), partial=0.5, head_norm=head_norm, **biases)
    router = parts.grouped(fields, parts.router(fields, 8, fields.flag("norm_topk_prob", True)))
    shared = fields.count("n_shared_experts", 1) * fields.count("moe_intermediate_size", 1408)
    plain = range(fields.count("first_k_dense_replace", 1))
    return parts.layers(norm, mixers, parts.mixtures(fields, router, shared, plain=plain))


def _dots(fields: Fields) -> tuple[LayerSpec, ...]:
    norm, windows = parts.norm(fields), parts.same_windows(fields, SLIDING_WINDOW)
    beyond = fields.count("max_window_layers", 62)
    windows = parts.windows_of_kinds(fields, windows, [layer >= beyond for layer in range(len(windows))])
    mixers = parts.attention(fields, windows, head_norm=norm, **_biases(fields))
    router = parts.grouped(fields, parts.router(fields, 8, fields.flag("norm_topk_prob", False)))
    shared = fields.count("n_shared_experts") * fields.count("moe_intermediate_size", 1408)
    plain = range(fields.count("first_k_dense_replace", 0))
    return parts.layers(norm, mixers, parts.mixtures(fields, router, shared, plain=plain))


def _mellum(fields: Fields) -> tuple[LayerSpec, ...]:
    windows = parts.same_windows(fields, 1024)
    return _qwen3_moe(fields, parts.windows_of_kinds(fields, windows, [False] * len(windows)), normalises=True)


def _olmoe(fields: Fields) -> tuple[LayerSpec, ...]:
    if fields.values.get("clip_qkv") is not None:
        raise fields.bad("clip_qkv", fields.values["clip_qkv"], "absent (clipping is not implemented)")
    norm = parts.norm(fields)
    mixers = parts.attention(fields, parts.no_windows(fields), head_norm=norm, normed="all", **_biases(fields))
    router = parts.router(fields, num_chosen=8, normalises=fields.flag("norm_topk_prob", False))
    return parts.layers(norm, mixers, parts.mixtures(fields, router))


def _biases(fields: Fields, default: bool = False, key: str = "attention_bias") -> dict[str, bool]:
    has_bias = fields.flag(key, default)
    return {"qkv_bias": has_bias, "output_bias": has_bias}


def _smollm3(fields: Fields) -> tuple[LayerSpec, ...]:
    """The flag says which layers have a window only where `layer_types` does not."""
    has_windows, windows = fields.flag("use_sliding_window", False), parts.same_windows(fields)
    turned = [bool(one) for one in fields.ints("no_rope_layers", Bounds(0, 1))]
    turned = turned or parts.all_but_every(fields.count("no_rope_layer_interval", 4), windows)
    if len(turned) != len(windows):
        raise fields.bad("no_rope_layers", turned, f"a list of 0 or 1 for each of {len(windows)} layers")
    windows = parts.windows_of_kinds(fields, windows, [has_windows and not one for one in turned])
    mixers = parts.attention(fields, windows, **_biases(fields))
    layers = parts.layers(parts.norm(fields), mixers, parts.mlps(fields, has_bias=fields.flag("mlp_bias", False)))
    return parts.without_rope(layers, [not one for one in turned])


def _seed_oss(fields: Fields) -> tuple[LayerSpec, ...]:
    biases = _biases(fields, True) | {"output_bias": fields.flag("attention_out_bias", False)}
    mixers = parts.attention(fields, parts.no_windows(fields), **biases)
    return parts.layers(parts.norm(fields), mixers, parts.mlps(fields, has_bias=fields.flag("mlp_bias", False)))


def _ernie(fields: Fields) -> tuple[LayerSpec, ...]:
    biases = _biases(fields, key="use_bias")
    mixers = parts.attention(fields, parts.no_windows(fields), **biases)
    return parts.layers(parts.norm(fields), mixers, parts.mlps(fields, has_bias=biases["qkv_bias"]))


def _granite(fields: Fields, feed_forwards: FeedForwards | None = None) -> tuple[LayerSpec, ...]:
    """What a layer adds is multiplied by r. Of the residual stream over r instead, all is as it is elsewhere: a norm of
    it is that of the stream, with an epsilon over r squared."""
    factor = fields.number("attention_multiplier", 1.0)
    mixers = parts.attention(fields, parts.no_windows(fields), score_factor=factor, **_biases(fields))
    norm = NormSpec(parts.norm(fields).eps / fields.number("residual_multiplier", 1.0) ** 2)
    return parts.layers(norm, mixers, feed_forwards or parts.mlps(fields, has_bias=fields.flag("mlp_bias", False)))


def _granite_ends(fields: Fields) -> Ends:
    stream = fields.number("embedding_multiplier", 1.0) / fields.number("residual_multiplier", 1.0)
    return Ends(stream, 1 / fields.number("logits_scaling", 1.0))


def _granite_hybrid(fields: Fields) -> tuple[LayerSpec, ...]:
    """Composes those of the family that have attention alone, with one MLP."""
    experts = fields.values.get("num_local_experts")
    kinds = fields.values.get("layer_types") or fields.values.get("layers_block_type")
    if experts != 0:
        raise fields.bad("num_local_experts", experts, "0 (experts of this family are not served)")
    if not isinstance(kinds, list) or any(kind not in ("attention", parts.FULL) for kind in kinds):
        raise fields.bad("layer_types", kinds, "attention in every layer (Mamba layers are not served)")
    inner, num_layers = fields.count("shared_intermediate_size"), fields.count("num_hidden_layers")
    layers = _granite(fields, [MlpSpec(inner)] * num_layers)
    return parts.without_rope(layers, [fields.text("position_embedding_type", "nope") != "rope"] * num_layers)


def _ministral(fields: Fields) -> tuple[LayerSpec, ...]:
    windows = parts.same_windows(fields, SLIDING_WINDOW)
    mixers = parts.attention(fields, parts.windows_of_kinds(fields, windows, [True] * len(windows)))
    return parts.layers(parts.norm(fields), mixers, parts.mlps(fields))


def _hunyuan(fields: Fields, feed_forwards: FeedForwards | None = None) -> tuple[LayerSpec, ...]:
    norm, windows = parts.norm(fields), parts.no_windows(fields)
    mixers = parts.attention(fields, windows, normed="turned", stretches=True, **_biases(fields))
    mixers = [_normed_behind(mixer, norm.eps) for mixer in mixers]
    return parts.layers(norm, mixers, feed_forwards or parts.mlps(fields))


def _hunyuan_moe(fields: Fields) -> tuple[LayerSpec, ...]:
    fields = parts.alike(fields, "moe_topk", "moe_intermediate_size", "num_shared_expert")
    shared = fields.count("num_shared_expert", 1) * fields.count("intermediate_size")
    router = parts.router(fields, num_chosen=1, normalises=True)
    return _hunyuan(fields, parts.mixtures(fields, router, shared))


def _normed_behind(mixer: AttentionSpec, eps: float) -> AttentionSpec:
    """Returns the mixer with a norm behind its position, which takes out again the factor f that turned elements are
    multiplied by: the norm of f x is that of x, with an epsilon over f squared."""
    head_norm = NormSpec(eps / mixer.position.factor_of_turned**2)
    return replace(mixer, position=replace(mixer.position, factor_of_turned=1.0), head_norm=head_norm)


def _olmo3(fields: Fields) -> tuple[LayerSpec, ...]:
    windows = parts.same_windows(fields, SLIDING_WINDOW)
    every = fields.count("sliding_window_pattern", 4)
    windows = parts.windows_of_kinds(fields, windows, parts.all_but_every(every, windows))
    return _olmo(fields, windows, theta=500_000.0)


def _olmo(fields: Fields, windows: parts.Windows | None = None, theta: float | None = None) -> tuple[LayerSpec, ...]:
    """theta: of layers with windows."""
    norm, windows = parts.norm(fields), windows or parts.no_windows(fields)
    mixers = parts.attention(fields, windows, head_norm=norm, normed="all", local_theta=theta, **_biases(fields))
    return parts.layers(norm, mixers, parts.mlps(fields), "after")


def _exaone4(fields: Fields) -> tuple[LayerSpec, ...]:
    """Where some layers have windows, those that have none know no positions."""
    norm, windows = parts.norm(fields), parts.same_windows(fields, SLIDING_WINDOW)
    is_local = [False] * len(windows) if windows[0] is None else None
    is_said = is_local or fields.values.get("layer_types") is not None  # a pattern beside it may be in letters
    pattern = is_local or parts.all_but_every(4 if is_said else fields.count("sliding_window_pattern", 4), windows)
    windows = parts.windows_of_kinds(fields, windows, pattern)
    layers = parts.layers(norm, parts.attention(fields, windows, head_norm=norm), parts.mlps(fields), "after")
    return parts.without_rope(layers, [is_local is None and window is None for window in windows])


def _glm(fields: Fields, places: Places = "before") -> tuple[LayerSpec, ...]:
    biases = {"qkv_bias": fields.flag("attention_bias", True)}
    mixers = parts.attention(fields, parts.no_windows(fields), partial=0.5, **biases)
    return parts.layers(parts.norm(fields), mixers, parts.mlps(fields), places)


def _cohere(fields: Fields, windows: parts.Windows | None = None) -> tuple[LayerSpec, ...]:
    norm = NormSpec(fields.number("layer_norm_eps", 1e-5), is_centred=True)
    head_norm, normed = (norm, "apart") if fields.flag("use_qk_norm", False) else (None, "heads")
    windows = windows or parts.no_windows(fields)
    mixers = parts.attention(fields, windows, head_norm=head_norm, normed=normed, **_biases(fields))
    return parts.layers(norm, mixers, parts.mlps(fields), "shared")


def _cohere2(fields: Fields) -> tuple[LayerSpec, ...]:
    """Only layers with windows know positions."""
    every, windows = fields.count("sliding_window_pattern", 4), parts.same_windows(fields, SLIDING_WINDOW)
    layers = _cohere(fields, parts.windows_of_kinds(fields, windows, parts.all_but_every(every, windows)))
    return parts.without_rope(layers, [one.attention.window_tokens is None for one in layers])


def _starcoder2(fields: Fields) -> tuple[LayerSpec, ...]:
    norm = NormSpec(fields.number("norm_epsilon", 1e-5), is_centred=True, has_bias=True)
    biases = _biases(fields, True, "use_bias")
    mixers = parts.attention(fields, parts.same_windows(fields), **biases)
    plain = parts.mlps(fields, has_bias=biases["qkv_bias"], activation="gelu_tanh", is_gated=False)
    return parts.layers(norm, mixers, plain)


def _gemma(fields: Fields) -> tuple[LayerSpec, ...]:
    mixers = parts.attention(fields, parts.no_windows(fields), **_biases(fields))
    return parts.layers(parts.norm(fields), mixers, parts.mlps(fields, activation="gelu_tanh"))


def _gemma2(fields: Fields) -> tuple[LayerSpec, ...]:
    return _sandwiched(fields, 2, cap=fields.number_or_zero("attn_logit_softcapping"))


def _sandwiched(
    fields: Fields, every: int, local_theta: float | None = None, head_norm: NormSpec | None = None, cap: float = 0.0
) -> tuple[LayerSpec, ...]:
    windows = parts.same_windows(fields, SLIDING_WINDOW)
    windows = parts.windows_of_kinds(fields, windows, parts.all_but_every(every, windows))
    factor = fields.number("query_pre_attn_scalar", 256.0) ** -0.5
    mixers = parts.attention(
        fields,
        windows,
        local_theta=local_theta,
        head_norm=head_norm,
        score_factor=factor,
        score_cap=cap,
        **_biases(fields),
    )
    return parts.layers(parts.norm(fields), mixers, parts.mlps(fields, activation="gelu_tanh"), "both")


def _gemma3(fields: Fields) -> tuple[LayerSpec, ...]:
    """Its scores have no cap: transformers reads `attn_logit_softcapping` and gives it to nobody."""
    local_theta = fields.number("rope_local_base_freq", 10_000.0)
    every = fields.count("sliding_window_pattern", 6)
    return _sandwiched(fields, every, local_theta=local_theta, head_norm=parts.norm(fields))


def _gemma4(fields: Fields) -> tuple[LayerSpec, ...]:
    norm, windows = parts.norm(fields), parts.same_windows(fields, 512)
    windows = parts.windows_of_kinds(fields, windows, [*parts.all_but_every(6, windows)[:-1], False])
    if windows[-1] is not None:
        raise fields.bad("layer_types", parts.SLIDING, f"{parts.FULL} for the last layer")
    shares = fields.flag("attention_k_eq_v", False)
    wide = {"head_dim": fields.count("global_head_dim", 512)}
    if shares and (num_heads := fields.count_or_none("num_global_key_value_heads")):
        wide["num_key_value_heads"] = num_heads
    own = parts.per_layer(fields, [wide if window is None else {} for window in windows])
    alike = {"head_norm": norm, "value_norm": norm, "score_factor": 1.0, **_biases(fields)}
    mixers = parts.attention_by_layer(fields, windows, own, **alike)
    mixers = [replace(one, keys_are_values=shares and one.window_tokens is None) for one in mixers]
    mlps = parts.mlps(fields, activation="gelu_tanh")
    if num_shared := fields.count("num_kv_shared_layers", 0):
        first = len(windows) - num_shared
        if first < 1 or set(windows[:first]) != set(windows):
            raise fields.bad("num_kv_shared_layers", num_shared, "less, so that layers of each kind have their own")
        sources = {window: layer for layer, window in enumerate(windows[:first])}  # the last of each kind
        mixers[first:] = [replace(one, keys_of=sources[one.window_tokens]) for one in mixers[first:]]
        if fields.flag("use_double_wide_mlp", False):
            mlps[first:] = [replace(one, inner=2 * one.inner) for one in mlps[first:]]
    if not fields.flag("enable_moe_block", False):
        return parts.layers(norm, mixers, mlps, "both")
    num_experts, chosen = fields.count("num_experts"), fields.count("top_k_experts")
    if chosen > num_experts:
        raise fields.bad("top_k_experts", chosen, f"at most num_experts, {num_experts}")
    router = RouterSpec(num_experts, chosen, normalises=True)
    expert = replace(mlps[0], inner=fields.count("moe_intermediate_size"))
    mixtures = [MixtureSpec(router, expert, mlp, is_apart=True) for mlp in mlps]
    return parts.layers(norm, mixers, mixtures, "both")


def _gemma4_ends(fields: Fields) -> Ends:
    size, vocab_size = fields.count("hidden_size_per_layer_input"), fields.count("vocab_size")
    if size and (given := fields.count("vocab_size_per_layer_input", vocab_size)) != vocab_size:
        raise fields.bad("vocab_size_per_layer_input", given, f"vocab_size, {vocab_size}")
    return _gemma_ends(fields)._replace(layer_input_size=size)


def _gemma_ends(fields: Fields) -> Ends:
    """The embedding's factor is rounded as the checkpoint's numbers are, which is how it was trained."""
    dtype = getattr(torch, parts.dtype_of(fields))
    root = torch.tensor(fields.count("hidden_size") ** 0.5).to(dtype).item()
    return Ends(root, logits_cap=fields.number_or_zero("final_logit_softcapping"))


SHARED_EXPERTS = MlpNames(*(f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")))
GRANITE_MOE = LayerNames(
    router="block_sparse_moe.router.layer",
    experts="block_sparse_moe.experts.{}.",
    stacked=Stacked("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
)
GPT_OSS = LayerNames(
    router="mlp.router",
    stacked=Stacked("mlp.experts.gate_up_proj", "mlp.experts.down_proj", is_turned=True, alternates=True),
)
ERNIE_MOE = LayerNames(
    rows_are_paired=True,
    correction="mlp.moe_statics.e_score_correction_bias",
    correction_dims=(1,),
    shared=SHARED_EXPERTS,
)
GRANITE_4 = LayerNames(
    mlp=MlpNames("shared_mlp.gate_proj", "shared_mlp.up_proj", "shared_mlp.output_linear"),
    gate_up="shared_mlp.input_linear",
)
HUNYUAN = LayerNames(
    query_norm="self_attn.query_layernorm",
    key_norm="self_attn.key_layernorm",
    router="mlp.gate.wg",
    shared=MlpNames(*(f"mlp.shared_mlp.{name}_proj" for name in ("gate", "up", "down"))),
)
GLM = LayerNames(rows_are_paired=True, gate_up="mlp.gate_up_proj")
LESS_ONE = LayerNames(norms_less_one=True)
SANDWICH = replace(LESS_ONE, mlp_norm="pre_feedforward_layernorm")
GEMMA_4 = LayerNames(
    mlp_norm="pre_feedforward_layernorm",
    router="router.proj",
    experts="experts.{}.",
    shared=PLAIN.mlp,
    stacked=Stacked("experts.gate_up_proj", "experts.down_proj"),
    factor="layer_scalar",
)
GEMMA_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
GEMMA_2_DEFAULTS = {
    **GEMMA_DEFAULTS,
    **{"vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 8192},
    **{"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
}
GEMMA_3_DEFAULTS = {
    **GEMMA_2_DEFAULTS,
    **{"vocab_size": 262_208, "max_position_embeddings": 131_072, "rope_theta": 1_000_000.0},
    **{"final_logit_softcapping": None, "attn_logit_softcapping": None},
}
GEMMA_4_DEFAULTS = {
    **{**GEMMA_3_DEFAULTS, "vocab_size": 262_144, "num_hidden_layers": 30, "hidden_size_per_layer_input": 256},
    "rope_parameters": {
        parts.FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        parts.SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
MINISTRAL_YARN = {
    **{"rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16_384},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}
GPT_OSS_YARN = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    **{"original_max_position_embeddings": 4096},
}
MELLUM_ROPES = {
    parts.FULL: {"rope_type": "default", "rope_theta": 500_000.0},
    parts.SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
SHORT_EPS = {"rms_norm_eps": 1e-5}
COHERE = Architecture(
    _cohere,
    LayerNames(rows_are_paired=True),
    lambda fields: Ends(logits_factor=fields.number("logit_scale", 0.0625)),
    defaults={"rope_theta": 5e5, "tie_word_embeddings": True},
)

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(_llama),
    "MistralForCausalLM": Architecture(_mistral, defaults={"sliding_window": SLIDING_WINDOW}),
    "Qwen2ForCausalLM": Architecture(_qwen2),
    "MiMoForCausalLM": Architecture(_qwen2),  # with a head beside it (`models.head`)
    "Qwen3ForCausalLM": Architecture(_qwen3),
    "Qwen3_5ForCausalLM": Architecture(_qwen3_5, LESS_ONE),
    "Qwen3_5MoeForCausalLM": Architecture(
        _qwen3_5_moe,
        replace(LESS_ONE, stacked=Stacked("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
        defaults={"num_experts": 256, "moe_intermediate_size": 512, "intermediate_size": 512},
    ),
    "Qwen3NextForCausalLM": Architecture(
        lambda fields: _qwen3_5_moe(fields, 10, fields.flag("norm_topk_prob", True)),
        replace(
            LESS_ONE, delta=DeltaNames("linear_attn.in_proj_qkvz", strength="linear_attn.in_proj_ba", by_head=True)
        ),
        defaults={"num_experts": 512, "moe_intermediate_size": 512, "intermediate_size": 5632},
    ),
    "MixtralForCausalLM": Architecture(
        _mixtral,
        LayerNames(
            router="block_sparse_moe.gate", experts="block_sparse_moe.experts.{}.", expert=MlpNames("w1", "w3", "w2")
        ),
    ),
    "Qwen3MoeForCausalLM": Architecture(_qwen3_moe),
    "Qwen2MoeForCausalLM": Architecture(_qwen2_moe),
    "GptOssForCausalLM": Architecture(
        _gpt_oss,
        GPT_OSS,
        defaults={"head_dim": 64, "rope_theta": 150_000.0, "rope_parameters": GPT_OSS_YARN, **SHORT_EPS},
    ),
    "Ernie4_5_MoeForCausalLM": Architecture(
        _ernie_moe, ERNIE_MOE, defaults={"rope_theta": 5e5, "tie_word_embeddings": True, **SHORT_EPS}
    ),
    "Glm4MoeForCausalLM": Architecture(_glm_moe, LayerNames(shared=SHARED_EXPERTS), defaults=SHORT_EPS),
    "Dots1ForCausalLM": Architecture(_dots, LayerNames(shared=SHARED_EXPERTS)),
    "MellumForCausalLM": Architecture(_mellum, defaults={"head_dim": 128, "rope_parameters": MELLUM_ROPES}),
    "OlmoeForCausalLM": Architecture(_olmoe, defaults=SHORT_EPS),
    "GraniteMoeForCausalLM": Architecture(
        lambda fields: _granite(fields, parts.mixtures(fields, parts.router(fields, num_chosen=2, normalises=True))),
        GRANITE_MOE,
        _granite_ends,
    ),
    "SmolLM3ForCausalLM": Architecture(_smollm3, defaults={"tie_word_embeddings": True, "rope_theta": 2e6}),
    "SeedOssForCausalLM": Architecture(_seed_oss, defaults={"head_dim": 128}),
    "Ernie4_5ForCausalLM": Architecture(
        _ernie,
        LayerNames(rows_are_paired=True),
        defaults={"head_dim": 128, "rope_theta": 5e5, "tie_word_embeddings": True, **SHORT_EPS},
    ),
    "GraniteForCausalLM": Architecture(_granite, ends=_granite_ends),
    "GraniteMoeHybridForCausalLM": Architecture(_granite_hybrid, GRANITE_4, _granite_ends),
    "Phi3ForCausalLM": Architecture(
        lambda fields: _mistral(fields, partial=1.0),
        LayerNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
        defaults={"original_max_position_embeddings": 4096, **SHORT_EPS},
    ),
    "MinistralForCausalLM": Architecture(_ministral),
    "Ministral3ForCausalLM": Architecture(
        _mistral, defaults={"head_dim": 128, "rope_parameters": MINISTRAL_YARN, **SHORT_EPS}
    ),
    "HunYuanDenseV1ForCausalLM": Architecture(_hunyuan, HUNYUAN, defaults=SHORT_EPS),
    "HunYuanMoEV1ForCausalLM": Architecture(_hunyuan_moe, HUNYUAN, defaults={"num_experts": 1, **SHORT_EPS}),
    "Olmo2ForCausalLM": Architecture(_olmo, defaults=SHORT_EPS),
    "Olmo3ForCausalLM": Architecture(_olmo3, defaults={"rope_theta": 5e5, **SHORT_EPS}),
    "Exaone4ForCausalLM": Architecture(_exaone4, defaults=SHORT_EPS),
    "GlmForCausalLM": Architecture(_glm, GLM, defaults={"head_dim": 128, "rms_norm_eps": 1.5625e-7}),
    "Glm4ForCausalLM": Architecture(
        lambda fields: _glm(fields, "both"),
        replace(GLM, norm_after_mixer="post_self_attn_layernorm", norm_after_mlp="post_mlp_layernorm"),
        defaults={"head_dim": 128, "rms_norm_eps": 1.5625e-7},
    ),
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": replace(COHERE, compose=_cohere2, defaults={"tie_word_embeddings": True}),
    "Starcoder2ForCausalLM": Architecture(
        _starcoder2,
        LayerNames(mlp=MlpNames("", "mlp.c_fc", "mlp.c_proj")),
        defaults={"num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "GemmaForCausalLM": Architecture(_gemma, LESS_ONE, _gemma_ends, GEMMA_DEFAULTS),
    "Gemma2ForCausalLM": Architecture(_gemma2, SANDWICH, _gemma_ends, GEMMA_2_DEFAULTS),
    "Gemma3ForCausalLM": Architecture(_gemma3, SANDWICH, _gemma_ends, GEMMA_3_DEFAULTS),
    "Gemma4ForCausalLM": Architecture(_gemma4, GEMMA_4, _gemma4_ends, GEMMA_4_DEFAULTS),
    "Gemma3TextModel": Architecture(_gemma3, SANDWICH, _gemma_ends, GEMMA_3_DEFAULTS, has_head=False),
    "LlamaModel": Architecture(_llama, has_head=False),
    "MistralModel": Architecture(_mistral, defaults={"sliding_window": SLIDING_WINDOW}, has_head=False),
    "Qwen3Model": Architecture(_qwen3, has_head=False),
}
WRAPPERS = {
    ("Gemma3ForConditionalGeneration", "gemma3_text"): "Gemma3ForCausalLM",
    ("Gemma4ForConditionalGeneration", "gemma4_text"): "Gemma4ForCausalLM",
    ("Mistral3ForConditionalGeneration", "mistral"): "MistralForCausalLM",
    ("Mistral3ForConditionalGeneration", "ministral3"): "Ministral3ForCausalLM",
    ("Qwen3_5ForConditionalGeneration", "qwen3_5_text"): "Qwen3_5ForCausalLM",
    ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"): "Qwen3_5MoeForCausalLM",
}
"""By the name of a multimodal model and the type of its text part, which is served."""


def unwrapped(values: dict[str, object]) -> dict[str, object]:
    """Returns the config of a multimodal model's text part, with what stands beside it; any other as it is."""
    text, names = values.get("text_config"), values.get("architectures")
    if not isinstance(text, dict) or not isinstance(names, list) or len(names) != 1:
        return values
    name = WRAPPERS.get((str(names[0]), str(text.get("model_type"))))
    beside = {key: value for key, value in values.items() if key not in ("text_config", "vision_config")}
    whole = {key: beside[key] for key in ("tie_word_embeddings",) if key in beside}  # the head is the wrapper's
    return values if name is None else {**beside, **text, **whole, "architectures": [name]}


def layer_names(name: str) -> LayerNames:
    """Returns what checkpoints of the architecture `name`, which is served, call a layer's modules."""
    return ARCHITECTURES[name].names


def find(values: dict[str, object]) -> str:
    """The name of a config's architecture. Raises `ConfigError` that lists what is supported."""
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise bad("architectures", names, "a list of one name")
    if names[0] not in ARCHITECTURES:
        said = f"architecture {names[0]} is not supported; supported are {', '.join(ARCHITECTURES)}"
        raise ConfigError(said, param="architectures", value=names[0], limit=list(ARCHITECTURES))
    return names[0]
