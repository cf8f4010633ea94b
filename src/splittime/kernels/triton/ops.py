"""The Triton backend: each operation of `kernels.api.Ops` on the device, none of which waits for it.

The three that answer with lists (`finite`, `argmax`, `draw`) do wait. Whoever must not, the device runner, takes the
tensors instead: `finite_flags` and `draw_tokens`.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.kernels import reads
from splittime.kernels.api import AttentionBatch, KvShape, LayerKv, PlainOps, RoundedRows, WeightScheme
from splittime.kernels.triton import activation, attention, grouped, linear, norm, rotary, sampling
from splittime.kernels.triton.device import device, is_interpreted
from splittime.kernels.triton.mixture import GroupedExperts, MixtureLayer
from splittime.kernels.triton.weights import Draws

log = logging.getLogger("splittime.kernels")


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

    def pack_linear(self, parts: Sequence[Tensor], bias: Tensor | None, scheme: WeightScheme) -> Any:
        return linear.pack_linear(parts, bias, scheme, self.activation_dtype, self.device)

    def pack_rounded(
        self,
        parts: Iterable[RoundedRows],
        out_features: int,
        in_features: int,
        bias: Tensor | None,
        scheme: WeightScheme,
        columns: Tensor | None = None,
    ) -> Any:
        sizes = (out_features, in_features)
        return linear.pack_rounded(parts, *sizes, bias, scheme, columns, self.activation_dtype, self.device)

    def stack_linear(self, packed: Sequence[Any]) -> Any:
        return linear.stack(packed)

    def linear(self, x: Tensor, packed: Any, residual: Tensor | None = None) -> Tensor:
        return linear.linear(x, packed, residual)

    def pack_norm(self, weight: Tensor, eps: float) -> norm.Norm:
        return norm.pack(weight.to(self.device), eps)

    def rms_norm(self, x: Tensor, packed: norm.Norm) -> Tensor:
        return norm.rms_norm(x, packed)

    def linear_norm(self, x: Tensor, packed: Any, residual: Tensor, norm: norm.Norm) -> tuple[Tensor, Tensor]:
        return linear.linear_norm(x, packed, residual, norm)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return activation.silu_mul(gate_up)

    def plan_attention(
        self, batch: AttentionBatch, shape: KvShape, window_tokens: int | None, dtype: torch.dtype
    ) -> attention.Plan:
        return attention.plan(batch, shape, window_tokens, dtype, self.device)

    def rope_write(
        self, qkv: Tensor, qk_norm: norm.Norm | None, turns: Tensor, kv: LayerKv, plan: attention.Plan
    ) -> None:
        rotary.rope_write(qkv, qk_norm, turns, kv, plan.shape, plan.token_blocks, plan.token_offsets)

    def attention(self, q: Tensor, store: LayerKv, plan: attention.Plan, scale: float) -> Tensor:
        if plan.positions_read is not None:
            reads.count_kv_bytes(store.data.dtype, attention.kv_bytes(plan, store))
        return attention.attend(q, store, plan, scale)

    def fuse_layer(self, layer: Any) -> Any | None:
        """A layer of experts, with all of them in one product; None for others, which are composed: a layer without
        experts, and one whose experts are kept as there is no such product for (act-order, say)."""
        experts = getattr(layer.mlp, "experts", None)
        if experts is None:
            return None
        try:
            together = grouped.stack_experts([one.gate_up for one in experts], [one.down for one in experts])
        except ConfigError as error:
            log.warning("experts are computed one after the other, and no step is captured: %s", error)
            return None
        self._experts.append(together)
        mlp = GroupedExperts(self, layer.mlp.router, together, layer.mlp.num_chosen, layer.mlp.normalises)
        return MixtureLayer(self, layer.input_norm, layer.attention, layer.mlp_norm, mlp)

    def forget_experts(self) -> None:
        """Their weights are dropped; what was read of them stays counted."""
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
        return activation.finite(x)

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

    def draw(self, logits: Tensor, draws: np.ndarray) -> list[int]:
        return self.draw_tokens(logits, draws).tolist()
