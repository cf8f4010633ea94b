"""A decoder layer run part by part, each with the operations of any backend: what a fused layer computes, spelled out.

T is the step's number of tokens. A feed-forward returns the residual stream with its own contribution added. What
adapters add comes to a product when it is there whole; experts are not adapted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from splittime.kernels.api import AttentionPlan, LayerKv, LayerStore, Ops, StatePlan, own
from splittime.kernels.layer import (
    ApartNorms,
    AttentionWeights,
    Clamped,
    DeltaWeights,
    LayerWeights,
    MixtureWeights,
    MlpWeights,
    PackedNorm,
    RouterSpec,
)
from splittime.kernels.low_rank import LayerUses, ProductUses
from splittime.kernels.plain import LayerNorm, each_alike, gelu, turned


@dataclass(frozen=True)
class ComposedLayer:
    """A layer as its parts: its mixer, then the feed-forward, each normed before and added to the residual stream."""

    ops: Ops
    weights: LayerWeights
    parts_reason: str

    @property
    def needs_host(self) -> bool:
        """The host looks which experts were chosen."""
        return isinstance(self.weights.feed_forward, MixtureWeights)

    def __call__(
        self, hidden: Tensor, turns: Tensor, kv: LayerStore, plan: AttentionPlan, uses: LayerUses = ()
    ) -> Tensor:
        ops, layer = self.ops, self.weights
        hidden, normed = attention(ops, layer, hidden, turns, kv, plan, uses)
        part, after = layer.feed_forward, layer.norm_after_feed_forward
        if after is None:
            hidden = feed_forward(ops, part, normed, hidden, uses)
        elif isinstance(part, MixtureWeights) and part.norms is not None:
            hidden = hidden + ops.rms_norm(apart(ops, part, part.norms, normed, hidden), after)
        else:
            hidden = hidden + ops.rms_norm(feed_forward(ops, part, normed, None, uses), after)
        return hidden if layer.factor == 1.0 else hidden * layer.factor


def normed_by(ops: Ops, norm: PackedNorm | None, x: Tensor) -> Tensor:
    if isinstance(norm, LayerNorm):
        return norm(x)
    return x if norm is None else ops.rms_norm(x, norm)


def attention(
    ops: Ops, layer: LayerWeights, hidden: Tensor, turns: Tensor, kv: LayerStore, plan: AttentionPlan, uses: LayerUses
) -> tuple[Tensor, Tensor]:
    """Returns the residual stream with the mixer's contribution added, and that normed for the feed-forward."""
    on_qkv, on_output = [(one.qkv, tokens) for one, tokens in uses], [(one.output, tokens) for one, tokens in uses]
    normed = normed_by(ops, layer.mixer_norm, hidden)
    mixed = mix(ops, layer.mixer, normed, turns, kv, plan, on_qkv)
    after, norm = layer.norm_after_mixer, layer.feed_forward_norm
    if not uses and after is None and not isinstance(norm, LayerNorm | None):
        return ops.linear_norm(mixed, layer.mixer.output, hidden, norm)
    added = ops.linear(mixed, layer.mixer.output, hidden if after is None else None)
    ops.add_low_rank(added, mixed, on_output)
    hidden = added if after is None else hidden + ops.rms_norm(added, after)
    return hidden, normed if layer.spec.places == "shared" else normed_by(ops, norm, hidden)


def mix(
    ops: Ops,
    part: AttentionWeights | DeltaWeights,
    x: Tensor,
    turns: Tensor,
    store: LayerStore,
    plan: AttentionPlan,
    uses: ProductUses = (),
) -> Tensor:
    """x: normed [T, hidden] -> the heads' outputs beside each other. store, plan: of the mixer's kind."""
    if isinstance(part, AttentionWeights):
        assert isinstance(store, LayerKv), "attention has keys and values"
        heads = attend(ops, part, x, turns, store, plan, uses)
        return heads if part.gate is None else heads * each_alike(torch.sigmoid, ops.linear(x, part.gate))
    assert isinstance(store, Tensor), "a gated delta net has states"
    return ops.delta(ops.linear(x, part.products), part, store, own(plan, StatePlan))


def attend(
    ops: Ops, part: AttentionWeights, x: Tensor, turns: Tensor, kv: LayerKv, plan: AttentionPlan, uses: ProductUses = ()
) -> Tensor:
    """x: normed [T, hidden] -> the heads' outputs beside each other, [T, query_width]. uses: of adapters, to
    queries, keys and values."""
    spec, product = part.spec, ops.linear(x, part.qkv)
    ops.add_low_rank(product, x, uses)
    if part.all_norms is not None:
        places = slice(0, spec.query_width), slice(spec.query_width, spec.query_width + spec.kv_width)
        for norm, place in zip(part.all_norms, places, strict=True):
            product[:, place] = normed_by(ops, norm, product[:, place])
    factors = []
    if spec.position.query_growth:
        turns, grown = turns[:, :-1].contiguous(), turns[:, -1].real
        factors.append(grown[:, None, None].to(x.dtype))
    if part.query_factors is not None:
        factors.append(part.query_factors)
    qkv = product.view(x.shape[0], -1, spec.head_dim)  # [T, Hq + 2 Hkv, D]
    if spec.keys_of is not None:
        queries = qkv if part.head_norm is None else ops.rms_norm(qkv.view(-1, spec.head_dim), part.head_norm)
        return ops.attention(turned(queries.view_as(qkv), turns).to(x.dtype), kv, plan, part.weighing)
    if part.value_norm is not None:
        values = qkv[:, -spec.num_kv_heads :]
        values.copy_(ops.rms_norm(values.reshape(-1, spec.head_dim), part.value_norm).view_as(values))
    ops.rope_write(qkv, part.head_norm, turns, kv, plan)
    queries = qkv[:, : spec.num_heads]
    for factor in factors:
        queries = queries * factor
    return ops.attention(queries, kv, plan, part.weighing)


def feed_forward(
    ops: Ops, part: MlpWeights | MixtureWeights, x: Tensor, residual: Tensor | None, uses: LayerUses = ()
) -> Tensor:
    """x: normed [T, hidden] -> the same, with `residual` added if there is one."""
    return mlp(ops, part, x, residual, uses) if isinstance(part, MlpWeights) else mixture(ops, part, x, residual)


def mlp(ops: Ops, part: MlpWeights, x: Tensor, residual: Tensor | None, uses: LayerUses = ()) -> Tensor:
    gate_up = ops.linear(x, part.gate_up)
    ops.add_low_rank(gate_up, x, [(one.gate_up, tokens) for one, tokens in uses])
    if part.spec.clamped is not None:
        inner = clamped_mul(gate_up, part.spec.clamped)
    elif not part.spec.is_gated:
        inner = gelu(gate_up, "tanh")
    else:
        inner = ops.silu_mul(gate_up) if part.spec.activation == "silu" else ops.gelu_mul(gate_up)
    y = ops.linear(inner, part.down, residual)
    ops.add_low_rank(y, inner, [(one.down, tokens) for one, tokens in uses])
    return y


def clamped_mul(gate_up: Tensor, clamped: Clamped) -> Tensor:
    """gate_up [T, 2 I] -> [T, I]."""
    alpha, limit = clamped
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * each_alike(torch.sigmoid, gate * alpha) * (up + 1)


def mixture(ops: Ops, part: MixtureWeights, x: Tensor, residual: Tensor | None) -> Tensor:
    return _with_experts(ops, part, x, x, _beside(ops, part, x, residual))


def apart(ops: Ops, part: MixtureWeights, norms: ApartNorms, x: Tensor, hidden: Tensor) -> Tensor:
    """x: what the shared expert is given. hidden: the residual stream, whose norms the others are given."""
    assert part.shared is not None
    shared = ops.rms_norm(mlp(ops, part.shared, x, None), norms.after_shared)
    given = ops.rms_norm(hidden, norms.experts)
    made = _with_experts(ops, part, ops.rms_norm(hidden, norms.router), given, torch.zeros_like(given))
    return shared + ops.rms_norm(made, norms.after_experts)


def _with_experts(ops: Ops, part: MixtureWeights, routed: Tensor, x: Tensor, out: Tensor) -> Tensor:
    """Adds to `out` what the experts that `routed` chooses make of x. Each runs once, on all tokens that chose it."""
    weights, chosen = choose_experts(ops.linear(routed, part.router), part.spec, part.correction)
    if part.shares is not None:
        weights = weights * part.shares[chosen]
    order = chosen.flatten().argsort()  # (token, choice) pairs, grouped by expert
    tokens = order // part.spec.num_chosen
    shares = weights.flatten()[order].to(x.dtype).unsqueeze(1)
    counts = chosen.flatten().bincount(minlength=len(part.experts)).tolist()
    begin = 0
    for expert, count in zip(part.experts, counts, strict=True):
        if count:
            mine = tokens[begin : begin + count]
            out.index_add_(0, mine, mlp(ops, expert, x[mine], None) * shares[begin : begin + count])
            begin += count
    return out


def choose_experts(logits: Tensor, spec: RouterSpec, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """logits [T, E], correction [E] -> the experts' weights, float32 [T, k], and their numbers, int64 [T, k]."""
    wide = logits.float()
    scores = each_alike(torch.sigmoid, wide) if spec.scoring == "sigmoid" else wide.softmax(-1)
    ranked = scores if correction is None else scores + correction
    if spec.num_groups > 1:
        ranked = _of_best_groups(ranked, spec)
    weights, chosen = ranked.topk(spec.num_chosen, dim=-1)
    if ranked is not scores:
        weights = scores.gather(-1, chosen)
    if spec.normalises:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(spec.least_sum)
    return weights * spec.scale, chosen


def _of_best_groups(ranked: Tensor, spec: RouterSpec) -> Tensor:
    """ranked [T, E] -> the same, -inf outside the best groups."""
    groups = ranked.unflatten(-1, (spec.num_groups, -1))  # [T, G, E / G]
    goodness = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
    best = goodness.topk(spec.chosen_groups, dim=-1).indices
    is_out = torch.ones_like(goodness, dtype=torch.bool).scatter_(-1, best, False)
    return groups.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(-2)


def _beside(ops: Ops, part: MixtureWeights, x: Tensor, residual: Tensor | None) -> Tensor:
    """Returns what the experts add to, which may be changed: the residual and what the shared expert makes of x."""
    if part.shared is None:
        return torch.zeros_like(x) if residual is None else residual.clone()
    if part.shared_gate is None:
        return mlp(ops, part.shared, x, residual)
    y = mlp(ops, part.shared, x, None) * each_alike(torch.sigmoid, ops.linear(x, part.shared_gate))
    return y if residual is None else y.add_(residual)
