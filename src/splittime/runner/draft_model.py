"""Drafts from a model: a smaller one with the same vocabulary, or the model itself in fewer bits.

The draft model runs in the same process after the model's step, with a KV cache of its own whose blocks have the ids of
the model's: what the scheduler lends a request, both models write to, and a prefix that is found in the cache is found
in both. The draft model may be behind, so a block counts how many of its positions it has computed (`draft_blocks`).
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
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from math import exp

import msgspec

from splittime.core.step import Admitted, Row, RowResult, StepPlan, StepResult
from splittime.runner.acceptance import Trust
from splittime.runner.draft_blocks import DraftBlocks, spare_blocks
from splittime.runner.draft_worth import (
    FADES,
    LEAST_TEXT,
    MARGIN,
    VERIFIED_WEIGHT,
    Confidence,
    DraftCosts,
    StepWorth,
)
from splittime.runner.drafting import Draft, Look
from splittime.runner.parked import Emptied
from splittime.runner.torch_runner import TorchRunner
from splittime.runner.warm_up import Probe

FORGIVE_STEPS = 16  # without a draft
LONGEST_PAUSE = 8  # steps in which it is not asked whether drafts are worth it, while they are not
READING_MARGIN = 2.0  # so many times what a text costs must its drafts be expected to save: few were verified yet
MEASURED_STEPS = 8
FIRST_OUTPUTS = 2  # tokens that an answer has before it is drafted


class DraftedAnswer:
    """What is kept of a request.

    tokens: all that are known. table: the model's blocks; spare: further ones, for drafts. num_computed: positions that
    the draft model has computed, those of drafts in lent blocks among them. drafts: the last ones, which begin at the
    position `drafted_at`; probabilities: that the draft model gave to each; survival: of each the chance that it and
    all before it are right.
    """

    __slots__ = (
        *("drafted_at", "drafts", "is_broken", "most_tokens", "num_computed", "num_prompt", "probabilities"),
        *("request_id", "spare", "stop_ids", "survival", "table", "tokens", "trust"),
    )

    def __init__(self, admitted: Admitted, most_tokens: int) -> None:
        self.request_id, self.stop_ids, self.trust = admitted.request_id, admitted.stop_token_ids, Trust()
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
        """Whether a further draft could be a token of the answer, which ends with one that is not drafted."""
        is_ended = bool(self.drafts) and self.drafts[-1] in self.stop_ids
        return not is_ended and len(self.tokens) + len(self.drafts) + 1 < self.most_tokens


class ModelDrafter:
    """Implements `runner.drafting.Drafter`. How much time searches may take (`Look`) is not its measure: it weighs what
    its own steps take.

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
        self._verified = 1.0  # the share of drafts that was verified
        self._num_idle = self._next_try = 0  # steps without drafts, and after how many of them some are tried again
        self._answers: dict[str, DraftedAnswer] = {}

    # ---- what happens to requests

    def admit(self, admitted: Admitted) -> None:
        self.release(admitted.request_id)
        self._answers[admitted.request_id] = DraftedAnswer(admitted, self._most_tokens)
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

    def measure(self) -> None:
        """Times the draft model's steps, before the first request: a row, some rows, and a text."""
        with Probe(self.runner.run, self.runner.resolved) as probe:
            for _ in range(MEASURED_STEPS):
                self.costs.draft.learn(1, self._timed(probe.decode))
                self.costs.draft.learn(probe.num_rows, self._timed(probe.decode_served))
            self.costs.text_ns = self._timed(probe.prefill) / probe.max_tokens

    def _timed(self, step: Callable[[], None]) -> int:
        begin_ns = self.now_ns()
        step()
        return self.now_ns() - begin_ns

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
            if answer is not None:
                self._take_in(answer, row, one)
                if one.error is None and self._may_draft(answer, one.token_ids):
                    asking.append(answer)
        if asking and self.costs.model.is_known and self._num_idle >= self._next_try:
            self._next_try = 0 if self._make_drafts(asking) else self._num_idle + self._pause()
        drafts = {one.request_id: Draft(tuple(one.drafts), tuple(one.survival)) for one in asking if one.drafts}
        self._num_idle = 0 if drafts else self._num_idle + 1
        if self._num_idle and self._num_idle % FORGIVE_STEPS == 0:
            self._forgive(asking)
        return drafts

    def _pause(self) -> int:
        """Returns after how many steps it is asked again; answers that are ready still are so then."""
        return min(self._num_idle + 1, LONGEST_PAUSE, self._most)

    def _forgive(self, asking: Sequence[DraftedAnswer]) -> None:
        """Forgets a little of what speaks against drafts, so that they are tried again, seldom."""
        self._confidence.fade()
        self._verified += (1 - FADES) * (1 - self._verified)
        for answer in asking:
            answer.trust.recover()

    def _take_in(self, answer: DraftedAnswer, row: Row, result: RowResult) -> None:
        """What a row of the model brings: its blocks, its tokens, and what became of the drafts."""
        is_new = not answer.table
        self._blocks.lend(answer.table, row.new_block_ids, row.start)
        if is_new:
            self._find_computed(answer)
        answer.tokens += result.token_ids
        if answer.drafts:
            share = len(row.draft_token_ids) / len(answer.drafts)
            self._verified += VERIFIED_WEIGHT * (min(1.0, share) - self._verified)
            self._compare(answer)
        if row.draft_token_ids and result.token_ids:  # the scheduler has taken the blocks behind
            del answer.table[-(-(len(answer.tokens) - 1) // self._block_size) :]

    def _may_draft(self, answer: DraftedAnswer, new_tokens: Sequence[int]) -> bool:
        is_ended = not set(answer.stop_ids).isdisjoint(new_tokens)
        is_wanted = bool(new_tokens) and not is_ended and answer.num_outputs >= FIRST_OUTPUTS
        return is_wanted and not answer.is_broken and answer.may_go_on and self._has_spare(answer)

    def _has_spare(self, answer: DraftedAnswer) -> bool:
        """More requests may run than the start said, since that may be changed: some then have no drafts."""
        if not answer.spare:
            answer.spare = self._blocks.take_spare(spare_blocks(self._most, self._block_size))
        return bool(answer.spare)

    def _find_computed(self, answer: DraftedAnswer) -> None:
        """Blocks of a prefix may have been computed for another request."""
        found = min(self._blocks.computed(answer.table), len(answer.tokens) - 1)
        answer.num_computed = max(answer.num_computed, found)

    def _compare(self, answer: DraftedAnswer) -> None:
        """Learns of the last drafts how many were right, and forgets them with what was computed for wrong ones."""
        came = answer.tokens[answer.drafted_at :]
        num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(answer.drafts, came, strict=False)))
        for place in range(min(num_right + 1, len(answer.drafts), len(came))):
            self._confidence.learn(answer.probabilities[place], place < num_right)
        answer.trust.learn(sum(answer.survival[: len(came)]) / answer.trust.factor, num_right)
        end = min(answer.num_computed, answer.drafted_at + num_right, len(answer.tokens) - 1)  # the last gives a draft
        self._blocks.set_computed(answer.table, answer.num_computed, end)
        self.runner.slots[answer.request_id].rewind(answer.drafted_at + num_right)
        answer.num_computed, answer.drafts, answer.survival, answer.probabilities = end, [], [], []

    def _make_drafts(self, asking: Sequence[DraftedAnswer]) -> bool:
        """Puts drafts into the answers, one more of each in a step of the draft model, while they are worth it. Returns
        whether the draft model computed anything."""
        worth, chance = StepWorth(self.costs, len(asking)), self._verified * self._confidence.mean
        if not worth.gains(chance * len(asking), len(asking), MARGIN):  # not even if all were ready
            return False
        (going, has_read), expected = self._ready(asking, chance), 0.0
        for number in range(self._most):
            expected = sum((one.survival[-1] if number else one.trust.factor) for one in going) * chance
            if not going or not worth.gains(expected, len(going), 0.0 if number else MARGIN):
                break
            self._draft_one_more(going)
            going = [one for one in going if len(one.drafts) == number + 1]
            worth.add(sum(one.survival[-1] for one in going), len(going))
            going = [one for one in going if one.may_go_on]
        return has_read or any(one.drafts for one in asking)

    def _ready(self, asking: Sequence[DraftedAnswer], chance: float) -> tuple[list[DraftedAnswer], bool]:
        """Returns those who lack no more than drafts leave behind, and whether texts of others were computed, as far as
        that is worth it. chance: that a draft is verified and right."""
        ready: list[DraftedAnswer] = []
        behind: list[DraftedAnswer] = []
        for answer in asking:
            if answer.num_behind > self._most + 1:
                self._find_computed(answer)
            (ready if answer.num_behind <= self._most + 1 else behind).append(answer)
        if behind:
            saved_ns = self.costs.saved_ns(len(asking), chance, self._most)
            behind = [one for one in behind if self._is_worth_reading(one, saved_ns)]
            self._read(behind, len(asking))
        return ready, bool(behind)

    def _is_worth_reading(self, answer: DraftedAnswer, saved_ns: float) -> bool:
        """Whether drafts of what is left of an answer are worth it to compute the text before them. saved_ns: of a
        token."""
        left = self.costs.num_left(answer.num_outputs, answer.most_tokens - len(answer.tokens))
        return left * saved_ns * answer.trust.factor > READING_MARGIN * answer.num_behind * self.costs.text_ns

    def _read(self, behind: Sequence[DraftedAnswer], num_rows: int) -> None:
        """Computes texts, for about as long as the model's step takes."""
        time_left = self.costs.model.expected_ns(num_rows)
        num_left = min(
            max(LEAST_TEXT, int(time_left / self.costs.text_ns)), self.runner.resolved.max_num_batched_tokens
        )
        rows = []
        for answer in behind:
            begin, num_tokens = answer.num_computed, min(answer.num_behind - 1, num_left)
            if num_tokens > 0:
                rows.append(Row(answer.request_id, begin, tuple(answer.tokens[begin : begin + num_tokens]), (), 0))
                num_left -= num_tokens
        _, took_ns = self._run(rows)
        self.costs.learn_text(sum(row.num_tokens for row in rows), took_ns)

    def _draft_one_more(self, going: Sequence[DraftedAnswer]) -> None:
        rows = [_next_row(answer) for answer in going]
        results, took_ns = self._run(rows)
        if sum(row.num_tokens for row in rows) <= 2 * len(rows):  # the last draft is often not computed yet
            self.costs.draft.learn(len(rows), took_ns)
        for result in results:
            if result.token_ids:
                self._take_draft(self._answers[result.request_id], result)

    def _take_draft(self, answer: DraftedAnswer, result: RowResult) -> None:
        probability = exp(min(0.0, result.logprobs[0].logprob))
        before = answer.survival[-1] if answer.survival else answer.trust.factor
        answer.drafts.append(result.token_ids[0])
        answer.probabilities.append(probability)
        answer.survival.append(before * self._confidence.chance(probability))

    def _run(self, rows: Sequence[Row]) -> tuple[tuple[RowResult, ...], int]:
        """Returns what came of a step of the draft model, and how long it took."""
        if not rows:
            return (), 0
        for row in rows:
            answer = self._answers[row.request_id]
            self.runner.slots[row.request_id].block_ids = [*answer.table, *answer.spare]
        begin_ns = self.now_ns()
        results = self.runner.run(StepPlan(0, tuple(rows))).rows
        took_ns = self.now_ns() - begin_ns
        for row, result in zip(rows, results, strict=True):
            self._note_computed(self._answers[row.request_id], row, result)
        return results, took_ns

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
