"""From a plan's rows to tensors: tokens, positions, block tables, where K and V go, which tokens are sampled.

A `Slot` is what the runner remembers of an admitted request until it is released: its block table and its tokens.
Everything else comes with the plan. The number of outputs so far is worked out from positions, not counted, so a row
that is run again, or a request that was preempted and admitted anew, gives the same random numbers and penalties.

Rows are put in the order that attention likes: decode rows by length, then the others as they come. A decode row is one
token after the prompt; the last token of a prompt that was cut is not one, though it is alone. So how a prompt was cut,
which depends on who else is served, decides nothing about the arithmetic that its tokens get.
`Batch.rows` keeps that order; results go back to the plan's order by request id.

A row with drafts becomes several: its known tokens, and a decode row for each draft. They share the request's block
table, and a layer writes the KV of all tokens before any attends to it, so each draft is computed as the token that it
guesses would be in a step of its own, to the last bit.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor

from splittime.core.errors import EngineError, ErrorInfo, SplittimeError
from splittime.core.step import PENDING, Admitted, Row
from splittime.kernels.api import AttentionBatch
from splittime.kernels.low_rank import AdapterUse
from splittime.models.adapters import Adapter
from splittime.runner.adapters import Adapters, uses_of
from splittime.runner.marks import to_device
from splittime.runner.penalties import TokenCounts, listed, listed_at_all
from splittime.runner.reasoning_bound import bound_of

if TYPE_CHECKING:
    from concurrent.futures import Future

    from splittime.runner.far_forms import FarWalk
    from splittime.runner.form_looks import FoundMasks
    from splittime.runner.form_masks import FormMasks
    from splittime.runner.form_walk import GrammarWalk, Key
    from splittime.runner.grammars import Grammars


class Slot:
    """State of one request. tokens: int64 [max_tokens + 1], known up to `num_known`; behind that, while a row with
    drafts runs, its drafts.

    place: a small number that no other slot has at the time.
    error: why no row of it can be computed, or what was computed does not count; or None.
    dead_end: the position of the first draft of its row behind which nothing may come.
    pooled: what an embedding needs of the chunks that were computed (`torch_runner`).
    adapter: what is added to the model's products for it; None: nothing.
    is_late: nothing is sampled for it in this step, as what may come is not known in time. late_mask: where that was
        so last, which place, and the look at it.
    """

    __slots__ = (
        "adapter",
        "admitted",
        "block_ids",
        "counts",
        "dead_end",
        "error",
        "grammar",
        "is_late",
        "late_mask",
        "listed_at_all",
        "max_tokens",
        "num_known",
        "place",
        "pooled",
        "prompt_len",
        "reasoning_bound",
        "tokens",
    )

    def __init__(self, admitted: Admitted, max_tokens: int, vocab_size: int, place: int) -> None:
        self.place = place
        known = len(admitted.token_ids)
        self.admitted = admitted
        self.error: str | ErrorInfo | None = _why_unservable(admitted, max_tokens, vocab_size)
        self.block_ids: list[int] = []
        self.max_tokens = self.dead_end = max_tokens
        self.prompt_len = known - admitted.num_output_tokens
        self.tokens = np.zeros(max(max_tokens, known) + 1, dtype=np.int64)
        self.tokens[:known] = admitted.token_ids
        self.num_known = known
        self.pooled: Tensor | None = None
        self.grammar: GrammarWalk | FarWalk | None = None
        self.is_late = False
        self.late_mask: tuple[Key, Future[FoundMasks]] | None = None
        self.adapter: Adapter | None = None
        self.reasoning_bound = bound_of(admitted.sampling)
        self.listed_at_all = listed_at_all(admitted.sampling, vocab_size) if self.error is None else None
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
        self.dead_end, self.is_late = self.max_tokens, False
        if row.token_ids != (PENDING,):
            self._learn(row.start, row.token_ids)
        if row.draft_token_ids:
            self.tokens[self.num_known : self.num_known + len(row.draft_token_ids)] = row.draft_token_ids

    @property
    def goes_on(self) -> bool:
        """Returns whether something may follow its last known token; of lengths it knows no limit but the context."""
        return self.error is None and int(self.tokens[self.num_known - 1]) not in self.admitted.stop_token_ids

    def learn_sampled(self, position: int, token_id: int) -> None:
        """The token that was sampled for this position."""
        self._learn(position, (token_id,))

    def knows(self, position: int, token_id: int) -> bool:
        """Returns whether this token is known to stand there, and another may follow; of a draft, whether it was
        right."""
        return position < min(self.num_known, self.dead_end) and int(self.tokens[position]) == token_id

    def rewind(self, num_known: int) -> None:
        """Forget tokens behind so many; a penalised request's outputs are counted anew."""
        if num_known >= self.num_known:
            return
        self.num_known = num_known
        if self.counts is not None:
            self.counts = TokenCounts(len(self.counts.seen), self.tokens[: self.prompt_len])
            self.counts.add_outputs(self.tokens[self.prompt_len : num_known])

    def drop_blocks(self, block_size: int) -> None:
        """Forget the blocks behind that of the last known token whose KV was written: all but the very last."""
        del self.block_ids[-(-(self.num_known - 1) // block_size) :]

    def counts_at(self, num_outputs: int) -> "TokenCounts | None":
        """The counts of the first `num_outputs` outputs, drafts among them; None where nothing counts them."""
        end = self.prompt_len + num_outputs
        if self.counts is None or end <= self.num_known:
            return self.counts
        return self.counts.followed_by(self.tokens[self.num_known : end])

    def listed_at(self, num_outputs: int) -> np.ndarray | None:
        """Returns which tokens the request's lists allow behind so many outputs, drafts among them, bool [vocab]; None:
        all. Where none may come, the request fails."""
        if self.listed_at_all is None:
            return None
        outputs = self.tokens[self.prompt_len : self.prompt_len + num_outputs]
        try:
            return listed(self.admitted.sampling, self.listed_at_all, outputs)
        except SplittimeError as failure:
            self.end_behind(num_outputs, failure.info)
            return None

    def end_behind(self, num_outputs: int, error: str | ErrorInfo | None) -> None:
        """Nothing may come behind so many outputs: the request fails; if a draft is among them, which may be wrong,
        what is sampled there does not count."""
        end = self.prompt_len + num_outputs
        if end > self.num_known:
            self.dead_end = min(self.dead_end, end - 1)
        else:
            self.error = error

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
    sampling, limit = admitted.sampling, admitted.sampling.reasoning_limit
    lists = [("bad_words", run) for run in sampling.bad_token_ids]
    lists += [("reasoning_limit", () if limit is None else limit.end_ids)]
    lists += [("allowed_token_ids", sampling.allowed_token_ids), ("logit_bias", tuple(sampling.logit_bias))]
    for kind, ids in (("prompt", admitted.token_ids), *lists):
        strange = [token for token in ids if not 0 <= token < vocab_size]
        if strange:
            return f"{kind} holds token id {strange[0]}, outside the vocabulary of {vocab_size}"
    return None


class Slots:
    """The slots by request id. grammars: what answers are held to; None: nothing here is. masks: what may come in them;
    None before the first. adapters: those that are loaded; None: this runner has none."""

    grammars: "Grammars | None" = None
    masks: "FormMasks | None" = None
    adapters: Adapters | None = None

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
                slot.late_mask = None  # nobody is told of it: another request may have this id by then
                self._free_places.append(slot.place)
        for newcomer in admitted:
            place = self._free_places.pop() if self._free_places else len(self._by_id)
            slot = self._by_id[newcomer.request_id] = Slot(newcomer, self.max_tokens, self.vocab_size, place)
            try:
                self._equip(slot)
            except SplittimeError as error:
                slot.error = error.info

    def _equip(self, slot: Slot) -> None:
        """Gives it its adapter, and a walk of its own through its grammar, which was compiled before it was queued.
        Raises `SplittimeError` where there is no such thing."""
        adapter, grammar = slot.admitted.adapter, slot.admitted.sampling.grammar
        if grammar and self.grammars is not None:
            slot.grammar = self.grammars.walk(grammar, slot.admitted.tenant)
            self.masks = self.masks or self.grammars.masks()
        if adapter and self.adapters is None:
            slot.error = "this runner has no adapters"
        elif adapter and self.adapters is not None:
            slot.adapter = self.adapters.named(adapter)


@dataclass(frozen=True)
class Batch:
    """token_ids, positions: int64 [T]. `attention` is in the order of `rows` and `slots`. has_drafts: some rows are of
    one request, since the plan's row brought drafts. adapter_uses: which tokens use which."""

    rows: list[Row]
    slots: list[Slot]
    has_drafts: bool
    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    adapter_uses: tuple[AdapterUse, ...] = ()

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
        check_row(row, slot, block_size)
        if row.draft_token_ids:
            check_drafts(row, slots.vocab_size, verifies_drafts)
        slot.learn(row)
    has_drafts = any(row.draft_token_ids for row in rows)
    alone = [part for row in rows for part in _parts(row)] if has_drafts else rows
    ordered = sorted(alone, key=lambda row: row.start if _is_decode(row, slots) else 1 << 62)
    chosen = [slots[row.request_id] for row in ordered]
    lengths = [len(row.token_ids) for row in ordered]
    begins = [0, *accumulate(lengths)]
    lines, positions = _places(ordered, lengths, begins)
    tables = _block_tables(chosen, zero_block)
    attention = AttentionBatch(
        query_begins=begins,
        context_lens=[row.start + length for row, length in zip(ordered, lengths, strict=True)],
        block_tables=torch.from_numpy(tables),
        token_blocks=torch.from_numpy(tables[lines, positions // block_size]),
        token_offsets=torch.from_numpy(positions % block_size),
        num_decode_rows=sum(_is_decode(row, slots) for row in ordered),
    )
    token_ids = np.array([token for row in ordered for token in row.token_ids])
    uses = uses_of([slot.adapter for slot in chosen], begins) if slots.adapters is not None else ()
    arrays = torch.from_numpy(token_ids), torch.from_numpy(positions)
    return Batch(ordered, chosen, has_drafts, *arrays, attention, uses)


def _places(rows: Sequence[Row], lengths: list[int], begins: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns of each token of these rows which row it is of, and its position in the request."""
    lines, positions = np.arange(len(rows)), np.array([row.start for row in rows])
    if begins[-1] == len(rows):  # a token each
        return lines, positions
    return np.repeat(lines, lengths), np.arange(begins[-1]) + np.repeat(positions - begins[:-1], lengths)


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
