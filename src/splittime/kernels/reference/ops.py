"""Every operation of `kernels.api.Ops` as its definition says, row by row. Slow, and meant to be obviously right."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splittime.kernels import plain, rounded
from splittime.kernels.api import (
    AttentionBatch,
    AttentionPlan,
    KvShape,
    LayerKv,
    LinearShape,
    RoundedRows,
    WeightScheme,
    own,
)
from splittime.kernels.layer import PackedNorm, PackedWeight, Weighing
from splittime.kernels.plain import HostOps, Stack
from splittime.kernels.reference import products, rounding


@dataclass(frozen=True)
class RoundedWeight(PackedWeight):
    """Integers and what they stand for, just as given; bias: [out] or None; columns: of x, or None."""

    rows: RoundedRows
    scheme: WeightScheme
    bias: Tensor | None
    columns: Tensor | None

    def dense(self) -> Tensor:
        """float32 [out, in], as `RoundedRows` says."""
        rows, in_features = self.rows, self.rows.integers.shape[1]
        group = torch.arange(in_features) // (self.scheme.group or in_features)  # of each column
        steps = rows.integers.float()
        if rows.zeros is not None:
            steps -= rows.zeros[:, group].float()
        elif self.scheme.name == "int4":
            steps -= rounded.INT4_ZERO
        weight = rows.scales[:, group] * steps
        return weight if rows.minima is None else weight - rows.minima[:, group]


@dataclass(frozen=True)
class ReferenceWeight(PackedWeight):
    """weight [out, in], bias [out] or None, of the activations' dtype."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class ReferenceNorm(PackedNorm):
    weight: Tensor
    eps: float


@dataclass(frozen=True)
class ReferencePlan(AttentionPlan):
    batch: AttentionBatch
    shape: KvShape
    window_tokens: int | None


class ReferenceOps(HostOps):
    name = "reference"
    linear_name = "matmul"
    attention_name = "loop over rows and heads"

    def __init__(self, dtype: torch.dtype) -> None:
        self.activation_dtype = dtype

    def pack_linear(self, parts: Sequence[Tensor], bias: Tensor | None, scheme: WeightScheme) -> PackedWeight:
        weight = torch.cat(list(parts))
        bias = None if bias is None else bias.to(self.activation_dtype)
        if scheme.name in rounding.INTEGER_SCHEMES:
            return RoundedWeight(RoundedRows(*rounding.quantize(weight, scheme)), scheme, bias, None)
        if scheme.name == "fp8":
            return RoundedWeight(products.fp8_rows(weight), scheme, bias, None)
        return ReferenceWeight(weight.to(self.activation_dtype), bias)

    def pack_rounded(self, parts: Iterable[RoundedRows], shape: LinearShape) -> RoundedWeight:
        rounded.check_columns(shape.columns, shape.in_features)
        bias = None if shape.bias is None else shape.bias.to(self.activation_dtype)
        return RoundedWeight(rounded.joined(rounded.checked(parts, shape)), shape.scheme, bias, shape.columns)

    def linear(self, x: Tensor, packed: PackedWeight, residual: Tensor | None = None) -> Tensor:
        if isinstance(packed, Stack):
            return packed.product(self.linear, x, residual)
        if isinstance(packed, RoundedWeight):
            y = _rounded_product(rounding.inputs(x, packed.columns, packed.scheme.is_turned), packed)
        else:
            assert isinstance(packed, ReferenceWeight), "a weight of another backend"
            y = x @ packed.weight.T
        if len(x):
            _count(packed)
        if packed.bias is not None:
            y = y + packed.bias
        return y if residual is None else y + residual

    def pack_norm(self, weight: Tensor, eps: float) -> ReferenceNorm:
        return ReferenceNorm(weight, eps)

    def rms_norm(self, x: Tensor, packed: PackedNorm) -> Tensor:
        assert isinstance(packed, ReferenceNorm), "a norm of another backend"
        wide = x.float()
        return (wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + packed.eps)).to(x.dtype) * packed.weight

    def rotate(self, x: Tensor, turns: Tensor) -> None:
        even, odd = x[..., 0::2].float(), x[..., 1::2].float()  # [T, H, D / 2]
        cos, sin = turns.real[:, None], turns.imag[:, None]  # [T, 1, D / 2]
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        x.copy_(turned.flatten(-2))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate * torch.sigmoid(gate) * up

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        wide = gate.float()
        bent = torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))
        return (0.5 * wide * (1 + bent)).to(gate.dtype) * up

    def product_dtype(self, scheme: WeightScheme) -> str:
        return scheme.name if scheme.rounds_activations else super().product_dtype(scheme)

    def plan_attention(self, batch: AttentionBatch, shape: KvShape, window_tokens: int | None) -> ReferencePlan:
        return ReferencePlan(batch, shape, window_tokens)

    def write_kv(self, kv: Tensor, store: LayerKv, plan: AttentionPlan) -> None:
        mine = own(plan, ReferencePlan)
        batch, shape = mine.batch, mine.shape
        rows = kv.view(-1, 2, shape.num_kv_heads, shape.head_dim)
        tiles = _tiles(store, shape)
        places = zip(batch.token_blocks.tolist(), batch.token_offsets.tolist(), strict=True)
        for token, (block, offset) in enumerate(places):
            if store.scales is None:
                tiles[block, :, :, offset] = rows[token].to(tiles.dtype)
            else:
                values, scales = rounding.quantize_kv(rows[token], tiles.dtype)
                tiles[block, :, :, offset], store.scales[block, :, :, offset] = values, scales

    def attention(self, q: Tensor, kv: LayerKv, plan: AttentionPlan, weighing: Weighing) -> Tensor:
        mine = own(plan, ReferencePlan)
        (scale, cap, sinks), (batch, shape, window_tokens) = weighing, (mine.batch, mine.shape, mine.window_tokens)
        out = torch.empty_like(q)
        for row, context_tokens in enumerate(batch.context_lens):
            keys, values = _read_row(kv, shape, batch.block_tables[row], context_tokens)
            begin, end = batch.query_begins[row], batch.query_begins[row + 1]
            for token in range(begin, end):
                position = context_tokens - (end - token)
                first = 0 if window_tokens is None else max(0, position - window_tokens + 1)
                seen = slice(first, position + 1)
                for head in range(q.shape[1]):
                    kv_head = head // (q.shape[1] // shape.num_kv_heads)
                    found = keys[kv_head, seen] @ q[token, head].float() * scale
                    found = cap * torch.tanh(found / cap) if cap else found
                    shares = found.softmax(0) if sinks is None else torch.cat((found, sinks[head, None])).softmax(0)
                    out[token, head] = (shares[: len(found)] @ values[kv_head, seen]).to(q.dtype)
        return out.flatten(1)


def _rounded_product(x: Tensor, packed: RoundedWeight) -> Tensor:
    if packed.scheme.rounds_activations:
        return products.eight_bit_product(x, packed.rows, packed.scheme)
    return x @ packed.dense().to(x.dtype).T


def _count(packed: RoundedWeight | ReferenceWeight) -> None:
    if isinstance(packed, RoundedWeight):
        rows = packed.rows
        plain.count_weight(packed.scheme.name, rows.integers, rows.scales, rows.zeros, rows.minima)
    else:
        plain.count_weight(str(packed.weight.dtype).removeprefix("torch."), packed.weight)


def _tiles(store: LayerKv, shape: KvShape) -> Tensor:
    return store.data.view(-1, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)


def _read_row(store: LayerKv, shape: KvShape, block_table: Tensor, context_tokens: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one row, each float32 [num_kv_heads, context_tokens, head_dim]."""
    blocks = block_table[: -(-context_tokens // shape.block_size)]
    tiles = _tiles(store, shape)[blocks]  # [blocks, 2, Hkv, block_size, D]
    scales = None if store.scales is None else store.scales[blocks]
    plain.count_kv(tiles, scales)
    tiles = tiles.float() if scales is None else rounding.dequantize_kv(tiles, scales)
    keys, values = tiles.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return keys[:, :context_tokens], values[:, :context_tokens]
