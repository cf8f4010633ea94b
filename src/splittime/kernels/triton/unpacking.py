"""From integers in a register to 16-bit floats, by a mask and a subtraction of floats instead of a conversion.

*Four bits*, put below the exponent of 1024 (float16, or of 128 in bfloat16), are the number 1024 + q, from which
1024 + z is taken, exactly, two numbers an instruction (the trick: Kim et al., arXiv:2211.10017).

*Eight bits.* In float16, 0x64 above q + 128 is 1024 + q + 128. In bfloat16, whose seven bits are too few for that, 0x43
above q's lower seven bits is 128 and them, and 0x43 above q's sign bit is 128, or 256 where q is negative: the
difference is q.

Both as PTX, which the interpreter cannot run; there, and for float32, integers are converted. `run_ptx` of the tests
carries the PTX out by its definition. A scale and what goes with it share a 32-bit word (`words_of`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from splittime.kernels.rounded import INT4_ZERO
from splittime.kernels.triton.device import is_interpreted

ZERO = tl.constexpr(INT4_ZERO)


def is_fast(dtype: torch.dtype) -> bool:
    """Whether integers become floats of `dtype` by PTX of our own, which the interpreter cannot run."""
    return dtype != torch.float32 and not is_interpreted()


@triton.jit
def half_of(word):
    """The float16 in the lower half of a word, as float32."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


def words_of(lower: Tensor, upper: Tensor) -> Tensor:
    """lower: float16, upper: small integers or int16 -> int32, a word each."""
    return upper.to(torch.int32) << 16 | lower.view(torch.int16).to(torch.int32) & 0xFFFF


def halves(words: Tensor) -> tuple[Tensor, Tensor]:
    """What `words_of` was given: float32, and int16."""
    lower = (words << 16 >> 16).to(torch.int16).view(torch.float16)
    return lower.float(), (words >> 16).to(torch.int16)


@triton.constexpr_function
def four_bits_asm(slab: int, is_bfloat16: bool) -> str:
    """PTX for two lanes: words $1 and $2, zero points (two 16-bit floats, with the exponent's offset) $3 -> $0."""
    shift = f"shr.u32 t, t, {slab % 4 * 4};" if slab % 4 else ""
    exponent, kind = ("0x43004300", "bf16x2") if is_bfloat16 else ("0x64006400", "f16x2")
    halves = "0x5410" if slab < 4 else "0x7632"
    return (
        f"{{ .reg .b32 t; prmt.b32 t, $1, $2, {halves}; {shift} "
        f"lop3.b32 t, t, 0x000f000f, {exponent}, 0xea; sub.{kind} $0, t, $3; }}"
    )


@triton.jit
def slab_of(words, zeros, SLAB_INDEX: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr):
    """words int32 [outputs, 32], zeros [outputs] by `zeros_of` -> q - z of one slab, DOT [outputs, 32]."""
    if FAST:
        ASM: tl.constexpr = four_bits_asm(SLAB_INDEX, tl.bfloat16 == DOT)
        spread = tl.broadcast_to(zeros[:, None], words.shape)
        return tl.inline_asm_elementwise(ASM, "=r,r,r,r", [words, spread], dtype=zeros.dtype, is_pure=True, pack=2)
    else:
        return (((words >> (4 * SLAB_INDEX)) & 15) - zeros[:, None]).to(DOT)


@triton.jit
def zeros_of(scales, HAS_MINIMA: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr):
    """What is taken from the integers: int32, or if FAST a DOT with the offset that `four_bits_asm` gives them."""
    zeros = tl.full(scales.shape, ZERO, tl.int32) if HAS_MINIMA else scales >> 16
    if FAST:
        EXPONENT: tl.constexpr = 0x4300 if tl.bfloat16 == DOT else 0x6400
        return (zeros | EXPONENT).to(tl.int16).to(DOT, bitcast=True)
    else:
        return zeros


@triton.constexpr_function
def eight_bits_asm(is_bfloat16: bool) -> str:
    """PTX for four integers, $2 -> two pairs of 16-bit floats, $0 and $1."""
    if is_bfloat16:
        pair = (
            "prmt.b32 t, $2, 0x43434343, {bytes}; and.b32 u, t, 0xff7fff7f; and.b32 t, t, 0xff80ff80; "
            "sub.bf16x2 {out}, u, t; "
        )
        pairs = pair.format(bytes="0x4140", out="$0") + pair.format(bytes="0x4342", out="$1")
        return "{ .reg .b32 t, u; " + pairs + "}"
    pair = "prmt.b32 u, t, 0x64646464, {bytes}; sub.f16x2 {out}, u, k; "
    pairs = pair.format(bytes="0x4140", out="$0") + pair.format(bytes="0x4342", out="$1")
    return "{ .reg .b32 t, u, k; mov.b32 k, 0x64806480; xor.b32 t, $2, 0x80808080; " + pairs + "}"


@triton.jit
def floats_of(values, like, DOT: tl.constexpr, FAST: tl.constexpr):
    """int8 [..] -> DOT [..], exactly. like: any tensor of DOT."""
    if FAST:
        ASM: tl.constexpr = eight_bits_asm(tl.bfloat16 == DOT)
        return tl.inline_asm_elementwise(ASM, "=&r,=&r,r", [values], dtype=like.dtype, is_pure=True, pack=4)
    else:
        return values.to(DOT)
