"""The parts of `kernels.layer` with their weights: what a backend is given to fuse, and what is run part by part."""

from dataclasses import dataclass

from torch import Tensor

from splittime.kernels.layer import AttentionSpec, LayerSpec, MlpSpec, RouterSpec


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
