"""The parts of a decoder layer: attention, the MLP, and the mixture of experts. Each holds packed weights and `Ops`,
takes tensors, and returns the residual stream with its own contribution added. T is the step's number of tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splittime.kernels.api import LayerKv, Ops
from splittime.models.ranks import Ranks


@dataclass(frozen=True)
class Attention:
    """qkv: packed [(num_heads + 2 num_kv_heads) * head_dim, hidden]; qk_norm: scale [num_heads + num_kv_heads, D]."""

    ops: Ops
    qkv: Any
    output: Any
    qk_norm: Any | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window_tokens: int | None

    def __call__(self, x: Tensor, residual: Tensor | None, turns: Tensor, store: LayerKv, plan: Any) -> Tensor:
        """x: normed [T, hidden]; turns: [T, D / 2]; store: this layer's KV; plan: the backend's, for this window."""
        return self.ops.linear(self.attend(x, turns, store, plan), self.output, residual)

    def attend(self, x: Tensor, turns: Tensor, store: LayerKv, plan: Any) -> Tensor:
        """The heads' outputs beside each other, [T, Hq D]."""
        qkv = self.ops.linear(x, self.qkv).view(x.shape[0], -1, self.head_dim)  # [T, Hq + 2 Hkv, D]
        self.ops.rope_write(qkv, self.qk_norm, turns, store, plan)
        return self.ops.attention(qkv[:, : self.num_heads], store, plan, self.head_dim**-0.5)


@dataclass(frozen=True)
class Mlp:
    """gate_up: packed [2 intermediate, hidden]; down: packed [hidden, intermediate]."""

    ops: Ops
    gate_up: Any
    down: Any

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return self.ops.linear(self.ops.silu_mul(self.ops.linear(x, self.gate_up)), self.down, residual)


@dataclass(frozen=True)
class MixtureOfExperts:
    """Each token goes to its `num_chosen` best experts, weighted by their router probability (made to sum to 1 if
    `normalises`). An expert runs once, on all the tokens that chose it."""

    ops: Ops
    router: Any
    experts: tuple[Mlp, ...]
    num_chosen: int
    normalises: bool

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        scores = self.ops.linear(x, self.router).float().softmax(-1)  # [T, E]
        weights, chosen = scores.topk(self.num_chosen, dim=-1)  # [T, k]
        if self.normalises:
            weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort()  # (token, choice) pairs, grouped by expert
        tokens = order // self.num_chosen
        shares = weights.flatten()[order].to(x.dtype).unsqueeze(1)
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        out = torch.zeros_like(x) if residual is None else residual.clone()
        begin = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                mine = tokens[begin : begin + count]
                out.index_add_(0, mine, expert(x[mine], None) * shares[begin : begin + count])
                begin += count
        return out


@dataclass(frozen=True)
class DecoderLayer:
    """Pre-norm: attention then MLP (or experts), each added to the residual stream."""

    ops: Ops
    input_norm: Any
    attention: Attention
    mlp_norm: Any
    mlp: Mlp | MixtureOfExperts

    def __call__(self, hidden: Tensor, turns: Tensor, store: LayerKv, plan: Any) -> Tensor:
        """hidden [T, hidden] -> the same, one layer on."""
        attention = self.attention
        mixed = attention.attend(self.ops.rms_norm(hidden, self.input_norm), turns, store, plan)
        hidden, normed = self.ops.linear_norm(mixed, attention.output, hidden, self.mlp_norm)
        return self.mlp(normed, hidden)


@dataclass(frozen=True)
class SharedLayer:
    """A layer of which each rank has a part, with the signature of the whole one: the parts' contributions are summed,
    and the first rank brings the residual."""

    layer: DecoderLayer
    ranks: Ranks

    @property
    def attention(self) -> Attention:
        return self.layer.attention

    def __call__(self, hidden: Tensor, turns: Tensor, store: LayerKv, plan: Any) -> Tensor:
        layer = self.layer
        normed = layer.ops.rms_norm(hidden, layer.input_norm)
        hidden = self.ranks.sum(layer.attention(normed, self._brought(hidden), turns, store, plan))
        normed = layer.ops.rms_norm(hidden, layer.mlp_norm)
        return self.ranks.sum(layer.mlp(normed, self._brought(hidden)))

    def _brought(self, hidden: Tensor) -> Tensor | None:
        return hidden if self.ranks.index == 0 else None


def embed(table: Any, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """table [vocab, hidden] (it may be a view of a file: only the rows asked for are read) or a `weights.source.Table`,
    token_ids int64 [T] -> a new tensor [T, hidden] of `dtype`."""
    rows = torch.index_select(table, 0, token_ids) if isinstance(table, Tensor) else table.look_up(token_ids)
    return rows.to(dtype)
