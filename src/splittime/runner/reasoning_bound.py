"""The bound of what an answer may think: when so many tokens of reasoning are out, the marks that end it must come.

What must come hangs on the outputs alone, so it is the same after a preemption, and behind drafts. Like what a form
leaves no choice about, it is known before anything is computed, and told as drafts that cannot be wrong.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from splittime.core.sampling import ReasoningLimit, SamplingParams
from splittime.kernels.draw import has_bit, one_bit
from splittime.runner.sampler import Allowed

if TYPE_CHECKING:
    from splittime.runner.batch import Slot


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


def must_come(slot: "Slot", num_outputs: int) -> tuple[int, ...]:
    """Returns the tokens that must follow so many outputs of a request, drafts among them; () where nothing must."""
    end = slot.prompt_len + num_outputs
    return () if slot.reasoning_bound is None else slot.reasoning_bound.must_come(slot.tokens[slot.prompt_len : end])


def may_hold(slot: "Slot", num_outputs: int) -> bool:
    """Returns whether the bound of its reasoning may say what follows so many outputs, known or not."""
    known = slot.tokens[slot.prompt_len : slot.num_known]
    return slot.reasoning_bound is not None and slot.reasoning_bound.may_hold(num_outputs, known)


def has_bounds(slots: "Sequence[Slot]") -> bool:
    return any(slot.reasoning_bound is not None for slot in slots)


def hold_to_bounds(slots: "Sequence[Slot]", counts: Sequence[int], vocab_size: int, allowed: Allowed) -> Allowed:
    """Returns which tokens may come: as `allowed` has it, and only one where a bound says which must. What a form does
    not allow waits until it does: a character may have to be whole before."""
    if not has_bounds(slots):
        return allowed
    held = dict(allowed)
    for line, (slot, count) in enumerate(zip(slots, counts, strict=True)):
        following = must_come(slot, count)
        if following and (line not in held or has_bit(held[line], following[0])):
            held[line] = one_bit(following[0], vocab_size)
    return held
