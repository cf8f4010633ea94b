"""A decoder layer of experts on the device: the plan's places tell which tokens are there, so that the unused rows of a
captured step choose no expert."""

from dataclasses import dataclass

from torch import Tensor

from splittime.kernels import compose
from splittime.kernels.api import AttentionPlan, LayerKv, Ops
from splittime.kernels.layer import RouterSpec
from splittime.kernels.layer_weights import LayerWeights, PackedWeight
from splittime.kernels.triton import attention, choosing, grouped


@dataclass(frozen=True)
class MixtureLayer:
    """A `kernels.api.RunnableLayer` whose experts are all in one product."""

    ops: Ops
    weights: LayerWeights
    router: PackedWeight
    spec: RouterSpec
    experts: grouped.Experts
    parts_reason, needs_host = "", False

    def __call__(self, hidden: Tensor, turns: Tensor, kv: LayerKv, plan: AttentionPlan) -> Tensor:
        ops, layer = self.ops, self.weights
        mixed = compose.attend(ops, layer.mixer, ops.rms_norm(hidden, layer.mixer_norm), turns, kv, plan)
        hidden, normed = ops.linear_norm(mixed, layer.mixer.output, hidden, layer.feed_forward_norm)
        return self.feed_forward(normed, hidden, attention.own(plan).token_blocks)

    def feed_forward(self, x: Tensor, residual: Tensor, token_blocks: Tensor) -> Tensor:
        """token_blocks: [T], below 0 for tokens that are not there."""
        logits, spec = self.ops.linear(x, self.router), self.spec
        chosen, shares = choosing.choose_experts(logits, spec.num_chosen, spec.normalises, x.dtype, token_blocks)
        return grouped.grouped(x, chosen, shares, self.experts, residual)
