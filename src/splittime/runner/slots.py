"""What the runner remembers of each admitted request: its block table and its tokens; gone when it is released.

Everything else comes with the plan. The number of outputs so far is worked out from positions, not counted, so a row
that is run again, or a request that was preempted and admitted anew, gives the same random numbers and penalties.
"""

from collections.abc import Iterable

import msgspec
import numpy as np

from splittime.core.errors import EngineError
from splittime.core.step import PENDING, Admitted, Row
from splittime.runner.penalties import TokenCounts


class Slot:
    """State of one request. tokens: int64 [max_tokens + 1], known up to `num_known`; behind that, while a row with
    drafts runs, its drafts.

    place: a small number that no other slot has at the time.
    error: why no row of it can be computed, or None.
    """

    __slots__ = (
        "admitted",
        "block_ids",
        "counts",
        "error",
        "max_tokens",
        "num_known",
        "place",
        "prompt_len",
        "tokens",
    )

    def __init__(self, admitted: Admitted, max_tokens: int, vocab_size: int, place: int) -> None:
        self.place = place
        known = len(admitted.token_ids)
        self.admitted = admitted
        self.error = _why_unservable(admitted, max_tokens, vocab_size)
        self.block_ids: list[int] = []
        self.max_tokens = max_tokens
        self.prompt_len = known - admitted.num_output_tokens
        self.tokens = np.zeros(max(max_tokens, known) + 1, dtype=np.int64)
        self.tokens[:known] = admitted.token_ids
        self.num_known = known
        self.counts: TokenCounts | None = None
        if admitted.sampling.has_penalties and self.error is None:
            self.counts = TokenCounts(vocab_size, self.tokens[: self.prompt_len])
            self.counts.add_outputs(self.tokens[self.prompt_len : known])

    def known(self, row: Row) -> Row | None:
        """The row with its tokens, where the plan could not know them; None where the step before gave none."""
        if row.token_ids != (PENDING,):
            return row
        if row.start >= self.num_known:
            return None
        return msgspec.structs.replace(row, token_ids=(int(self.tokens[row.start]),))

    def learn(self, row: Row) -> None:
        """Take in what a row brings: its blocks, its tokens if it has them, and its drafts."""
        self.block_ids.extend(row.new_block_ids)
        if row.token_ids != (PENDING,):
            self._learn(row.start, row.token_ids)
        if row.draft_token_ids:
            self.tokens[self.num_known : self.num_known + len(row.draft_token_ids)] = row.draft_token_ids

    def learn_sampled(self, position: int, token_id: int) -> None:
        """The token that was sampled for this position."""
        self._learn(position, (token_id,))

    def knows(self, position: int, token_id: int) -> bool:
        """Whether this token is known to stand there; of a draft, whether it was right."""
        return position < self.num_known and int(self.tokens[position]) == token_id

    def drop_blocks(self, block_size: int) -> None:
        """Forget the blocks behind that of the last known token whose KV was written: all but the very last."""
        del self.block_ids[-(-(self.num_known - 1) // block_size) :]

    def counts_at(self, num_outputs: int) -> "TokenCounts | None":
        """The counts of the first `num_outputs` outputs, drafts among them; None where nothing counts them."""
        end = self.prompt_len + num_outputs
        if self.counts is None or end <= self.num_known:
            return self.counts
        return self.counts.followed_by(self.tokens[self.num_known : end])

    def _learn(self, start: int, token_ids: tuple[int, ...]) -> None:
        end = start + len(token_ids)
        self.tokens[start:end] = token_ids
        if end > self.num_known:
            if self.counts is not None:
                self.counts.add_outputs(self.tokens[self.num_known : end])
            self.num_known = end


def _why_unservable(admitted: Admitted, max_tokens: int, vocab_size: int) -> str | None:
    if len(admitted.token_ids) > max_tokens:
        return f"{len(admitted.token_ids)} tokens are more than max_model_len {max_tokens}"
    for kind, ids in (("prompt", admitted.token_ids), ("logit_bias", admitted.sampling.logit_bias)):
        strange = [token for token in ids if not 0 <= token < vocab_size]
        if strange:
            return f"{kind} holds token id {strange[0]}, outside the vocabulary of {vocab_size}"
    return None


class Slots:
    """The slots by request id."""

    def __init__(self, max_tokens: int, vocab_size: int) -> None:
        self.max_tokens = max_tokens
        self.vocab_size = vocab_size
        self._by_id: dict[str, Slot] = {}
        self._free_places: list[int] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, request_id: str) -> Slot:
        slot = self._by_id.get(request_id)
        if slot is None:
            raise EngineError(f"the plan has a row for {request_id}, which was not admitted", value=request_id)
        return slot

    def update(self, released: Iterable[str], admitted: Iterable[Admitted]) -> None:
        """Forget the released, then learn the admitted. A request may be in both."""
        for request_id in released:
            slot = self._by_id.pop(request_id, None)
            if slot is not None:
                self._free_places.append(slot.place)
        for newcomer in admitted:
            place = self._free_places.pop() if self._free_places else len(self._by_id)
            self._by_id[newcomer.request_id] = Slot(newcomer, self.max_tokens, self.vocab_size, place)
