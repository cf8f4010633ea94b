"""Calibration text through one layer at a time: the model's own layers (`models.layers`) on float32 weights by name.

`Tapped` stands where a packed weight stands; `TapOps.linear` hands the input of each that is watched to its
`Gatherer`. Sequences go through one by one, whole, so that no sum depends on how they were batched.
"""

import dataclasses
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from splittime.kernels.api import AttentionBatch, KvShape, LayerKv
from splittime.kernels.cpu.ops import CpuOps
from splittime.models import rope
from splittime.models.config import ModelConfig
from splittime.models.layers import Attention, DecoderLayer, MixtureOfExperts, Mlp
from splittime.models.weights.packing import pair_rows
from splittime.quantize import layer_map
from splittime.quantize.layer_map import K, O, Q, V
from splittime.quantize.moments import Gatherer

Weights = Mapping[str, Tensor]  # float32, by their names below the layer


@dataclasses.dataclass(frozen=True)
class Tapped:
    """A linear under the name of its group's tap. weight: float32 [out, in]."""

    tap: str
    weight: Tensor
    bias: Tensor | None


class TapOps(CpuOps):
    """The torch backend in float32 on weights that were not packed; `watched`: whose inputs to gather."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.watched: dict[str, Gatherer] = {}

    def linear(self, x: Tensor, packed: Tapped, residual: Tensor | None = None) -> Tensor:  # type: ignore[override]
        gatherer = self.watched.get(packed.tap)
        if gatherer is not None:
            gatherer.add(x)
        y = F.linear(x, packed.weight, packed.bias)
        return y if residual is None else y.add_(residual)


def build(config: ModelConfig, index: int, weights: Weights, ops: TapOps) -> DecoderLayer:
    """The layer that these weights are."""
    norms = [
        ops.pack_norm(weights[f"{name}.weight"], config.rms_norm_eps)
        for name in (layer_map.INPUT_NORM, layer_map.MLP_NORM)
    ]
    return DecoderLayer(
        ops, norms[0], _attention(config, index, weights, ops), norms[1], _mlp(config, index, weights, ops)
    )


def _tapped(tap: str, names: tuple[str, ...], weights: Weights, head_dims: tuple[int, ...] = ()) -> Tapped:
    """These linears as one, one below the other; heads with a head_dim get their halves as pairs, as the kernels turn
    them."""
    dims = head_dims or (0,) * len(names)

    def joined(suffix: str) -> Tensor:
        rows = [weights[name + suffix] for name in names]
        return torch.cat([pair_rows(part, dim) if dim else part for part, dim in zip(rows, dims, strict=True)])

    return Tapped(tap, joined(".weight"), joined(".bias") if f"{names[0]}.bias" in weights else None)


def _attention(config: ModelConfig, index: int, weights: Weights, ops: TapOps) -> Attention:
    return Attention(
        ops=ops,
        qkv=_tapped(Q, (Q, K, V), weights, (config.head_dim, config.head_dim, 0)),
        output=_tapped(O, (O,), weights),
        qk_norm=_qk_norm(config, weights, ops) if config.qk_norm else None,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        window_tokens=config.layer_windows[index],
    )


def _qk_norm(config: ModelConfig, weights: Weights, ops: TapOps) -> object:
    query, key = (pair_rows(weights[f"self_attn.{name}_norm.weight"], config.head_dim) for name in "qk")
    scales = torch.cat((query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)))
    return ops.pack_norm(scales, config.rms_norm_eps)


def _mlp(config: ModelConfig, index: int, weights: Weights, ops: TapOps) -> Mlp | MixtureOfExperts:
    parts = [
        Mlp(ops, _tapped(part.tap, (part.gate, part.up), weights), _tapped(part.down, (part.down,), weights))
        for part in layer_map.mlps(config, index)
    ]
    gate = layer_map.router(config, index)
    if gate is None or config.moe is None:
        return parts[0]
    chosen = _tapped(gate, (gate,), weights)
    return MixtureOfExperts(ops, chosen, tuple(parts), config.moe.num_experts_per_tok, config.moe.normalises)


class Sequences:
    """Runs sequences of one length through layers, with a KV store of one block that all of them reuse."""

    def __init__(self, config: ModelConfig, length: int) -> None:
        self.config = config
        self.ops = TapOps()
        self._turns = rope.turns(config.rope, config.head_dim, length)
        shape = KvShape(1, length, config.num_kv_heads, config.head_dim)
        self._store = LayerKv(torch.zeros(2, 2, config.num_kv_heads, length * config.head_dim), None)
        place = torch.zeros(length, dtype=torch.int64)
        batch = AttentionBatch([0, length], [length], place[:1, None], place, torch.arange(length), 0)
        self._plans = {
            window: self.ops.plan_attention(batch, shape, window, torch.float32)
            for window in dict.fromkeys(config.layer_windows)
        }

    def run(self, index: int, weights: Weights, hidden: Tensor, into: Tensor | None) -> None:
        """hidden: float32 [N, length, hidden]; what the layer makes of it goes to `into`, which may be the same."""
        layer = build(self.config, index, weights, self.ops)
        plan = self._plans[layer.attention.window_tokens]
        for number, sequence in enumerate(hidden):
            out = layer(sequence, self._turns, self._store, plan)
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
