"""The one decoder: embed, layers, final norm, head. Which architecture it is was settled when its layers were built.

It holds weights and nothing else: the KV cache, the positions and the batch come in with each call, and two calls with
the same arguments return the same tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from splittime.kernels.api import AttentionBatch, AttentionPlan, KvPools, LayerKv, Ops, RunnableLayer
from splittime.kernels.compose import normed_by
from splittime.kernels.layer import KvGroup, LayerSpec, PackedNorm, PackedWeight, RopeSpec, kv_groups
from splittime.kernels.low_rank import AdapterUse
from splittime.models.config import ModelConfig
from splittime.models.layer_inputs import LayerInputs
from splittime.models.ranks import Ranks
from splittime.models.weights.source import Table

Position = tuple[RopeSpec, int]  # and the head_dim


@dataclass(frozen=True)
class Decoder:
    """embedding: [vocab, hidden], or a `Table`; turns: of each position that some layer has, its rotary turns; head:
    packed [vocab, hidden].

    ranks: those that share the model, of which this is one's part; None: it is whole.
    """

    config: ModelConfig
    ops: Ops
    embedding: Tensor | Table
    turns: Mapping[Position, Tensor]
    layers: tuple[RunnableLayer, ...]
    final_norm: PackedNorm
    head: PackedWeight
    ranks: Ranks | None = None
    inputs: LayerInputs | None = None

    @cached_property
    def kv_groups(self) -> tuple[KvGroup, ...]:
        """Returns how keys and values are kept: a pool of the KV cache for each."""
        return kv_groups(self.config.layers)

    @cached_property
    def _walk(self) -> tuple[tuple[RunnableLayer, int, int, int], ...]:
        """The layers, each with the number of its turns, of its KV group and of its store."""
        group_of = {layer: number for number, group in enumerate(self.kv_groups) for layer in group.layers}
        positions, places = list(self.turns), {layer: place for place, layer in enumerate(sorted(group_of))}
        tables = [positions.index(position_of(layer)) for layer in self.config.layers]
        of = [one.mixer.keys_of for one in self.config.layers]
        keys = [index if one is None else one for index, one in enumerate(of)]
        return tuple(
            (layer, table, group_of[kept], places[kept])
            for layer, table, kept in zip(self.layers, tables, keys, strict=True)
        )

    def without_weights(self) -> "Decoder":
        """Returns a decoder of the configuration and the operations alone, which cannot be run."""
        nothing = torch.empty(0)
        plain = replace(self, embedding=nothing, turns={}, layers=(), final_norm=PackedNorm(), head=PackedWeight())
        return replace(plain, inputs=None)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv: KvPools,
        batch: AttentionBatch,
        adapter_uses: Sequence[AdapterUse] = (),
    ) -> Tensor:
        """token_ids, positions: int64 [T] -> the last layer's output, [T, hidden], not normed. adapter_uses: which
        tokens use which adapters; the others use none."""
        hidden, plans = self.embedded(token_ids), self.planned(kv, batch)
        return self.through(hidden, positions, kv.layers, plans, adapter_uses, self.given(token_ids, hidden))

    def planned(self, kv: KvPools, batch: AttentionBatch) -> list[AttentionPlan]:
        """Returns the attention of a batch: one plan for each of `kv_groups`."""
        return [
            self.ops.plan_attention(batch, shape, group.window_tokens)
            for group, shape in zip(self.kv_groups, kv.shapes, strict=True)
        ]

    def given(self, token_ids: Tensor, embedded: Tensor) -> Tensor | None:
        """Returns what each layer is given of its own, [T, layers, size], if they are."""
        if self.inputs is None:
            return None
        return self.inputs.given(embed(self.inputs.table, token_ids, self.ops.activation_dtype), embedded)

    def embedded(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> the first layer's input, [T, hidden]."""
        rows = embed(self.embedding, token_ids, self.ops.activation_dtype)
        return rows if self.config.embedding_factor == 1.0 else rows.mul_(self.config.embedding_factor)

    def through(
        self,
        hidden: Tensor,
        positions: Tensor,
        stores: Sequence[LayerKv],
        plans: Sequence[AttentionPlan],
        adapter_uses: Sequence[AdapterUse] = (),
        given: Tensor | None = None,
    ) -> Tensor:
        """Returns what the layers make of their input, [T, hidden]. plans: one for each of `kv_groups`. given: what
        each layer has of its own."""
        turns = [table.index_select(0, positions) for table in self.turns.values()]
        for index, (layer, table, group, store) in enumerate(self._walk):
            own = [(one.layers[index], one.tokens) for one in adapter_uses]
            hidden = layer(hidden, turns[table], stores[store], plans[group], own)
            if self.inputs is not None and given is not None:
                hidden = self.inputs.added(index, hidden, given[:, index])
        return hidden

    def normed(self, hidden: Tensor) -> Tensor:
        """Returns what the head is given for rows of what `forward` returned."""
        return normed_by(self.ops, self.final_norm, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden], rows of what `forward` returned -> float32 [N, vocab]."""
        logits = self.headed(self.normed(hidden))
        return logits if self.ranks is None else self.ranks.join(logits, self.config.vocab_size)

    def headed(self, normed: Tensor) -> Tensor:
        """Returns the logits of the own part of the vocabulary, float32."""
        logits = self.ops.linear(normed, self.head).float()
        factor, cap = self.config.logits_factor, self.config.logits_cap
        logits = logits if factor == 1.0 else logits.mul_(factor)
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def position_of(layer: LayerSpec) -> Position:
    return layer.mixer.position, layer.mixer.head_dim


def embed(table: Tensor | Table, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """table [vocab, hidden] (it may be a view of a file: only the rows asked for are read), token_ids int64 [T] -> a
    new tensor [T, hidden] of `dtype`."""
    rows = torch.index_select(table, 0, token_ids) if isinstance(table, Tensor) else table.look_up(token_ids)
    return rows.to(dtype)
