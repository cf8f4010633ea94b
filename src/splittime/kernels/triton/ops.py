"""The Triton backend: each operation of `kernels.api.Ops` on the device, none of which waits for it.

The three that answer with lists (`finite`, `argmax`, `draw`) do wait. Whoever must not, the device runner, takes the
tensors instead: `finite_flags` and `draw_tokens`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, replace

import numpy as np
import torch
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.kernels import plain
from splittime.kernels.api import (
    AttentionBatch,
    AttentionPlan,
    KvShape,
    LayerKv,
    LinearShape,
    NotFused,
    RoundedRows,
    RunnableLayer,
    WeightScheme,
    own,
)
from splittime.kernels.layer import LayerWeights, MixtureWeights, PackedNorm, PackedWeight, RouterSpec, Weighing
from splittime.kernels.plain import PlainOps
from splittime.kernels.triton import attention, elementwise, grouped, linear, rotary, sampling
from splittime.kernels.triton.attention_plan import PagedPlan
from splittime.kernels.triton.device import device, is_interpreted
from splittime.kernels.triton.mixture import MixtureLayer
from splittime.kernels.triton.weights import Draws


class TritonOps(PlainOps):
    name = "triton"
    attention_name = attention.NAME

    def __init__(self, dtype: torch.dtype) -> None:
        self.device = device()
        self.activation_dtype = dtype
        self._experts: list[grouped.Experts] = []
        self._read_of_forgotten: Counter[str] = Counter()
        self.linear_name = "cublas, triton below 16 bits" + (", interpreted" if is_interpreted() else "")

    def product_dtype(self, scheme: WeightScheme) -> str:
        is_rounded = scheme.rounds_activations or scheme.name == "fp8"
        return scheme.name if is_rounded else super().product_dtype(scheme)

    def pack_linear(self, parts: Sequence[Tensor], bias: Tensor | None, scheme: WeightScheme) -> PackedWeight:
        return linear.pack_linear(parts, bias, scheme, self.activation_dtype, self.device)

    def pack_rounded(self, parts: Iterable[RoundedRows], shape: LinearShape) -> PackedWeight:
        return linear.pack_rounded(parts, shape, self.activation_dtype, self.device)

    def linear(self, x: Tensor, packed: PackedWeight, residual: Tensor | None = None) -> Tensor:
        return linear.linear(x, packed, residual)

    def pack_norm(self, weight: Tensor, eps: float) -> elementwise.TritonNorm:
        return elementwise.pack(weight.to(self.device), eps)

    def rms_norm(self, x: Tensor, packed: PackedNorm) -> Tensor:
        return elementwise.rms_norm(x, own(packed, elementwise.TritonNorm))

    def linear_norm(
        self, x: Tensor, packed: PackedWeight, residual: Tensor, scale: PackedNorm
    ) -> tuple[Tensor, Tensor]:
        return linear.linear_norm(x, packed, residual, own(scale, elementwise.TritonNorm))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return elementwise.silu_mul(gate_up)

    def plan_attention(self, batch: AttentionBatch, shape: KvShape, window_tokens: int | None) -> PagedPlan:
        return attention.plan(batch, shape, window_tokens, self.activation_dtype, self.device)

    def rope_write(
        self, qkv: Tensor, head_norm: PackedNorm | None, turns: Tensor, kv: LayerKv, plan: AttentionPlan
    ) -> None:
        scale, mine = None if head_norm is None else own(head_norm, elementwise.TritonNorm), own(plan, PagedPlan)
        rotary.rope_write(qkv, scale, turns, kv, mine.shape, mine.token_blocks, mine.token_offsets)

    def attention(self, q: Tensor, kv: LayerKv, plan: AttentionPlan, weighing: Weighing) -> Tensor:
        assert weighing == Weighing(weighing.scale), "models with capped scores or sinks are refused at the start"
        mine = own(plan, PagedPlan)
        if mine.positions_read is not None:
            plain.count_kv_bytes(kv.data.dtype, attention.kv_bytes(mine, kv))
        return attention.attend(q, kv, mine, weighing.scale)

    def fuse(self, layer: LayerWeights) -> RunnableLayer | NotFused:
        """A layer of experts, with all of them in one product, where there is one for how they are kept."""
        part = layer.feed_forward
        if not isinstance(part, MixtureWeights):
            return NotFused("each part of a dense layer is a kernel of its own")
        is_plain = part.shared is None and part.experts[0].spec.clamped is None
        if not is_plain or part.spec != RouterSpec(*astuple(part.spec)[:3]):
            return NotFused("experts are computed one after the other: for the router or an expert there is no kernel")
        if layer.norm_after_feed_forward is not None:
            return NotFused("there is a norm after the experts")
        try:
            experts = grouped.stack_experts([one.gate_up for one in part.experts], [one.down for one in part.experts])
        except ConfigError as error:
            return NotFused(f"experts are computed one after the other, and no step is captured: {error}")
        self._experts.append(experts)
        without = replace(layer, feed_forward=replace(part, experts=()))  # else each would lie in memory twice
        return MixtureLayer(self, without, part.router, part.spec, experts)

    def forget_experts(self) -> None:
        """Drop the experts' weights; what was read of them stays counted."""
        self._read_of_forgotten = Counter(self.bytes_read()) - Counter(super().bytes_read())
        self._experts = []

    def bytes_read(self) -> dict[str, int]:
        """Experts are counted on the device, which alone knows which of them ran."""
        read = Counter(super().bytes_read()) + self._read_of_forgotten
        for experts in self._experts:
            read.update(experts.bytes_read())
        return dict(read)

    def finite_flags(self, x: Tensor) -> Tensor:
        """x [N, D] -> bool [N] on the device."""
        return elementwise.finite(x)

    def draw_tokens(self, logits: Tensor, draws: np.ndarray) -> Tensor:
        """As `draw`, and greedy where the temperature is 0; int64 [N] on the device. Of logits that are not finite, any
        token there is: what is looked up by it must exist, since the device cannot refuse."""
        filters = bool(((draws["top_k"] > 0) | (draws["top_p"] < 1.0)).any())
        if not draws["temperature"].any():
            tokens = sampling.argmax(logits)
        else:
            tokens = sampling.draw(logits, Draws.of(draws, self.device), filters)
        return tokens.clamp_(0, logits.shape[1] - 1)

    def finite(self, x: Tensor) -> list[bool]:
        return self.finite_flags(x).tolist()

    def argmax(self, logits: Tensor) -> list[int]:
        return sampling.argmax(logits).tolist()

    def draw(self, logits: Tensor, draws: np.ndarray, bits: np.ndarray | None = None) -> list[int] | None:
        return None if bits is not None else self.draw_tokens(logits, draws).tolist()
