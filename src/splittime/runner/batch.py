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

The adapters that are loaded, by the id that a plan's requests name. A load runs in a thread of its own
(`drive.gates`), beside the steps; what it has made is there for them at once.

A request that has been admitted keeps its adapter, also when that is unloaded meanwhile.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from splittime.core.errors import ConfigError, EngineError, SplittimeError
from splittime.core.step import NO_STATE, Admitted, Row, RowState
from splittime.kernels.api import AttentionBatch, StateBatch, WeightScheme
from splittime.kernels.low_rank import AdapterUse
from splittime.models.adapters import Adapter, load_adapter
from splittime.models.decoder import Decoder
from splittime.runner.marks import to_device
from splittime.runner.slot import Slot

if TYPE_CHECKING:
    from splittime.runner.grammars import FormMasks, Grammars

MOST_LOADED = 128


class Adapters:
    """decoder: the base model, of which only its configuration and operations are looked at. scheme: that the adapters
    are kept in."""

    def __init__(self, decoder: Decoder, scheme: WeightScheme, max_rank: int) -> None:
        self._config, self._ops = decoder.config, decoder.ops
        self._scheme, self._max_rank = scheme, max_rank
        self._loaded: dict[str, Adapter] = {}

    def load(self, adapter_id: str, folder: str) -> int:
        """Returns the number of its parameters. Raises `ConfigError` for one that does not fit the base model or is
        one too many."""
        if len(self._loaded) >= MOST_LOADED:
            said = f"{MOST_LOADED} adapters are loaded"
            raise ConfigError(said, param="lora_name", limit=MOST_LOADED, hint="unload one: /v1/unload_lora_adapter")
        with torch.inference_mode():
            made = load_adapter(Path(folder), self._config, self._ops, self._scheme, self._max_rank)
        self._loaded[adapter_id] = made
        return made.num_parameters

    def unload(self, adapter_id: str) -> None:
        """Forgets it; one that is not there is no error."""
        self._loaded.pop(adapter_id, None)

    def named(self, adapter_id: str) -> Adapter:
        """Raises `EngineError` for one that is not loaded."""
        found = self._loaded.get(adapter_id)
        if found is None:
            hint = "unload it first, /v1/unload_lora_adapter, and load it again"
            raise EngineError("the request's adapter is not loaded", code="adapter_not_loaded", hint=hint)
        return found


def uses_of(adapters: Sequence[Adapter | None], begins: Sequence[int]) -> tuple[AdapterUse, ...]:
    """Returns which tokens of a batch use which adapter. adapters: of each row; begins: the first token of each, and
    the end of the last."""
    tokens: dict[Adapter, list[int]] = {}
    for row, adapter in enumerate(adapters):
        if adapter is not None:
            tokens.setdefault(adapter, []).extend(range(begins[row], begins[row + 1]))
    return tuple(AdapterUse(one.layers, torch.tensor(mine, dtype=torch.int32)) for one, mine in tokens.items())


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


def build(
    rows: Sequence[Row],
    slots: Slots,
    block_size: int,
    zero_block: int,
    verifies_drafts: bool = False,
    has_states: bool = False,
) -> Batch:
    """has_states: the model's layers keep some. Raises `EngineError` when a row's tokens lie
    outside its request's blocks, or it brings drafts that are not to be verified or make no sense."""
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
        states=_states(ordered, chosen) if has_states else None,
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


def _states(rows: Sequence[Row], slots: Sequence[Slot]) -> StateBatch:
    """A row that names no state has that of its request's place."""
    found = [
        row.state or RowState(slot.place if row.start else NO_STATE, slot.place)
        for row, slot in zip(rows, slots, strict=True)
    ]
    return StateBatch(
        reads=[state.read for state in found],
        writes=[state.write for state in found],
        keeps=[(line, count, slot) for line, state in enumerate(found) for count, slot in state.keeps],
    )


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
