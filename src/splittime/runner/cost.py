"""What a step of this model needs of the machine at the least, from its shape and from its packed weights as they lie.

Left out, each well under a per cent of a step: norms, rotary turns, activations, the rows of the embedding that are
looked up, and the arithmetic of everything that is not a product. Of a mixture of experts one token's experts count:
a step of several tokens reads more, how many more depends on the text.
"""

from dataclasses import dataclass

from splittime.kernels.api import Ops, WeightScheme
from splittime.models.config import ModelConfig
from splittime.models.quant.plan import WeightPlan, kept_bytes


@dataclass(frozen=True)
class Cost:
    """Field by field as in `ledger.facts.TokenCost`, which says what they mean."""

    weight_bytes: int
    kv_bytes_per_token: int
    operations_per_token: int
    operations_per_context_token: int
    head_bytes: int
    operations_per_sample: int
    window_tokens: int | None
    windowed_share: float


def cost(model: ModelConfig, plan: WeightPlan, ops: Ops, weights_bytes: int, kv_bytes_per_token: int) -> Cost:
    """weights_bytes: of all packed weights, the head's and every expert's among them."""
    windows = [window for window in model.layer_windows if window is not None]
    return Cost(
        weight_bytes=weights_bytes - _idle_expert_bytes(model, plan, ops),
        kv_bytes_per_token=kv_bytes_per_token,
        operations_per_token=2 * _layer_weights(model),
        operations_per_context_token=4 * model.num_layers * model.num_heads * model.head_dim,
        head_bytes=_bytes(ops, model.vocab_size, model.hidden_size, plan.head),
        operations_per_sample=2 * model.vocab_size * model.hidden_size,
        window_tokens=max(windows, default=None),
        windowed_share=len(windows) / model.num_layers,
    )


def _layer_weights(model: ModelConfig) -> int:
    """That one token is multiplied by, in all layers."""
    heads = 2 * model.num_heads + 2 * model.num_kv_heads
    attention = model.num_layers * model.hidden_size * heads * model.head_dim
    plain_mlp = 3 * model.hidden_size * model.intermediate_size
    if model.moe is None:
        return attention + model.num_layers * plain_mlp
    moe, sparse = model.moe, sum(model.moe.layers)
    chosen = 3 * model.hidden_size * moe.intermediate_size * moe.num_experts_per_tok
    router = model.hidden_size * moe.num_experts
    return attention + sparse * (chosen + router) + (model.num_layers - sparse) * plain_mlp


def _idle_expert_bytes(model: ModelConfig, plan: WeightPlan, ops: Ops) -> int:
    """Of the experts that one token does not choose."""
    moe = model.moe
    if moe is None:
        return 0
    gate_up = _bytes(ops, 2 * moe.intermediate_size, model.hidden_size, plan.layers)
    down = _bytes(ops, model.hidden_size, moe.intermediate_size, plan.layers)
    return sum(moe.layers) * (moe.num_experts - moe.num_experts_per_tok) * (gate_up + down)


def _bytes(ops: Ops, out_features: int, in_features: int, scheme: WeightScheme) -> int:
    return ops.packed_bytes(out_features, in_features, scheme) or kept_bytes(out_features, in_features, scheme)
