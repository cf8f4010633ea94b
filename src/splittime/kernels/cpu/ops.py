"""The torch backend, for a CPU without the native kernels: `linear` and `attention` have files of their own, the small
operations are here. Integer weights are rebuilt for each product (`kernels.reference.rounding`): small, and slow.

The small ones count: a model of width 256 spends most of a decode step in call overhead, so each is written for the
fewest torch calls. Measured at [1, 256]: `torch.rms_norm` 14 us, norm-hypot-multiply-divide 10; rotate-half with cat
28 us, one complex product 10.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from splittime.kernels.api import (
    AttentionBatch,
    AttentionPlan,
    KvShape,
    LayerKv,
    LinearShape,
    RoundedRows,
    WeightScheme,
)
from splittime.kernels.cpu import attention, linear
from splittime.kernels.layer_weights import PackedNorm, PackedWeight
from splittime.kernels.plain import HostOps, Stack
from splittime.kernels.reference import rounding


@dataclass(frozen=True)
class CpuNorm(PackedNorm):
    """scaled: weight * sqrt(D). floor: sqrt(D * eps), so that the divisor is hypot(|x|, floor)."""

    weight: Tensor
    scaled: Tensor
    floor: Tensor
    eps: float


class CpuOps(HostOps):
    name = "torch"
    attention_name = "torch flash over gathered tiles"

    def __init__(self, dtype: torch.dtype) -> None:
        self.linear_name = "onednn-packed" if linear.can_pack(dtype) else "torch-dense"
        self.activation_dtype = dtype

    def pack_linear(self, parts: Sequence[Tensor], bias: Tensor | None, scheme: WeightScheme) -> PackedWeight:
        bias = None if bias is None else bias.to(self.activation_dtype)
        if scheme.name in rounding.INTEGER_SCHEMES:
            return rounding.pack(parts, bias, scheme)
        return linear.pack(torch.cat([part.to(self.activation_dtype) for part in parts]), bias)

    def pack_rounded(self, parts: Iterable[RoundedRows], shape: LinearShape) -> PackedWeight:
        bias = None if shape.bias is None else shape.bias.to(self.activation_dtype)
        return rounding.pack_rounded(parts, replace(shape, bias=bias))

    def linear(self, x: Tensor, packed: PackedWeight, residual: Tensor | None = None) -> Tensor:
        if isinstance(packed, Stack):
            return packed.product(self.linear, x, residual)
        if isinstance(packed, rounding.RebuiltWeight):
            return rounding.product(x, packed, residual)
        assert isinstance(packed, linear.CpuWeight), "a weight of another backend"
        return linear.apply(x, packed, residual)

    def pack_norm(self, weight: Tensor, eps: float) -> CpuNorm:
        width = weight.shape[-1]
        return CpuNorm(weight, weight * width**0.5, torch.tensor((width * eps) ** 0.5), eps)

    def rms_norm(self, x: Tensor, packed: PackedNorm) -> Tensor:
        """x / sqrt(mean(x^2) + eps) = x sqrt(D) / hypot(|x|, sqrt(D eps))."""
        assert isinstance(packed, CpuNorm), "a norm of another backend"
        if x.dtype != torch.float32:
            return torch.rms_norm(x.float(), x.shape[-1:], None, packed.eps).to(x.dtype) * packed.weight
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * packed.scaled).div_(torch.hypot(length, packed.floor))

    def rotate(self, x: Tensor, turns: Tensor) -> None:
        pairs = x.unflatten(-1, (-1, 2))
        if x.dtype == torch.float32:
            torch.view_as_complex(pairs).mul_(turns.unsqueeze(1))
        else:
            pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(turns.unsqueeze(1))))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def plan_attention(self, batch: AttentionBatch, shape: KvShape, window_tokens: int | None) -> attention.GatherPlan:
        return attention.plan(batch, shape, window_tokens, self.activation_dtype)

    def write_kv(self, kv: Tensor, store: LayerKv, plan: AttentionPlan) -> None:
        attention.write_kv(kv, store, attention.own(plan))

    def attention(self, q: Tensor, kv: LayerKv, plan: AttentionPlan, scale: float) -> Tensor:
        return attention.attend(q, kv, attention.own(plan), scale)
