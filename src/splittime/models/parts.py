"""Reading the parts of layers out of a `config.json`: what an architecture's entry composes (`architectures`).

Windows, mixers and feed-forwards come as one value for each layer, so that layers may differ.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from splittime.kernels.layer import AttentionSpec, LayerSpec, MixtureSpec, MlpSpec, NormSpec, RouterSpec
from splittime.models.fields import Fields, bad
from splittime.models.limits import LAYERS, Bounds
from splittime.models.rope_config import LAYER_KINDS, parse_rope

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
