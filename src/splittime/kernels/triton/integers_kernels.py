"""From integers in a register to 16-bit floats, by a mask and a subtraction of floats instead of a conversion.

*Four bits*, put below the exponent of 1024 (float16, or of 128 in bfloat16), are the number 1024 + q, from which
1024 + z is taken, exactly, two numbers an instruction (the trick: Kim et al., arXiv:2211.10017).

*Eight bits*, kept as u = q + 128. In float16, 0x64 above u is 1024 + u. In bfloat16, whose seven bits are too few for
that, 0x43 above u's lower seven bits is 128 and them, from which 256 is taken, or 128 where u's highest bit is set: it
turns the one number's bits into the other's.

Both as PTX, which the interpreter cannot run; there, and for float32, integers are converted. `run_ptx` of the tests
carries the PTX out by its definition. A scale and what goes with it share a 32-bit word (`words_of`).

The kernels of `integers`: a tile of outputs and tokens, from words to float32 sums. The layout is told there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from splittime.kernels.rounded import INT4_ZERO
from splittime.kernels.triton.device import is_interpreted
from splittime.kernels.triton.tiles import finish

ZERO = tl.constexpr(INT4_ZERO)


def is_fast(dtype: torch.dtype) -> bool:
    """Returns whether integers become floats of `dtype` by PTX of our own, which the interpreter cannot run."""
    return dtype != torch.float32 and not is_interpreted()


@triton.jit
def half_of(word):
    """The float16 in the lower half of a word, as float32."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


def words_of(lower: Tensor, upper: Tensor) -> Tensor:
    """lower: float16, upper: small integers or int16 -> int32, a word each."""
    return upper.to(torch.int32) << 16 | lower.view(torch.int16).to(torch.int32) & 0xFFFF


def halves(words: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what `words_of` was given: float32, and int16."""
    lower = (words << 16 >> 16).to(torch.int16).view(torch.float16)
    return lower.float(), (words >> 16).to(torch.int16)


@triton.constexpr_function
def unpack_asm(bits: int, slab: int, is_bfloat16: bool) -> str:
    """PTX for two lanes: words $1 and $2 -> two 16-bit floats, $0. Of four bits less the zero points (two such floats,
    with the exponent's offset) $3."""
    kind = "bf16x2" if is_bfloat16 else "f16x2"
    if bits == 4:
        shift = f"shr.u32 t, t, {slab % 4 * 4};" if slab % 4 else ""
        exponent, bytes_of = "0x43004300" if is_bfloat16 else "0x64006400", "0x5410" if slab < 4 else "0x7632"
        mask = f"{shift} lop3.b32 t, t, 0x000f000f, {exponent}, 0xea;"  # (a & b) | c
        return f"{{ .reg .b32 t; prmt.b32 t, $1, $2, {bytes_of}; {mask} sub.{kind} $0, t, $3; }}"
    exponent, bytes_of = "0x43434343" if is_bfloat16 else "0x64646464", "0x5140" if slab < 2 else "0x7362"
    pair = f"prmt.b32 t, $1, $2, {bytes_of}; prmt.b32 t, t, {exponent}, {'0x4342' if slab % 2 else '0x4140'};"
    if is_bfloat16:
        off = "lop3.b32 u, t, 0xff80ff80, 0x00800080, 0x6a; and.b32 t, t, 0xff7fff7f;"  # (a & b) ^ c
    else:
        off = "mov.b32 u, 0x64806480;"
    return f"{{ .reg .b32 t, u; {pair} {off} sub.{kind} $0, t, u; }}"


@triton.jit
def slab_of(words, zeros, BITS: tl.constexpr, SLAB_INDEX: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr):
    """words int32 [outputs, 32], zeros [outputs] by `zeros_of` -> q - z of one slab, DOT [outputs, 32]."""
    if FAST:
        ASM: tl.constexpr = unpack_asm(BITS, SLAB_INDEX, tl.bfloat16 == DOT)
        if BITS == 4:
            spread = tl.broadcast_to(zeros[:, None], words.shape)
            return tl.inline_asm_elementwise(ASM, "=r,r,r,r", [words, spread], dtype=zeros.dtype, is_pure=True, pack=2)
        else:
            return tl.inline_asm_elementwise(ASM, "=r,r,r", [words], dtype=zeros.dtype, is_pure=True, pack=2)
    else:
        return (((words >> (BITS * SLAB_INDEX)) & ((1 << BITS) - 1)) - zeros[:, None]).to(DOT)


@triton.jit
def zeros_of(scales, BITS: tl.constexpr, HAS_MINIMA: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr):
    """What is taken from the integers as they are kept: int32, or if FAST a DOT with the offset of `unpack_asm`."""
    if BITS == 8:
        zeros = tl.full(scales.shape, 128, tl.int32)
    elif HAS_MINIMA:
        zeros = tl.full(scales.shape, ZERO, tl.int32)
    else:
        zeros = scales >> 16
    if FAST:
        EXPONENT: tl.constexpr = 0x4300 if tl.bfloat16 == DOT else 0x6400
        return (zeros | EXPONENT).to(tl.int16).to(DOT, bitcast=True)
    else:
        return zeros


SLAB_COLUMNS = 32  # and words of a tile
SLAB = tl.constexpr(SLAB_COLUMNS)


@triton.jit
def product(
    x_ptr, rows, is_row, in_features, words_ptr, scales_ptr, outs, out_features, begin, end,
    BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, HAS_MINIMA: tl.constexpr, IS_WHOLE: tl.constexpr,
    DOT: tl.constexpr, FAST: tl.constexpr, OUTS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of the tiles [begin, end) -> float32 [OUTS, TOKENS]. rows: where each token's x begins, int64 [TOKENS].

    UNIT: columns that surely have one group. IS_WHOLE: the last tile ends with x's columns."""
    TILE: tl.constexpr = SLAB * 32 // BITS
    is_out = outs < out_features
    lanes = tl.arange(0, SLAB)
    words_at = words_ptr + outs.to(tl.int64)[:, None] * SLAB + lanes[None, :]
    x_at = x_ptr + rows[None, :] + lanes[:, None]
    sums = tl.zeros([OUTS, TOKENS], tl.float32)
    for tile in tl.range(begin, end, num_stages=STAGES):
        words = tl.load(words_at + tile * (out_features * SLAB), mask=is_out[:, None], other=0)
        for unit in tl.static_range(TILE // UNIT):
            if GROUP == 0:
                scales = tl.zeros([OUTS], tl.int32)
            else:
                group = (tile * TILE + unit * UNIT) // GROUP
                scales = tl.load(scales_ptr + group * out_features + outs, mask=is_out, other=0)
            zeros = zeros_of(scales, BITS, HAS_MINIMA, DOT, FAST)
            part = tl.zeros([OUTS, TOKENS], tl.float32)
            total = tl.zeros([TOKENS], tl.float32)
            for slab in tl.static_range(unit * UNIT // SLAB, (unit * UNIT + UNIT + SLAB - 1) // SLAB):
                seen = is_row[None, :]
                if not IS_WHOLE:
                    seen = seen & (lanes + (tile * TILE + slab * SLAB) < in_features)[:, None]
                if UNIT < SLAB:
                    seen = seen & ((lanes + slab * SLAB) // UNIT == unit)[:, None]
                x = tl.load(x_at + tile * TILE + slab * SLAB, mask=seen, other=0).to(DOT)
                weights = slab_of(words, zeros, BITS, slab, DOT, FAST)
                if GROUP == 0:
                    sums = tl.dot(weights, x, sums, input_precision="ieee")
                else:
                    part = tl.dot(weights, x, part, input_precision="ieee")
                if HAS_MINIMA:
                    total += tl.sum(x.to(tl.float32), 0)
            if GROUP != 0:
                sums += half_of(scales)[:, None] * part
            if HAS_MINIMA:
                sums -= half_of(scales >> 16)[:, None] * total[None, :]
    if GROUP == 0:
        sums *= tl.load(scales_ptr + outs, mask=is_out, other=0)[:, None]
    return sums


@triton.jit(do_not_specialize=["num_tokens"])
def multiply(
    x_ptr, words_ptr, scales_ptr, y_ptr, bias_ptr, residual_ptr,
    num_tokens, in_features, out_features, tiles, x_stride,
    BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, HAS_MINIMA: tl.constexpr, IS_WHOLE: tl.constexpr,
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
        BITS, GROUP, UNIT, HAS_MINIMA, IS_WHOLE, DOT, FAST, OUTS, TOKENS, STAGES,
    )  # fmt: skip
    finish(
        sums, y_ptr, bias_ptr, residual_ptr, tokens, outs, num_tokens, out_features, split,
        HAS_BIAS, HAS_RESIDUAL, SPLITS > 1,
    )  # fmt: skip


@triton.jit
def widen(
    words_ptr, scales_ptr, y_ptr, in_features, out_features,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_MINIMA: tl.constexpr, OUTS: tl.constexpr,
):  # fmt: skip
    """Stores one tile of OUTS outputs as the floats that it stands for, rounded once, into y [out, in]. A group is a
    whole number of slabs, or all columns (0)."""
    tile, outs = tl.program_id(0), tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    is_out, lanes = outs < out_features, tl.arange(0, SLAB)
    places = outs.to(tl.int64)[:, None]
    words_at = words_ptr + (tile.to(tl.int64) * out_features + places) * SLAB
    words = tl.load(words_at + lanes, mask=is_out[:, None], other=0)
    for slab in tl.static_range(32 // BITS):
        first = tile * (SLAB * 32 // BITS) + slab * SLAB
        integers = (words >> (BITS * slab)) & ((1 << BITS) - 1)
        if GROUP == 0:
            scales = tl.load(scales_ptr + outs, mask=is_out, other=0)
            floats = (integers - 128).to(tl.float32) * scales[:, None]
        else:
            kept = tl.load(scales_ptr + (first // GROUP) * out_features + outs, mask=is_out, other=0)
            zeros = zeros_of(kept, BITS, HAS_MINIMA, tl.float32, False)
            floats = (integers - zeros[:, None]).to(tl.float32) * half_of(kept)[:, None]
            if HAS_MINIMA:
                floats -= half_of(kept >> 16)[:, None]
        columns = first + lanes[None, :]
        is_there = is_out[:, None] & (columns < in_features)
        tl.store(y_ptr + places * in_features + columns, floats.to(y_ptr.dtype.element_ty), mask=is_there)
