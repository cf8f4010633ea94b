"""The one decoder: embed, layers, final norm, head. Which architecture it is was settled when its layers were built.

It holds weights and nothing else: the KV stores, the positions and the batch come in with each call, and two calls
with the same arguments return the same tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from splittime.kernels.api import AttentionBatch, KvShape, LayerKv, Ops
from splittime.models.config import ModelConfig
from splittime.models.layers import DecoderLayer, SharedLayer, embed
from splittime.models.ranks import Ranks


@dataclass(frozen=True)
class Decoder:
    """embedding: [vocab, hidden], or a `weights.source.Table`; turns: complex64 [positions, head_dim / 2]; head: packed
    [vocab, hidden].

    layers: each a `DecoderLayer`, or the backend's one call in its place (`Ops.fuse_layer`).
    ranks: those that share the model, of which this is one's part; None: it is whole.
    """

    config: ModelConfig
    ops: Ops
    embedding: Any
    turns: Tensor
    layers: tuple[DecoderLayer | SharedLayer, ...]
    final_norm: Any
    head: Any
    ranks: Ranks | None = None

    def forward(
        self, token_ids: Tensor, positions: Tensor, stores: Sequence[LayerKv], batch: AttentionBatch, shape: KvShape
    ) -> Tensor:
        """token_ids, positions: int64 [T]; stores: one a layer -> the last layer's output, [T, hidden], not normed."""
        plans = {
            window: self.ops.plan_attention(batch, shape, window, self.ops.activation_dtype)
            for window in dict.fromkeys(self.config.layer_windows)
        }
        return self.compute(token_ids, positions, stores, plans)

    def compute(
        self, token_ids: Tensor, positions: Tensor, stores: Sequence[LayerKv], plans: Mapping[int | None, Any]
    ) -> Tensor:
        """`forward`, with the attention planned: by the layers' windows."""
        hidden = embed(self.embedding, token_ids, self.ops.activation_dtype)
        turns = self.turns.index_select(0, positions)
        for layer, store in zip(self.layers, stores, strict=True):
            hidden = layer(hidden, turns, store, plans[layer.attention.window_tokens])
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden], rows of what `forward` returned -> float32 [N, vocab]."""
        logits = self.ops.linear(self.ops.rms_norm(hidden, self.final_norm), self.head).float()
        return logits if self.ranks is None else self.ranks.join(logits, self.config.vocab_size)
