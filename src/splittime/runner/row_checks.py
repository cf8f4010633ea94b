"""What a runner refuses of a plan's rows, rather than compute it wrongly."""

from typing import TYPE_CHECKING

from splittime.core.errors import EngineError
from splittime.core.step import Row

if TYPE_CHECKING:
    from splittime.runner.batch import Slot


def check_row(row: Row, slot: "Slot", block_size: int) -> None:
    """Raises `EngineError` for a row whose tokens do not fit."""
    end = row.start + row.num_tokens
    num_blocks = len(slot.block_ids) + len(row.new_block_ids)
    limit = min(num_blocks * block_size, slot.max_tokens)
    if not row.token_ids or end > limit:
        said = f"request {row.request_id}: tokens [{row.start}, {end}) do not fit its {num_blocks} blocks"
        raise EngineError(f"{said} and the context of {slot.max_tokens}", value=end, limit=limit)


def check_drafts(row: Row, vocab_size: int, verifies_drafts: bool) -> None:
    """Raises `EngineError` for drafts that make no sense, or are not to be verified."""
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
