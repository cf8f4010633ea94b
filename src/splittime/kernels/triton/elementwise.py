"""The small operations: RMS norm, SwiGLU's elementwise part, and the check that a step's outputs are numbers.

*RMS norm*, alone or after adding the residual stream, in one pass over memory.

A program holds whole lines of x in registers: LINES of them, so that the short lines of a norm over heads fill it too.
The sum of squares is float32, in an order that depends on the width alone, so a line's result does not depend on what
else is in the batch. Rounded as the definition (`kernels.reference`) says: the sum to the activations' dtype before it
is normed, the normed line before it is scaled.

*SwiGLU.* silu(gate) is computed in float32 and rounded to the activations' dtype before it is multiplied, as torch does
it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from splittime.kernels.layer import PackedNorm

MAX_WIDTH = 32768  # of a line that is held in registers


@dataclass(frozen=True)
class TritonNorm(PackedNorm):
    """weight: [D] or [H, D], a line for each of the H lines that x [.., H, D] has."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class NormTiles:
    lines: int
    columns: int
    num_warps: int


def tiles_of(width: int) -> NormTiles:
    """About 4096 elements a program and 16 a thread: two loads of 16 bytes each of bfloat16, enough in flight for a
    program that is alone on its multiprocessor. Lines wider than that get more warps, up to 16."""
    columns = triton.next_power_of_2(width)
    lines = max(1, 1024 // columns)
    return NormTiles(lines, columns, num_warps=min(16, max(1, lines * columns // 512)))


def pack(weight: Tensor, eps: float) -> TritonNorm:
    assert weight.shape[-1] <= MAX_WIDTH, f"a norm over {weight.shape[-1]} is wider than {MAX_WIDTH}"
    return TritonNorm(weight.contiguous(), eps)


@triton.jit
def normed(x, weight, EPS: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """float32 [L, C], 0 beyond WIDTH, over its lines' root mean square, rounded to DTYPE, times `weight` [L, C] and
    rounded again -> DTYPE."""
    mean = tl.sum(x * x, axis=1) / WIDTH
    inverse = tl.math.div_rn(tl.full(mean.shape, 1.0, tl.float32), tl.math.sqrt_rn(mean + EPS))
    unit = (x * inverse[:, None]).to(DTYPE)
    return (unit.to(tl.float32) * weight.to(tl.float32)).to(DTYPE)


@triton.jit(do_not_specialize=["num_lines", "size"])
def _rms_norm(
    x, bias, residual, weight, total, y, num_lines, size,
    EPS: tl.constexpr, WIDTH: tl.constexpr, WEIGHT_LINES: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """residual and total are None, or total = x + residual is stored and normed. Of x there are PARTS, of `size` each,
    which are added in their order, then the bias, if any."""
    lines = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    columns = tl.arange(0, COLUMNS)
    places = lines[:, None] * WIDTH + columns[None, :]
    is_inside = (lines < num_lines)[:, None] & (columns < WIDTH)[None, :]
    scale_places = (lines % WEIGHT_LINES)[:, None] * WIDTH + columns[None, :]
    scale = tl.load(weight + scale_places, mask=is_inside, other=0.0)
    wide = tl.load(x + places, mask=is_inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        wide += tl.load(x + part * size + places, mask=is_inside, other=0.0)
    if bias is not None:
        wide += tl.load(bias + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        more = tl.load(residual + places, mask=is_inside, other=0.0).to(tl.float32)
        stream = (wide + more).to(y.dtype.element_ty)
        tl.store(total + places, stream, mask=is_inside)
        wide = stream.to(tl.float32)
    tl.store(y + places, normed(wide, scale, EPS, WIDTH, y.dtype.element_ty), mask=is_inside)


def rms_norm(x: Tensor, packed: TritonNorm, tiles: NormTiles | None = None) -> Tensor:
    """x [T, ..., D] -> a new tensor."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _launch(x, None, None, packed, None, y, tiles)
    return y


def add_parts_rms_norm(
    parts: Tensor, bias: Tensor | None, residual: Tensor, packed: TritonNorm, total: Tensor
) -> Tensor:
    """parts: float32 [splits, T, D], added in their order, then bias [D] and residual [T, D] -> total [T, D], which is
    written, as `tiles.add_parts` does it; and that normed, a new tensor."""
    y = torch.empty_like(total)
    _launch(parts, bias, residual.contiguous(), packed, total, y, None)
    return y


def _launch(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, packed: TritonNorm, total: Tensor | None, y: Tensor,
    tiles: NormTiles | None,
) -> None:  # fmt: skip
    width = y.shape[-1]
    tiles = tiles or tiles_of(width)
    num_lines = y.numel() // width
    if num_lines:
        _rms_norm[(triton.cdiv(num_lines, tiles.lines),)](
            x, bias, residual, packed.weight, total, y, num_lines, y.numel(),
            EPS=packed.eps, WIDTH=width, WEIGHT_LINES=packed.weight.numel() // width,
            LINES=tiles.lines, COLUMNS=tiles.columns, PARTS=x.numel() // y.numel(), num_warps=tiles.num_warps,
        )  # fmt: skip


@dataclass(frozen=True)
class LineTiles:
    columns: int
    num_warps: int


SILU_TILES = LineTiles(columns=1024, num_warps=4)  # 8 elements a thread: one load of 16 bytes of each half
FINITE_TILES = LineTiles(columns=2048, num_warps=4)


@triton.jit
def _silu_mul(gate_up, y, INNER: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = columns < INNER
    line = gate_up + token * (2 * INNER) + columns
    gate = tl.load(line, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(line + INNER, mask=is_inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + token * INNER + columns, (silu * up).to(y.dtype.element_ty), mask=is_inside)


def silu_mul(gate_up: Tensor, tiles: LineTiles = SILU_TILES) -> Tensor:
    """gate_up [T, 2 I] -> silu(gate) * up, [T, I]."""
    gate_up = gate_up.contiguous()
    num_tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(num_tokens, inner, dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(inner, tiles.columns))
        _silu_mul[grid](gate_up, y, INNER=inner, COLUMNS=tiles.columns, num_warps=tiles.num_warps)
    return y


@triton.jit
def _finite(x, is_finite, stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Exponents are compared, not values: no order of additions can hide a NaN, and no sum overflows."""
    line = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    num_bad = tl.zeros([COLUMNS], tl.int32)
    for begin in range(0, WIDTH, COLUMNS):
        value = tl.load(x + line * stride + begin + columns, mask=begin + columns < WIDTH, other=0.0).to(tl.float32)
        num_bad += tl.where((value.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000, 1, 0)
    tl.store(is_finite + line, tl.sum(num_bad, axis=0) == 0)


def finite(x: Tensor, tiles: LineTiles = FINITE_TILES) -> Tensor:
    """x [N, D] -> bool [N] on the device: whether all of a row is finite."""
    is_finite = torch.empty(len(x), dtype=torch.bool, device=x.device)
    x = x if x.stride(-1) == 1 else x.contiguous()
    if len(x):
        columns = min(tiles.columns, triton.next_power_of_2(x.shape[1]))
        _finite[(len(x),)](
            x, is_finite, x.stride(0), WIDTH=x.shape[1], COLUMNS=columns, num_warps=tiles.num_warps
        )  # fmt: skip
    return is_finite
