"""SwiGLU's elementwise part, and the check that a step's outputs are numbers.

silu(gate) is computed in float32 and rounded to the activations' dtype before it is multiplied, as torch does it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


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
