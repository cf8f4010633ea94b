"""From a plan's rows to tensors: tokens, positions, block tables, where K and V go, which tokens are sampled.

Rows are put in the order that attention likes: decode rows by length, then the others as they come. A decode row is one
token after the prompt; the last token of a prompt that was cut is not one, though it is alone. So how a prompt was cut,
which depends on who else is served, decides nothing about the arithmetic that its tokens get.
`Batch.rows` keeps that order; results go back to the plan's order by request id.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splittime.core.errors import EngineError
from splittime.core.plan import Row
from splittime.kernels.api import AttentionBatch
from splittime.runner.device.marks import to_device
from splittime.runner.slots import Slot, Slots


@dataclass(frozen=True)
class Batch:
    """token_ids, positions: int64 [T]. `attention` is in the order of `rows` and `slots`."""

    rows: list[Row]
    slots: list[Slot]
    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch

    def last_of(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """hidden [T, hidden] -> of the last token of each of these rows, [len(rows), hidden]."""
        if len(rows) == hidden.shape[0]:  # all rows, of one token each
            return hidden
        ends = torch.tensor([self.attention.query_begins[index + 1] - 1 for index in rows])
        return hidden[to_device(ends, hidden.device)]


def build(rows: Sequence[Row], slots: Slots, block_size: int, zero_block: int) -> Batch:
    """Raises `EngineError` when a row's tokens lie outside its request's blocks, or it brings drafts."""
    ordered = sorted(rows, key=lambda row: row.start if _is_decode(row, slots) else 1 << 62)
    chosen = [slots[row.request_id] for row in ordered]
    for row, slot in zip(ordered, chosen, strict=True):
        _check(row, slot, block_size)
        slot.learn(row)
    lengths = [len(row.token_ids) for row in ordered]
    contexts = [row.start + length for row, length in zip(ordered, lengths, strict=True)]
    begins = [0, *np.cumsum(lengths).tolist()]
    shifts = np.array([row.start for row in ordered]) - np.array(begins[:-1])
    positions = np.arange(begins[-1]) + np.repeat(shifts, lengths)
    tables = _block_tables(chosen, zero_block)
    token_blocks = tables[np.repeat(np.arange(len(ordered)), lengths), positions // block_size]
    attention = AttentionBatch(
        query_begins=begins,
        context_lens=contexts,
        block_tables=torch.from_numpy(tables),
        token_blocks=torch.from_numpy(token_blocks),
        token_offsets=torch.from_numpy(positions % block_size),
        num_decode_rows=sum(_is_decode(row, slots) for row in ordered),
    )
    token_ids = torch.tensor([token for row in ordered for token in row.token_ids])
    return Batch(ordered, chosen, token_ids, torch.from_numpy(positions), attention)


def _is_decode(row: Row, slots: Slots) -> bool:
    return len(row.token_ids) == 1 and row.start >= slots[row.request_id].prompt_len


def _block_tables(slots: Sequence[Slot], zero_block: int) -> np.ndarray:
    """int64 [R, longest table], padded with the zero block."""
    tables = np.full((len(slots), max(len(slot.block_ids) for slot in slots)), zero_block, dtype=np.int64)
    for line, slot in zip(tables, slots, strict=True):
        line[: len(slot.block_ids)] = slot.block_ids
    return tables


def _check(row: Row, slot: Slot, block_size: int) -> None:
    if row.draft_token_ids:
        raise EngineError(f"request {row.request_id}: this runner does not verify drafts", value=row.request_id)
    end = row.start + len(row.token_ids)
    num_blocks = len(slot.block_ids) + len(row.new_block_ids)
    limit = min(num_blocks * block_size, slot.max_tokens)
    if not row.token_ids or end > limit:
        said = f"request {row.request_id}: tokens [{row.start}, {end}) do not fit its {num_blocks} blocks"
        raise EngineError(f"{said} and the context of {slot.max_tokens}", value=end, limit=limit)
