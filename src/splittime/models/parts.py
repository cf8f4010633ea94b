"""Reading the parts of layers out of a `config.json`: what an architecture's entry composes (`architectures`).

Windows, mixers and feed-forwards come as one value for each layer, so that layers may differ.

The rotary settings come in each form that transformers has given them.

    rope_theta, rope_scaling {..}                     transformers 4
    rope_parameters {rope_theta, rope_type, ..}       transformers 5
    rope_parameters {"full_attention": {..}, ..}      transformers 5, of models with several kinds of layers

A key that is not known here may change the arithmetic, so it is refused by name; so are two forms that contradict each
other.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from splittime.core.errors import ConfigError
from splittime.kernels.layer import (
    NO_ROPE,
    PROPORTIONAL,
    AttentionSpec,
    DeltaSpec,
    LayerSpec,
    MixtureSpec,
    MlpSpec,
    NormSpec,
    Places,
    RopeSpec,
    RouterSpec,
)
from splittime.models.fields import LAYERS, Bounds, Fields

NEW, OLD = "rope_parameters", "rope_scaling"
LLAMA3, YARN, LONGROPE, DYNAMIC = "llama3", "yarn", "longrope", "dynamic"
_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
OF_TYPE: dict[str, set[str]] = {
    "default": set(),
    "linear": set(),
    LLAMA3: set(),
    YARN: {*_YARN, "attention_factor", "truncate", "llama_4_scaling_beta"},
    DYNAMIC: {*_YARN, "alpha"},
    LONGROPE: {"attention_factor", "short_factor", "long_factor"},
    PROPORTIONAL: set(),
}
"""Keys that these types of rotary embedding read besides `OF_ALL`."""
OF_ALL = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "max_position_embeddings"),
}
AXES = ("mrope_section", "mrope_interleaved")
FULL, SLIDING = LAYER_KINDS = ("full_attention", "sliding_attention")
LINEAR = "linear_attention"
EXPERTS = ("num_experts", "n_routed_experts", "moe_num_experts", "num_local_experts")  # names of one field
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk")


class Ropes:
    """What a config says of rotary embeddings. theta: where it names none. local_theta: of layers with windows, where
    the architecture gives them a plain one of their own; None: theirs is that of all. partial: the share of each head
    that is turned, where the config names none; None: all is, and nothing else is implemented. stretches: its "dynamic"
    embedding has an alpha that stretches theta, which others do not know."""

    def __init__(
        self,
        fields: Fields,
        head_dim: int,
        theta: float = 10_000.0,
        local_theta: float | None = None,
        partial: float | None = None,
        stretches: bool = False,
    ) -> None:
        self._fields, self._head_dim, self._partial, self._stretches = fields, head_dim, partial, stretches
        self._theta, self._local_theta = fields.number("rope_theta", theta), local_theta

    def of_layers(self, kinds: Sequence[str]) -> list[RopeSpec]:
        """Returns the embedding of each layer. Raises `ConfigError` naming what is not carried out."""
        ropes = {kind: self._of_kind(kind, kinds) for kind in dict.fromkeys(kinds)}
        return [ropes[kind] for kind in kinds]

    def _of_kind(self, kind: str, kinds: Sequence[str]) -> RopeSpec:
        is_local = kind == SLIDING and self._local_theta is not None
        theta = self._local_theta if is_local and self._local_theta is not None else self._theta
        found = {}
        for key in (NEW,) if is_local else (NEW, OLD):
            for where, values in self._forms(key, kind, kinds):
                found[where] = self._parse(values, where, theta)
        if not found:
            return self._parse({}, OLD, theta)
        (first, rope), *others = found.items()
        for where, other in others:
            if other != rope:
                raise ConfigError(
                    f"config.json: {first} is {_shown(rope)}, {where} is {_shown(other)}; they must say the same",
                    param=where,
                    value=_shown(other),
                    limit=_shown(rope),
                )
        return rope

    def _forms(self, key: str, kind: str, kinds: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
        """The object that holds a kind's settings, and where it stands; none if nothing is given. Where layers with
        windows have a plain embedding of their own, a kind may be left out, and what is flat is nobody's."""
        given, has_local = self._fields.values.get(key), self._local_theta is not None
        if not isinstance(given, dict | None):
            raise self._fields.bad(key, given, "an object")
        given = {name: value for name, value in (given or {}).items() if value is not None}
        if not given:
            return []
        is_flat = not any(isinstance(value, dict) for value in given.values())
        if is_flat and not (has_local and key == NEW):
            return [(key, given)]
        needed = given if has_local else kinds
        if is_flat or any(not isinstance(given.get(each), dict) for each in needed) or set(given) - set(LAYER_KINDS):
            flat = "" if has_local and key == NEW else "flat, or "
            want = f"{flat}an object for each of {', '.join(LAYER_KINDS)} that the layers are"
            raise self._fields.bad(key, given, want)
        return [(f"{key}.{kind}", given[kind])] if kind in given else []

    def _parse(self, values: dict[str, Any], where: str, theta: float) -> RopeSpec:
        own = self._fields.below(values, f"{where}.")
        rope_type = own.text("rope_type", own.text("type", "default"))
        rope_type = LONGROPE if rope_type == "su" else rope_type
        if rope_type not in OF_TYPE:
            raise own.bad("rope_type", rope_type, f"one of {', '.join(OF_TYPE)}")
        known = OF_ALL | OF_TYPE[rope_type]
        for name in values:
            if name not in known and values[name] is not None:
                raise own.bad(name, values[name], f"absent: only {', '.join(sorted(known))} are implemented")
        if rope_type == PROPORTIONAL:
            share, theta = self._share_of(own), own.number("rope_theta", theta)
            return RopeSpec(PROPORTIONAL, theta, own.number("factor", 1.0), share=share)
        plain = RopeSpec("default", own.number("rope_theta", theta), share=self._share(own))
        if rope_type == "default":
            return plain
        if rope_type == DYNAMIC:
            return replace(plain, theta=plain.theta * self._stretch(own, where))
        if rope_type == LONGROPE:
            return self._longrope(own, where, plain)
        rope = replace(plain, rope_type=rope_type, factor=own.number("factor"))
        if rope_type == "linear":
            return rope
        rope = replace(rope, original_max_position_embeddings=self._original(own, where))
        return _yarn(own, rope) if rope_type == YARN else _llama3(own, rope)

    def _share(self, own: Fields) -> float:
        key, share = "partial_rotary_factor", self._share_of(own)
        if share != 1.0 and self._partial is None:
            raise own.bad(key, share, "1 (partial rotary embedding is not implemented for this architecture)")
        if int(self._head_dim * share) % 2 or int(self._head_dim * share) == 0:
            raise own.bad(key, share, f"such that an even number of a head's {self._head_dim} elements is turned")
        return share

    def _share_of(self, own: Fields) -> float:
        key = "partial_rotary_factor"
        return own.number(key, self._fields.number(key, 1.0 if self._partial is None else self._partial))

    def _stretch(self, own: Fields, where: str) -> float:
        """Returns what theta is multiplied by in a "dynamic" embedding whose alpha is the same for every length."""
        if own.values.get("alpha") is None or not self._stretches:
            want = "another type: it follows the length, which is implemented for no architecture"
            raise own.bad("rope_type", DYNAMIC, f"{want} (HunYuan's has an alpha in its place)")
        if self._head_dim <= 2:
            raise self._fields.bad("head_dim", self._head_dim, f"above 2, with {where} of type {DYNAMIC}")
        return own.number("alpha") ** (self._head_dim / (self._head_dim - 2))

    def _original(self, own: Fields, where: str) -> int:
        """Phi-3's configs have it outside of the settings, whose own it then goes before, unless they are by kind."""
        key, fields = "original_max_position_embeddings", self._fields
        outer = None if "." in where else fields.count_or_none(key)
        return outer or own.count(key, fields.count("max_position_embeddings"))

    def _longrope(self, own: Fields, where: str, plain: RopeSpec) -> RopeSpec:
        original, pairs = self._original(own, where), plain.turned_dims(self._head_dim) // 2
        factor = own.number("factor", max(1.0, self._fields.count("max_position_embeddings") / original))
        attention = max(1.0, 1 + math.log(factor) / math.log(original)) ** 0.5 if original > 1 else 1.0
        return replace(
            plain,
            rope_type=LONGROPE,
            original_max_position_embeddings=original,
            divisors=own.numbers("short_factor", "factor", pairs),
            far_divisors=own.numbers("long_factor", "factor", pairs),
            factor_of_turned=own.number("attention_factor", attention),
        )


def _llama3(own: Fields, rope: RopeSpec) -> RopeSpec:
    low, high = own.number("low_freq_factor"), own.number("high_freq_factor")
    if high <= low:
        raise own.bad("high_freq_factor", high, f"above low_freq_factor, {low}")
    return replace(rope, low_freq_factor=low, high_freq_factor=high)


def _yarn(own: Fields, rope: RopeSpec) -> RopeSpec:
    if rope.theta <= 1:
        raise own.bad("rope_theta", rope.theta, "above 1: pairs are blended along its logarithm")

    def stretched(strength: float) -> float:
        return 1.0 + 0.1 * strength * math.log(max(1.0, rope.factor))

    whole, part = own.number("mscale", 0.0), own.number("mscale_all_dim", 0.0)
    inferred = stretched(whole) / stretched(part) if whole and part else stretched(1.0)
    return replace(
        rope,
        fast_turns=own.number("beta_fast", 32.0),
        slow_turns=own.number("beta_slow", 1.0),
        truncates=own.flag("truncate", True),
        query_growth=own.number("llama_4_scaling_beta", 0.0),
        factor_of_turned=own.number("attention_factor", inferred),
    )


def _shown(rope: RopeSpec) -> str:
    return f"{rope.rope_type} with theta {rope.theta:g} and factor {rope.factor:g}"


Windows = tuple[int | None, ...]  # of each layer, in tokens


def layers(
    norm: NormSpec,
    mixers: Iterable[AttentionSpec | DeltaSpec],
    feed_forwards: Iterable[MlpSpec | MixtureSpec],
    places: Places = "before",
) -> tuple[LayerSpec, ...]:
    """places: of the norms, see `LayerSpec`."""
    pairs = zip(mixers, feed_forwards, strict=True)
    return tuple(LayerSpec(norm, mixer, feed_forward, places) for mixer, feed_forward in pairs)


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
    has_windows = fields.flag("use_sliding_window", False)
    windows = same_windows(fields, default) if has_windows else no_windows(fields)
    full_layers = fields.count("max_window_layers", 28)
    return windows_of_kinds(fields, windows, [layer >= full_layers for layer in range(len(windows))])


def windows_of_kinds(fields: Fields, windows: Windows, has_window: Sequence[bool]) -> Windows:
    """These windows for the layers that `layer_types` says. has_window: which have theirs where it says nothing."""
    types = fields.values.get("layer_types")
    if types is None:
        types = [LAYER_KINDS[one] for one in has_window]
    if not isinstance(types, list) or len(types) != len(windows) or any(kind not in LAYER_KINDS for kind in types):
        raise fields.bad("layer_types", types, f"a list of {len(windows)} names from {', '.join(LAYER_KINDS)}")
    return tuple(window if kind == SLIDING else None for kind, window in zip(types, windows, strict=True))


def all_but_every(nth: int, windows: Windows) -> list[bool]:
    """Returns for each layer whether it is none of every `nth`; 0: all are none."""
    return [nth == 0 or bool((layer + 1) % nth) for layer in range(len(windows))]


def attention(
    fields: Fields,
    windows: Windows,
    *,
    head_dim: int | None = None,
    theta: float = 10_000.0,
    local_theta: float | None = None,
    partial: float | None = None,
    stretches: bool = False,
    **alike: Any,
) -> list[AttentionSpec]:
    """head_dim, theta: where the config names none; without either, hidden_size is divided among the heads.
    local_theta, partial, stretches: see `Ropes`. alike: what else all layers have, by the names of `AttentionSpec`."""
    num_heads = fields.count("num_attention_heads")
    fields.count("max_position_embeddings")
    head_dim = _head_dim(fields, head_dim, num_heads)
    positions = Ropes(fields, head_dim, theta, local_theta, partial, stretches).of_layers(_kinds(fields, windows))
    num_kv_heads = _kv_heads(fields, num_heads)
    return [
        AttentionSpec(num_heads, num_kv_heads, head_dim, position, window, **alike)
        for position, window in zip(positions, windows, strict=True)
    ]


def deltas(fields: Fields, attention: Sequence[AttentionSpec]) -> list[AttentionSpec | DeltaSpec]:
    """Returns these mixers, and a gated delta net in the place of each whose layer `layer_types` calls linear; where it
    says nothing, all but every fourth or so are."""
    heads, value_heads = fields.count("linear_num_key_heads", 16), fields.count("linear_num_value_heads", 32)
    if value_heads % heads:
        raise fields.bad("linear_num_value_heads", value_heads, f"a multiple of linear_num_key_heads, {heads}")
    dims = fields.count("linear_key_head_dim", 128), fields.count("linear_value_head_dim", 128)
    spec = DeltaSpec(heads, value_heads, *dims, fields.count("linear_conv_kernel_dim", 4), norm(fields))
    every, num_layers, kinds = fields.count("full_attention_interval", 4), len(attention), (LINEAR, FULL)
    types = fields.values.get("layer_types")
    if types is None:
        types = [kinds[(layer + 1) % every == 0] for layer in range(num_layers)]
    is_list = isinstance(types, list) and len(types) == num_layers and all(kind in kinds for kind in types)
    if not is_list or FULL not in types:
        want = f"a list of {num_layers} names from {', '.join(kinds)}, with the second among them"
        raise fields.bad("layer_types", types, want)
    return [spec if kind == LINEAR else mixer for kind, mixer in zip(types, attention, strict=True)]


def per_layer(fields: Fields, defaults: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns which of the config's fields each layer has of its own: as `per_layer_config` says, else as here."""
    given = fields.values.get("per_layer_config")
    if given is None:
        return defaults
    names, layers = {"head_dim", "num_key_value_heads"}, [str(layer) for layer in range(len(defaults))]
    is_meant = isinstance(given, dict) and all(isinstance(own, dict) and own.keys() <= names for own in given.values())
    if not is_meant or not given.keys() <= set(layers):
        raise fields.bad("per_layer_config", given, f"{' and '.join(sorted(names))} by the number of a layer")
    for layer, own in given.items():
        for name in own:
            fields.below(own, f"per_layer_config.{layer}.").count(name)
    return [given.get(layer, {}) for layer in layers]


def attention_by_layer(
    fields: Fields, windows: Windows, own: Sequence[dict[str, Any]], **alike: Any
) -> list[AttentionSpec]:
    """own: which of the config's fields each layer has of its own."""
    kinds = [tuple(sorted(mine.items())) for mine in own]
    found = {
        kind: attention(fields.below({**fields.values, **dict(kind)}, fields.prefix), windows, **alike)
        for kind in dict.fromkeys(kinds)
    }
    return [found[kind][layer] for layer, kind in enumerate(kinds)]


def without_axes(fields: Fields) -> Fields:
    """Returns the fields without what says which pairs are turned by which axis of an image: text has one position."""
    ropes = {key: fields.values.get(key) for key in (NEW, OLD)}
    left = {
        key: {name: one[name] for name in one if name not in AXES}
        for key, one in ropes.items()
        if isinstance(one, dict)
    }
    return fields.below(fields.values | left, fields.prefix)


def without_rope(layers: Sequence[LayerSpec], are_without: Sequence[bool]) -> tuple[LayerSpec, ...]:
    """Returns the layers, of which some know no positions."""
    mixers = [replace(one.attention, position=NO_ROPE) for one in layers]
    trios = zip(layers, mixers, are_without, strict=True)
    return tuple(replace(one, mixer=mixer) if is_without else one for one, mixer, is_without in trios)


def mlps(fields: Fields, **alike: Any) -> list[MlpSpec]:
    """alike: what else all of them have, by the names of `MlpSpec`."""
    return [MlpSpec(fields.count("intermediate_size"), **alike)] * fields.count("num_hidden_layers")


def router(fields: Fields, num_chosen: int, normalises: bool) -> RouterSpec:
    """num_chosen: where the config names none."""
    num_experts = next(filter(None, map(fields.count_or_none, EXPERTS)), None) or fields.count(EXPERTS[-1])
    key = next((key for key in CHOSEN if fields.values.get(key) is not None), CHOSEN[0])
    chosen = fields.count(key, num_chosen)
    if chosen > num_experts:
        raise fields.bad(key, chosen, f"at most the number of experts, {num_experts}")
    return RouterSpec(num_experts, chosen, normalises)


def alike(fields: Fields, *keys: str) -> Fields:
    """Returns the fields with one number for a list that has it for each layer."""
    lists = {key: fields.values[key] for key in keys if isinstance(fields.values.get(key), list)}
    same = {key: each[0] for key, each in lists.items() if len({repr(one) for one in each}) == 1}
    return fields.below(fields.values | same, fields.prefix)


def grouped(fields: Fields, router: RouterSpec) -> RouterSpec:
    """Returns the router as DeepSeek-V3's is: by sigmoid, corrected, in groups, scaled."""
    groups, chosen_groups = fields.count("n_group", 1), fields.count("topk_group", 1)
    if router.num_experts % groups or router.num_experts == groups > 1:
        want = f"a divisor of the number of experts, {router.num_experts}, with two or more in a group"
        raise fields.bad("n_group", groups, want)
    if chosen_groups > groups or chosen_groups * (router.num_experts // groups) < router.num_chosen:
        want = f"at most {groups}, with {router.num_chosen} experts in them or more"
        raise fields.bad("topk_group", chosen_groups, want)
    return replace(
        router,
        scoring="sigmoid",
        is_corrected=True,
        num_groups=groups,
        chosen_groups=chosen_groups,
        scale=fields.number("routed_scaling_factor", 1.0),
    )


def mixtures(
    fields: Fields,
    router: RouterSpec,
    shared_inner: int = 0,
    *,
    gates_shared: bool = False,
    plain: Iterable[int] = (),
    **alike: Any,
) -> list[MlpSpec | MixtureSpec]:
    """Every layer's experts, but for the layers that are `plain` or that the config makes so. shared_inner: of the
    shared expert; 0: there is none. alike: what else every MLP has, by the names of `MlpSpec`."""
    inner = fields.count_or_none("moe_intermediate_size") or fields.count("intermediate_size")
    shared = MlpSpec(shared_inner, **alike) if shared_inner else None
    experts = MixtureSpec(router, MlpSpec(inner, **alike), shared, gates_shared)
    plain = {*plain, *fields.ints("mlp_only_layers", Bounds(0, LAYERS.most)), *_dense(fields)}
    every = fields.count("decoder_sparse_step", 1)
    mlp = MlpSpec(fields.count("intermediate_size"), **alike)
    layers = range(fields.count("num_hidden_layers"))
    return [mlp if layer in plain or (layer + 1) % every else experts for layer in layers]


def _dense(fields: Fields) -> list[int]:
    """Returns the layers that `mlp_layer_types` calls dense."""
    types = fields.values.get("mlp_layer_types")
    if types is None:
        return []
    num_layers = fields.count("num_hidden_layers")
    if not isinstance(types, list) or len(types) != num_layers or any(one not in ("dense", "sparse") for one in types):
        raise fields.bad("mlp_layer_types", types, f"a list of {num_layers} names from dense, sparse")
    return [layer for layer, kind in enumerate(types) if kind == "dense"]


def _kv_heads(fields: Fields, num_heads: int) -> int:
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.bad("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads, {num_heads}")
    return num_kv_heads


def _head_dim(fields: Fields, default: int | None, num_heads: int) -> int:
    hidden_size = fields.count("hidden_size")
    given = fields.count_or_none("head_dim", default)
    if given is None and hidden_size % num_heads:
        want = f"a multiple of num_attention_heads, {num_heads}, or head_dim given"
        raise fields.bad("hidden_size", hidden_size, want)
    head_dim = given or hidden_size // num_heads
    if head_dim % 2:
        raise fields.bad("head_dim", head_dim, "even, for the rotary embedding")
    return head_dim


def _kinds(fields: Fields, windows: Sequence[int | None]) -> list[str]:
    """Returns which of `LAYER_KINDS` each layer is."""
    types = fields.values.get("layer_types")
    if isinstance(types, list) and len(types) == len(windows) and all(kind in LAYER_KINDS for kind in types):
        return types
    return [LAYER_KINDS[window is not None] for window in windows]


DTYPES = ("float32", "bfloat16", "float16")


def dtype_of(fields: Fields) -> str:
    """Returns the dtype that a checkpoint's floats are said to have."""
    dtype = fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch.")
    if dtype not in DTYPES:
        raise fields.bad("torch_dtype", dtype, f"one of {', '.join(DTYPES)}")
    return dtype
