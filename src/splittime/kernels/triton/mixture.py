"""A decoder layer of experts on the device: the plan's places tell which tokens are there, so that the unused rows of a
captured step choose no expert.

`choose_experts` says which experts each token goes to, and with what share: softmax, the best of it, and their sum, in
one kernel.

    scores = softmax(logits) in float32;  chosen = the k best, the best first;  share = score (/ sum of the chosen)

Equal scores: the expert with the smaller number. A token that is not there (its block is negative: an unused row of a
captured step) gets no expert, -1, and no share: nothing of any expert's weights is then read for it. Where a logit is
not a number no share is, so that the row is found out, and its experts are some that exist.

A program is one token. Seven launches of torch's did the same, and a mixture's decode step is all launches.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from splittime.kernels import compose
from splittime.kernels.api import AttentionPlan, LayerStore, Ops, own
from splittime.kernels.layer import LayerWeights, PackedWeight, RouterSpec
from splittime.kernels.low_rank import LayerUses
from splittime.kernels.triton import grouped
from splittime.kernels.triton.attention_plan import PagedPlan

_GONE = tl.constexpr(-1.0)  # below every score


@triton.jit
def _choose(
    logits, token_blocks, chosen, shares, num_experts, stride,
    CHOSEN: tl.constexpr, NORMALISES: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    experts, slots = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    is_there = experts < num_experts
    given = tl.load(logits + token * stride + experts, mask=is_there, other=-float("inf")).to(tl.float32)
    odds = tl.exp(given - tl.max(given, 0))
    scores = odds / tl.sum(odds, 0)
    is_number = tl.sum(tl.where(scores == scores, 0, 1), 0) == 0
    left = tl.where(is_there, tl.where(is_number, scores, 0.0), _GONE)
    picked, parts = tl.full([SLOTS], -1, tl.int32), tl.zeros([SLOTS], tl.float32)
    for slot in tl.static_range(CHOSEN):
        best = tl.argmax(left, 0)
        picked = tl.where(slots == slot, best, picked)
        parts = tl.where(slots == slot, tl.max(left, 0), parts)
        left = tl.where(experts == best, _GONE, left)
    if NORMALISES:
        parts = parts / tl.sum(parts, 0)
    parts = tl.where(is_number, parts, float("nan"))
    if token_blocks is not None:
        is_used = tl.load(token_blocks + token) >= 0
        picked, parts = tl.where(is_used, picked, -1), tl.where(is_used, parts, 0.0)
    places = token * CHOSEN + slots
    tl.store(chosen + places, picked, mask=slots < CHOSEN)
    tl.store(shares + places, parts.to(shares.dtype.element_ty), mask=slots < CHOSEN)


def num_warps(num_experts: int) -> int:
    """Eight experts a thread: what is compared between warps costs more than what one of them compares."""
    return min(8, max(1, triton.next_power_of_2(num_experts) // 256))


def choose_experts(
    logits: Tensor, num_chosen: int, normalises: bool, dtype: torch.dtype, token_blocks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> experts int32 [T, k] and their shares `dtype` [T, k]; `reference.products.choose_experts`.
    token_blocks: integers [T], below 0 for tokens that are not there; None: all are."""
    num_tokens, num_experts = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    chosen = torch.empty(num_tokens, num_chosen, dtype=torch.int32, device=logits.device)
    shares = torch.empty(num_tokens, num_chosen, dtype=dtype, device=logits.device)
    if num_tokens:
        _choose[(num_tokens,)](
            logits, token_blocks, chosen, shares, num_experts, logits.stride(0),
            CHOSEN=num_chosen, NORMALISES=normalises, EXPERTS=triton.next_power_of_2(num_experts),
            SLOTS=triton.next_power_of_2(num_chosen), num_warps=num_warps(num_experts),
        )  # fmt: skip
    return chosen, shares


@dataclass(frozen=True)
class MixtureLayer:
    """A `kernels.api.RunnableLayer` whose experts are all in one product."""

    ops: Ops
    weights: LayerWeights
    router: PackedWeight
    spec: RouterSpec
    experts: grouped.Experts
    parts_reason, needs_host = "", False

    def __call__(
        self, hidden: Tensor, turns: Tensor, kv: LayerStore, plan: AttentionPlan, uses: LayerUses = ()
    ) -> Tensor:
        hidden, normed = compose.attention(self.ops, self.weights, hidden, turns, kv, plan, uses)
        return self.feed_forward(normed, hidden, own(plan, PagedPlan).token_blocks)

    def feed_forward(self, x: Tensor, residual: Tensor, token_blocks: Tensor) -> Tensor:
        """token_blocks: [T], below 0 for tokens that are not there."""
        logits, spec = self.ops.linear(x, self.router), self.spec
        chosen, shares = choose_experts(logits, spec.num_chosen, spec.normalises, x.dtype, token_blocks)
        return grouped.grouped(x, chosen, shares, self.experts, residual)
