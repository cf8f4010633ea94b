"""Calibration text through one layer at a time: the model's own layers (`kernels.compose`) on float32 weights by name.

`Tapped` stands where a packed weight stands; `TapOps.linear` hands the input of each that is watched to its
`Gatherer`. Sequences go through one by one, whole, so that no sum depends on how they were batched.

The hidden states between two layers are in memory, or in a file where they are too large (`begin_states`): 4 bytes x
samples x length x hidden_size, 536 MB for 128 samples of 512 tokens at a width of 2048.

What calibration text says about the input x of a linear does not grow with the text:

    gram = E[x x^T]  [in, in]     mean|x|, max|x|  [in]

The mean squared error that a change D of a weight makes in its output is tr(D gram D^T): exact over all of the text, so
that GPTQ's Hessian, AWQ's search and the reported errors need no activations to be kept.
"""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from splittime.kernels import layer as layers
from splittime.kernels.api import AttentionBatch, AttentionPlan, KvShape, LayerKv
from splittime.kernels.compose import ComposedLayer
from splittime.kernels.cpu.ops import CpuOps
from splittime.lab.quantize import layer_map
from splittime.lab.quantize.layer_map import K, O, Q, V
from splittime.lab.quantize.tensor_file import unwritable
from splittime.models import rope
from splittime.models.architectures import layer_names
from splittime.models.config import ModelConfig
from splittime.models.decoder import embed
from splittime.models.weights.packing import pair_rows

IN_MEMORY_BYTES = 512 << 20
Weights = Mapping[str, Tensor]  # float32, by their names below the layer


@dataclass(frozen=True)
class Moments:
    tokens: int
    gram: Tensor
    mean_abs: Tensor
    max_abs: Tensor

    def divided(self, scales: Tensor) -> "Moments":
        """Returns the moments of x / scales."""
        return Moments(
            self.tokens, self.gram / torch.outer(scales, scales), self.mean_abs / scales, self.max_abs / scales
        )


class Gatherer:
    """Takes the tokens of one input as they come by; `moments` when all have."""

    def __init__(self, width: int) -> None:
        self.tokens = 0
        self._gram = torch.zeros(width, width)
        self._sum = torch.zeros(width)
        self._max = torch.zeros(width)

    def add(self, x: Tensor) -> None:
        """x: float32 [T, width]."""
        self.tokens += len(x)
        self._gram.addmm_(x.t(), x)
        magnitudes = x.abs()
        self._sum += magnitudes.sum(0)
        torch.maximum(self._max, magnitudes.amax(0), out=self._max)

    def moments(self) -> Moments | None:
        """None if no token came by (an expert that no token chose)."""
        if not self.tokens:
            return None
        return Moments(self.tokens, self._gram.div_(self.tokens), self._sum / self.tokens, self._max)


def relative_error(weight: Tensor, kept: Tensor, moments: Moments | None) -> float:
    """Root mean square of the error in the output over that of the output; of the weights where there is no text."""
    change = kept - weight
    wrong, whole = (_energy(values, moments) for values in (change, weight))
    return float((wrong / whole).sqrt()) if whole > 0 else 0.0


def _energy(values: Tensor, moments: Moments | None) -> Tensor:
    if moments is None:
        return values.double().square().sum()
    return ((values @ moments.gram) * values).sum(dtype=torch.float64).clamp_(min=0)


@dataclasses.dataclass(frozen=True)
class Tapped(layers.PackedWeight):
    """A linear under the name of its group's tap. weight: float32 [out, in]."""

    tap: str
    weight: Tensor
    bias: Tensor | None


class TapOps(CpuOps):
    """The torch backend in float32 on weights that were not packed; `watched`: whose inputs to gather."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.watched: dict[str, Gatherer] = {}

    def linear(self, x: Tensor, packed: layers.PackedWeight, residual: Tensor | None = None) -> Tensor:
        assert isinstance(packed, Tapped)
        gatherer = self.watched.get(packed.tap)
        if gatherer is not None:
            gatherer.add(x)
        y = F.linear(x, packed.weight, packed.bias)
        return y if residual is None else y.add_(residual)


def build(config: ModelConfig, index: int, weights: Weights, ops: TapOps) -> ComposedLayer:
    """The layer that these weights are."""
    spec = config.layers[index]
    norms = [
        ops.pack_norm(weights[f"{name}.weight"], spec.norm.eps) for name in (layer_map.INPUT_NORM, layer_map.MLP_NORM)
    ]
    is_paired = layer_names(config.architecture).rows_are_paired
    mixer, part = _attention(config.attention[index], weights, ops, is_paired), _feed_forward(config, index, weights)
    return ComposedLayer(
        ops, layers.LayerWeights(spec, norms[0], mixer, norms[1], part), "the inputs of its parts are gathered"
    )


def _tapped(tap: str, names: tuple[str, ...], weights: Weights, head_dims: tuple[int, ...] = ()) -> Tapped:
    """These linears as one, one below the other; heads with a head_dim get their halves as pairs, as the kernels turn
    them."""
    dims = head_dims or (0,) * len(names)

    def joined(suffix: str) -> Tensor:
        rows = [weights[name + suffix] for name in names]
        return torch.cat([pair_rows(part, dim) if dim else part for part, dim in zip(rows, dims, strict=True)])

    return Tapped(tap, joined(".weight"), joined(".bias") if f"{names[0]}.bias" in weights else None)


def _attention(spec: layers.AttentionSpec, weights: Weights, ops: TapOps, is_paired: bool) -> layers.AttentionWeights:
    """is_paired: rotary pairs are neighbours in the rows as they are."""
    pairs = 0 if is_paired else spec.head_dim
    return layers.AttentionWeights(
        spec=spec,
        qkv=_tapped(Q, (Q, K, V), weights, (pairs, pairs, 0)),
        output=_tapped(O, (O,), weights),
        head_norm=None if spec.head_norm is None else _head_norm(spec, spec.head_norm, weights, ops),
    )


def _head_norm(spec: layers.AttentionSpec, norm: layers.NormSpec, weights: Weights, ops: TapOps) -> layers.PackedNorm:
    query, key = (pair_rows(weights[f"self_attn.{name}_norm.weight"], spec.head_dim) for name in "qk")
    scales = torch.cat((query.expand(spec.num_heads, -1), key.expand(spec.num_kv_heads, -1)))
    return ops.pack_norm(scales, norm.eps)


def _feed_forward(config: ModelConfig, index: int, weights: Weights) -> layers.MlpWeights | layers.MixtureWeights:
    spec = config.layers[index].feed_forward
    mlp = spec if isinstance(spec, layers.MlpSpec) else spec.expert
    parts = tuple(
        layers.MlpWeights(
            mlp,
            _tapped(layer_map.tap_of(part), (part.gate, part.up), weights),
            _tapped(part.down, (part.down,), weights),
        )
        for part in layer_map.mlps(config, index)
    )
    gate = layer_map.router(config, index)
    if isinstance(spec, layers.MlpSpec) or gate is None:
        return parts[0]
    return layers.MixtureWeights(spec.router, _tapped(gate, (gate,), weights), parts)


@dataclasses.dataclass(frozen=True)
class _Place:
    """What the layers of a KV group are given besides their input."""

    group: layers.KvGroup
    store: LayerKv
    plan: AttentionPlan


class Sequences:
    """Runs sequences of one length through layers, with a KV store of one block that all of them reuse."""

    def __init__(self, config: ModelConfig, length: int) -> None:
        self.config = config
        self.ops = TapOps()
        place = torch.zeros(length, dtype=torch.int64)
        batch = AttentionBatch([0, length], [length], place[:1, None], place, torch.arange(length), 0)
        self._places = [self._place(group, length, batch) for group in layers.kv_groups(config.layers)]
        kinds = {(mixer.position, mixer.head_dim) for mixer in config.attention}
        self._turns = {kind: rope.turns(*kind, length) for kind in kinds}

    def _place(self, group: layers.KvGroup, length: int, batch: AttentionBatch) -> "_Place":
        shape = KvShape(1, length, group.num_kv_heads, group.head_dim)
        store = LayerKv(torch.zeros(2, 2, group.num_kv_heads, length * group.head_dim), None)
        return _Place(group, store, self.ops.plan_attention(batch, shape, group.window_tokens))

    def run(self, index: int, weights: Weights, hidden: Tensor, into: Tensor | None) -> None:
        """hidden: float32 [N, length, hidden]; what the layer makes of it goes to `into`, which may be the same."""
        layer = build(self.config, index, weights, self.ops)
        place = next(place for place in self._places if index in place.group.layers)
        mixer = self.config.attention[index]
        turns = self._turns[mixer.position, mixer.head_dim]
        for number, sequence in enumerate(hidden):
            out = layer(sequence, turns, place.store, place.plan)
            if into is not None:
                into[number] = out

    def gather(self, index: int, weights: Weights, hidden: Tensor, widths: Mapping[str, int]) -> dict[str, Gatherer]:
        """The inputs of these taps (name and width) over all sequences."""
        self.ops.watched = {tap: Gatherer(width) for tap, width in widths.items()}
        try:
            self.run(index, weights, hidden, None)
            return self.ops.watched
        finally:
            self.ops.watched = {}


def begin_states(windows: Tensor, embedding: Tensor, factor: float, file: Path, in_memory_bytes: int) -> Tensor:
    """Returns the embeddings of windows [N, length], times the factor: float32 [N, length, hidden], mapped from `file`
    if that is too large."""
    count, length = windows.shape
    width = embedding.shape[1]
    states = _allocate((count, length, width), file, in_memory_bytes)
    for number, ids in enumerate(windows):
        states[number] = embed(embedding, ids, torch.float32) * factor
    return states


def _allocate(shape: tuple[int, int, int], file: Path, in_memory_bytes: int) -> Tensor:
    num_elements = shape[0] * shape[1] * shape[2]
    if 4 * num_elements <= in_memory_bytes:
        return torch.empty(shape)
    try:
        with open(file, "wb") as made:
            os.posix_fallocate(made.fileno(), 0, 4 * num_elements)  # a full disk is an error here, and a crash later
    except OSError as error:
        raise unwritable(file, error) from error
    return torch.from_file(str(file), shared=True, size=num_elements, dtype=torch.float32).view(shape)
