"""The language of decoder layers: named parts, each a small value that says what the part computes.

    layer = norm, mixer, norm, feed-forward          each of the two added to the residual stream
    mixer = attention: heads, position, window, a norm of each head
    feed-forward = MLP, or a router and a mixture of MLPs

A model is a sequence of `LayerSpec`s, composed from its checkpoint's config by its architecture's entry
(`models.architectures`). Layers may differ from one another in every part. Models build layers from these values,
backends say which of them they fuse, and the KV cache is laid out by them (`kv_groups`).
No spec holds a tensor; the parts with their weights (`LayerWeights`) are what a backend is given to fuse, and what is
run part by part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class NormSpec:
    """An RMS norm: x over its root mean square (with eps under the root), times a scale."""

    eps: float


@dataclass(frozen=True)
class RopeSpec:
    """A rotary position embedding; all after `theta` are read only by the types that use them.

    rope_type: "default", "linear" or "llama3", as in `config.json`; or "divided", which is how GGUF files say what they
        do: each pair's frequency is divided by its own of `divisors`.
    """

    rope_type: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class AttentionSpec:
    """window_tokens: a query at position p sees positions (p - window_tokens, p]; None: all of [0, p].

    head_norm: queries and keys pass this norm, head by head, before their position; None: they do not.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    position: RopeSpec
    window_tokens: int | None = None
    head_norm: NormSpec | None = None
    qkv_bias: bool = False
    output_bias: bool = False

    @property
    def scale(self) -> float:
        """Returns the factor on the scores."""
        return self.head_dim**-0.5

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Returns the width of the keys, which is that of the values."""
        return self.num_kv_heads * self.head_dim

    def num_weights(self, hidden_size: int) -> int:
        return hidden_size * (2 * self.query_width + 2 * self.kv_width)


@dataclass(frozen=True)
class MlpSpec:
    """down(silu(gate(x)) * up(x)), `inner` wide between."""

    inner: int
    has_bias: bool = False

    def num_weights(self, hidden_size: int) -> int:
        return 3 * hidden_size * self.inner


@dataclass(frozen=True)
class RouterSpec:
    """Each token goes to its `num_chosen` best of `num_experts`, weighted by their probabilities; with `normalises`
    these are made to sum to 1."""

    num_experts: int
    num_chosen: int
    normalises: bool


@dataclass(frozen=True)
class MixtureSpec:
    """A mixture of experts, all of which have the shape of `expert`."""

    router: RouterSpec
    expert: MlpSpec

    def num_weights(self, hidden_size: int) -> int:
        """Returns how many weights one token is multiplied by."""
        return self.router.num_experts * hidden_size + self.router.num_chosen * self.expert.num_weights(hidden_size)


@dataclass(frozen=True)
class LayerSpec:
    """norm: of both places, before the mixer and before the feed-forward."""

    norm: NormSpec
    mixer: AttentionSpec
    feed_forward: MlpSpec | MixtureSpec

    @property
    def widest(self) -> int:
        """Outputs of its widest product."""
        part = self.feed_forward
        inner = part.inner if isinstance(part, MlpSpec) else part.expert.inner
        return max(self.mixer.query_width + 2 * self.mixer.kv_width, inner)


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
    """The groups that these layers fall into, in the order of their first layers."""
    found: dict[tuple[int, int, int | None], list[int]] = {}
    for index, layer in enumerate(layers):
        mixer = layer.mixer
        found.setdefault((mixer.num_kv_heads, mixer.head_dim, mixer.window_tokens), []).append(index)
    return tuple(KvGroup(tuple(mine), *kind) for kind, mine in found.items())


class PackedWeight:
    """A linear weight as a backend keeps it. blob: uint8, all of it."""

    blob: Tensor | None  # is there in backends that have `packed_bytes`


class PackedNorm:
    """The scale of a norm as a backend keeps it."""


@dataclass(frozen=True)
class AttentionWeights:
    """qkv: [query_width + 2 kv_width, hidden]; output: [hidden, query_width]; head_norm: [num_heads + num_kv_heads,
    head_dim], None where the spec has none."""

    spec: AttentionSpec
    qkv: PackedWeight
    output: PackedWeight
    head_norm: PackedNorm | None


@dataclass(frozen=True)
class MlpWeights:
    """gate_up: [2 inner, hidden]; down: [hidden, inner]."""

    spec: MlpSpec
    gate_up: PackedWeight
    down: PackedWeight


@dataclass(frozen=True)
class MixtureWeights:
    """router: [num_experts, hidden]."""

    spec: RouterSpec
    router: PackedWeight
    experts: tuple[MlpWeights, ...]


@dataclass(frozen=True)
class LayerWeights:
    """A layer of `kernels.layer`, each part with its weights."""

    spec: LayerSpec
    mixer_norm: PackedNorm
    mixer: AttentionWeights
    feed_forward_norm: PackedNorm
    feed_forward: MlpWeights | MixtureWeights
