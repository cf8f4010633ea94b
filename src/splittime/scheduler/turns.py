"""How keys share a step: whose prompts come next, and who gives back a slot or blocks for another's (ADR 28).

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
from splittime.kv.cache import KVCache
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
