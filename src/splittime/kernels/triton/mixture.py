"""A decoder layer of experts on the device: the plan's places tell which tokens are there, so that the unused rows of a
captured step choose no expert."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from splittime.kernels.api import LayerKv
from splittime.kernels.triton import attention, choosing, grouped

if TYPE_CHECKING:
    from splittime.kernels.triton.ops import TritonOps


@dataclass(frozen=True)
class GroupedExperts:
    """In the place of a `models.layers.MixtureOfExperts`: all experts in one product."""

    ops: "TritonOps"
    router: Any
    experts: grouped.Experts
    num_chosen: int
    normalises: bool

    def __call__(self, x: Tensor, residual: Tensor | None, token_blocks: Tensor | None = None) -> Tensor:
        """token_blocks: [T], below 0 for tokens that are not there; None: all are."""
        logits = self.ops.linear(x, self.router)
        chosen, shares = choosing.choose_experts(logits, self.num_chosen, self.normalises, x.dtype, token_blocks)
        return grouped.grouped(x, chosen, shares, self.experts, residual)


@dataclass(frozen=True)
class MixtureLayer:
    """Has the signature of `models.layers.DecoderLayer`."""

    ops: "TritonOps"
    input_norm: Any
    attention: Any
    mlp_norm: Any
    mlp: GroupedExperts

    def __call__(self, hidden: Tensor, turns: Tensor, store: LayerKv, plan: attention.Plan) -> Tensor:
        attention = self.attention
        mixed = attention.attend(self.ops.rms_norm(hidden, self.input_norm), turns, store, plan)
        hidden, normed = self.ops.linear_norm(mixed, attention.output, hidden, self.mlp_norm)
        return self.mlp(normed, hidden, plan.token_blocks)
