"""Query and key norm, rotary embedding and the write into the KV store, in one kernel: qkv is read once.

A program takes one token and HEADS of its lines [num_heads + 2 num_kv_heads, D]. Queries and keys are turned in place,
adjacent pairs (2 i, 2 i + 1) as in `models.rope`; keys and values go to the token's place as `kv_write` rounds them,
from what is rounded to the activations' dtype. A token whose block is negative is turned and written nowhere.

The angles come gathered, `turns` complex64 [T, D / 2], or as the model's whole table with the tokens' `positions`: then
nothing is gathered beforehand, and a captured step reads the positions that it finds on the device.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from splittime.kernels.api import KvShape, LayerKv
from splittime.kernels.triton.kv_write import store_kv_heads
from splittime.kernels.triton.norm import TritonNorm, normed


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
