"""What the attention of one step works from: where rows begin and end and where their tokens lie, on the device.

`plan` makes it from a step's batch: one copy to the device, of one pinned buffer, and no waiting. A captured step
(a CUDA graph) makes it once from buffers that stay, `PagedPlan(...)` itself, and before each replay writes other values
into those buffers.

*What the graph fixes* is what is not in a tensor of the plan, because the host chooses launches from it: the shape and
the window; that all rows are decode rows (`prefill` None) and how many there are, `num_decode_rows`, so T; the width of
the block tables; and `max_context_tokens`, the longest context that is ever replayed, from which the number of parts
that contexts are cut into is chosen. Any context of 0 to that many tokens may then stand in `context_lens`. A row that
is not used has context 0 and token block -1: it reads nothing, writes nothing, and its output is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.kernels.api import AttentionBatch, AttentionPlan, KvShape, LayerKv
from splittime.kernels.triton.device import dot_dtype

MAX_HEAD_DIM = 256
BLOCK_SIZES = (8, 16, 32, 64, 128)
_ALIGNED_INTS = 4  # 16 bytes: pointers that are so aligned, or not, are different kernels


@dataclass(frozen=True, eq=False)
class PrefillRows:
    """The rows after the decode rows, on the host: row numbers, query tokens and the position of the first of them.

    tables: tile tables, by tokens a tile, made when the first layer asks for them; the other layers share them.
    """

    rows: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    tables: dict[int, Tensor] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        return int(self.lengths.max())

    @property
    def longest_context(self) -> int:
        return int((self.starts + self.lengths).max())

    def table(self, tile_tokens: int, device: torch.device) -> Tensor:
        if tile_tokens not in self.tables:
            self.tables[tile_tokens] = _on(device, torch.from_numpy(tile_table(self, tile_tokens)))
        return self.tables[tile_tokens]


def tile_table(prefill: PrefillRows, tile_tokens: int) -> np.ndarray:
    """int32 [tiles, 2]: the row of each tile and the first of its query tokens, counted from the row's first; those
    that end latest in their context, which have the most to do, first."""
    counts = -(-prefill.lengths // tile_tokens)
    index = np.repeat(np.arange(len(counts)), counts)
    firsts = (np.arange(len(index)) - np.repeat(counts.cumsum() - counts, counts)) * tile_tokens
    ends = prefill.starts[index] + np.minimum(firsts + tile_tokens, prefill.lengths[index])
    order = np.argsort(-ends, kind="stable")
    return np.stack((prefill.rows[index], firsts), axis=1)[order].astype(np.int32)


@dataclass(frozen=True, eq=False)
class PagedPlan(AttentionPlan):
    """All tensors int32, on the device. R rows, decode rows first; T query tokens.

    window_tokens: None, or how many positions back a query sees. query_begins [R + 1], context_lens [R], block_tables
    [R, blocks], token_blocks and token_offsets [T]: as in `AttentionBatch`. max_context_tokens: of the decode rows.
    positions_read: by one layer, of all rows together; None where the host did not say (a captured step: see
    `positions_read` for each replay).
    """

    shape: KvShape
    window_tokens: int | None
    query_begins: Tensor
    context_lens: Tensor
    block_tables: Tensor
    token_blocks: Tensor
    token_offsets: Tensor
    num_decode_rows: int
    max_context_tokens: int
    prefill: PrefillRows | None = None
    positions_read: int | None = None

    @property
    def max_seen_tokens(self) -> int:
        """Returns the most tokens that a decode row attends to: its context, or what of it is in the window."""
        if self.window_tokens is None:
            return self.max_context_tokens
        return min(self.max_context_tokens, self.window_tokens)


def plan(
    batch: AttentionBatch, shape: KvShape, window_tokens: int | None, dtype: torch.dtype, device: torch.device
) -> PagedPlan:
    """The plan of one step whose batch is on the host. dtype: of the activations."""
    check(shape, dtype)
    query_begins = torch.tensor(batch.query_begins, dtype=torch.int32)
    context_lens = torch.tensor(batch.context_lens, dtype=torch.int32)
    parts = (query_begins, context_lens, batch.block_tables, batch.token_blocks, batch.token_offsets)
    lengths = query_begins.diff().numpy()
    decode = batch.num_decode_rows
    there = _on_together(device, parts)
    return PagedPlan(
        shape=shape,
        window_tokens=window_tokens,
        query_begins=there[0],
        context_lens=there[1],
        block_tables=there[2],
        token_blocks=there[3],
        token_offsets=there[4],
        num_decode_rows=decode,
        max_context_tokens=max(batch.context_lens[:decode], default=0),
        prefill=_prefill_rows(decode, context_lens.numpy(), lengths),
        positions_read=positions_read(batch.context_lens, lengths.tolist(), window_tokens),
    )


def check(shape: KvShape, dtype: torch.dtype) -> None:
    """Raises `ConfigError` for what the kernels cannot do."""
    if not 1 <= shape.head_dim <= MAX_HEAD_DIM:
        message = f"head_dim {shape.head_dim} is not within 1 and {MAX_HEAD_DIM}, what the attention kernels hold"
        raise ConfigError(message, param="kernels", value="triton", limit=MAX_HEAD_DIM, hint="kernels=torch")
    if shape.block_size not in BLOCK_SIZES:
        message = f"block size {shape.block_size} is not one of {BLOCK_SIZES}, which tiles of keys are made of"
        raise ConfigError(message, param="block_size", value=shape.block_size, limit=max(BLOCK_SIZES))
    dot_dtype(dtype)


def positions_read(context_lens: Sequence[int], query_lens: Sequence[int], window_tokens: int | None) -> int:
    """Positions of the context that one layer looks at, each row's once: all of its context, or from the first that its
    first query token sees."""
    total = sum(context_lens)
    if window_tokens is not None:
        pairs = zip(context_lens, query_lens, strict=True)
        total -= sum(max(0, context - query - window_tokens + 1) for context, query in pairs if query)
    return total


def kv_bytes(plan: PagedPlan, store: LayerKv, positions: int | None = None) -> int:
    """Bytes of keys, values and their scales that one layer's attention looks at: at `positions` positions, or as many
    as the plan knows of."""
    seen = plan.positions_read if positions is None else positions
    assert seen is not None, "a captured plan does not know its lengths: give positions_read(...)"
    head_bytes = plan.shape.head_dim * store.data.element_size() + (0 if store.scales is None else 4)
    return seen * 2 * plan.shape.num_kv_heads * head_bytes


def _prefill_rows(decode: int, context_lens: np.ndarray, lengths: np.ndarray) -> PrefillRows | None:
    rows = decode + np.flatnonzero(lengths[decode:])
    if not len(rows):
        return None
    return PrefillRows(rows, lengths[rows], context_lens[rows] - lengths[rows])


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _on_together(device: torch.device, parts: Sequence[Tensor]) -> list[Tensor]:
    """These host tensors as int32 on the device, by one copy, each aligned."""
    sizes = [-(-part.numel() // _ALIGNED_INTS) * _ALIGNED_INTS for part in parts]
    host = torch.zeros(sum(sizes), dtype=torch.int32)
    for part, place in zip(parts, host.split(sizes), strict=True):
        place[: part.numel()] = part.flatten()
    there = _on(device, host).split(sizes)
    return [place[: part.numel()].view(part.shape) for part, place in zip(parts, there, strict=True)]
