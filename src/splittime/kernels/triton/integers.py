"""Products with weights that are integers of four or eight bits, and activations as they are.

    y[t, n] = sum_g s[n, g] * (sum_{k in g} (q[n, k] - z[n, g]) x[t, k])  -  sum_g m[n, g] * (sum_{k in g} x[t, k])

q - z is between -128 and 127 and exact in float16 and bfloat16, so the weight itself is never rounded to 16 bits; sums
are float32 and meet their group's scale in float32 (of int8 without groups: once, at the end). x is not rounded.

*Layout.* A 32-bit word holds 8 (or 4) integers of one output, 32 columns apart: a tile is 32 words, that is 8 (4)
*slabs* of 32 columns, and word i holds column 32 j + i of the tile in its j-th field from below. So one word a lane
gives, by a shift and a mask, the same lane of each slab, and no lane ever needs another's bits; a slab of x is 32
neighbouring columns. Eight bits are kept as q + 128. Words lie as [tiles, out, 32]: what a program reads in a step of
its loop is one run of memory. A group's scale is the lower half of a 32-bit word, as float16; the upper half is its
zero point (of int4), or its minimum as float16: one load, wide enough to be fetched ahead with the weights. These words
lie as [groups, out]. How a word becomes floats: `integers_kernels`.
"""

from dataclasses import dataclass
from math import gcd

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from splittime.kernels.api import RoundedRows, WeightScheme
from splittime.kernels.layer import PackedWeight
from splittime.kernels.rounded import INT4_ZERO
from splittime.kernels.triton.device import dot_dtype
from splittime.kernels.triton.integers_kernels import SLAB_COLUMNS, halves, is_fast, multiply, widen, words_of
from splittime.kernels.triton.tiles import (
    FEW_TOKENS,
    PROCESSORS,
    SOME_TOKENS,
    WIDE_TOKENS,
    End,
    Tiles,
    add_parts,
    splits_for,
    sums_target,
)

CENTRES = {4: 0, 8: 128}  # what is added to an integer to keep it


@dataclass(frozen=True)
class IntegerWeight(PackedWeight):
    """words: int32 [tiles, out, 32]; scales: int32 [groups, out], of as many groups as whole tiles have, or float32
    [out] where `group` is 0; see above. group: columns of one, a multiple of 32 (int8: of 16). bits: 4 or 8."""

    words: Tensor
    scales: Tensor
    in_features: int
    bits: int
    group: int
    has_minima: bool
    bias: Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.words.shape[-2]


def tile_columns(bits: int) -> int:
    return SLAB_COLUMNS * 32 // bits


def empty(out_features: int, in_features: int, scheme: WeightScheme, device: torch.device) -> IntegerWeight:
    """A weight to `put` rows in. Its columns are filled up to whole tiles, with scales of 0."""
    bits = 4 if scheme.name == "int4" else 8
    tiles = -(-in_features // tile_columns(bits))
    words = torch.zeros(tiles, out_features, SLAB_COLUMNS, dtype=torch.int32, device=device)
    if scheme.group:
        groups = -(-tiles * tile_columns(bits) // scheme.group)
        scales = torch.zeros(groups, out_features, dtype=torch.int32, device=device)
    else:
        scales = torch.zeros(out_features, dtype=torch.float32, device=device)
    return IntegerWeight(words, scales, in_features, bits, scheme.group, scheme.has_minima)


def put(weight: IntegerWeight, begin: int, rows: RoundedRows) -> None:
    """Rows as `rounded.as_packed` makes them, at outputs [begin, ..)."""
    device, here = weight.words.device, slice(begin, begin + len(rows.integers))
    weight.words[:, here] = _words(rows.integers.to(device), weight.bits)
    if not weight.group:
        weight.scales[here] = rows.scales[:, 0].to(device)
        return
    upper = rows.zeros
    if rows.minima is not None:
        upper = rows.minima.half().view(torch.int16)
    elif upper is None:
        upper = torch.full_like(rows.scales, INT4_ZERO if weight.bits == 4 else 0)
    words = words_of(rows.scales.half(), upper)
    weight.scales[: words.shape[1], here] = words.t().to(device)


def _words(integers: Tensor, bits: int) -> Tensor:
    """int8 [rows, in] -> int32 [tiles, rows, 32]."""
    filled = F.pad(integers, (0, -integers.shape[1] % tile_columns(bits)))
    slabs = filled.view(len(filled), -1, 32 // bits, SLAB_COLUMNS).permute(1, 0, 2, 3)
    words = torch.zeros(slabs.shape[0], slabs.shape[1], SLAB_COLUMNS, dtype=torch.int32, device=integers.device)
    for slab in range(32 // bits):
        words |= slabs[:, :, slab].to(torch.int32) + CENTRES[bits] << bits * slab
    return words


def unpacked(weight: IntegerWeight) -> RoundedRows:
    """The integers again: int8 [out, in], and scales, zeros and minima as kept, in float32."""
    bits = weight.bits
    fields = [weight.words >> bits * slab & (1 << bits) - 1 for slab in range(32 // bits)]
    slabs = torch.stack(fields, dim=2) - CENTRES[bits]  # [tiles, out, slabs, 32]
    integers = slabs.permute(1, 0, 2, 3).flatten(1)[:, : weight.in_features].to(torch.int8)
    if not weight.group:
        return RoundedRows(integers, weight.scales.unsqueeze(-1))
    scales, upper = halves(weight.scales[: -(-weight.in_features // weight.group)].t())
    minima = upper.view(torch.float16).float() if weight.has_minima else None
    zeros = None if weight.has_minima or bits == 8 else upper.to(torch.uint8)
    return RoundedRows(integers, scales, zeros, minima)


def choose(num_tokens: int, weight: IntegerWeight, dtype: torch.dtype) -> Tiles:
    """Few tokens: where there are outputs enough for all processors, 128 of them share what a step of the loop costs
    besides unpacking; else a program is 64 outputs, of int4 two warps: more, smaller programs hide more of the memory's
    latency. More tokens: wide tiles, so that unpacking is shared by more of them. All are what was fastest on an H100
    at the shapes of an 8B model (BENCHMARKS.md). float32 has no matrix instruction: its tiles are small so that sums
    fit in registers."""
    if dtype == torch.float32:
        return Tiles(tokens=16 if num_tokens <= FEW_TOKENS else 32, outputs=32, num_warps=4, num_stages=2)
    splits = splits_for(triton.cdiv(weight.out_features, 64), weight.words.shape[-3])
    is_int4, is_broad = weight.bits == 4, weight.out_features >= 128 * PROCESSORS
    if num_tokens <= FEW_TOKENS and is_broad:
        return Tiles(tokens=16, outputs=128, num_warps=4, num_stages=4)
    if num_tokens <= FEW_TOKENS:
        warps, stages = (2, 3) if is_int4 else (4, 5)
        return Tiles(tokens=16, outputs=64, splits=splits, num_warps=warps, num_stages=stages)
    if num_tokens <= SOME_TOKENS:
        outputs, warps = (128, 8) if is_int4 or is_broad else (64, 4)
        return Tiles(tokens=64, outputs=outputs, splits=splits, num_warps=warps, num_stages=3)
    has_room = not is_int4 and is_broad and weight.group % 128 == 0
    return Tiles(128 if has_room else 64, 128, num_warps=8, num_stages=3)


def linear(
    x: Tensor, weight: IntegerWeight, residual: Tensor | None = None, tiles: Tiles | None = None, end: End = add_parts
) -> Tensor:
    """x [T, in], of contiguous rows -> x W^T + bias (+ residual) [T, out]. tiles: for benchmarks; else `choose`."""
    num_tokens, out_features = x.shape[0], weight.out_features
    tiles = tiles or choose(num_tokens, weight, x.dtype)
    y = x.new_empty(num_tokens, out_features)
    target = sums_target(y, tiles.splits)
    ends = tiles.splits == 1
    multiply[tiles.grid(num_tokens, out_features)](
        x, weight.words, weight.scales, target,
        weight.bias if ends else None, residual if ends else None,
        num_tokens, x.shape[1], out_features, weight.words.shape[0], x.stride(0),
        **constants(weight, x.dtype), HAS_BIAS=ends and weight.bias is not None,
        HAS_RESIDUAL=ends and residual is not None, OUTS=tiles.outputs, TOKENS=tiles.tokens, SPLITS=tiles.splits,
        STAGES=tiles.num_stages, num_warps=tiles.num_warps,
    )  # fmt: skip
    if not ends:
        end(target, weight.bias, residual, y)
    return y


WIDENED_OUTPUTS = 64  # of a program


def is_better_wide(num_tokens: int, weight: IntegerWeight, dtype: torch.dtype) -> bool:
    """Returns whether `widened` and a product of cuBLAS take less time than `linear`: from some tokens on the matrix
    units are the limit, and cuBLAS uses them better than a kernel that unpacks between its products."""
    is_known = weight.group % SLAB_COLUMNS == 0 and dtype != torch.float32
    return is_known and num_tokens > WIDE_TOKENS


def widened(weight: IntegerWeight, dtype: torch.dtype) -> Tensor:
    """Returns the weight as floats [out, in], each rounded once to `dtype`. Its groups are whole slabs."""
    y = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=weight.words.device)
    grid = weight.words.shape[0], triton.cdiv(weight.out_features, WIDENED_OUTPUTS)
    widen[grid](
        weight.words, weight.scales, y, weight.in_features, weight.out_features,
        weight.bits, weight.group, weight.has_minima, WIDENED_OUTPUTS,
    )  # fmt: skip
    return y


def constants(weight: IntegerWeight, dtype: torch.dtype) -> dict[str, object]:
    """Returns what `product` is compiled for."""
    columns = tile_columns(weight.bits)
    return {
        "BITS": weight.bits,
        "GROUP": weight.group,
        "UNIT": gcd(weight.group, columns),
        "HAS_MINIMA": weight.has_minima,
        "IS_WHOLE": weight.in_features % columns == 0,
        "DOT": dot_dtype(dtype),
        "FAST": is_fast(dtype),
    }
