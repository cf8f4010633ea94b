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
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence

from splittime.core.shares import UNIT, KeyShare
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
        self, running: Sequence[RequestState], amount_of: Callable[[RequestState], int], kept: Collection[str] = ()
    ) -> None:
        self._amount_of = amount_of
        self._held: dict[str, int] = defaultdict(int)
        self._states: dict[str, list[RequestState]] = defaultdict(list)
        self._last: dict[str, RequestState] = {}
        for state in running:
            name = state.share.name
            self._last[name] = state
            self._held[name] += amount_of(state)
            if state.request_id not in kept and len(state.token_ids) > state.spared_until:
                self._states[name].append(state)
        self._levels = {name: self._held[name] / state.share.weight for name, state in self._last.items()}
        self._most = max(self._levels.values(), default=0.0)

    def level(self, share: KeyShare, more: int = 0) -> float:
        """Returns what a key would hold with so much more, by weight."""
        return (self._held.get(share.name, 0) + more) / share.weight

    def worst_of(self, share: KeyShare) -> RequestState:
        """Returns who ranks last of a key that runs."""
        return self._last[share.name]

    def who_gives(self, share: KeyShare, need: int, lacking: int) -> RequestState | None:
        """Returns who is preempted so that a key gets `need` more, of which so many are lacking; None if that does not
        help, or nobody has more than it would have."""
        level = self.level(share, need)
        if level >= self._most:
            return None
        levels, left, first = dict(self._levels), {name: list(states) for name, states in self._states.items()}, None
        while lacking > 0:
            most = max(levels, key=levels.__getitem__)
            if levels[most] <= level or not left.get(most):
                return None
            victim = left[most].pop()
            first = first or victim
            levels[most] -= self._amount_of(victim) / victim.share.weight
            lacking -= self._amount_of(victim)
        return first

    def whose_turn_ends(self, share: KeyShare) -> RequestState | None:
        """Returns who is preempted so that a key that holds nothing gets its turn; None if it has some, or nobody was
        served so much more."""
        if self._held.get(share.name):
            return None
        last = (states[-1] for states in self._states.values() if states)
        most = max(last, key=lambda state: state.share.counter, default=None)
        is_ahead = most is not None and most.share.counter - share.counter > TURN_TOKENS * UNIT
        return most if is_ahead else None


def one_slot(_: RequestState) -> int:
    return 1


def blocks_of(state: RequestState) -> int:
    return len(state.lease.block_ids)
