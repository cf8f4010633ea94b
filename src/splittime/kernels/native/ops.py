"""`Ops` by the C++ kernels. Activations are float32 whatever the weights are; packed weights are one blob each.

A dense decoder layer is one call (`fused`); what is composed in Python goes through `torch_ops`.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splittime.kernels.api import AttentionBatch, KvShape, LayerKv, WeightScheme
from splittime.kernels.native import library as native
from splittime.kernels.native import memory, torch_ops
from splittime.kernels.native.check import choose_isa
from splittime.kernels.native.library import BFLOAT16, FLOAT16, FLOAT32, INT4, INT8, Batch, library

SCHEMES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int8": INT8, "int4": INT4}
DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
PANEL_ROWS = 16  # a part of a weight can be packed on its own if it begins at a multiple of these


@dataclass(frozen=True)
class PackedLinear:
    """blob: uint8, see csrc/splittime.h; bias: float32 [out] or None."""

    blob: Tensor
    scheme: WeightScheme
    out_features: int
    in_features: int
    bias: Tensor | None

    def struct(self) -> native.Linear:
        """Valid while this object lives."""
        kind = SCHEMES[self.scheme.name]
        bias = torch_ops.address(self.bias)
        return native.Linear(
            kind, self.out_features, self.in_features, self.scheme.group, 0, self.blob.data_ptr(), bias
        )


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

    def __init__(self) -> None:
        """Raises `LibraryMissing`."""
        self.linear_name = f"native {choose_isa()}"

    def set_threads(self, num_threads: int) -> None:
        """torch keeps one: what it still does is small, and two pools would fight for the same cores."""
        torch.set_num_threads(1)
        started = library().st_set_threads(num_threads)
        if started < num_threads:
            warnings.warn(f"the system gives {started} of {num_threads} threads", stacklevel=2)

    def packed_bytes(self, out_features: int, in_features: int, scheme: WeightScheme) -> int:
        return int(library().st_packed_bytes(SCHEMES[scheme.name], out_features, in_features, scheme.group, 0))

    def pack_linear(self, parts: Sequence[Tensor], bias: Tensor | None, scheme: WeightScheme) -> PackedLinear:
        if any(len(part) % PANEL_ROWS for part in parts[:-1]):
            parts = [torch.cat(list(parts))]
        out_features, in_features = sum(len(part) for part in parts), parts[0].shape[1]
        blob = memory.allocate(self.packed_bytes(out_features, in_features, scheme))
        begin = 0
        for part in parts:
            rows = part.contiguous()
            library().st_pack(
                SCHEMES[scheme.name],
                out_features,
                in_features,
                scheme.group,
                rows.data_ptr(),
                DTYPES[rows.dtype],
                begin,
                begin + len(rows),
                blob.data_ptr(),
            )
            begin += len(rows)
        return self.linear_from_blob(blob, out_features, in_features, bias, scheme)

    def linear_from_blob(
        self, blob: Tensor, out_features: int, in_features: int, bias: Tensor | None, scheme: WeightScheme
    ) -> PackedLinear:
        wide = None if bias is None else bias.float().contiguous()
        return PackedLinear(blob, scheme, out_features, in_features, wide)

    def linear(self, x: Tensor, packed: PackedLinear, residual: Tensor | None = None) -> Tensor:
        scheme = packed.scheme
        return torch.ops.splittime.linear.default(
            x, packed.blob, packed.bias, residual, SCHEMES[scheme.name], packed.out_features, scheme.group, False
        )

    def pack_norm(self, weight: Tensor, eps: float) -> PackedNorm:
        return PackedNorm(weight.float().contiguous(), eps)

    def rms_norm(self, x: Tensor, packed: PackedNorm) -> Tensor:
        return torch.ops.splittime.rms_norm.default(x, packed.weight, packed.eps)

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

    def fuse_layer(self, layer: Any) -> Any | None:
        from splittime.kernels.native.fused import fuse

        return fuse(layer)
