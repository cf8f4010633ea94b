"""Query and key norm, rotary embedding and the write into the KV store, in one kernel: qkv is read once.

A program takes one token and HEADS of its lines [num_heads + 2 num_kv_heads, D]. Queries and keys are turned in place,
adjacent pairs (2 i, 2 i + 1) as in `models.rope`; keys and values go to the token's place, rounded
from what is rounded to the activations' dtype. A token whose block is negative is turned and written nowhere.

The angles come gathered, `turns` complex64 [T, D / 2], or as the model's whole table with the tokens' `positions`: then
nothing is gathered beforehand, and a captured step reads the positions that it finds on the device.

Keys and values are rounded as `kernels.reference.rounding` says, to the bit.

A store keeps heads as they are (float32, float16, bfloat16), as int8 or as float8_e4m3fn; the last two have one float32
scale a token and head. Device functions tell which by the element type of the store's pointer, so that a kernel which
fuses something with the write (rotary embedding) needs to know nothing of it: it calls `store_kv_heads`.

A token whose block is negative is written nowhere: that is how the unused rows of a captured batch are marked.

Why not the obvious instructions: `/` is an approximation on the card and `div_rn` is not; there is no round-to-even in
Triton that its interpreter has too, and adding and subtracting a power of two rounds to even in any IEEE arithmetic;
and a maximum of floats loses a NaN, but a maximum of their bits keeps it (bits of absolute values are ordered alike).
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from splittime.kernels.api import KvShape, LayerKv
from splittime.kernels.reference import rounding
from splittime.kernels.triton.attention_plan import PagedPlan
from splittime.kernels.triton.elementwise import TritonNorm, normed

_LEAST_BITS = tl.constexpr(int(np.float32(rounding.LEAST_SCALE).view(np.int32)))  # it is subnormal: a double here
_INFINITY_BITS = tl.constexpr(0x7F800000)
_TO_INTEGER = tl.constexpr(1.5 * 2**23)  # floats near this are integers
_TO_THREE_BITS = tl.constexpr(1.5 * 2**20)  # times 2^e: floats near this are what e4m3 has in [2^e, 2^(e+1))
_LEAST_E4M3 = tl.constexpr(2.0**-6)  # the least power of two that is not subnormal there
_SIGN = tl.constexpr(-(2**31))  # the sign bit, as int32


@triton.jit
def largest(x):
    """float32 [H, C] -> the largest |x| of each line, [H]; NaN where there is one."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis=1).to(tl.float32, bitcast=True)


@triton.jit
def round_kv(x, LIMIT: tl.constexpr):
    """float32 [H, C] -> x over its line's scale, within [-LIMIT, LIMIT], and the scales [H] that are max |x| / LIMIT.
    A line whose scale is not a usable number is zeros."""
    scales = tl.math.div_rn(largest(x), LIMIT * 1.0)
    bits = scales.to(tl.int32, bitcast=True)
    is_usable = (bits >= _LEAST_BITS) & (bits < _INFINITY_BITS)
    steps = tl.math.div_rn(x, tl.broadcast_to(tl.where(is_usable, scales, 1.0)[:, None], x.shape))
    steps = tl.minimum(tl.maximum(steps, -LIMIT), LIMIT)
    return tl.where(is_usable[:, None], steps, 0.0), scales


@triton.jit
def to_int8(steps):
    """The nearest integers, ties to even, of steps in [-127, 127]."""
    return ((steps + _TO_INTEGER) - _TO_INTEGER).to(tl.int8)


@triton.jit
def to_e4m3(steps):
    """The nearest floats of 3 bits, ties to even, of steps in [-448, 448]: rounded before the cast, so that the cast is
    exact wherever it runs."""
    bits = steps.to(tl.int32, bitcast=True)
    shift = tl.maximum((bits & _INFINITY_BITS).to(tl.float32, bitcast=True), _LEAST_E4M3) * _TO_THREE_BITS
    rounded = ((steps + shift) - shift).to(tl.int32, bitcast=True)
    return (rounded | (bits & _SIGN)).to(tl.float32, bitcast=True).to(tl.float8e4nv)  # -0 stays -0


@triton.jit
def store_kv_heads(
    x, heads, columns, is_head, data, scales, side, block, offset,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Put heads of one token at their place in a store.

    x: float32 [H, C], already rounded to the activations' dtype; what is outside the masks may be anything.
    heads: int32 [H], KV heads; is_head: int1 [H], which of them to store. columns: int32 [C], the column of a head that
    each column of x is, in any order; those of HEAD_DIM and more are not stored.
    data, scales: pointers to `LayerKv.data` and `LayerKv.scales` (None where the store has none).
    side: 0 for keys, 1 for values, a scalar or int32 [H]. block, offset: the token's place, scalars; nothing is stored
    if block < 0.
    """
    is_inside = is_head[:, None] & (columns < HEAD_DIM)[None, :]
    x = tl.where(is_inside, x, 0.0)
    tiles = (block.to(tl.int64) * 2 + side) * NUM_KV_HEADS + heads  # [H]
    places = tiles * BLOCK_SIZE + offset
    targets = data + places[:, None] * HEAD_DIM + columns[None, :]
    is_stored = is_inside & (block >= 0)
    if data.dtype.element_ty == tl.int8:
        steps, head_scales = round_kv(x, 127)
        tl.store(targets, to_int8(steps), mask=is_stored)
        tl.store(scales + places, head_scales, mask=is_head & (block >= 0))
    elif data.dtype.element_ty == tl.float8e4nv:
        steps, head_scales = round_kv(x, 448)
        tl.store(targets, to_e4m3(steps), mask=is_stored)
        tl.store(scales + places, head_scales, mask=is_head & (block >= 0))
    else:
        tl.store(targets, x.to(data.dtype.element_ty), mask=is_stored)


@triton.jit
def _write_kv(
    kv, token_stride, data, scales, token_blocks, token_offsets,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    LINES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One token: its key heads, then its value heads, [2 Hkv, D]."""
    token = tl.program_id(0)
    block = tl.load(token_blocks + token)
    offset = tl.load(token_offsets + token)
    lines = tl.arange(0, LINES)
    columns = tl.arange(0, COLUMNS)
    is_line = lines < 2 * NUM_KV_HEADS
    is_inside = is_line[:, None] & (columns < HEAD_DIM)[None, :]
    source = kv + token.to(tl.int64) * token_stride + lines[:, None] * HEAD_DIM + columns[None, :]
    x = tl.load(source, mask=is_inside & (block >= 0), other=0.0).to(tl.float32)
    store_kv_heads(
        x, lines % NUM_KV_HEADS, columns, is_line, data, scales, lines // NUM_KV_HEADS, block, offset,
        NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM,
    )  # fmt: skip


def write_kv(kv: Tensor, store: LayerKv, plan: PagedPlan) -> None:
    """kv [T, 2 Hkv, D], keys then values, a view whose heads lie one after the other, to `plan`'s places (a
    `triton.attention.PagedPlan`)."""
    num_tokens, num_lines, head_dim = kv.shape
    assert kv.stride()[1:] == (head_dim, 1), "heads must be contiguous"
    if num_tokens:
        _write_kv[(num_tokens,)](
            kv, kv.stride(0), store.data, store.scales, plan.token_blocks, plan.token_offsets,
            NUM_KV_HEADS=plan.shape.num_kv_heads, BLOCK_SIZE=plan.shape.block_size, HEAD_DIM=head_dim,
            LINES=triton.next_power_of_2(num_lines), COLUMNS=triton.next_power_of_2(head_dim),
        )  # fmt: skip


@dataclass(frozen=True)
class RopeTiles:
    heads: int
    num_warps: int


def tiles_of(num_tokens: int, num_lines: int, head_dim: int) -> RopeTiles:
    """2048 elements a program where there are many tokens; few tokens are spread over more programs, since a step of
    one token is all latency."""
    columns = triton.next_power_of_2(head_dim)
    elements = 2048 if num_tokens >= 64 else 512
    heads = max(1, min(elements // columns, triton.next_power_of_2(num_lines)))
    return RopeTiles(heads, num_warps=4 if elements == 2048 else 2)


@triton.jit
def _turned(x, cos, sin):
    """float32 [H, C], pairs beside each other; cos, sin: [C / 2]."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    cos, sin = cos[None, :], sin[None, :]
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [x.shape[0], x.shape[1]])


@triton.jit
def _rope_write(
    qkv, norm_weight, turns, positions, data, scales, token_blocks, token_offsets,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    EPS: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, COLUMNS)
    is_turned = heads < NUM_HEADS + NUM_KV_HEADS
    is_inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (columns < HEAD_DIM)[None, :]
    places = heads[:, None] * HEAD_DIM + columns[None, :]
    line = qkv + token.to(tl.int64) * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM) + places
    given = tl.load(line, mask=is_inside, other=0.0)
    x = given
    if norm_weight is not None:
        weight = tl.load(norm_weight + places, mask=is_inside & is_turned[:, None], other=0.0)
        x = normed(given.to(tl.float32), weight, EPS, HEAD_DIM, qkv.dtype.element_ty)
    turn = token.to(tl.int64) if positions is None else tl.load(positions + token).to(tl.int64)
    pairs = tl.arange(0, COLUMNS // 2)
    angle = turns + turn * HEAD_DIM + 2 * pairs
    cos = tl.load(angle, mask=pairs < HEAD_DIM // 2, other=1.0)
    sin = tl.load(angle + 1, mask=pairs < HEAD_DIM // 2, other=0.0)
    turned = _turned(x.to(tl.float32), cos, sin).to(qkv.dtype.element_ty)
    tl.store(line, turned, mask=is_inside & is_turned[:, None])
    final = tl.where(is_turned[:, None], turned.to(tl.float32), given.to(tl.float32))
    kv_head = heads - NUM_HEADS
    is_kv = (kv_head >= 0) & (kv_head < 2 * NUM_KV_HEADS)
    side = tl.where(kv_head >= NUM_KV_HEADS, 1, 0)
    store_kv_heads(
        final, kv_head - side * NUM_KV_HEADS, columns, is_kv, data, scales, side,
        tl.load(token_blocks + token), tl.load(token_offsets + token), NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM,
    )  # fmt: skip


def rope_write(
    qkv: Tensor,
    qk_norm: TritonNorm | None,
    turns: Tensor,
    kv: LayerKv,
    shape: KvShape,
    token_blocks: Tensor,
    token_offsets: Tensor,
    positions: Tensor | None = None,
    tiles: RopeTiles | None = None,
) -> None:
    """qkv [T, num_heads + 2 num_kv_heads, head_dim], contiguous, in place; `kernels.api.Ops.rope_write`.

    turns: complex64 [T, head_dim / 2]; with positions, int64 or int32 [T], the table [num_positions, head_dim / 2] that
    they choose from. token_blocks, token_offsets: integers [T] on the device.
    """
    num_tokens, num_lines, head_dim = qkv.shape
    assert qkv.is_contiguous(), "qkv must be contiguous"
    assert turns.is_contiguous(), "turns must be contiguous"
    if not num_tokens:
        return
    tiles = tiles or tiles_of(num_tokens, num_lines, head_dim)
    weight, eps = (None, 0.0) if qk_norm is None else (qk_norm.weight, qk_norm.eps)
    _rope_write[(num_tokens, triton.cdiv(num_lines, tiles.heads))](
        qkv, weight, torch.view_as_real(turns), positions, kv.data, kv.scales, token_blocks, token_offsets,
        NUM_HEADS=num_lines - 2 * shape.num_kv_heads, NUM_KV_HEADS=shape.num_kv_heads, BLOCK_SIZE=shape.block_size,
        HEAD_DIM=head_dim, EPS=eps, HEADS=tiles.heads, COLUMNS=triton.next_power_of_2(head_dim),
        num_warps=tiles.num_warps,
    )  # fmt: skip
