"""Others' attention at the same shapes: torch SDPA, FlexAttention, and FlashInfer where it can be imported."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.card import place
from splittime.kernels.api import AttentionBatch, KvShape, LayerKv

WORKSPACE_BYTES = 256 << 20


def row_of(store: LayerKv, shape: KvShape, table: Tensor, context: int) -> Tensor:
    """Keys and values of a row in one piece each, [2, Hkv, context, D]."""
    blocks = table[: -(-context // shape.block_size)].to(store.data.device)
    tiles = store.data[blocks].view(len(blocks), 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    return tiles.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]


def of_decode(
    q: Tensor, stores: list[LayerKv], batch: AttentionBatch, shape: KvShape, context: int, scale: float
) -> dict[str, Callable[[], Any]]:
    """Runs that go round stores, and round copies of them in one piece."""
    distinct = list({id(store): store for store in stores}.values())
    whole = cycle([torch.randn(2, len(q), shape.num_kv_heads, context, shape.head_dim, dtype=q.dtype, device=q.device)
                   for _ in distinct])  # fmt: skip
    wide = q[:, :, None]  # [rows, Hq, 1, D]
    flex = _compiled_flex()
    runs: dict[str, Callable[[], Any]] = {
        "torch sdpa": lambda: scaled_dot_product_attention(wide, *next(whole), scale=scale, enable_gqa=True),
        "torch flex": lambda: flex(wide, *next(whole), scale=scale, enable_gqa=True),
    }
    paged = cycle([_as_flashinfer(store, shape) for store in distinct])
    wrapper = _flashinfer("BatchDecodeWithPagedKVCacheWrapper")
    if wrapper is not None:
        sizes = (q.shape[1], shape.num_kv_heads, shape.head_dim, shape.block_size)
        wrapper.plan(*_pages(batch, shape), *sizes, q_data_type=q.dtype, kv_data_type=q.dtype, sm_scale=scale)
        runs["flashinfer"] = lambda: wrapper.run(q, next(paged))
    return runs


def of_prefill(
    q: Tensor, store: LayerKv, batch: AttentionBatch, shape: KvShape, scale: float
) -> dict[str, Callable[[], Any]]:
    """One prompt from its beginning."""
    tokens = len(q)
    whole = row_of(store, shape, batch.block_tables[0], tokens)[:, None].contiguous()
    wide = q.transpose(0, 1)[None].contiguous()  # [1, Hq, T, D]
    mask = create_block_mask(lambda b, h, query, key: query >= key, None, None, tokens, tokens, device=q.device.type)
    flex = _compiled_flex()
    runs: dict[str, Callable[[], Any]] = {
        "torch sdpa": lambda: scaled_dot_product_attention(wide, *whole, is_causal=True, scale=scale, enable_gqa=True),
        "torch flex": lambda: flex(wide, *whole, block_mask=mask, scale=scale, enable_gqa=True),
    }
    wrapper = _flashinfer("BatchPrefillWithPagedKVCacheWrapper")
    if wrapper is not None:
        paged = _as_flashinfer(store, shape)
        begins = torch.tensor(batch.query_begins, dtype=torch.int32, device=q.device)
        sizes = (q.shape[1], shape.num_kv_heads, shape.head_dim, shape.block_size)
        wrapper.plan(begins, *_pages(batch, shape), *sizes, causal=True, q_data_type=q.dtype, sm_scale=scale)
        runs["flashinfer"] = lambda: wrapper.run(q, paged)
    return runs


def _compiled_flex() -> Any:
    """For one shape: what was compiled for others goes, or torch would give up compiling after a few of them."""
    torch.compiler.reset()
    backend = "inductor" if torch.cuda.is_available() else "eager"
    return torch.compile(flex_attention, dynamic=False, backend=backend)


def _flashinfer(name: str) -> Any | None:
    try:
        import flashinfer
    except ImportError:
        return None
    return getattr(flashinfer, name)(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=place()), "HND")


def _as_flashinfer(store: LayerKv, shape: KvShape) -> Tensor:
    return store.data.view(-1, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)


def _pages(batch: AttentionBatch, shape: KvShape) -> tuple[Tensor, Tensor, Tensor]:
    """Where each row's blocks begin among all, the blocks, and how full each row's last one is."""
    counts = torch.tensor([-(-context // shape.block_size) for context in batch.context_lens])
    blocks = torch.cat([row[:count] for row, count in zip(batch.block_tables, counts.tolist(), strict=True)])
    last = [(context - 1) % shape.block_size + 1 for context in batch.context_lens]
    begins = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    return begins.int().to(place()), blocks.int().to(place()), torch.tensor(last, dtype=torch.int32).to(place())
