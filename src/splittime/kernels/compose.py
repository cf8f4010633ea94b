"""A decoder layer run part by part, each with the operations of any backend: what a fused layer computes, spelled out.

T is the step's number of tokens. A feed-forward returns the residual stream with its own contribution added. What
adapters add comes to a product when it is there whole; experts are not adapted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from splittime.kernels.api import AttentionPlan, LayerKv, Ops
from splittime.kernels.layer import AttentionWeights, LayerWeights, MixtureWeights, MlpWeights
from splittime.kernels.low_rank import LayerUses, ProductUses


@dataclass(frozen=True)
class ComposedLayer:
    """A layer as its parts: attention, then the feed-forward, each normed before and added to the residual stream."""

    ops: Ops
    weights: LayerWeights
    parts_reason: str

    @property
    def needs_host(self) -> bool:
        """The host looks which experts were chosen."""
        return isinstance(self.weights.feed_forward, MixtureWeights)

    def __call__(self, hidden: Tensor, turns: Tensor, kv: LayerKv, plan: AttentionPlan, uses: LayerUses = ()) -> Tensor:
        hidden, normed = attention(self.ops, self.weights, hidden, turns, kv, plan, uses)
        return feed_forward(self.ops, self.weights.feed_forward, normed, hidden, uses)


def attention(
    ops: Ops, layer: LayerWeights, hidden: Tensor, turns: Tensor, kv: LayerKv, plan: AttentionPlan, uses: LayerUses
) -> tuple[Tensor, Tensor]:
    """Returns the residual stream with the heads' contribution added, and that normed for the feed-forward."""
    on_qkv = [(one.qkv, tokens) for one, tokens in uses]
    mixed = attend(ops, layer.mixer, ops.rms_norm(hidden, layer.mixer_norm), turns, kv, plan, on_qkv)
    if not uses:
        return ops.linear_norm(mixed, layer.mixer.output, hidden, layer.feed_forward_norm)
    hidden = ops.linear(mixed, layer.mixer.output, hidden)
    ops.add_low_rank(hidden, mixed, [(one.output, tokens) for one, tokens in uses])
    return hidden, ops.rms_norm(hidden, layer.feed_forward_norm)


def attend(
    ops: Ops, part: AttentionWeights, x: Tensor, turns: Tensor, kv: LayerKv, plan: AttentionPlan, uses: ProductUses = ()
) -> Tensor:
    """x: normed [T, hidden] -> the heads' outputs beside each other, [T, query_width]. uses: of adapters, to
    queries, keys and values."""
    spec, product = part.spec, ops.linear(x, part.qkv)
    ops.add_low_rank(product, x, uses)
    qkv = product.view(x.shape[0], -1, spec.head_dim)  # [T, Hq + 2 Hkv, D]
    ops.rope_write(qkv, part.head_norm, turns, kv, plan)
    return ops.attention(qkv[:, : spec.num_heads], kv, plan, spec.scale)


def feed_forward(
    ops: Ops, part: MlpWeights | MixtureWeights, x: Tensor, residual: Tensor | None, uses: LayerUses = ()
) -> Tensor:
    """x: normed [T, hidden] -> the same, with `residual` added if there is one."""
    return mlp(ops, part, x, residual, uses) if isinstance(part, MlpWeights) else mixture(ops, part, x, residual)


def mlp(ops: Ops, part: MlpWeights, x: Tensor, residual: Tensor | None, uses: LayerUses = ()) -> Tensor:
    gate_up = ops.linear(x, part.gate_up)
    ops.add_low_rank(gate_up, x, [(one.gate_up, tokens) for one, tokens in uses])
    inner = ops.silu_mul(gate_up)
    y = ops.linear(inner, part.down, residual)
    ops.add_low_rank(y, inner, [(one.down, tokens) for one, tokens in uses])
    return y


def mixture(ops: Ops, part: MixtureWeights, x: Tensor, residual: Tensor | None) -> Tensor:
    """An expert runs once, on all the tokens that chose it."""
    scores = ops.linear(x, part.router).float().softmax(-1)  # [T, E]
    weights, chosen = scores.topk(part.spec.num_chosen, dim=-1)  # [T, k]
    if part.spec.normalises:
        weights = weights / weights.sum(-1, keepdim=True)
    order = chosen.flatten().argsort()  # (token, choice) pairs, grouped by expert
    tokens = order // part.spec.num_chosen
    shares = weights.flatten()[order].to(x.dtype).unsqueeze(1)
    counts = chosen.flatten().bincount(minlength=len(part.experts)).tolist()
    out = torch.zeros_like(x) if residual is None else residual.clone()
    begin = 0
    for expert, count in zip(part.experts, counts, strict=True):
        if count:
            mine = tokens[begin : begin + count]
            out.index_add_(0, mine, mlp(ops, expert, x[mine], None) * shares[begin : begin + count])
            begin += count
    return out
