"""What the scheduler does with drafts: which rows they widen, and what the books say once some were accepted.

A runner guesses what follows a token (`RowResult.draft_token_ids`), and the request's next row verifies the guesses.
The scheduler guesses nothing and asks nobody to. Two rules make drafts harmless to everybody else:

* They come last: a row is widened with tokens of the budget and with blocks that no row, prompt or admission of the
  step had use for, while a block stays free for each running request. Nobody is preempted or kept waiting for a draft.
* Who has drafts is not planned ahead: where its next row begins hangs on what is accepted. It waits for the result and
  then gets its row, so where steps are planned ahead it has one in every second step.

While a row with drafts runs, all of its tokens count as computed and promised. `settle` corrects that by what was
accepted: the blocks behind go back, and none of them was in the prefix index.
"""

from splittime.core.step import Row, RowResult
from splittime.kv.cache import KVCache
from splittime.scheduler.counts import Counts
from splittime.scheduler.state import RequestState


class Speculation:
    """active: the requests that have drafts, in hand or in a row, or that wait because of some."""

    def __init__(self, cache: KVCache, counts: Counts) -> None:
        self.active: set[RequestState] = set()
        self._cache = cache
        self._counts = counts

    def widen(self, rows: list[Row], num_tokens_left: int, num_running: int) -> None:
        """Put drafts into the rows of a step that is otherwise planned. Those that do not fit are dropped: the row's
        result makes them old."""
        drafted = {state.request_id: state for state in self.active if state.draft_token_ids}
        for place, row in enumerate(rows):
            state = drafted.get(row.request_id)
            if state is None:
                continue
            drafts, state.draft_token_ids = state.draft_token_ids, ()
            num_drafts = self._num_that_fit(state, min(len(drafts), num_tokens_left), num_running)
            if num_drafts > 0:
                rows[place] = _widened(state, row, drafts[:num_drafts])
                num_tokens_left -= num_drafts

    def _num_that_fit(self, state: RequestState, num_drafts: int, num_running: int) -> int:
        """As many of its drafts as it may still have tokens, and as there are blocks for, which it then holds."""
        num_known = len(state.token_ids)
        num_drafts = min(num_drafts, state.max_num_tokens - num_known - 1)
        if num_drafts > 0 and self._cache.has_room(state.lease, num_known + num_drafts, keep_free=num_running):
            self._cache.reserve(state.lease, num_known + num_drafts)
        return min(num_drafts, len(state.lease.block_ids) * self._cache.block_size - num_known)

    def count(self, states: list[RequestState | None], rows: tuple[Row, ...], results: tuple[RowResult, ...]) -> None:
        """The drafts of a step, but for those of rows that are of no interest any more."""
        for state, row, result in zip(states, rows, results, strict=True):
            if state is not None and row.draft_token_ids:
                self._counts.draft_tokens += len(row.draft_token_ids)
                self._counts.accepted_draft_tokens += max(0, len(result.token_ids) - 1)

    def settle(self, state: RequestState, row: Row, next_drafts: tuple[int, ...]) -> None:
        """A row that sampled has given its request tokens, and the request goes on."""
        if row.draft_token_ids:
            state.num_computed = len(state.token_ids) - 1
            self._cache.trim(state.lease, state.num_computed)
        is_known = state.num_promised == 0  # else its next row runs already, and these drafts are old
        state.draft_token_ids = next_drafts if is_known else ()
        state.plan_until = 0 if next_drafts and not is_known else state.max_num_tokens
        if next_drafts:
            self.active.add(state)
        else:
            self.active.discard(state)

    def forget(self, state: RequestState) -> None:
        """It has ended, or was preempted: of its rows nothing will come."""
        self.active.discard(state)
        state.draft_token_ids = ()
        state.plan_until = state.max_num_tokens


def _widened(state: RequestState, row: Row, drafts: tuple[int, ...]) -> Row:
    """The row with these drafts; they count as computed and promised from now on."""
    state.num_computed += len(drafts)
    state.num_promised += len(drafts)
    state.plan_until = 0
    new_block_ids = row.new_block_ids + state.lease.unsent()
    return Row(row.request_id, row.start, row.token_ids, new_block_ids, 1 + len(drafts), drafts)
