"""The torch backend, for a CPU without the native kernels: `linear` and `attention` have files of their own, the small
operations are here. Integer weights are rebuilt for each product (`kernels.reference.rounding`): small, and slow.

The small ones count: a model of width 256 spends most of a decode step in call overhead, so each is written for the
fewest torch calls. Measured at [1, 256]: `torch.rms_norm` 14 us, norm-hypot-multiply-divide 10; rotate-half with cat
28 us, one complex product 10.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from splittime.kernels.api import AttentionBatch, KvShape, LayerKv, PlainOps, RoundedRows, Stack, WeightScheme
from splittime.kernels.cpu import attention, linear
from splittime.kernels.reference import rounding

Packed = linear.PackedLinear | rounding.IntegerLinear | Stack


@dataclass(frozen=True)
class PackedNorm:
    """scaled: weight * sqrt(D). floor: sqrt(D * eps), so that the divisor is hypot(|x|, floor)."""

    weight: Tensor
    scaled: Tensor
    floor: Tensor
    eps: float


class CpuOps(PlainOps):
    name = "torch"
    attention_name = "torch flash over gathered tiles"

    def __init__(self, dtype: torch.dtype) -> None:
        self.linear_name = "onednn-packed" if linear.can_pack(dtype) else "torch-dense"
        self.activation_dtype = dtype

    def pack_linear(self, parts: Sequence[Tensor], bias: Tensor | None, scheme: WeightScheme) -> Packed:
        bias = None if bias is None else bias.to(self.activation_dtype)
        if scheme.name in rounding.INTEGER_SCHEMES:
            return rounding.pack(parts, bias, scheme)
        return linear.pack(torch.cat([part.to(self.activation_dtype) for part in parts]), bias)

    def pack_rounded(
        self,
        parts: Iterable[RoundedRows],
        out_features: int,
        in_features: int,
        bias: Tensor | None,
        scheme: WeightScheme,
        columns: Tensor | None = None,
    ) -> Packed:
        bias = None if bias is None else bias.to(self.activation_dtype)
        return rounding.pack_rounded(parts, out_features, in_features, bias, scheme, columns)

    def linear(self, x: Tensor, packed: Packed, residual: Tensor | None = None) -> Tensor:
        if isinstance(packed, Stack):
            return packed.product(self.linear, x, residual)
        if isinstance(packed, rounding.IntegerLinear):
            return rounding.product(x, packed, residual)
        return linear.apply(x, packed, residual)

    def pack_norm(self, weight: Tensor, eps: float) -> PackedNorm:
        width = weight.shape[-1]
        return PackedNorm(weight, weight * width**0.5, torch.tensor((width * eps) ** 0.5), eps)

    def rms_norm(self, x: Tensor, packed: PackedNorm) -> Tensor:
        """x / sqrt(mean(x^2) + eps) = x sqrt(D) / hypot(|x|, sqrt(D eps))."""
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

    def plan_attention(
        self, batch: AttentionBatch, shape: KvShape, window_tokens: int | None, dtype: torch.dtype
    ) -> attention.Plan:
        return attention.plan(batch, shape, window_tokens, dtype)

    def write_kv(self, kv: Tensor, store: LayerKv, plan: attention.Plan) -> None:
        attention.write_kv(kv, store, plan)

    def attention(self, q: Tensor, store: LayerKv, plan: attention.Plan, scale: float) -> Tensor:
        return attention.attend(q, store, plan, scale)
