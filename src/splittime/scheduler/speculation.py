"""What the scheduler does with drafts: how many pay in the next step, and what the books say once some were accepted.

A runner guesses what follows a token (`RowResult.draft_token_ids`), and the request's next row verifies the guesses.
The scheduler guesses nothing and asks nobody to. Three rules make drafts harmless:

* They pay: a step with drafts is expected to give more tokens for its time than one without, by `MARGIN` at least. The
  chance that a draft and all before it are right comes with it; what one more draft costs is learnt from the steps
  (`core.row_costs`). Of all drafts of all rows the likeliest come first, so a row that is rarely right gets none where
  the batch is large. Where none pays, the step is the plain one.
  In one step of `MOST_DRAFTED_STEPS` and one there are none whatever they would give, to see what a step takes then.
* They come last: a row is widened with tokens of the budget and with blocks that no row, prompt or admission of the
  step had use for, while a block stays free for each running request. Nobody is preempted or kept waiting for one.
* Who has drafts is not planned ahead: where its next row begins hangs on what is accepted. It waits for the result and
  then gets its row, so where steps are planned ahead it has one in every second step.

While a row with drafts runs, all of its tokens count as computed and promised. `settle` corrects that by what was
accepted: the blocks behind go back, and none of them was in the prefix index.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from splittime.core.row_costs import RowCosts
from splittime.core.step import Row, RowResult
from splittime.kv.cache import KVCache
from splittime.scheduler.state import RequestState

MARGIN = 0.03
MOST_UNTOLD = 64  # drafts of a step whose chance nobody tells, but for one a row: they are sure, and lengthen it
MOST_DRAFTED_STEPS = 31  # then comes one without drafts: what those before took more is told by it


@dataclass
class Counts:
    """`prefix_*` and `prompt_tokens` count a request at its first admission."""

    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_host_hit_tokens: int = 0  # of these
    prompt_tokens: int = 0
    output_tokens: int = 0
    draft_tokens: int = 0  # verified
    accepted_draft_tokens: int = 0  # of these, as the runner says


class Speculation:
    """active: the requests that have drafts, in hand or in a row, or that wait because of some. costs: None until the
    first drafts come."""

    def __init__(self, cache: KVCache, counts: Counts) -> None:
        self.active: set[RequestState] = set()
        self.costs: RowCosts | None = None
        self._cache = cache
        self._counts = counts
        self._num_drafted = 0  # rows with drafts that were planned and not committed
        self._planned_ns = self._num_planned = 0  # of the step planned last: when, and its rows; 0: not decodes alone
        self._num_planned_drafts = self._num_planned_drafted = 0  # its drafts, and its rows that have some
        self._num_drafted_steps = 0  # since one of decodes alone had none

    def plan(self, rows: list[Row], num_decodes: int, max_tokens: int, num_running: int, now_ns: int) -> float:
        """Put drafts into the rows of a step that is otherwise planned, the first of them decodes. Returns how likely
        one must be to pay in a step of these rows; 0 where nobody knows."""
        if self.costs is None:  # there has never been a draft
            return 0.0
        is_decode = num_decodes == len(rows)
        num_rows = num_decodes if is_decode else sum(row.num_samples for row in rows)
        num_drafts, num_before = 0, self._num_drafted
        if self.active:
            num_drafts = self._widen(rows, max_tokens - sum(row.num_tokens for row in rows), num_running)
        self._planned_ns, self._num_planned = now_ns, num_rows if is_decode else 0
        self._num_planned_drafts, self._num_planned_drafted = num_drafts, self._num_drafted - num_before
        return self._least_survival(num_rows)

    def learn(self, now_ns: int) -> None:
        """The step planned last ran alone and was committed now."""
        if self.costs is not None and self._num_planned:
            self._num_drafted_steps = self._num_drafted_steps + 1 if self._num_planned_drafts else 0
            took_ns = now_ns - self._planned_ns
            self.costs.learn(self._num_planned, took_ns, self._num_planned_drafts, self._num_planned_drafted)

    def _least_survival(self, num_rows: int) -> float:
        if self.costs is None or not self.costs.is_known:
            return 0.0
        return (1 + MARGIN) * num_rows * self.costs.ns_per_draft / self.costs.expected_ns(num_rows)

    def _widen(self, rows: list[Row], num_tokens_left: int, num_running: int) -> int:
        """Drafts that do not pay or do not fit are dropped: the row's result makes them old. Returns how many are
        left."""
        drafted = {state.request_id: state for state in self.active if state.draft_token_ids}
        states = [drafted[row.request_id] for row in rows if row.request_id in drafted]
        chosen = self._chosen(states, sum(row.num_samples for row in rows), num_tokens_left)
        num_left_before = num_tokens_left
        for place, row in enumerate(rows):
            state = drafted.get(row.request_id)
            if state is None:
                continue
            drafts, state.draft_token_ids, state.draft_survival = state.draft_token_ids, (), ()
            num_drafts = self._num_that_fit(state, min(chosen[row.request_id], num_tokens_left), num_running)
            if num_drafts > 0:
                rows[place] = _widened(state, row, drafts[:num_drafts])
                num_tokens_left -= num_drafts
                self._num_drafted += 1
        return num_left_before - num_tokens_left

    def _chosen(self, states: list[RequestState], num_rows: int, num_tokens_left: int) -> Mapping[str, int]:
        """Returns how many drafts each of these requests gets. Those of which nobody told the chance are taken, of each
        request the same share of `MOST_UNTOLD` at most, unless the step is to have none."""
        chosen = {state.request_id: 0 for state in states}
        if self._num_drafted_steps >= MOST_DRAFTED_STEPS:
            return chosen
        without = [state for state in states if not state.draft_survival]
        share = max(1, MOST_UNTOLD // max(1, len(without)))
        untold = {state.request_id: min(share, len(state.draft_token_ids)) for state in without}
        costs = self.costs
        if costs is None or not costs.is_known or not num_rows:
            return chosen | untold
        slots = sorted(_slots(states, self._least_survival(num_rows)), key=lambda slot: -slot[0])
        slots = slots[: max(0, num_tokens_left - sum(untold.values()))]
        for _, request_id in slots[: _best_number(slots, num_rows, costs)]:
            chosen[request_id] += 1
        return chosen | untold

    def _num_that_fit(self, state: RequestState, num_drafts: int, num_running: int) -> int:
        """As many of its drafts as it may still have tokens, and as there are blocks for, which it then holds."""
        num_known = len(state.token_ids)
        num_drafts = min(num_drafts, state.max_num_tokens - num_known - 1)
        if num_drafts > 0 and self._cache.has_room(state.lease, num_known + num_drafts, keep_free=num_running):
            self._cache.reserve(state.lease, num_known + num_drafts)
        return min(num_drafts, len(state.lease.block_ids) * self._cache.block_size - num_known)

    def count(self, states: list[RequestState | None], rows: tuple[Row, ...], results: tuple[RowResult, ...]) -> None:
        """The drafts of a step, but for those that nobody looked at, as their row was late, or is of no interest."""
        if not self._num_drafted:
            return
        for state, row, result in zip(states, rows, results, strict=True):
            self._num_drafted -= bool(row.draft_token_ids)
            if state is not None and row.draft_token_ids and not result.is_late:
                self._counts.draft_tokens += len(row.draft_token_ids)
                self._counts.accepted_draft_tokens += max(0, len(result.token_ids) - 1)

    def settle(self, state: RequestState, row: Row, result: RowResult) -> None:
        """A row that sampled has given its request tokens, and the request goes on."""
        if row.draft_token_ids:
            state.num_computed = len(state.token_ids) - 1
            self._cache.trim(state.lease, state.num_computed)
        is_known, next_drafts = state.num_promised == 0, result.draft_token_ids
        state.draft_token_ids, state.draft_survival = (), ()
        if is_known:  # else its next row runs already, and these drafts are old
            state.draft_token_ids, state.draft_survival = next_drafts, result.draft_survival
        state.plan_until = 0 if next_drafts and not is_known else state.max_num_tokens
        if next_drafts:
            self.active.add(state)
            self.costs = self.costs or RowCosts()
        else:
            self.active.discard(state)

    def forget(self, state: RequestState) -> None:
        """Expect nothing of its rows: the request has ended, or was preempted."""
        self.active.discard(state)
        state.draft_token_ids, state.draft_survival = (), ()
        state.plan_until = state.max_num_tokens


def _slots(states: list[RequestState], least: float) -> Iterator[tuple[float, str]]:
    """Each draft that is at least so likely to be right with all before it, with its request."""
    for state in states:
        for chance in state.draft_survival:
            if chance < least:
                break
            yield chance, state.request_id


def _best_number(slots: list[tuple[float, str]], num_rows: int, costs: RowCosts) -> int:
    """Returns how many of these drafts, the likeliest first, give the step most tokens for its time; 0 if that is not
    better by `MARGIN` than none."""
    expected, ns = float(num_rows), costs.expected_ns(num_rows)
    best, number_best = (1 + MARGIN) * expected / ns, 0
    drafted: set[str] = set()
    for number, (chance, request_id) in enumerate(slots, 1):
        if chance <= best * costs.ns_per_draft:  # neither this nor a later one can make it better
            break
        expected += chance
        ns += costs.ns_per_draft + (0.0 if request_id in drafted else costs.ns_per_drafted)
        drafted.add(request_id)
        if expected / ns > best:
            best, number_best = expected / ns, number
    return number_best


def _widened(state: RequestState, row: Row, drafts: tuple[int, ...]) -> Row:
    """The row with these drafts; they count as computed and promised from now on."""
    state.num_computed += len(drafts)
    state.num_promised += len(drafts)
    state.plan_until = 0
    new_block_ids = row.new_block_ids + state.lease.unsent()
    return Row(row.request_id, row.start, row.token_ids, new_block_ids, 1 + len(drafts), drafts)
