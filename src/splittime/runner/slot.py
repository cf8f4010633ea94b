"""A `Slot`: what the runner remembers of an admitted request until it is released, and what its sampling parameters
keep of its tokens.

Its block table and its tokens are here; everything else comes with the plan. `TokenCounts` are what penalties go by,
`listed` says which tokens a request's lists allow.

`ReasoningBound` bounds what an answer may think: when so many tokens of reasoning are out, the marks that end it must
come. What must come hangs on the outputs alone, so it is the same after a preemption, and behind drafts.
"""

import copy
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor

from splittime.core.errors import ErrorInfo, RequestError, SplittimeError
from splittime.core.sampling import ReasoningLimit, SamplingParams
from splittime.core.step import PENDING, Admitted, Row
from splittime.models.adapters import Adapter

if TYPE_CHECKING:
    from concurrent.futures import Future

    from splittime.runner.far_forms import FarWalk
    from splittime.runner.form_walk import FoundMasks, GrammarWalk, Key

MOST_BLANKS = 8  # tokens of white space before the mark that begins the reasoning


class ReasoningBound:
    """The bound of one request. An end that was found is remembered, and looked at again: it may have been a draft."""

    def __init__(self, limit: ReasoningLimit) -> None:
        self._limit, self._ends = limit, [np.array(run) for run in (limit.end_ids, *limit.closed_by)]
        self._closed_at, self._closed_by = 0, self._ends[0]  # so many outputs have this end, where they do
        self._is_settled = False

    def must_come(self, outputs: np.ndarray) -> tuple[int, ...]:
        """Returns the tokens that must follow these outputs, int64 [N]; () where the model is free."""
        begin = self._begin(outputs) if len(outputs) >= self._limit.max_tokens else None
        if begin is None or len(outputs) < begin + self._limit.max_tokens or self._is_closed(outputs, begin):
            return ()
        end, thought = self._limit.end_ids, outputs[begin:].tolist()
        sizes = range(min(len(end) - 1, len(thought)), -1, -1)
        return end[next(size for size in sizes if thought[len(thought) - size :] == list(end[:size])) :]

    def may_hold(self, num_outputs: int, known: np.ndarray) -> bool:
        """Returns whether anything may have to follow so many outputs, by those that are known, the first of them."""
        if num_outputs < self._limit.max_tokens or self._is_settled:
            return False
        begin, most = self._begin(known), MOST_BLANKS + max(map(len, self._limit.begin_ids), default=0)
        self._is_settled = len(known) >= most if begin is None else self._is_closed(known, begin)
        return not self._is_settled

    def _begin(self, outputs: np.ndarray) -> int | None:
        """Returns behind how many outputs the reasoning begins; None where there is none, or not yet."""
        for blanks in range(MOST_BLANKS + 1):
            for run in self._limit.begin_ids or ((),):
                if outputs[blanks : blanks + len(run)].tolist() == list(run):
                    return blanks + len(run)
            if blanks >= len(outputs) or outputs[blanks] not in self._limit.blank_ids:
                return None
        return None

    def _is_closed(self, outputs: np.ndarray, begin: int) -> bool:
        size, at = len(self._closed_by), self._closed_at
        if begin + size <= at <= len(outputs) and np.array_equal(outputs[at - size : at], self._closed_by):
            return True
        for end in self._ends:
            if found := _end_of(end, outputs[begin:]):
                self._closed_at, self._closed_by = begin + found, end
                return True
        return False


def _end_of(run: np.ndarray, outputs: np.ndarray) -> int:
    """Returns how many outputs there are up to the end of this run, where it first stands among them; 0 for nowhere."""
    if len(outputs) < len(run):
        return 0
    found = np.flatnonzero((np.lib.stride_tricks.sliding_window_view(outputs, len(run)) == run).all(axis=1))
    return int(found[0]) + len(run) if len(found) else 0


def bound_of(sampling: SamplingParams) -> ReasoningBound | None:
    """Returns the bound that a request asks for; None for none."""
    return None if sampling.reasoning_limit is None else ReasoningBound(sampling.reasoning_limit)


class TokenCounts:
    """How often each token occurred. outputs: float32 [vocab]; seen: bool [vocab], in the prompt or the outputs."""

    def __init__(self, vocab_size: int, prompt: np.ndarray) -> None:
        self.outputs = torch.zeros(vocab_size)
        self.seen = torch.zeros(vocab_size, dtype=torch.bool)
        self.seen[torch.from_numpy(prompt)] = True

    def add_outputs(self, token_ids: np.ndarray) -> None:
        ids = torch.from_numpy(token_ids)
        self.outputs.index_add_(0, ids, torch.ones(len(token_ids)))
        self.seen[ids] = True

    def followed_by(self, token_ids: np.ndarray) -> "TokenCounts":
        """A copy that counts these outputs too."""
        other = copy.copy(self)
        other.outputs, other.seen = self.outputs.clone(), self.seen.clone()
        other.add_outputs(token_ids)
        return other


def listed_at_all(sampling: SamplingParams, vocab_size: int) -> np.ndarray | None:
    """Returns which tokens `allowed_token_ids` has, bool [vocab]; None where the request has no list of tokens."""
    if not sampling.is_listed:
        return None
    found = np.full(vocab_size, not sampling.allowed_token_ids)
    found[list(sampling.allowed_token_ids)] = True
    return found


def listed(sampling: SamplingParams, at_all: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Returns which tokens may follow these outputs, bool [vocab]: those of `listed_at_all`, but for the last token of
    any of `bad_token_ids` whose others are there. Raises RequestError where nothing is left.

    outputs: int64 [N], drafts among them; a run that began in the prompt is none."""
    found = at_all.copy()
    for *begin, last in sampling.bad_token_ids:
        if len(begin) <= len(outputs) and outputs[len(outputs) - len(begin) :].tolist() == begin:
            found[last] = False
    if not found.any():
        words, hint = "allowed_token_ids and bad_words leave no token here", "allow more tokens, or forbid fewer words"
        raise RequestError(words, param="bad_words", hint=hint)
    return found


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
