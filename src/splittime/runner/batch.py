"""From a plan's rows to tensors: tokens, positions, block tables, where K and V go, which tokens are sampled.

Rows are put in the order that attention likes: decode rows by length, then the others as they come. A decode row is one
token after the prompt; the last token of a prompt that was cut is not one, though it is alone. So how a prompt was cut,
which depends on who else is served, decides nothing about the arithmetic that its tokens get.
`Batch.rows` keeps that order; results go back to the plan's order by request id.

A row with drafts becomes several: its known tokens, and a decode row for each draft. They share the request's block
table, and a layer writes the KV of all tokens before any attends to it, so each draft is computed as the token that it
guesses would be in a step of its own, to the last bit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from splittime.core.errors import EngineError
from splittime.core.step import Row
from splittime.kernels.api import AttentionBatch
from splittime.runner.marks import to_device
from splittime.runner.slots import Slot, Slots


@dataclass(frozen=True)
class Batch:
    """token_ids, positions: int64 [T]. `attention` is in the order of `rows` and `slots`. has_drafts: some rows are of
    one request, since the plan's row brought drafts."""

    rows: list[Row]
    slots: list[Slot]
    has_drafts: bool
    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch

    def last_of(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """hidden [T, hidden] -> of the last token of each of these rows, [len(rows), hidden]."""
        if len(rows) == hidden.shape[0]:  # all rows, of one token each
            return hidden
        ends = torch.tensor([self.attention.query_begins[index + 1] - 1 for index in rows])
        return hidden[to_device(ends, hidden.device)]


def build(rows: Sequence[Row], slots: Slots, block_size: int, zero_block: int, verifies_drafts: bool = False) -> Batch:
    """Raises `EngineError` when a row's tokens lie outside its request's blocks, or it brings drafts that are not to be
    verified or make no sense."""
    for row in rows:
        slot = slots[row.request_id]
        _check(row, slot, block_size)
        if row.draft_token_ids:
            _check_drafts(row, slots.vocab_size, verifies_drafts)
        slot.learn(row)
    has_drafts = any(row.draft_token_ids for row in rows)
    alone = [part for row in rows for part in _parts(row)] if has_drafts else rows
    ordered = sorted(alone, key=lambda row: row.start if _is_decode(row, slots) else 1 << 62)
    chosen = [slots[row.request_id] for row in ordered]
    lengths = [len(row.token_ids) for row in ordered]
    contexts = [row.start + length for row, length in zip(ordered, lengths, strict=True)]
    begins = [0, *accumulate(lengths)]
    lines, positions = np.arange(len(ordered)), np.array([row.start for row in ordered])
    if begins[-1] > len(ordered):  # else a token each
        positions = np.arange(begins[-1]) + np.repeat(positions - begins[:-1], lengths)
        lines = np.repeat(lines, lengths)
    tables = _block_tables(chosen, zero_block)
    token_blocks = tables[lines, positions // block_size]
    attention = AttentionBatch(
        query_begins=begins,
        context_lens=contexts,
        block_tables=torch.from_numpy(tables),
        token_blocks=torch.from_numpy(token_blocks),
        token_offsets=torch.from_numpy(positions % block_size),
        num_decode_rows=sum(_is_decode(row, slots) for row in ordered),
    )
    token_ids = np.array([token for row in ordered for token in row.token_ids])
    return Batch(ordered, chosen, has_drafts, torch.from_numpy(token_ids), torch.from_numpy(positions), attention)


def _parts(row: Row) -> Iterator[Row]:
    """A row without its drafts, then one for each of them."""
    if not row.draft_token_ids:
        yield row
        return
    yield Row(row.request_id, row.start, row.token_ids, row.new_block_ids, 1)
    for position, token_id in enumerate(row.draft_token_ids, row.start + len(row.token_ids)):
        yield Row(row.request_id, position, (token_id,), (), 1)


def _is_decode(row: Row, slots: Slots) -> bool:
    return len(row.token_ids) == 1 and row.start >= slots[row.request_id].prompt_len


def _block_tables(slots: Sequence[Slot], zero_block: int) -> np.ndarray:
    """int64 [R, longest table], padded with the zero block."""
    tables = np.full((len(slots), max(len(slot.block_ids) for slot in slots)), zero_block, dtype=np.int64)
    for line, slot in zip(tables, slots, strict=True):
        line[: len(slot.block_ids)] = slot.block_ids
    return tables


def _check(row: Row, slot: Slot, block_size: int) -> None:
    end = row.start + row.num_tokens
    num_blocks = len(slot.block_ids) + len(row.new_block_ids)
    limit = min(num_blocks * block_size, slot.max_tokens)
    if not row.token_ids or end > limit:
        said = f"request {row.request_id}: tokens [{row.start}, {end}) do not fit its {num_blocks} blocks"
        raise EngineError(f"{said} and the context of {slot.max_tokens}", value=end, limit=limit)


def _check_drafts(row: Row, vocab_size: int, verifies_drafts: bool) -> None:
    said = f"request {row.request_id}"
    if not verifies_drafts:
        raise EngineError(f"{said}: this runner does not verify drafts", value=row.request_id)
    if row.num_samples != 1 + len(row.draft_token_ids):
        raise EngineError(
            f"{said}: {len(row.draft_token_ids)} drafts, {row.num_samples} samples", value=row.num_samples
        )
    strange = [token for token in row.draft_token_ids if not 0 <= token < vocab_size]
    if strange:
        raise EngineError(f"{said}: draft {strange[0]} is outside the vocabulary of {vocab_size}", value=strange[0])
