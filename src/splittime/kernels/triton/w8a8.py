"""Products of eight bits with eight bits: weights rounded once, one scale an output, activations as they come, one
scale a token.

    y[t, n] = s[n] * r[t] * sum_k q[n, k] p[t, k],    x[t, k] ~ r[t] p[t, k]

    int8    q, p in -127..127 (weights that come as integers: from -128), r = max |x[t]| / 127, ties to even: the rule
            of the native kernels. Sums are int32, exact: 2^31 / 127^2 is 133,000 columns.
    fp8     q, p in e4m3 (largest: 448; Micikevicius et al., arXiv:2209.05433), s and r = largest / 448. The matrix
            instruction of Hopper keeps about 14 bits of its sums (DeepSeek-V3, arXiv:2412.19437, 3.3.2), so each TILE
            of columns is summed anew and added in float32.
    fp8 in groups   a scale for each TILE of 128 columns, of x too (the same, 3.3.1), met by that TILE's sum in float32:

    y[t, n] = sum_g s[n, g] * r[t, g] * sum_{k in g} q[n, k] p[t, k]

            Neighbouring outputs often share their scales, in files all 128 of a block: of those one is kept, or the
            scales would be 3 % of the weight's bytes.

Beside a weight-only product this halves the bytes of activations and doubles the matrix rate, at the price of rounding
x; `kernels.reference.products` says all in plain torch. Rounding a token is a kernel of its own, `round_rows`, which
every product with the same x could share. The kernels: `w8a8_kernels`.
"""

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from splittime.kernels.layer_weights import PackedWeight
from splittime.kernels.triton.device import is_interpreted
from splittime.kernels.triton.tiles import FEW_TOKENS, SOME_TOKENS, End, Tiles, add_parts, splits_for, sums_target
from splittime.kernels.triton.w8a8_kernels import TILE, multiply, round_each, round_groups

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
ROUND_COLUMNS = 2048  # at a time: 16 bytes for each of 256 threads
SHARING = (128, 64, 32, 16)  # outputs that may share their scales


@dataclass(frozen=True)
class EightBitWeight(PackedWeight):
    """values: int8 or float8_e4m3fn [out, columns filled up to whole tiles]. scales: float32 [out], or where e4m3 is in
    groups [groups, out / unit, rounded up]; unit: outputs that share them, 0 where there are no groups."""

    values: Tensor
    scales: Tensor
    in_features: int
    bias: Tensor | None = None
    unit: int = 0

    @property
    def out_features(self) -> int:
        return self.values.shape[-2]


def empty(
    out_features: int, in_features: int, dtype: torch.dtype, device: torch.device, in_groups: bool = False
) -> EightBitWeight:
    """A weight to `put` rows in."""
    tiles = -(-in_features // TILE.value)
    values = torch.zeros(out_features, tiles * TILE.value, dtype=torch.int8, device=device).view(dtype)
    sizes = (tiles, out_features) if in_groups else (out_features,)
    return EightBitWeight(values, torch.zeros(sizes, device=device), in_features, unit=int(in_groups))


def put(weight: EightBitWeight, begin: int, values: Tensor, scales: Tensor) -> None:
    """values [rows, in] of the weight's dtype and scales [rows], or [rows, groups], at outputs [begin, ..)."""
    here, bits = slice(begin, begin + len(values)), torch.int8
    weight.values.view(bits)[here, : weight.in_features] = values.view(bits).to(weight.values.device)
    weight.scales[..., here] = scales.t().to(weight.scales.device)


def with_shared_scales(weight: EightBitWeight) -> EightBitWeight:
    """Once all rows are there: of outputs that share their scales one is kept, of as many as possible."""
    scales = weight.scales
    for unit in SHARING if weight.unit else ():
        each = scales[:, ::unit]
        if torch.equal(each.repeat_interleave(unit, 1)[:, : scales.shape[1]], scales):
            return replace(weight, scales=each.contiguous(), unit=unit)
    return weight


def scales_of(weight: EightBitWeight) -> Tensor:
    """Returns the scale of each value: float32, of a shape that broadcasts to [out, in]."""
    if not weight.unit:
        return weight.scales[:, None]
    rows = weight.scales.repeat_interleave(weight.unit, 1)[:, : weight.out_features]
    return rows.t().repeat_interleave(TILE.value, 1)[:, : weight.in_features]


def choose(num_tokens: int, weight: EightBitWeight) -> Tiles:
    """Both operands are read from shared memory as they are and nothing is unpacked: only the shape matters. 64 outputs
    are the fewest of the 8-bit matrix instruction of a warp group; below, float8 would be widened to float16."""
    splits = splits_for(triton.cdiv(weight.out_features, 64), weight.values.shape[1] // TILE.value)
    if num_tokens <= FEW_TOKENS:
        return Tiles(tokens=16, outputs=64, splits=splits, num_warps=4, num_stages=5)
    if num_tokens <= SOME_TOKENS:
        return Tiles(tokens=64, outputs=64, splits=splits, num_warps=4, num_stages=4)
    return Tiles(tokens=128, outputs=128, num_warps=8, num_stages=4)


def round_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [T, in], of contiguous rows -> (of dtype int8 or float8_e4m3fn [T, whole tiles], zeros after the last column;
    float32 [T]). A token that is not finite gets a scale that is not."""
    num_tokens, in_features = x.shape
    columns = -(-in_features // TILE.value) * TILE.value
    values = torch.empty(num_tokens, columns, dtype=dtype, device=x.device)
    scales = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    round_each[(num_tokens,)](
        x, values, scales, in_features, columns, x.stride(0), LARGEST[dtype], dtype == torch.int8, is_interpreted(),
        ROUND_COLUMNS, num_warps=8,
    )  # fmt: skip
    return values, scales


def round_row_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same to e4m3, with a scale for each TILE of a token's columns: float32 [tiles, T]."""
    num_tokens, in_features = x.shape
    tiles, each = -(-in_features // TILE.value), ROUND_COLUMNS // TILE.value
    values = torch.empty(num_tokens, tiles * TILE.value, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(tiles, num_tokens, dtype=torch.float32, device=x.device)
    round_groups[(num_tokens, triton.cdiv(tiles, each))](
        x, values, scales, in_features, values.shape[1], x.stride(0), num_tokens,
        LARGEST[values.dtype], is_interpreted(), each, num_warps=8,
    )  # fmt: skip
    return values, scales


def linear(
    x: Tensor, weight: EightBitWeight, residual: Tensor | None = None, tiles: Tiles | None = None, end: End = add_parts
) -> Tensor:
    """x [T, in], of contiguous rows -> x W^T + bias (+ residual) [T, out]. tiles: for benchmarks; else `choose`."""
    values, scales = round_row_groups(x) if weight.unit else round_rows(x, weight.values.dtype)
    return product(values, scales, weight, residual, x.dtype, tiles, end)


def product(
    values: Tensor, scales: Tensor, weight: EightBitWeight, residual: Tensor | None, dtype: torch.dtype,
    tiles: Tiles | None = None, end: End = add_parts,
) -> Tensor:  # fmt: skip
    """The same, of what `round_rows` (or `round_row_groups`) made: -> [T, out] of `dtype`."""
    num_tokens, out_features = len(values), weight.out_features
    tiles = tiles or choose(num_tokens, weight)
    y = torch.empty(num_tokens, out_features, dtype=dtype, device=values.device)
    target, ends = sums_target(y, tiles.splits), tiles.splits == 1
    multiply[tiles.grid(num_tokens, out_features)](
        values, scales, weight.values, weight.scales, target,
        weight.bias if ends else None, residual if ends else None, num_tokens, out_features, weight.values.shape[1],
        weight.scales.shape[-1],
        HAS_BIAS=ends and weight.bias is not None, HAS_RESIDUAL=ends and residual is not None,
        IS_INTEGER=values.dtype == torch.int8, UNIT=weight.unit, OUTS=tiles.outputs, TOKENS=tiles.tokens,
        SPLITS=tiles.splits, STAGES=tiles.num_stages, num_warps=tiles.num_warps,
    )  # fmt: skip
    if not ends:
        end(target, weight.bias, residual, y)
    return y
