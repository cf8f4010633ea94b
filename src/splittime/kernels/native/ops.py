"""`Ops` by the C++ kernels. Activations are float32 between products whatever the weights are (`product_dtype` says
what a product makes of them); packed weights are one blob each.

A dense decoder layer is one call (`fused`); what is composed in Python goes through `torch_ops`.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splittime.kernels.api import CPU, AttentionBatch, KvShape, LayerKv, RoundedRows, WeightScheme
from splittime.kernels.native import check, packed, torch_ops
from splittime.kernels.native.check import choose_isa
from splittime.kernels.native.library import READ_KINDS, Batch, library
from splittime.kernels.native.packed import SCHEMES, PackedLinear, PackedStack, extras
from splittime.kernels.rounded import check_columns, check_scheme

READS = [*(f"weights.{scheme}" for scheme in SCHEMES), "kv.float32", "kv.bfloat16", "kv.int8"]  # `st_bytes_read`


@dataclass(frozen=True)
class PackedNorm:
    weight: Tensor  # float32 [..., D]
    eps: float


@dataclass(frozen=True)
class Plan:
    """arrays: the int32 arrays of `StBatch`, which points into them."""

    arrays: list[Tensor]
    batch: Batch
    shape: KvShape
    window_tokens: int


class NativeOps:
    name = "native"
    attention_name = "native, paged in place"
    activation_dtype = torch.float32
    device = CPU

    def __init__(self) -> None:
        """Raises `LibraryMissing`."""
        isa, self.isa_reason = choose_isa()
        self.linear_name = f"native {isa}"
        check.bytes_read()  # now, before there are weights

    def set_threads(self, num_threads: int) -> None:
        """torch keeps one: what it still does is small, and two pools would fight for the same cores."""
        torch.set_num_threads(1)
        started = library().st_set_threads(num_threads)
        if started < num_threads:
            warnings.warn(f"the system gives {started} of {num_threads} threads", stacklevel=2)

    def product_dtype(self, scheme: WeightScheme) -> str:
        if scheme.name in ("int8", "int4"):
            return "int8"
        return "bfloat16" if scheme.name == "bfloat16" and scheme.rounds_activations else "float32"

    def keeps(self, scheme: WeightScheme) -> bool:
        return scheme.name in SCHEMES

    def packed_bytes(self, out_features: int, in_features: int, scheme: WeightScheme) -> int:
        return packed.packed_bytes(out_features, in_features, scheme)

    def pack_linear(self, parts: Sequence[Tensor], bias: Tensor | None, scheme: WeightScheme) -> PackedLinear:
        out_features, in_features = sum(len(part) for part in parts), parts[0].shape[1]
        return self.linear_from_blob(packed.pack_floats(parts, scheme), out_features, in_features, bias, scheme)

    def pack_rounded(
        self,
        parts: Iterable[RoundedRows],
        out_features: int,
        in_features: int,
        bias: Tensor | None,
        scheme: WeightScheme,
        columns: Tensor | None = None,
    ) -> PackedLinear:
        blob = packed.pack_integers(parts, out_features, in_features, scheme)
        return self.linear_from_blob(blob, out_features, in_features, bias, scheme, columns)

    def linear_from_blob(
        self,
        blob: Tensor,
        out_features: int,
        in_features: int,
        bias: Tensor | None,
        scheme: WeightScheme,
        columns: Tensor | None = None,
    ) -> PackedLinear:
        if columns is not None:
            check_scheme(scheme)
            check_columns(columns, in_features)
        wide = None if bias is None else bias.float().contiguous()
        order = None if columns is None else columns.to(torch.int32).contiguous()
        return PackedLinear(blob, scheme, out_features, in_features, wide, order)

    def stack_linear(self, packed: Sequence[PackedLinear | PackedStack]) -> PackedStack:
        return PackedStack(packed)

    def linear(self, x: Tensor, packed: PackedLinear | PackedStack, residual: Tensor | None = None) -> Tensor:
        if isinstance(packed, PackedStack):
            return torch.ops.splittime.linear_stack.default(x, *packed.tensors, residual, *packed.numbers)
        scheme = packed.scheme
        return torch.ops.splittime.linear.default(
            x,
            packed.blob,
            packed.bias,
            packed.columns,
            residual,
            SCHEMES[scheme.name],
            packed.out_features,
            scheme.group,
            extras(scheme),
        )

    def pack_norm(self, weight: Tensor, eps: float) -> PackedNorm:
        return PackedNorm(weight.float().contiguous(), eps)

    def rms_norm(self, x: Tensor, packed: PackedNorm) -> Tensor:
        return torch.ops.splittime.rms_norm.default(x, packed.weight, packed.eps)

    def linear_norm(
        self, x: Tensor, packed: PackedLinear | PackedStack, residual: Tensor, norm: PackedNorm
    ) -> tuple[Tensor, Tensor]:
        total = self.linear(x, packed, residual)
        return total, self.rms_norm(total, norm)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return torch.ops.splittime.silu_mul.default(gate_up)

    def plan_attention(self, batch: AttentionBatch, shape: KvShape, window_tokens: int | None, dtype: Any) -> Plan:
        arrays = [
            torch.tensor(batch.query_begins, dtype=torch.int32),
            torch.tensor(batch.context_lens, dtype=torch.int32),
            batch.block_tables.int(),
            batch.token_blocks.int(),
            batch.token_offsets.int(),
        ]
        return Plan(arrays, torch_ops.batch_of(arrays, batch.num_decode_rows, None), shape, window_tokens or 0)

    def rope_write(self, qkv: Tensor, qk_norm: PackedNorm | None, turns: Tensor, kv: LayerKv, plan: Plan) -> None:
        shape = plan.shape
        torch.ops.splittime.rope_write.default(
            qkv,
            kv.data,
            kv.scales,
            None if qk_norm is None else qk_norm.weight,
            torch.view_as_real(turns),
            plan.arrays,
            plan.batch.decode_rows,
            qkv.shape[1] - 2 * shape.num_kv_heads,
            shape.block_size,
            shape.head_dim,
            0.0 if qk_norm is None else qk_norm.eps,
        )

    def attention(self, q: Tensor, kv: LayerKv, plan: Plan, scale: float) -> Tensor:
        shape, rows = plan.shape, plan.batch.decode_rows
        return torch.ops.splittime.attention.default(
            q, kv.data, kv.scales, plan.arrays, rows, shape.block_size, shape.head_dim, plan.window_tokens, scale
        )

    def finite(self, x: Tensor) -> list[bool]:
        lines, flags = x.contiguous(), np.empty(len(x), dtype=np.bool_)
        library().st_finite(len(lines), lines.shape[1], lines.data_ptr(), flags.ctypes.data)
        return flags.tolist()

    def argmax(self, logits: Tensor) -> list[int]:
        lines, tokens = logits.contiguous(), np.empty(len(logits), dtype=np.int32)
        library().st_argmax(len(lines), lines.shape[1], lines.data_ptr(), tokens.ctypes.data)
        return tokens.tolist()

    def draw(self, logits: Tensor, draws: np.ndarray) -> list[int]:
        lines, tokens = logits.contiguous(), np.empty(len(logits), dtype=np.int32)
        library().st_draw(len(lines), lines.shape[1], lines.data_ptr(), draws.ctypes.data, tokens.ctypes.data)
        return tokens.tolist()

    def bytes_read(self) -> dict[str, int]:
        counts = np.zeros(READ_KINDS, dtype=np.int64)
        library().st_bytes_read(counts.ctypes.data)
        counts -= check.bytes_read()
        return {kind: int(count) for kind, count in zip(READS, counts, strict=True) if count}

    def fuse_layer(self, layer: Any) -> Any | None:
        from splittime.kernels.native.fused import fuse

        return fuse(layer)
