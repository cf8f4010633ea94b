"""Products with weights of four bits: integers in memory, exact small numbers in registers, scales on the sums.

    y[t, n] = sum_g s[n, g] * (sum_{k in g} (q[n, k] - z[n, g]) x[t, k])  -  sum_g m[n, g] * (sum_{k in g} x[t, k])

q - z is between -15 and 15 and exact in float16 and bfloat16, so the weight itself is never rounded to 16 bits; sums
are float32 and meet their group's scale in float32. Activations are not rounded.

*Layout.* A tile is TILE = 256 columns in 8 slabs of 32: word i of a row's 32 words holds column 32 j + i of the tile in
its bits [4 j, 4 j + 4). So one 32-bit word a lane gives, by a shift and a mask, the same lane of eight slabs, and no
lane ever needs another's bits; a slab of x is 32 neighbouring columns. Words lie as [tiles, out, 32]: what a program
reads in a step of its loop is one run of memory. A group's scale is the lower half of a 32-bit word, as float16; the
upper half is its zero point, or its minimum as float16 (then the zero point is 8): one load, wide enough to be fetched
ahead with the weights. These words lie as [groups, out]. How a word becomes floats: `unpacking`.
"""

from dataclasses import dataclass
from math import gcd

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from splittime.kernels.api import RoundedRows, WeightScheme
from splittime.kernels.rounded import INT4_ZERO
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
from splittime.kernels.triton.unpacking import half_of, halves, is_fast, slab_of, words_of, zeros_of

TILE = tl.constexpr(256)
SLAB = tl.constexpr(32)


@dataclass(frozen=True)
class Int4Linear:
    """words: int32 [tiles, out, 32]; scales: int32 [groups, out], of as many groups as whole tiles have; see above.
    group: columns of one, a multiple of 32."""

    words: Tensor
    scales: Tensor
    in_features: int
    group: int
    has_minima: bool
    bias: Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.words.shape[-2]


def empty(out_features: int, in_features: int, scheme: WeightScheme, device: torch.device) -> Int4Linear:
    """A weight to `put` rows in. Its columns are filled up to whole tiles, with scales of 0."""
    tiles = -(-in_features // TILE.value)
    words = torch.zeros(tiles, out_features, SLAB.value, dtype=torch.int32, device=device)
    scales = torch.zeros(-(-tiles * TILE.value // scheme.group), out_features, dtype=torch.int32, device=device)
    return Int4Linear(words, scales, in_features, scheme.group, scheme.has_minima)


def put(weight: Int4Linear, begin: int, rows: RoundedRows) -> None:
    """Rows as `rounded.as_packed` makes them, at outputs [begin, ..)."""
    device, here = weight.words.device, slice(begin, begin + len(rows.integers))
    weight.words[:, here] = _words(rows.integers.to(device))
    upper = rows.zeros
    if rows.minima is not None:
        upper = rows.minima.half().view(torch.int16)
    elif upper is None:
        upper = torch.full_like(rows.scales, INT4_ZERO)
    words = words_of(rows.scales.half(), upper)
    weight.scales[: words.shape[1], here] = words.t().to(device)


def _words(integers: Tensor) -> Tensor:
    """int8 0..15 [rows, in] -> int32 [tiles, rows, 32]."""
    filled = F.pad(integers, (0, -integers.shape[1] % TILE.value))
    slabs = filled.view(len(filled), -1, 8, SLAB.value).permute(1, 0, 2, 3)
    words = torch.zeros(slabs.shape[0], slabs.shape[1], SLAB.value, dtype=torch.int32, device=integers.device)
    for slab in range(8):
        words |= slabs[:, :, slab].to(torch.int32) << (4 * slab)
    return words


def unpacked(weight: Int4Linear) -> RoundedRows:
    """The integers again: int8 [out, in], and scales, zeros and minima as kept, in float32."""
    slabs = torch.stack([weight.words >> (4 * slab) & 15 for slab in range(8)], dim=2)  # [tiles, out, 8, 32]
    integers = slabs.permute(1, 0, 2, 3).flatten(1)[:, : weight.in_features].to(torch.int8)
    scales, upper = halves(weight.scales[: -(-weight.in_features // weight.group)].t())
    if weight.has_minima:
        return RoundedRows(integers, scales, None, upper.view(torch.float16).float())
    return RoundedRows(integers, scales, upper.to(torch.uint8))


def choose(num_tokens: int, weight: Int4Linear, dtype: torch.dtype) -> Tiles:
    """Few tokens: 64 outputs are the fewest rows of a warp group's matrix instruction, and a narrow tile leaves
    registers and shared memory for loads under way. More: wide tiles, so that unpacking is shared by more tokens; at
    128 x 128 three stages would be more shared memory than a processor has, and with groups under 128 columns their
    sums more registers. float32 has no matrix instruction: its tiles are small so that sums fit in registers."""
    if dtype == torch.float32:
        return Tiles(tokens=16 if num_tokens <= FEW_TOKENS else 32, outputs=32, num_warps=4, num_stages=2)
    splits = splits_for(triton.cdiv(weight.out_features, 64), weight.words.shape[-3])
    if num_tokens <= FEW_TOKENS:
        return Tiles(tokens=16, outputs=64, splits=splits, num_warps=4, num_stages=4)
    if num_tokens <= SOME_TOKENS:
        return Tiles(tokens=64, outputs=64, splits=splits, num_warps=4, num_stages=3)
    return Tiles(tokens=64 if weight.group % 128 else 128, outputs=128, num_warps=8, num_stages=2)


@triton.jit
def product(
    x_ptr, rows, is_row, in_features, words_ptr, scales_ptr, outs, out_features, begin, end,
    GROUP: tl.constexpr, UNIT: tl.constexpr, HAS_MINIMA: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr,
    OUTS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of the tiles [begin, end) -> float32 [OUTS, TOKENS]. rows: where each token's x begins, int64 [TOKENS].

    UNIT = gcd(GROUP, TILE): columns that surely have one group."""
    is_out = outs < out_features
    lanes = tl.arange(0, SLAB)
    sums = tl.zeros([OUTS, TOKENS], tl.float32)
    for tile in tl.range(begin, end, num_stages=STAGES):
        places = (tile * out_features + outs.to(tl.int64)) * SLAB
        words = tl.load(words_ptr + places[:, None] + lanes[None, :], mask=is_out[:, None], other=0)
        for unit in tl.static_range(TILE // UNIT):
            group = (tile * TILE + unit * UNIT) // GROUP
            scales = tl.load(scales_ptr + group * out_features + outs, mask=is_out, other=0)
            zeros = zeros_of(scales, HAS_MINIMA, DOT, FAST)
            part = tl.zeros([OUTS, TOKENS], tl.float32)
            total = tl.zeros([TOKENS], tl.float32)
            for slab in tl.static_range(unit * (UNIT // SLAB), (unit + 1) * (UNIT // SLAB)):
                columns = tile * TILE + slab * SLAB + lanes
                seen = (columns < in_features)[:, None] & is_row[None, :]
                x = tl.load(x_ptr + rows[None, :] + columns[:, None], mask=seen, other=0).to(DOT)
                part = tl.dot(slab_of(words, zeros, slab, DOT, FAST), x, part, input_precision="ieee")
                if HAS_MINIMA:
                    total += tl.sum(x.to(tl.float32), 0)
            sums += half_of(scales)[:, None] * part
            if HAS_MINIMA:
                sums -= half_of(scales >> 16)[:, None] * total[None, :]
    return sums


@triton.jit
def _linear(
    x_ptr, words_ptr, scales_ptr, y_ptr, bias_ptr, residual_ptr,
    num_tokens, in_features, out_features, tiles, x_stride,
    GROUP: tl.constexpr, UNIT: tl.constexpr, HAS_MINIMA: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr,
    OUTS: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    outs = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    split = tl.program_id(2)
    share = tl.cdiv(tiles, SPLITS)
    sums = product(
        x_ptr, tokens.to(tl.int64) * x_stride, tokens < num_tokens, in_features,
        words_ptr, scales_ptr, outs, out_features,
        split * share, tl.minimum(split * share + share, tiles),
        GROUP, UNIT, HAS_MINIMA, DOT, FAST, OUTS, TOKENS, STAGES,
    )  # fmt: skip
    finish(
        sums, y_ptr, bias_ptr, residual_ptr, tokens, outs, num_tokens, out_features, split,
        HAS_BIAS, HAS_RESIDUAL, SPLITS > 1,
    )  # fmt: skip


def linear(x: Tensor, weight: Int4Linear, residual: Tensor | None = None, tiles: Tiles | None = None) -> Tensor:
    """x [T, in], of contiguous rows -> x W^T + bias (+ residual) [T, out]. tiles: for benchmarks; else `choose`."""
    num_tokens, out_features = x.shape[0], weight.out_features
    tiles = tiles or choose(num_tokens, weight, x.dtype)
    y = x.new_empty(num_tokens, out_features)
    target = sums_target(y, tiles.splits)
    ends = tiles.splits == 1
    _linear[tiles.grid(num_tokens, out_features)](
        x, weight.words, weight.scales, target,
        weight.bias if ends else None, residual if ends else None,
        num_tokens, x.shape[1], out_features, weight.words.shape[0], x.stride(0),
        **constants(weight, x.dtype), HAS_BIAS=ends and weight.bias is not None,
        HAS_RESIDUAL=ends and residual is not None, OUTS=tiles.outputs, TOKENS=tiles.tokens, SPLITS=tiles.splits,
        STAGES=tiles.num_stages, num_warps=tiles.num_warps,
    )  # fmt: skip
    if not ends:
        add_parts(target, weight.bias, residual, y)
    return y


def constants(weight: Int4Linear, dtype: torch.dtype) -> dict[str, object]:
    """What `product` is compiled for."""
    return {
        "GROUP": weight.group,
        "UNIT": gcd(weight.group, TILE.value),
        "HAS_MINIMA": weight.has_minima,
        "DOT": dot_dtype(dtype),
        "FAST": is_fast(dtype),
    }
