"""The one decoder: embed, layers, final norm, head. Which architecture it is was settled when its layers were built.

It holds weights and nothing else: the KV cache, the positions and the batch come in with each call, and two calls with
the same arguments return the same tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from splittime.kernels.api import AttentionBatch, AttentionPlan, KvPools, LayerStore, Ops, RunnableLayer
from splittime.kernels.compose import normed_by
from splittime.kernels.layer import (
    AttentionSpec,
    DeltaSpec,
    KvGroup,
    LayerSpec,
    PackedNorm,
    PackedWeight,
    RopeSpec,
    kv_groups,
)
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
        """The layers, each with the number of its turns, of its plan (see `planned`) and of its store (see `stores`).
        Those that keep states have none of the first: 0 stands for it."""
        plan_of = {layer: number for number, group in enumerate(self.kv_groups) for layer in group.layers}
        keeping = [index for index, one in enumerate(self.config.layers) if isinstance(one.mixer, DeltaSpec)]
        places = {layer: place for place, layer in enumerate((*sorted(plan_of), *keeping))}
        plan_of |= dict.fromkeys(keeping, len(self.kv_groups))
        positions, found = list(self.turns), []
        for index, (layer, spec) in enumerate(zip(self.layers, self.config.layers, strict=True)):
            mixer, table, kept = spec.mixer, 0, index
            if isinstance(mixer, AttentionSpec):
                table, kept = positions.index(position_of(mixer)), index if mixer.keys_of is None else mixer.keys_of
            found.append((layer, table, plan_of[kept], places[kept]))
        return tuple(found)

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
        return self.through(hidden, positions, stores(kv), plans, adapter_uses, self.given(token_ids, hidden))

    def planned(self, kv: KvPools, batch: AttentionBatch) -> list[AttentionPlan]:
        """Returns what the layers do with a batch: a plan for each of `kv_groups`, then one of those that keep states,
        if there are some."""
        pairs = zip(self.kv_groups, kv.shapes, strict=True)
        of_groups = [self.ops.plan_attention(batch, shape, group.window_tokens) for group, shape in pairs]
        return [*of_groups, self.ops.plan_states(batch)] if kv.states else of_groups

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
        stores: Sequence[LayerStore],
        plans: Sequence[AttentionPlan],
        adapter_uses: Sequence[AdapterUse] = (),
        given: Tensor | None = None,
    ) -> Tensor:
        """Returns what the layers make of their input, [T, hidden]. stores, plans: see the functions. given: what each
        layer has of its own."""
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


def stores(kv: KvPools) -> list[LayerStore]:
    """Returns what the layers keep: keys and values first, by layer, then states, by layer."""
    return [*kv.layers, *kv.states]


def position_of(mixer: AttentionSpec) -> Position:
    return mixer.position, mixer.head_dim


def positions_of(layers: Sequence[LayerSpec]) -> list[Position]:
    """Returns each position that some of these layers have, once."""
    return list(dict.fromkeys(position_of(one.mixer) for one in layers if isinstance(one.mixer, AttentionSpec)))


def embed(table: Tensor | Table, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """table [vocab, hidden] (it may be a view of a file: only the rows asked for are read), token_ids int64 [T] -> a
    new tensor [T, hidden] of `dtype`."""
    rows = torch.index_select(table, 0, token_ids) if isinstance(table, Tensor) else table.look_up(token_ids)
    return rows.to(dtype)
