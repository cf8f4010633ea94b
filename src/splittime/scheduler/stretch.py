"""A stretch of steps in which nothing is decided: who runs gets a row for one token, nobody is admitted or preempted.

A simulation takes such steps without a plan for each (ADR 20). Each step changes the same things for all rows, except
for rows at a block's edge. These are known beforehand: rows of the same *phase* (the place of their next token within
its block) reach the edge in the same step.

    block size 4, places of next rows     a: 6   b: 9   c: 2      a and c have phase 2, b has phase 1
    step 0                                a and c are at place 2, b at 1
    step 1                                a and c fill their blocks: the prefix index learns them
    step 2                                a and c begin a block, which they take from the pool; b fills its block

Whoever takes the steps says when each begins, and what its tokens are. `close` brings the requests to the state after
the last step, and ends those that have as many tokens as they may have; none has before the last step. A stretch may
end before any step: what `begin_step` has done by then is what that step's plan would do first.
"""

from collections.abc import Callable

from splittime.core.request import FinishReason
from splittime.scheduler.events import RequestOutput
from splittime.scheduler.requests import Requests
from splittime.scheduler.state import DECODE, RequestState

TokensOf = Callable[[str, int, int], list[int]]  # so many that a request samples, from a place on


class QuietStretch:
    """max_steps: how many steps there may be at the most; none may begin later than `until_ns`. num_steps: how many
    have ended. is_steady: called in each step, says whether all who wait go on waiting. request_ids, starts: of the
    rows of the first step."""

    def __init__(
        self, requests: Requests, tokens_of: TokensOf, max_steps: int, until_ns: float, is_steady: Callable[[], bool]
    ) -> None:
        self.max_steps, self.until_ns, self._steps_to_end = max_steps, until_ns, max_steps
        self.num_steps, self._is_steady = 0, is_steady
        self._states = list(requests.running)
        self.request_ids = [state.request_id for state in self._states]
        self.starts = [state.num_computed for state in self._states]
        self._requests, self._cache, self._tokens_of = requests, requests.cache, tokens_of
        self._block_size = requests.cache.block_size
        self._by_phase: list[list[RequestState]] = [[] for _ in range(self._block_size)]
        for state in self._states:
            self._by_phase[state.num_computed % self._block_size].append(state)

    def begin_step(self) -> bool:
        """Takes a block for each row at a block's edge. Returns False if there are too few blocks, or if somebody can
        be admitted."""
        for state in self._by_phase[-self.num_steps % self._block_size]:
            if not self._cache.reserve(state.lease, state.num_computed + self.num_steps + 1):
                return False
        return self._is_steady()

    def end_step(self) -> None:
        """Index the blocks that the step has filled."""
        self.num_steps += 1
        if self._cache.enable_prefix_caching:
            for state in self._by_phase[-self.num_steps % self._block_size]:
                self._learn_tokens(state)
                self._cache.commit(state.lease, state.token_ids, len(state.token_ids) - 1)

    @property
    def has_ends(self) -> bool:
        """The step that has ended last was the last of one of the requests."""
        return self.num_steps == self._steps_to_end

    def close(self, committed_ns: int) -> list[RequestOutput]:
        """Put the requests where the steps have left them, the last of which was committed then. Returns the ends."""
        for state in self._states:
            self._learn_tokens(state)
            state.num_computed += self.num_steps
            state.share.charge(self.num_steps)
        self._requests.counts.output_tokens += self.num_steps * len(self._states)
        ended = [state for state in self._states if len(state.token_ids) == state.max_num_tokens]
        return [self._requests.end(state, FinishReason.LENGTH, committed_ns) for state in ended]

    def _learn_tokens(self, state: RequestState) -> None:
        begin, end = len(state.token_ids), state.num_computed + self.num_steps + 1
        state.token_ids += self._tokens_of(state.request_id, begin, end - begin)


def num_undecided(requests: Requests) -> int:
    """Returns for how many steps from now on those who run do nothing but decode, if there are blocks for it, up to the
    one in which the first of them ends. 0 if the next step has more to do."""
    if requests.is_shared:  # whose turn it is changes with each token
        return 0
    if requests.prompts_ahead or not requests.running or requests.speculation.active or requests.has_step_in_flight:
        return 0
    left = []
    for state in requests.running:  # each computes its last known token next, and whatever follows does not end it
        num_tokens = len(state.token_ids)
        is_next = state.num_computed == num_tokens - 1 and not state.num_promised
        if not is_next or state.account.stage is not DECODE or state.stop_ids:
            return 0
        left.append(state.max_num_tokens - num_tokens)
    return min(left)
