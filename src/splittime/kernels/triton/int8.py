"""Products with weights of eight bits and activations as they are: integers in memory, 16-bit floats in registers.

    y[t, n] = s[n] * sum_k q[n, k] x[t, k]                                           one scale an output
    y[t, n] = sum_g s[n, g] * (sum_{k in g} q[n, k] x[t, k])  -  sum_g m[n, g] * (sum_{k in g} x[t, k])      in groups

Each q is exact in float16 and bfloat16; sums are float32 and meet their scales in float32. Activations are not rounded
(`w8a8` is the product that rounds them).

*Layout.* Integers [out, in], the columns filled up to a multiple of TILE = 128 so that each tile is whole, aligned
lines of memory. Scales: float32 [out]; in groups a 32-bit word each as in `int4`, [groups, out]: float16 scale below,
float16 minimum above. How integers become floats: `unpacking`.
"""

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from splittime.kernels.api import RoundedRows, WeightScheme
from splittime.kernels.triton.device import dot_dtype
from splittime.kernels.triton.tiles import (
    FEW_TOKENS,
    SOME_TOKENS,
    Tiles,
    add_parts,
    finish,
    splits_for,
    sums_target,
)
from splittime.kernels.triton.unpacking import floats_of, half_of, halves, is_fast, words_of

TILE = tl.constexpr(128)


@dataclass(frozen=True)
class Int8Linear:
    """values: int8 [out, whole tiles]; scales: float32 [out], or int32 [groups, out]; see above."""

    values: Tensor
    scales: Tensor
    in_features: int
    group: int
    has_minima: bool
    bias: Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.values.shape[-2]


def empty(out_features: int, in_features: int, scheme: WeightScheme, device: torch.device) -> Int8Linear:
    """A weight to `put` rows in."""
    columns = -(-in_features // TILE.value) * TILE.value
    values = torch.zeros(out_features, columns, dtype=torch.int8, device=device)
    if scheme.group:
        scales = torch.zeros(-(-columns // scheme.group), out_features, dtype=torch.int32, device=device)
    else:
        scales = torch.zeros(out_features, dtype=torch.float32, device=device)
    return Int8Linear(values, scales, in_features, scheme.group, scheme.has_minima)


def put(weight: Int8Linear, begin: int, rows: RoundedRows) -> None:
    """Rows at outputs [begin, ..)."""
    here = slice(begin, begin + len(rows.integers))
    weight.values[here, : weight.in_features] = rows.integers.to(weight.values.device)
    if weight.group:
        upper = torch.zeros_like(rows.scales) if rows.minima is None else rows.minima
        words = words_of(rows.scales.half(), upper.half().view(torch.int16))
        weight.scales[: words.shape[1], here] = words.t().to(weight.scales.device)
    else:
        weight.scales[here] = rows.scales[:, 0].to(weight.scales.device)


def unpacked(weight: Int8Linear) -> RoundedRows:
    """The integers again, int8 [out, in], with scales and minima as kept, in float32."""
    integers = weight.values[..., : weight.in_features]
    if not weight.group:
        return RoundedRows(integers, weight.scales.unsqueeze(-1))
    scales, upper = halves(weight.scales[: -(-weight.in_features // weight.group)].t())
    return RoundedRows(integers, scales, None, upper.view(torch.float16).float() if weight.has_minima else None)


def choose(num_tokens: int, weight: Int8Linear, dtype: torch.dtype) -> Tiles:
    """As for `int4.choose`; a step of the loop is 128 columns, as many bytes of weights as 256 of four bits."""
    if dtype == torch.float32:
        return Tiles(tokens=16 if num_tokens <= FEW_TOKENS else 32, outputs=32, num_warps=4, num_stages=2)
    steps = weight.values.shape[-1] // TILE.value
    splits = splits_for(triton.cdiv(weight.out_features, 64), steps)
    if num_tokens <= FEW_TOKENS:
        return Tiles(tokens=16, outputs=64, splits=splits, num_warps=4, num_stages=5)
    if num_tokens <= SOME_TOKENS:
        return Tiles(tokens=64, outputs=64, splits=splits, num_warps=4, num_stages=4)
    return Tiles(tokens=128, outputs=128, num_warps=8, num_stages=3)


@triton.jit
def product(
    x_ptr, rows, is_row, in_features, values_ptr, scales_ptr, outs, out_features, columns, begin, end,
    GROUP: tl.constexpr, UNIT: tl.constexpr, HAS_MINIMA: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr,
    OUTS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of the tiles [begin, end) -> float32 [OUTS, TOKENS]. rows: where each token's x begins, int64 [TOKENS].
    columns: of the values. UNIT = gcd(GROUP, TILE): columns that surely have one group."""
    is_out = outs < out_features
    lanes = tl.arange(0, UNIT)
    places = outs.to(tl.int64) * columns
    sums = tl.zeros([OUTS, TOKENS], tl.float32)
    for tile in tl.range(begin, end, num_stages=STAGES):
        for unit in tl.static_range(TILE // UNIT):
            here = tile * TILE + unit * UNIT + lanes
            values = tl.load(values_ptr + places[:, None] + here[None, :], mask=is_out[:, None], other=0)
            seen = (here < in_features)[:, None] & is_row[None, :]
            x = tl.load(x_ptr + rows[None, :] + here[:, None], mask=seen, other=0).to(DOT)
            if GROUP == 0:
                sums = tl.dot(floats_of(values, x, DOT, FAST), x, sums, input_precision="ieee")
            else:
                group = (tile * TILE + unit * UNIT) // GROUP
                scales = tl.load(scales_ptr + group * out_features + outs, mask=is_out, other=0)
                part = tl.dot(floats_of(values, x, DOT, FAST), x, input_precision="ieee")
                sums += half_of(scales)[:, None] * part
                if HAS_MINIMA:
                    sums -= half_of(scales >> 16)[:, None] * tl.sum(x.to(tl.float32), 0)[None, :]
    if GROUP == 0:
        sums *= tl.load(scales_ptr + outs, mask=is_out, other=0)[:, None]
    return sums


@triton.jit
def _linear(
    x_ptr, values_ptr, scales_ptr, y_ptr, bias_ptr, residual_ptr,
    num_tokens, in_features, out_features, columns, x_stride,
    GROUP: tl.constexpr, UNIT: tl.constexpr, HAS_MINIMA: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr,
    OUTS: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    outs = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    split = tl.program_id(2)
    tiles = columns // TILE
    share = tl.cdiv(tiles, SPLITS)
    sums = product(
        x_ptr, tokens.to(tl.int64) * x_stride, tokens < num_tokens, in_features,
        values_ptr, scales_ptr, outs, out_features, columns,
        split * share, tl.minimum(split * share + share, tiles),
        GROUP, UNIT, HAS_MINIMA, DOT, FAST, OUTS, TOKENS, STAGES,
    )  # fmt: skip
    finish(
        sums, y_ptr, bias_ptr, residual_ptr, tokens, outs, num_tokens, out_features, split,
        HAS_BIAS, HAS_RESIDUAL, SPLITS > 1,
    )  # fmt: skip


def linear(x: Tensor, weight: Int8Linear, residual: Tensor | None = None, tiles: Tiles | None = None) -> Tensor:
    """x [T, in], of contiguous rows -> x W^T + bias (+ residual) [T, out]. tiles: for benchmarks; else `choose`."""
    num_tokens, out_features = x.shape[0], weight.out_features
    tiles = tiles or choose(num_tokens, weight, x.dtype)
    y = x.new_empty(num_tokens, out_features)
    target = sums_target(y, tiles.splits)
    ends = tiles.splits == 1
    _linear[tiles.grid(num_tokens, out_features)](
        x, weight.values, weight.scales, target, weight.bias if ends else None, residual if ends else None,
        num_tokens, x.shape[1], out_features, weight.values.shape[-1], x.stride(0),
        **constants(weight, x.dtype), HAS_BIAS=ends and weight.bias is not None,
        HAS_RESIDUAL=ends and residual is not None, OUTS=tiles.outputs, TOKENS=tiles.tokens, SPLITS=tiles.splits,
        STAGES=tiles.num_stages, num_warps=tiles.num_warps,
    )  # fmt: skip
    if not ends:
        add_parts(target, weight.bias, residual, y)
    return y


def constants(weight: Int8Linear, dtype: torch.dtype) -> dict[str, object]:
    """What `product` is compiled for."""
    return {
        "GROUP": weight.group,
        "UNIT": gcd(weight.group, TILE.value),
        "HAS_MINIMA": weight.has_minima,
        "DOT": dot_dtype(dtype),
        "FAST": is_fast(dtype),
    }
