"""Attention over the paged KV store: one call for decode rows, one for the others, on one stream without waiting.

`plan` (of `attention_plan`) is made once a step, `attend` called once a layer. Two launches at most, and one more for
each whose contexts were cut into parts.
"""

from functools import cache

import torch
from torch import Tensor

from splittime.kernels.api import AttentionPlan, LayerKv
from splittime.kernels.triton.attention_decode import DecodeTiles, attend_decode
from splittime.kernels.triton.attention_plan import PagedPlan, kv_bytes, plan, positions_read
from splittime.kernels.triton.attention_prefill import PrefillTiles, attend_prefill

__all__ = ["DecodeTiles", "PagedPlan", "PrefillTiles", "attend", "kv_bytes", "plan", "positions_read"]

NAME = "paged flash-decoding and flash-attention-2"


def attend(
    q: Tensor,
    store: LayerKv,
    plan: PagedPlan,
    scale: float,
    decode_tiles: DecodeTiles | None = None,
    prefill_tiles: PrefillTiles | None = None,
) -> Tensor:
    """q [T, Hq, D], whose heads lie one after the other, -> [T, Hq * D]; see `kernels.api.Ops.attention`. scale > 0.

    decode_tiles, prefill_tiles: None, what the shapes ask for; benchmarks give others.
    """
    assert q.stride()[1:] == (q.shape[2], 1), "heads must be contiguous"
    out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
    processors = processors_of(q.device)
    if plan.num_decode_rows:
        attend_decode(q, store, out, plan, scale, processors, decode_tiles)
    if plan.prefill is not None:
        attend_prefill(q, store, out, plan, scale, processors, prefill_tiles)
    return out


def own(plan: AttentionPlan) -> PagedPlan:
    assert isinstance(plan, PagedPlan), "a plan of another backend"
    return plan


@cache
def processors_of(device: torch.device) -> int:
    """Multiprocessors of the card; of the interpreter, which runs one program after the other, 1."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
