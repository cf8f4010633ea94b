"""The language of decoder layers: named parts, each a small value that says what the part computes.

    layer = norm, mixer, norm, feed-forward          each of the two added to the residual stream; norms before it,
                                                     after it, or both
    mixer = attention: heads, position, window, a norm of each head or of all of them
          | a gated delta net: a state of fixed size for each sequence in place of keys and values
    feed-forward = MLP, or a router and a mixture of MLPs

A model is a sequence of `LayerSpec`s, composed from its checkpoint's config by its architecture's entry
(`models.architectures`). Layers may differ from one another in every part. Models build layers from these values,
backends say which of them they fuse, and the KV cache is laid out by them (`kv_groups`).
No spec holds a tensor; the parts with their weights (`LayerWeights`) are what a backend is given to fuse, and what is
run part by part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class NormSpec:
    """x over its root mean square (with eps under the root), times a scale. is_centred: x without its mean, which makes
    it a layer norm; has_bias: and then with something added."""

    eps: float
    is_centred: bool = False
    has_bias: bool = False


PROPORTIONAL = "proportional"


@dataclass(frozen=True)
class RopeSpec:
    """A rotary position embedding; all after `theta` are read only by the types that use them, but for the last three.

    rope_type: "default", "linear", "llama3", "yarn", "longrope" or "proportional", as in `config.json`; or "divided",
        which is how GGUF files say what they do: each pair's frequency is divided by its own of `divisors`.
    divisors, far_divisors: of "longrope", for contexts up to `original_max_position_embeddings`, and for longer.
    fast_turns, slow_turns, truncates: of "yarn", between how many turns in the original context the pairs are blended,
        and whether the blend begins and ends at whole pairs.
    share: of each head's elements, the first, that are turned; with 0 the layer knows no positions. "proportional": of
        the pairs that all of a head's elements make.
    factor_of_turned: what they are multiplied by besides.
    query_growth: g, above 0: a turned query at position p is multiplied by 1 + g ln(1 + floor(p / original context)).
    """

    rope_type: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    divisors: tuple[float, ...] = ()
    far_divisors: tuple[float, ...] = ()
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    truncates: bool = True
    share: float = 1.0
    factor_of_turned: float = 1.0
    query_growth: float = 0.0

    def is_far(self, num_positions: int) -> bool:
        """Returns whether a context of so many positions is turned by `far_divisors`."""
        return bool(self.far_divisors) and num_positions > self.original_max_position_embeddings

    def turned_dims(self, head_dim: int) -> int:
        """Returns how many of a head's elements are turned."""
        return head_dim if self.rope_type == PROPORTIONAL else int(head_dim * self.share)


NO_ROPE = RopeSpec("default", theta=1.0, share=0.0)


@dataclass(frozen=True)
class AttentionSpec:
    """window_tokens: a query at position p sees positions (p - window_tokens, p]; None: all of [0, p].

    head_norm: queries and keys pass this norm, head by head, before their position; None: they do not.
    normed: "heads", each by itself; "apart", the same, each with a scale of its own; "turned", after their position;
        "all", those of a token as one row.
    score_factor: on the scores; None: one over the root of head_dim. score_cap: above 0, a score s becomes
        score_cap * tanh(s / score_cap).
    has_sinks: each head has a score of its own for seeing nothing, which takes its share of the softmax.
    value_norm: values pass this norm, head by head, with a scale of 1. keys_are_values: the product that makes keys
        makes values too, which are what it is before norms and position. is_gated: each number of a head's output is
        multiplied by the sigmoid of one of a product of its own. keys_of: the layer, an earlier one of the same
        shape, whose keys and values this one attends to; it has none of its own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    position: RopeSpec
    window_tokens: int | None = None
    head_norm: NormSpec | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    normed: Literal["heads", "apart", "turned", "all"] = "heads"
    score_factor: float | None = None
    score_cap: float = 0.0
    has_sinks: bool = False
    value_norm: NormSpec | None = None
    keys_are_values: bool = False
    keys_of: int | None = None
    is_gated: bool = False

    @property
    def scale(self) -> float:
        """Returns the factor on the scores."""
        return self.head_dim**-0.5 if self.score_factor is None else self.score_factor

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Returns the width of the keys, which is that of the values."""
        return self.num_kv_heads * self.head_dim

    @property
    def own_kv_width(self) -> int:
        """Returns the width of the keys that it makes."""
        return self.kv_width if self.keys_of is None else 0

    @property
    def widest(self) -> int:
        return self.query_width + 2 * self.kv_width

    def num_weights(self, hidden_size: int) -> int:
        return hidden_size * ((2 + self.is_gated) * self.query_width + 2 * self.own_kv_width)


LENGTH_EPS = 1e-6


@dataclass(frozen=True)
class DeltaSpec:
    """A gated delta net (Yang, Kautz, Hatamizadeh: Gated Delta Networks, 2024), as Qwen3-Next and Qwen3.5 have it.

    Queries, keys and values pass a causal convolution of each channel over `conv_width` tokens and a SiLU. Queries and
    keys are normed to a length of 1 (with `LENGTH_EPS` under the root), and queries divided by the root of key_dim.
    Then for each value head, of a state S [key_dim, value_dim] in float32, with a decay g and a strength b of the
    token:

        S <- exp(g) S,   S <- S + k (b (v - S^T k))^T,   output = S^T q

    Each key head serves num_value_heads / num_key_heads value heads. The output passes `norm`, head by head, times the
    SiLU of a gate.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm: NormSpec

    @property
    def channels(self) -> int:
        """Returns how many channels are convolved: of queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def inner(self) -> int:
        """Returns the width of the values, which is that of the gate and of the output before its product."""
        return self.num_value_heads * self.value_dim

    @property
    def state_floats(self) -> int:
        """Returns the size of a sequence's state: S of each value head, then the last inputs of the convolution."""
        return self.inner * self.key_dim + self.channels * (self.conv_width - 1)

    @property
    def widest(self) -> int:
        return self.channels + self.inner + 2 * self.num_value_heads

    def num_weights(self, hidden_size: int) -> int:
        return hidden_size * (self.widest + self.inner)


class Clamped(NamedTuple):
    """In the place of silu(g) * u: g * sigmoid(alpha * g) * (u + 1), of a g of at most `limit` and a u within it."""

    alpha: float
    limit: float


Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class MlpSpec:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) where it is not gated, `inner` wide between.
    "gelu_tanh": GELU by its approximation with a tanh."""

    inner: int
    has_bias: bool = False
    activation: Activation = "silu"
    clamped: Clamped | None = None
    is_gated: bool = True

    @property
    def outputs(self) -> int:
        """Returns how many outputs gate and up have together."""
        return 2 * self.inner if self.is_gated else self.inner

    def num_weights(self, hidden_size: int) -> int:
        return hidden_size * (self.outputs + self.inner)


@dataclass(frozen=True)
class RouterSpec:
    """Each token goes to its `num_chosen` best of `num_experts`, weighted by their scores, which are the `scoring` of
    the router's logits, times `scale`.

    normalises: the chosen scores are divided by their sum, or by `least_sum` where that is more. Of a softmax that
        makes them the softmax of the chosen logits alone, as some families put it.
    has_bias: the router's product has one. is_corrected: each expert has a number that is added to its score when
        experts are chosen, and not when they are weighted.
    num_groups, chosen_groups: neighbouring experts are a group, and only those of the best groups are chosen; a group
        is as good as its two best experts together.
    """

    num_experts: int
    num_chosen: int
    normalises: bool
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    has_bias: bool = False
    is_corrected: bool = False
    num_groups: int = 1
    chosen_groups: int = 1
    least_sum: float = 1e-20
    scale: float = 1.0


@dataclass(frozen=True)
class MixtureSpec:
    """A mixture of experts, all of which have the shape of `expert`, and one that every token goes to: `shared`, times
    the sigmoid of a product of its own if `gates_shared`. is_apart: the experts and their router are each given what a
    norm of their own makes of the residual stream, and what they add passes another, as that of `shared` does."""

    router: RouterSpec
    expert: MlpSpec
    shared: MlpSpec | None = None
    gates_shared: bool = False
    is_apart: bool = False

    def num_weights(self, hidden_size: int) -> int:
        """Returns how many weights one token is multiplied by."""
        beside = 0 if self.shared is None else self.shared.num_weights(hidden_size)
        small = (self.router.num_experts + self.gates_shared) * hidden_size
        return small + self.router.num_chosen * self.expert.num_weights(hidden_size) + beside


Places = Literal["before", "after", "both", "shared"]


@dataclass(frozen=True)
class LayerSpec:
    """norm: of all places. places: whether mixer and feed-forward are each given what a norm made of the residual
    stream, or add what a norm made of their own output, or both; "shared": both are given what one norm made of it."""

    norm: NormSpec
    mixer: AttentionSpec | DeltaSpec
    feed_forward: MlpSpec | MixtureSpec
    places: Places = "before"

    @property
    def attention(self) -> AttentionSpec:
        """The mixer, for those that are given models with attention in every layer alone."""
        assert isinstance(self.mixer, AttentionSpec), "a layer without attention"
        return self.mixer

    @property
    def widest(self) -> int:
        """Outputs of its widest product."""
        inner = max(mlp.inner for mlp in mlps_of(self.feed_forward))
        return max(self.mixer.widest, inner)


def mlps_of(part: MlpSpec | MixtureSpec) -> tuple[MlpSpec, ...]:
    """Returns each kind of MLP in it, the experts' first."""
    if isinstance(part, MlpSpec):
        return (part,)
    return (part.expert,) if part.shared is None else (part.expert, part.shared)


@dataclass(frozen=True)
class KvGroup:
    """Layers (by index) whose keys and values are kept and looked at alike: one pool of blocks, one plan a step.

    All groups have the same number of blocks and share block ids: block 7 of a request is block 7 of every group.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window_tokens: int | None


def kv_groups(layers: Sequence[LayerSpec]) -> tuple[KvGroup, ...]:
    """The groups that those of these layers fall into that make keys and values, in the order of their first layers."""
    found: dict[tuple[int, int, int | None], list[int]] = {}
    for index, layer in enumerate(layers):
        mixer = layer.mixer
        if isinstance(mixer, AttentionSpec) and mixer.keys_of is None:
            found.setdefault((mixer.num_kv_heads, mixer.head_dim, mixer.window_tokens), []).append(index)
    return tuple(KvGroup(tuple(mine), *kind) for kind, mine in found.items())


def state_floats(layers: Sequence[LayerSpec]) -> tuple[int, ...]:
    """Returns the size of a sequence's state in each layer that keeps one, in their order."""
    return tuple(layer.mixer.state_floats for layer in layers if isinstance(layer.mixer, DeltaSpec))


class Weighing(NamedTuple):
    """How scores become shares of the values: by a softmax, after `scale` and `cap` (see `AttentionSpec`).

    sinks: float32 [num_heads], the score of a token that every query sees besides and whose values are 0, or None."""

    scale: float
    cap: float = 0.0
    sinks: Tensor | None = None


class PackedWeight:
    """A linear weight as a backend keeps it. blob: uint8, all of it."""

    blob: Tensor | None  # is there in backends that have `packed_bytes`


class PackedNorm:
    """The scale of a norm as a backend keeps it."""


@dataclass(frozen=True)
class AttentionWeights:
    """qkv: [query_width + 2 own_kv_width, hidden]; output: [hidden, query_width]; head_norm: [num_heads + num_kv_heads,
    head_dim], or [head_dim] where the keys are another layer's; value_norm: its scale is 1; sinks: float32 [num_heads];
    gate: [query_width, hidden]; None where the spec has none, or norms of all.

    all_norms: of all queries, and of all keys, of a token, together or apart. query_factors: [head_dim], what turned
        queries are multiplied by: of a norm behind the position, whose scales for queries and keys are both in it.
    """

    spec: AttentionSpec
    qkv: PackedWeight
    output: PackedWeight
    head_norm: PackedNorm | None
    all_norms: tuple[PackedNorm, PackedNorm] | None = None
    query_factors: Tensor | None = None
    sinks: Tensor | None = None
    value_norm: PackedNorm | None = None
    gate: PackedWeight | None = None

    @property
    def weighing(self) -> Weighing:
        return Weighing(self.spec.scale, self.spec.score_cap, self.sinks)


@dataclass(frozen=True, eq=False)
class DeltaWeights:
    """products: [channels + inner + 2 num_value_heads, hidden], of queries, keys, values, gate, strengths (b) and
    decays (a); output: [hidden, inner]. The others are float32 and contiguous: conv [channels, conv_width], the oldest
    token first; decay [num_value_heads], below 0; dt_bias [num_value_heads]; norm [value_dim]."""

    spec: DeltaSpec
    products: PackedWeight
    output: PackedWeight
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor


@dataclass(frozen=True)
class MlpWeights:
    """gate_up: [2 inner, hidden], without a gate [inner, hidden]; down: [hidden, inner]."""

    spec: MlpSpec
    gate_up: PackedWeight
    down: PackedWeight


class ApartNorms(NamedTuple):
    """The norms of what router and experts are given, and of what the shared expert and the others make."""

    router: PackedNorm
    experts: PackedNorm
    after_shared: PackedNorm
    after_experts: PackedNorm


@dataclass(frozen=True)
class MixtureWeights:
    """router: [num_experts, hidden]; correction: float32 [num_experts]; shared_gate: [1, hidden]; shares: float32
    [num_experts], what weights are multiplied by. The last five are None where the spec has none."""

    spec: RouterSpec
    router: PackedWeight
    experts: tuple[MlpWeights, ...]
    correction: Tensor | None = None
    shared: MlpWeights | None = None
    shared_gate: PackedWeight | None = None
    norms: ApartNorms | None = None
    shares: Tensor | None = None


@dataclass(frozen=True)
class LayerWeights:
    """A layer of `kernels.layer`, each part with its weights, and the norms before and after each, where there are
    some. factor: what its output is multiplied by."""

    spec: LayerSpec
    mixer_norm: PackedNorm | None
    mixer: AttentionWeights | DeltaWeights
    feed_forward_norm: PackedNorm | None
    feed_forward: MlpWeights | MixtureWeights
    norm_after_mixer: PackedNorm | None = None
    norm_after_feed_forward: PackedNorm | None = None
    factor: float = 1.0
