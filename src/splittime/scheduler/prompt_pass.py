"""The part of a plan that computes prompts: chunks for those that run, admissions from the queue.

One key alone: the running first, then the queue, until something is missing; the first that does not fit ends the
admission. Of several keys each does so for itself when it is its turn.

How keys share a step: whose prompts come next, and who gives back a slot or blocks for another's (ADR 28).

Turns. The keys that have prompts to compute, of requests that run or wait, take turns: the one that has had least by
weight is next (`core.shares`). So the tokens of a step are shared, and the slots and blocks that come free.

Holdings. What is held already is shared too: a key may take from the one that holds most by weight, as long as that
holds more than the taker would then have. The worst-ranked request of it is preempted. Thus nobody is preempted for a
key that has as much, and what was taken is not taken back at once. Who was preempted gets a token before it is taken
for another key again, and so gets on. A key that holds no slot, where there are fewer slots than keys, gets one from
the most served when that is `TURN_TOKENS` ahead.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence

from splittime.core.shares import UNIT, KeyShare
from splittime.core.step import Admitted, Row
from splittime.kv.cache import KVCache, num_in_common
from splittime.ledger.stages import Cause
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.requests import Requests
from splittime.scheduler.state import RequestState

TURN_TOKENS = 512  # of a key of weight 1


class Turns:
    """Says whose turn it is in one plan. behind: who runs and has prompts to compute, best rank first. waiting: keys
    of which some wait."""

    def __init__(self, behind: Iterable[RequestState], waiting: Iterable[KeyShare]) -> None:
        self._behind: dict[str, deque[RequestState]] = defaultdict(deque)
        shares = {share.name: share for share in waiting}
        for state in behind:
            self._behind[state.share.name].append(state)
            shares[state.share.name] = state.share
        self._closed: set[str] = set()
        self._order = [(*share.order, name, share) for name, share in shares.items()]
        heapq.heapify(self._order)

    def next(self) -> KeyShare | None:
        """Returns whose turn it is; `go_on` says that it may have another."""
        return heapq.heappop(self._order)[-1] if self._order else None

    def go_on(self, share: KeyShare) -> None:
        """Have a key that had its turn come again, if it has more to compute."""
        if self._behind.get(share.name) or (share.num_waiting and share.name not in self._closed):
            heapq.heappush(self._order, (*share.order, share.name, share))

    def close(self, share: KeyShare) -> None:
        """None of its waiting is admitted in this plan any more."""
        self._closed.add(share.name)

    def take_behind(self, share: KeyShare) -> RequestState | None:
        """Returns who of it runs and comes next; None if nobody is left."""
        line = self._behind.get(share.name)
        return line.popleft() if line else None

    def forget(self, state: RequestState) -> None:
        """Give no turn to a request that was preempted."""
        line = self._behind.get(state.share.name)
        if line and state in line:
            line.remove(state)


class Holdings:
    """What the running hold of one thing, by key. amount_of: what one of them holds. kept: who is not preempted,
    besides those who have got no token since they were last."""

    def __init__(
        self, running: Sequence[RequestState], amount_of: Callable[[RequestState], float], kept: Collection[str] = ()
    ) -> None:
        self._held: dict[str, float] = defaultdict(float)
        self._states: dict[str, list[RequestState]] = defaultdict(list)
        self._last: dict[str, RequestState] = {}
        for state in running:
            name = state.share.name
            self._last[name] = state
            self._held[name] += amount_of(state)
            if state.request_id not in kept and len(state.token_ids) > state.spared_until:
                self._states[name].append(state)
        self._levels = {name: self._held[name] / state.share.weight for name, state in self._last.items()}

    def level(self, share: KeyShare, more: float = 0) -> float:
        """Returns what a key would hold with so much more, by weight."""
        return (self._held.get(share.name, 0) + more) / share.weight

    def worst_of(self, share: KeyShare) -> RequestState:
        """Returns who ranks last of a key that runs."""
        return self._last[share.name]

    def who_gives(
        self, share: KeyShare, need: float, lacking: int, freed_by: Callable[[RequestState], int]
    ) -> list[RequestState]:
        """Returns who is preempted so that a key gets `need` more, of which so many are lacking; nobody if that does
        not help, or none of those has more than it would have. freed_by: what comes free of one, called for one after
        another."""
        level, victims = self.level(share, need), []
        levels = {name: each for name, each in self._levels.items() if each > level and self._states[name]}
        left = {name: list(self._states[name]) for name in levels}
        while lacking > 0 and levels:
            most = max(levels, key=levels.__getitem__)
            victim = left[most].pop()
            victims.append(victim)
            freed = freed_by(victim)
            lacking -= freed
            levels[most] -= freed / victim.share.weight
            if levels[most] <= level or not left[most]:
                del levels[most]
        return [] if lacking > 0 else victims

    def whose_turn_ends(self, share: KeyShare) -> list[RequestState]:
        """Returns who is preempted so that a key that holds nothing gets its turn; nobody if it has some, or nobody was
        served so much more."""
        if self._held.get(share.name):
            return []
        last = (states[-1] for states in self._states.values() if states)
        most = max(last, key=lambda state: state.share.counter, default=None)
        is_ahead = most is not None and most.share.counter - share.counter > TURN_TOKENS * UNIT
        return [most] if most is not None and is_ahead else []


def one_slot(_: RequestState) -> int:
    return 1


class FreedBlocks:
    """Counts the blocks that come free when one after another is preempted: those that nobody else holds any more.
    wanted: stay in use, by the one for whom it is done."""

    def __init__(self, cache: KVCache, wanted: Collection[int] = ()) -> None:
        self._cache, self._wanted = cache, wanted
        self._given: Counter[int] = Counter()

    def __call__(self, victim: RequestState) -> int:
        self._given.update(victim.lease.block_ids)
        free = (block_id for block_id in victim.lease.block_ids if block_id not in self._wanted)
        return sum(self._given[block_id] == self._cache.num_holders(block_id) for block_id in free)


class StepBudget:
    """What a step with so many decode rows may still compute: `tokens`. With chunking, a prompt takes what is left;
    without, it goes whole or not at all, except that one prompt longer than the whole budget may go as the step's only
    prefill."""

    __slots__ = ("_left", "_most_prefill", "_spent", "enable_chunked_prefill", "has_prefill", "num_decodes")

    def __init__(self, config: SchedulerConfig, num_decodes: int) -> None:
        self.num_decodes = num_decodes
        self._left, self._spent = config.max_num_batched_tokens, 0
        self._most_prefill = self._left if config.max_prefill_tokens is None else config.max_prefill_tokens
        self.enable_chunked_prefill = config.enable_chunked_prefill
        self.has_prefill = False

    @property
    def tokens(self) -> int:
        return max(min(self._left - self.num_decodes, self._most_prefill) - self._spent, 0)

    def chunk(self, num_pending: int) -> int:
        """How many of a request's pending tokens fit now; 0: none."""
        if self.enable_chunked_prefill:
            return min(num_pending, self.tokens)
        fits = num_pending <= self.tokens or not self.has_prefill
        return num_pending if fits and self.tokens > 0 else 0

    def has_tokens_without(self, num_tokens: int, *, is_decode: bool) -> bool:
        """Whether anything is left if a row of so many tokens is taken back."""
        most = min(self._left - self.num_decodes + is_decode, self._most_prefill)
        return most > self._spent - (0 if is_decode else num_tokens)

    def spend(self, num_tokens: int) -> None:
        self._spent += num_tokens
        self.has_prefill = True


class PromptPass:
    """Plans prompts behind a plan's decodes. rows: the plan's so far, the first `budget.num_decodes` of them decodes.
    victims: whom it has preempted."""

    def __init__(self, requests: Requests, rows: list[Row], budget: StepBudget, now_ns: int) -> None:
        config = requests.config
        self._requests, self._config, self._rows, self._budget, self._now_ns = requests, config, rows, budget, now_ns
        self.victims: list[RequestState] = []
        self._bound_ns = config.starvation_bound_ms * 1e6
        self._may_admit = config.batching == "continuous" or not requests.num_served
        self._admitted: list[Admitted] = []
        self._blocked: list[tuple[RequestState, Cause]] = []  # the first of each key that waits on, in turn
        self._claim: float | None = None  # what the first that lacks blocks would hold with them, by weight
        self._held: dict[Cause, Holdings] = {}  # of slots and of blocks, since somebody last came or went
        # of the one that blocks were last sought for:
        self._num_blocks = 0  # by which its key would hold more, that of its next token too: else it would be too many
        self._num_lacking = 0
        self._found: frozenset[int] = frozenset()  # of its prefix
        self._fits = False  # in the step's budget

    def run(self, behind: list[RequestState], sitting_out: Collection[str] = ()) -> tuple[Admitted, ...]:
        """behind: who runs and has prompts to compute, best rank first. sitting_out: keys of which nobody is admitted.
        Returns who was admitted. Whoever waits on is told why."""
        requests, queue = self._requests, self._requests.queue
        waiting = [share for share in queue.shares.waiting.values() if share.name not in sitting_out]
        self._turns = Turns(behind, waiting)
        while (share := self._turns.next()) is not None:
            state = self._turns.take_behind(share)
            if state is not None:
                self._plan_row(state, is_admitted=False)
            elif (state := queue.peek(self._now_ns, self._bound_ns, share)) is not None:
                cause = self.obstacle_to(state)
                if cause is None:
                    self._admitted.append(requests.admit(state))
                    self._held.clear()
                    self._plan_row(state, is_admitted=True)
                else:
                    self._blocked.append((state, cause))
                    self._turns.close(share)
            self._turns.go_on(share)
        self._say_why()
        return tuple(self._admitted)

    def _say_why(self) -> None:
        """Tell all who stay what was missing."""
        queue = self._requests.queue
        if not self._blocked and (state := queue.peek(self._now_ns, self._bound_ns)) is not None:
            self._blocked.append((state, Cause.POLICY))  # it was preempted for another key
        if self._blocked:
            state, cause = self._blocked[0]
            rest_cause = Cause.POLICY if cause is Cause.KV_BLOCKS else cause
            queue.wait(self._now_ns, state, cause, rest_cause)

    # ---- rows

    def _plan_row(self, state: RequestState, *, is_admitted: bool) -> None:
        """Give a request a row. is_admitted: in this step; only a static batch admits one without a row."""
        num_tokens = self._budget.chunk(state.num_pending)
        if num_tokens or is_admitted:
            state.account.enter(state.computing_stage, self._now_ns)
        if not num_tokens:
            state.stall(Cause.TOKEN_BUDGET, self._now_ns)
            return
        state.share.charge(_num_first_computed(state, state.num_computed, num_tokens))
        self._rows.append(state.next_row(num_tokens))
        self._budget.spend(num_tokens)

    # ---- what is missing

    def obstacle_to(self, state: RequestState) -> Cause | None:
        """Returns what keeps the first of its key from being admitted now, even if others make way; else None, with its
        cached prefix leased."""
        has_way = False
        while True:
            cause = self.obstacle() or self.find_blocks(state)
            victims = self._who_makes_way(state, cause)
            if not victims:
                break
            has_way = True
            for victim in victims:
                self._preempt(victim)
        if cause is Cause.KV_BLOCKS and self._claim is None:
            self._claim = self._level_with(state)
        elif cause is None and not has_way and self._has_more(state):
            self._let_go(state)
            cause = Cause.POLICY
        return cause

    def obstacle(self) -> Cause | None:
        """Returns what keeps any request from being admitted now."""
        if not self._may_admit:
            return Cause.POLICY
        states = self._requests.cache.states
        if len(self._requests.running) >= self._config.max_num_seqs or not (states is None or states.has_room):
            return Cause.BATCH_SLOTS
        if self._budget.tokens == 0 and self._config.batching == "continuous":
            return Cause.TOKEN_BUDGET
        return None

    def find_blocks(self, state: RequestState) -> Cause | None:
        """Lease the cached prefix, with room for all its known tokens; or why not, with nothing changed."""
        cache, num_tokens = self._requests.cache, len(state.token_ids)
        if not state.request.sampling.computes_prompt:
            state.num_computed = cache.match(state.lease, state.token_ids)
        self._num_lacking = cache.num_new(state.lease, num_tokens) + self._keep_free - cache.num_free
        self._fits = self._config.batching != "continuous" or self._budget.chunk(state.num_pending) > 0
        if self._requests.is_shared:
            self._note_prefix(state)
        cause = None
        if self._num_lacking > 0:
            cause = Cause.KV_BLOCKS
        elif not self._fits:
            cause = Cause.TOKEN_BUDGET
        if cause is not None:
            self._let_go(state)
        elif state.num_cached_tokens is None:
            state.num_host_tokens = len(state.lease.in_host) * self._config.block_size
        return cause

    def _note_prefix(self, state: RequestState) -> None:
        """Blocks that its key holds already make it hold no more; those that others hold it may soon hold alone."""
        cache, found = self._requests.cache, state.lease.block_ids
        self._found = frozenset(found)
        self._num_blocks = cache.blocks_for(len(state.token_ids) + 1)
        if found and not state.lease.in_host and cache.num_holders(found[0]) > 1:
            own = (other.lease for other in self._requests.running if other.share is state.share)
            self._num_blocks -= max((num_in_common(found, lease.block_ids) for lease in own), default=0)

    @property
    def _keep_free(self) -> int:
        return max(1, self._config.num_blocks // 100) if self._requests.running else 0

    def _let_go(self, state: RequestState) -> None:
        self._requests.cache.free(state.lease)
        state.num_computed = 0

    def _has_more(self, state: RequestState) -> bool:
        """Whether its key would have more blocks with it than who lacks some would."""
        return self._claim is not None and self._level_with(state) >= self._claim

    def _level_with(self, state: RequestState) -> float:
        """Returns what its key would hold of the blocks with it."""
        return self._holdings(Cause.KV_BLOCKS).level(state.share, self._num_blocks)

    # ---- who makes way

    def _who_makes_way(self, state: RequestState, cause: Cause | None) -> list[RequestState]:
        """Returns who is preempted so that this one has the slot or blocks that it lacks: what is computed ahead, or
        those with more than their key's share. Nobody if it could not be admitted all the same, or is to come last."""
        if cause not in (Cause.BATCH_SLOTS, Cause.KV_BLOCKS):
            return []
        ahead = self._requests.running_prompt_ahead
        if ahead is not None:
            return [ahead]
        if not self._requests.is_shared:
            return []
        givers = self._who_gives_slot(state) if cause is Cause.BATCH_SLOTS else self._who_gives_blocks(state)
        return [] if any(self._comes_behind(state, giver) for giver in givers) else givers

    def _comes_behind(self, state: RequestState, giver: RequestState) -> bool:
        """Whether its priority is worse than the giver's, and than that of who asks for none: by a better one than
        others have, a key keeps nothing from them."""
        return self._config.policy == "priority" and state.request.priority > max(0, giver.request.priority)

    def _who_gives_slot(self, state: RequestState) -> list[RequestState]:
        holdings = self._holdings(Cause.BATCH_SLOTS)
        givers = holdings.who_gives(state.share, 1, 1, one_slot) or holdings.whose_turn_ends(state.share)
        if not givers:
            return []
        if self.find_blocks(state) is None:
            self._let_go(state)
        self._fits = self._fits or self._makes_room(givers[0])
        return self._who_gives_blocks(state, givers)

    def _makes_room(self, giver: RequestState) -> bool:
        """Whether a chunk fits into the step where this one's row is taken back."""
        budget = self._budget
        return budget.enable_chunked_prefill and any(
            budget.has_tokens_without(row.num_tokens, is_decode=place < budget.num_decodes)
            for place, row in enumerate(self._rows)
            if row.request_id == giver.request_id
        )

    def _who_gives_blocks(self, state: RequestState, givers: Sequence[RequestState] = ()) -> list[RequestState]:
        """Returns these and who else has to be preempted, for one that blocks were sought for; nobody if it would stay
        out all the same."""
        if not self._fits or self._has_more(state):
            return []
        freed_by = FreedBlocks(self._requests.cache, self._found)
        lacking = self._num_lacking - sum(map(freed_by, givers))
        if lacking <= 0:
            return list(givers)
        holdings = self._holdings(Cause.KV_BLOCKS) if not givers else self._block_holdings(givers)
        others = holdings.who_gives(state.share, self._num_blocks, lacking, freed_by)
        return [*givers, *others] if others else []

    def _holdings(self, cause: Cause) -> Holdings:
        """Returns what the running hold; whom this plan has admitted it does not preempt."""
        found = self._held.get(cause)
        if found is None:
            is_slots = cause is Cause.BATCH_SLOTS
            found = Holdings(self._requests.running, one_slot, self._fresh) if is_slots else self._block_holdings()
            self._held[cause] = found
        return found

    def _block_holdings(self, without: Sequence[RequestState] = ()) -> Holdings:
        cache = self._requests.cache
        running = [state for state in self._requests.running if state not in without]
        return Holdings(running, lambda state: cache.part_of(state.lease), self._fresh)

    @property
    def _fresh(self) -> set[str]:
        return {admitted.request_id for admitted in self._admitted}

    def _preempt(self, victim: RequestState) -> None:
        """Take back the row that the plan has for it, too."""
        self._take_row(victim)
        self._turns.forget(victim)
        self._held.clear()
        self.victims.append(victim)
        self._requests.preempt(victim, self._now_ns)

    def _take_row(self, victim: RequestState) -> None:
        row, place = take_row(victim, self._rows)
        if row is not None and place < self._budget.num_decodes:
            self._budget.num_decodes -= 1
        elif row is not None:
            self._budget.spend(-row.num_tokens)
            victim.share.charge(-_num_first_computed(victim, row.start, row.num_tokens))


def take_row(victim: RequestState, rows: list[Row]) -> tuple[Row | None, int]:
    """Take the row that the plan has for it out of `rows`. Returns it, and where it was; None if there is none."""
    for place, row in enumerate(rows):
        if row.request_id == victim.request_id:
            victim.num_computed = row.start
            del rows[place]
            return row, place
    return None, 0


def _num_first_computed(state: RequestState, begin: int, num_tokens: int) -> int:
    """Returns how many of these tokens were not computed before a preemption: a key is charged for a token once."""
    return max(0, begin + num_tokens - max(begin, state.recompute_until))
