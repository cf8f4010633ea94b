"""Drafts from a model: a smaller one with the same vocabulary, or the model itself in fewer bits.

The draft model runs in the same process after the model's step, with a KV cache of its own whose blocks have the ids of
the model's: what the scheduler lends a request, both models write to, and a prefix that is found in the cache is found
in both. The draft model may be behind, so a block counts how many of its positions it has computed (`DraftBlocks`).
Positions for which the scheduler has lent no block yet, those of drafts, lie in a few spare blocks of the request.

    a step of the model     a b c        three requests get a token each
    the text not computed   a b c        in one step of the draft model, which gives the first drafts
    the drafts before       a   c        one step for each further draft, of the requests for which one more is worth it

A draft is drawn as the model's token will be: with the request's temperature, filters, penalties and masks, and with
the same random number, since that depends on the seed and on the token's place alone (`sampler.uniforms`). So where
both models agree about the probabilities, they draw the same token. No answer changes, whatever the draft model
computes: the model's own tokens are what is told.

How many drafts are made is decided by time and chance (`draft_worth`), and which of them are verified by the scheduler.
A request's first token is told before the draft model reads its prompt.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from math import exp

import msgspec

from splittime.core.step import Admitted, Row, RowResult, StepPlan, StepResult
from splittime.runner.acceptance import Trust
from splittime.runner.draft_worth import MARGIN, Confidence, DraftCosts, StepWorth
from splittime.runner.drafting import Draft, Look
from splittime.runner.parked import Emptied
from splittime.runner.torch_runner import TorchRunner

LEAST_TEXT = 16  # tokens of texts that a step may compute, however long they take
FIRST_OUTPUTS = 2  # tokens that an answer has before it is drafted


class DraftBlocks:
    """Which positions the draft model has computed of each block, from its first on; and spare blocks for drafts.

    num_blocks: of the model's KV cache. spare: ids of further blocks."""

    def __init__(self, num_blocks: int, spare: Iterable[int], block_size: int) -> None:
        self._num_filled, self._spare, self._block_size = [0] * num_blocks, list(spare), block_size

    def lend(self, table: list[int], new_block_ids: Sequence[int], start: int) -> None:
        """A request's table grows, as a row of the model begins at position `start`: what lies behind is to come."""
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
        return [self._spare.pop() for _ in range(num_blocks)]

    def give_spare(self, blocks: Iterable[int]) -> None:
        self._spare.extend(blocks)

    def forget(self) -> None:
        """Nothing is computed any more."""
        self._num_filled = [0] * len(self._num_filled)


class DraftedAnswer:
    """What is kept of a request. tokens: all that are known. table: the model's blocks; spare: further ones, for
    drafts. num_computed: positions that the draft model has computed, of known tokens. drafts: the last ones, which
    begin at the position `drafted_at`; probabilities: that the draft model gave to each; survival: of each the chance
    that it and all before it are right."""

    __slots__ = (
        *("drafted_at", "drafts", "is_broken", "most_tokens", "num_computed", "num_prompt", "probabilities"),
        *("request_id", "spare", "stop_ids", "survival", "table", "tokens", "trust"),
    )

    def __init__(self, admitted: Admitted, spare: list[int], most_tokens: int) -> None:
        self.request_id, self.stop_ids, self.trust = admitted.request_id, admitted.stop_token_ids, Trust()
        self.tokens = list(admitted.token_ids)
        self.num_prompt = len(self.tokens) - admitted.num_output_tokens
        self.most_tokens = min(most_tokens, self.num_prompt + (admitted.sampling.max_tokens or most_tokens))
        self.table: list[int] = []
        self.spare = spare
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
        """Whether a further draft could be a token of the answer, which ends with one that is not drafted."""
        is_ended = bool(self.drafts) and self.drafts[-1] in self.stop_ids
        return not is_ended and len(self.tokens) + len(self.drafts) + 1 < self.most_tokens


class ModelDrafter:
    """Implements `runner.drafting.Drafter`.

    runner: of the draft model; behind the `num_blocks` blocks of the model it has those that `num_spare_blocks` counts.
    most: drafts a row. most_tokens: that a request may have in either model. now_ns: reads the clock. costs: what
    steps of both models took.
    """

    def __init__(
        self,
        runner: TorchRunner,
        most: int,
        num_blocks: int,
        most_tokens: int,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.runner, self._most, self._most_tokens, self.now_ns = runner, most, most_tokens, now_ns
        self._block_size = runner.store.block_size
        spare = range(num_blocks, runner.store.num_blocks)
        self._blocks = DraftBlocks(num_blocks, spare, self._block_size)
        self._confidence, self.costs = Confidence(), DraftCosts()
        self._answers: dict[str, DraftedAnswer] = {}

    # ---- what happens to requests

    def admit(self, admitted: Admitted) -> None:
        self.release(admitted.request_id)
        spare = self._blocks.take_spare(spare_blocks(self._most, self._block_size))
        self._answers[admitted.request_id] = DraftedAnswer(admitted, spare, self._most_tokens)
        told = msgspec.structs.replace(admitted.sampling, logprobs=0, prompt_logprobs=None)
        self.runner.slots.update((), (msgspec.structs.replace(admitted, sampling=told),))

    def release(self, request_id: str) -> None:
        gone = self._answers.pop(request_id, None)
        if gone is None:
            return
        self._blocks.give_spare(gone.spare)
        self.runner.slots.update((request_id,), ())
        if gone.num_outputs:
            self.costs.learn_answer(gone.num_outputs)

    def learn(self, request_id: str, num_drafts: int, num_right: int) -> None:
        """There is nothing to learn that the answer's next tokens do not tell (`_compare`)."""

    def forget(self) -> None:
        self._blocks.forget()
        kept = [layer.data for layer in self.runner.store.layers]
        kept += [layer.scales for layer in self.runner.store.layers if layer.scales is not None]
        Emptied(kept).free()

    # ---- a step

    def draft(self, plan: StepPlan, result: StepResult, look: Look) -> Mapping[str, Draft] | None:
        self.costs.learn_model(plan, result)
        asking = []
        for row, one in zip(plan.rows, result.rows, strict=True):
            answer = self._answers.get(row.request_id)
            if answer is not None and self._take_in(answer, row, one):
                asking.append(answer)
        if not (asking and self.costs.model.is_known):
            return None
        self._make_drafts(asking)
        for answer in asking:
            if not answer.drafts:
                answer.trust.recover()
        drafts = {one.request_id: Draft(tuple(one.drafts), tuple(one.survival)) for one in asking if one.drafts}
        if not drafts:
            self._confidence.fade()
        return drafts

    def _take_in(self, answer: DraftedAnswer, row: Row, result: RowResult) -> bool:
        """Returns whether the request may be drafted."""
        is_new = not answer.table
        self._blocks.lend(answer.table, row.new_block_ids, row.start)
        if is_new:
            answer.num_computed = min(self._blocks.computed(answer.table), len(answer.tokens) - 1)
        answer.tokens += result.token_ids
        self._compare(answer)
        if row.draft_token_ids and result.token_ids:  # the scheduler has taken the blocks behind
            del answer.table[-(-(len(answer.tokens) - 1) // self._block_size) :]
        is_fine = result.error is None and not answer.is_broken
        return is_fine and bool(result.token_ids) and answer.num_outputs >= FIRST_OUTPUTS and answer.may_go_on

    def _compare(self, answer: DraftedAnswer) -> None:
        """Learns of the last drafts how many were right, and forgets them with what was computed for wrong ones."""
        if not answer.drafts:
            return
        came = answer.tokens[answer.drafted_at :]
        num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(answer.drafts, came, strict=False)))
        for place in range(min(num_right + 1, len(answer.drafts), len(came))):
            self._confidence.learn(answer.probabilities[place], place < num_right)
        factor = answer.trust.factor
        answer.trust.learn(sum(answer.survival[: len(came)]) / factor, num_right)
        end = min(
            answer.num_computed, answer.drafted_at + num_right, len(answer.tokens) - 1
        )  # the last one gives a draft
        self._blocks.set_computed(answer.table, answer.num_computed, end)
        self.runner.slots[answer.request_id].rewind(answer.drafted_at + num_right)
        answer.num_computed, answer.drafts, answer.survival, answer.probabilities = end, [], [], []

    def _make_drafts(self, asking: Sequence[DraftedAnswer]) -> None:
        """Puts drafts into the answers, one more of each in a step of the draft model, while they are worth it."""
        num_rows = len(asking)
        worth, chance = StepWorth(self.costs, num_rows), self._confidence.mean
        going = self._ready([one for one in asking if self._is_worth_reading(one, num_rows)])
        for number in range(self._most):
            expected = sum((one.survival[-1] if number else one.trust.factor) * chance for one in going)
            if not going or not worth.gains(expected, len(going), 0.0 if number else MARGIN):
                break
            self._draft_one_more(going)
            going = [one for one in going if len(one.drafts) == number + 1]
            worth.add(sum(one.survival[-1] for one in going), len(going))
            going = [one for one in going if one.may_go_on]

    def _is_worth_reading(self, answer: DraftedAnswer, num_rows: int) -> bool:
        """Whether the drafts of what is left of an answer are worth it to compute the text before them."""
        num_text = answer.num_behind - 2  # a token or two are no text: that is a draft's own step
        if num_text <= 0:
            return True
        chance = self._confidence.mean * answer.trust.factor
        left = self.costs.num_left(answer.num_outputs, answer.most_tokens - len(answer.tokens))
        saved_ns = self.costs.saved_ns(num_rows, chance, self._most)
        return left * saved_ns > num_text * self.costs.text_token_ns()

    def _ready(self, asking: Sequence[DraftedAnswer]) -> list[DraftedAnswer]:
        """Returns the answers whose text is computed, but for a token or two; computes what there is time for of the
        others': as much as makes this step twice as long."""
        ready = [one for one in asking if one.num_behind <= 2]
        time_left = self.costs.model.expected_ns(len(asking)) if asking else 0.0
        num_left = max(LEAST_TEXT, int(time_left / self.costs.text_token_ns()))
        rows = []
        for answer in asking:
            num_tokens = min(answer.num_behind - 1, num_left)
            if answer.num_behind > 2 and num_tokens > 0:
                begin = answer.num_computed
                text = tuple(answer.tokens[begin : begin + num_tokens])
                rows.append(Row(answer.request_id, begin, text, (), 0))
                num_left -= num_tokens
        self._run(rows)
        return ready

    def _draft_one_more(self, going: Sequence[DraftedAnswer]) -> None:
        for result in self._run([_next_row(answer) for answer in going]):
            if result.token_ids:
                self._take_draft(self._answers[result.request_id], result)

    def _take_draft(self, answer: DraftedAnswer, result: RowResult) -> None:
        probability = exp(min(0.0, result.logprobs[0].logprob))
        before = answer.survival[-1] if answer.survival else answer.trust.factor
        answer.drafts.append(result.token_ids[0])
        answer.probabilities.append(probability)
        answer.survival.append(before * self._confidence.chance(probability))

    def _run(self, rows: Sequence[Row]) -> tuple[RowResult, ...]:
        """A step of the draft model."""
        if not rows:
            return ()
        for row in rows:
            answer = self._answers[row.request_id]
            self.runner.slots[row.request_id].block_ids = [*answer.table, *answer.spare]
        begin_ns = self.now_ns()
        results = self.runner.run(StepPlan(0, tuple(rows))).rows
        num_tokens = sum(row.num_tokens for row in rows)
        self.costs.learn_draft(len(rows), num_tokens, self.now_ns() - begin_ns)
        for row, result in zip(rows, results, strict=True):
            self._note_computed(self._answers[row.request_id], row, result)
        return results

    def _note_computed(self, answer: DraftedAnswer, row: Row, result: RowResult) -> None:
        """What lies in spare blocks is computed again once the scheduler has lent blocks for it."""
        answer.is_broken = result.error is not None
        end = min(row.start + row.num_tokens, len(answer.table) * self._block_size)
        if end > answer.num_computed and not answer.is_broken:
            self._blocks.set_computed(answer.table, answer.num_computed, end)
            answer.num_computed = end


def _next_row(answer: DraftedAnswer) -> Row:
    """Returns the row that samples the next draft: behind the last one, or behind what is known."""
    if answer.drafts:
        begin = len(answer.tokens) + len(answer.drafts) - 1
        return Row(answer.request_id, begin, (answer.drafts[-1],), (), 1)
    answer.drafted_at = len(answer.tokens)
    return Row(answer.request_id, answer.num_computed, tuple(answer.tokens[answer.num_computed :]), (), 1)


def spare_blocks(most: int, block_size: int) -> int:
    """Returns how many blocks a request needs for the KV of its drafts, whose first may be a block's last position."""
    return -(-most // block_size) + 1


def num_spare_blocks(most: int, block_size: int, max_num_seqs: int) -> int:
    """Returns how many blocks the draft model's cache has more than the model's."""
    return max_num_seqs * spare_blocks(most, block_size)
