"""The draft model's steps: what they compute of which request, where that lies, and how long it takes.

The draft model's KV cache has blocks with the ids of the model's: what the scheduler lends a request, both models write
to, and a prefix that is found in the cache is found in both. The draft model may be behind, so a block counts how many
of its positions it has computed (`DraftBlocks`). Positions for which the scheduler has lent no block yet, those of
drafts, lie in a few spare blocks of the request.

The draft model's blocks: which positions it has computed of each, and spare ones for drafts.

Its KV cache has the block ids of the model's, so a block that the scheduler lends a request is one in both caches. The
draft model may be behind the model, and blocks of a prefix may be full or half empty in its cache.

What is kept of a request for a draft model: its text, how far that is computed, and its last drafts.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from math import exp

import msgspec

from splittime.core.errors import ConfigError
from splittime.core.step import Admitted, Row, RowResult, StepPlan, StepResult
from splittime.models.head import HiddenFeatures
from splittime.runner.draft_record import LEAST_TEXT, DraftingCosts, TenantRecord, Trust
from splittime.runner.sleep import Emptied
from splittime.runner.torch_runner import TorchRunner
from splittime.runner.warm_up import Probe


class DraftedAnswer:
    """tokens: all that are known. table: the model's blocks; spare: further ones, for drafts. num_computed: positions
    that the draft model has computed, those of drafts in lent blocks among them. drafts: the last ones, which begin at
    the position `drafted_at`; probabilities: that the draft model gave to each; survival: of each the chance that it
    and all before it are right. record: of its tenant.
    """

    __slots__ = (
        *("drafted_at", "drafts", "is_broken", "most_tokens", "num_computed", "num_prompt", "probabilities"),
        *("record", "request_id", "spare", "stop_ids", "survival", "table", "tokens", "trust"),
    )

    def __init__(self, admitted: Admitted, most_tokens: int, record: TenantRecord) -> None:
        self.request_id, self.stop_ids = admitted.request_id, admitted.stop_token_ids
        self.record, self.trust = record, Trust()
        self.tokens = list(admitted.token_ids)
        self.num_prompt = len(self.tokens) - admitted.num_output_tokens
        self.most_tokens = min(most_tokens, self.num_prompt + (admitted.sampling.max_tokens or most_tokens))
        self.table: list[int] = []
        self.spare: list[int] = []
        self.num_computed = self.drafted_at = 0
        self.drafts: list[int] = []
        self.probabilities: list[float] = []
        self.survival: list[float] = []
        self.is_broken = False  # what the draft model computes for it is not finite

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_behind(self) -> int:
        """Returns how many known tokens the draft model has to compute for the first draft."""
        return len(self.tokens) - self.num_computed

    @property
    def may_go_on(self) -> bool:
        """Returns whether a further draft could be a token of the answer, which ends with one that is not drafted."""
        is_ended = bool(self.drafts) and self.drafts[-1] in self.stop_ids
        return not is_ended and len(self.tokens) + len(self.drafts) + 1 < self.most_tokens

    @property
    def survival_so_far(self) -> float:
        """Returns the chance that all its drafts are right; before the first, the request's own record."""
        return self.survival[-1] if self.survival else self.trust.factor

    def next_row(self) -> Row:
        """Returns the row that samples the next draft: behind the last one, or behind what is known."""
        if self.drafts:
            begin = len(self.tokens) + len(self.drafts) - 1
            return Row(self.request_id, begin, (self.drafts[-1],), (), 1)
        self.drafted_at = len(self.tokens)
        return Row(self.request_id, self.num_computed, tuple(self.tokens[self.num_computed :]), (), 1)

    def text_row(self, most_tokens: int) -> Row | None:
        """Returns the row that computes what is behind, but for the last token; None where there is none to compute."""
        num_tokens = min(self.num_behind - 1, most_tokens)
        end = self.num_computed + num_tokens
        token_ids = tuple(self.tokens[self.num_computed : end])
        return Row(self.request_id, self.num_computed, token_ids, (), 0) if num_tokens > 0 else None

    def add_draft(self, token_id: int, probability: float) -> None:
        self.survival.append(self.survival_so_far * self.record.confidence.chance(probability))
        self.drafts.append(token_id)
        self.probabilities.append(probability)

    def learn_drafts(self, num_verified: int) -> int:
        """Learns of the last drafts, of which so many were verified, how many were right, and forgets them. Returns up
        to which position the text is what was drafted from."""
        self.record.learn_verified(num_verified, len(self.drafts))
        came = self.tokens[self.drafted_at :]
        num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.drafts, came, strict=False)))
        for place in range(min(num_right + 1, len(self.drafts), len(came))):
            self.record.confidence.learn(self.probabilities[place], place < num_right)
        self.trust.learn(sum(self.survival[: len(came)]) / self.trust.factor, num_right)
        self.drafts, self.survival, self.probabilities = [], [], []
        return self.drafted_at + num_right


MEASURED_STEPS = 8


class DraftSteps:
    """runner: of the draft model; behind the `num_blocks` blocks of the model it has those that `num_spare_blocks`
    counts. most: drafts a row. now_ns: reads the clock. features: what a head reads; None for a model. costs: what
    steps of both models took."""

    def __init__(
        self,
        runner: TorchRunner,
        most: int,
        num_blocks: int,
        now_ns: Callable[[], int],
        features: HiddenFeatures | None = None,
    ) -> None:
        self._runner, self._most, self._now_ns, self._features = runner, most, now_ns, features
        self._block_size = runner.store.block_size
        self._blocks = DraftBlocks(num_blocks, range(num_blocks, runner.store.num_blocks), self._block_size)
        self.costs = DraftingCosts()

    def measure(self) -> None:
        """Times steps before the first request: a row, some rows, and a text. Raises ConfigError for a draft model that
        fails in them."""
        with Probe(self._run_probe, self._runner.resolved) as probe:
            for _ in range(MEASURED_STEPS):
                self.costs.draft.learn(1, self._timed(probe.decode))
                self.costs.draft.learn(probe.num_rows, self._timed(probe.decode_served))
            self.costs.text_ns = self._timed(probe.prefill) / probe.max_tokens

    def _run_probe(self, plan: StepPlan) -> StepResult:
        result = self._runner.run(plan)
        error = next((row.error for row in result.rows if row.error is not None), None)
        if error is not None:
            said = f"the draft model or head makes no drafts: {error}"
            raise ConfigError(
                said, param="speculative_config", hint="its weights may be damaged: make or fetch it again"
            )
        return result

    def _timed(self, step: Callable[[], None]) -> int:
        begin_ns = self._now_ns()
        step()
        return self._now_ns() - begin_ns

    # ---- whose blocks

    def admit(self, admitted: Admitted) -> None:
        told = msgspec.structs.replace(admitted.sampling, logprobs=0, prompt_logprobs=None, grammar="")
        self._runner.slots.update((), (msgspec.structs.replace(admitted, sampling=told, adapter=""),))

    def release(self, answer: DraftedAnswer) -> None:
        self._blocks.give_spare(answer.spare)
        self._runner.slots.update((answer.request_id,), ())

    def forget(self) -> None:
        """Nothing is computed any more, and what it took memory for is given back."""
        self._blocks.forget()
        kept = [layer.data for layer in self._runner.store.layers]
        kept += [layer.scales for layer in self._runner.store.layers if layer.scales is not None]
        kept += [self._features.data] if self._features is not None else []
        Emptied(kept).free()

    def lend(self, answer: DraftedAnswer, row: Row) -> None:
        """Takes in the blocks of a row of the model."""
        is_new = not answer.table
        self._blocks.lend(answer.table, row.new_block_ids, row.start)
        if is_new:
            self.find_computed(answer)

    def trim(self, answer: DraftedAnswer) -> None:
        """The scheduler has taken the blocks behind the last token whose KV the model has written."""
        del answer.table[-(-(len(answer.tokens) - 1) // self._block_size) :]

    def has_spare(self, answer: DraftedAnswer) -> bool:
        """More requests may run than the start said, since that may be changed: some then have no drafts."""
        if not answer.spare:
            answer.spare = self._blocks.take_spare(spare_blocks(self._most, self._block_size))
        return bool(answer.spare)

    def find_computed(self, answer: DraftedAnswer) -> None:
        """Blocks of a prefix may have been computed for another request."""
        found = min(self._blocks.computed(answer.table), len(answer.tokens) - 1)
        answer.num_computed = max(answer.num_computed, found)

    def rewind(self, answer: DraftedAnswer, num_right: int) -> None:
        """Forgets what was computed for drafts behind so many positions, which were wrong."""
        end = min(answer.num_computed, num_right, len(answer.tokens) - 1)  # the last gives a draft
        self._blocks.set_computed(answer.table, answer.num_computed, end)
        self._runner.slots[answer.request_id].rewind(num_right)
        answer.num_computed = end

    # ---- a step

    def read(self, behind: Sequence[DraftedAnswer], num_rows: int) -> None:
        """Computes texts, for about as long as a step of the model with so many rows takes."""
        num_in_time = int(self.costs.model.expected_ns(num_rows) / self.costs.text_ns)
        num_left = min(max(LEAST_TEXT, num_in_time), self._runner.resolved.max_num_batched_tokens)
        rows: dict[DraftedAnswer, Row] = {}
        for answer in behind:
            row = answer.text_row(num_left)
            if row is not None:
                rows[answer] = row
                num_left -= row.num_tokens
        _, took_ns = self._run(rows)
        self.costs.learn_text(sum(row.num_tokens for row in rows.values()), took_ns)

    def draft_one_more(self, going: Sequence[DraftedAnswer]) -> None:
        """Puts a draft more into each answer, but for those for which the draft model fails."""
        rows = {answer: answer.next_row() for answer in going}
        results, took_ns = self._run(rows)
        if sum(row.num_tokens for row in rows.values()) <= 2 * len(rows):  # the last draft is often not computed yet
            self.costs.draft.learn(len(rows), took_ns)
        for answer, result in zip(rows, results, strict=True):
            if result.token_ids:
                answer.add_draft(result.token_ids[0], exp(min(0.0, result.logprobs[0].logprob)))

    def _run(self, rows: dict[DraftedAnswer, Row]) -> tuple[tuple[RowResult, ...], int]:
        """Returns what came of a step of the draft model, and how long it took."""
        if not rows:
            return (), 0
        for answer in rows:
            self._runner.slots[answer.request_id].block_ids = [*answer.table, *answer.spare]
        begin_ns = self._now_ns()
        results = self._runner.run(StepPlan(0, tuple(rows.values()))).rows
        took_ns = self._now_ns() - begin_ns
        for (answer, row), result in zip(rows.items(), results, strict=True):
            answer.is_broken = result.error is not None
            # What lies in spare blocks is computed again once the scheduler has lent blocks for it; so is what a head
            # made of drafts, from its own features: the model's are better, and there by then.
            end = min(row.start + row.num_tokens, len(answer.table) * self._block_size)
            end = end if self._features is None else min(end, len(answer.tokens))
            if end > answer.num_computed and not answer.is_broken:
                self._blocks.set_computed(answer.table, answer.num_computed, end)
                answer.num_computed = end
        return results, took_ns


class DraftBlocks:
    """Which positions the draft model has computed of each block, from its first on; and spare blocks for drafts.

    num_blocks: of the model's KV cache. spare: ids of further blocks."""

    def __init__(self, num_blocks: int, spare: Iterable[int], block_size: int) -> None:
        self._num_filled, self._spare, self._block_size = [0] * num_blocks, list(spare), block_size

    def lend(self, table: list[int], new_block_ids: Sequence[int], start: int) -> None:
        """A request's table grows, as a row of the model begins at `start`; positions from there on are to come."""
        for block in new_block_ids:
            held = max(0, start - len(table) * self._block_size)
            self._num_filled[block] = min(self._num_filled[block], held)
            table.append(block)

    def computed(self, table: Sequence[int]) -> int:
        """Returns how many positions of a text are computed, from its first on."""
        full = sum(1 for _ in takewhile(lambda block: self._num_filled[block] == self._block_size, table))
        return full * self._block_size + (self._num_filled[table[full]] if full < len(table) else 0)

    def set_computed(self, table: Sequence[int], begin: int, end: int) -> None:
        """The positions from `begin` to `end` are computed now or, where `end` is the lower one, no more."""
        for place in range(min(begin, end) // self._block_size, -(-max(begin, end) // self._block_size)):
            if place < len(table):
                held = end - place * self._block_size
                self._num_filled[table[place]] = max(0, min(held, self._block_size))

    def take_spare(self, num_blocks: int) -> list[int]:
        """Returns so many, or none."""
        return [self._spare.pop() for _ in range(num_blocks)] if num_blocks <= len(self._spare) else []

    def give_spare(self, blocks: Iterable[int]) -> None:
        self._spare.extend(blocks)

    def forget(self) -> None:
        """Nothing is computed any more."""
        self._num_filled = [0] * len(self._num_filled)


def spare_blocks(most: int, block_size: int) -> int:
    """Returns how many blocks a request needs for the KV of its last token and its drafts."""
    return -(-most // block_size)


def num_spare_blocks(most: int, block_size: int, max_num_seqs: int) -> int:
    """Returns how many blocks the draft model's cache has more than the model's."""
    return max_num_seqs * spare_blocks(most, block_size)
