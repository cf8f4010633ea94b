"""Whose turn it would be by arrival, beside what the policy does: who is overtaken, and so waits for `policy`.

A slot that comes free is one turn. By arrival the oldest of the waiting would take it; if the policy gives it to a
younger one, the oldest that had not been passed over yet is overtaken, and stays so until it is admitted: without the
policy it would be running now. The others wait for what they would have waited for anyway (`batch_slots`, ...).

    waiting, by arrival     long  b  c        c is admitted: long is overtaken; b is not, it would still wait
                            long  b           b is admitted: that was the turn that c had left over; nobody is new
                            long              long is admitted

As many are overtaken as have been admitted before their turn and still stand in the line; `check` verifies it. Each
departure costs O(log n).
"""

import heapq
from collections.abc import Iterable

from splittime.scheduler.state import RequestState

SWEEP_FROM = 64  # dead heap entries that are not worth a sweep


class Turns:
    def __init__(self) -> None:
        self._line: list[tuple[int, int, RequestState]] = []  # by arrival; until its turn has come
        self._early: set[int] = set()  # pushes of those that were admitted before their turn

    def join(self, state: RequestState) -> None:
        """It waits; its `pushed` is new."""
        state.is_overtaken = False
        heapq.heappush(self._line, (state.arrival, state.pushed, state))

    def leave(self, state: RequestState, is_admitted: bool) -> RequestState | None:
        """It waits no more (its `pushed` still says which push that was). Returns who is overtaken by that, if
        anybody is. One that goes away without a turn takes none; one that was overtaken had its turn already."""
        if not (is_admitted or state.is_overtaken):
            return None
        if not state.is_overtaken:
            self._early.add(state.pushed)
        return self._take_turn()

    def sweep(self, num_alive: int) -> None:
        """Forget who went away before their turn, once they are the most."""
        if len(self._line) > 2 * (num_alive + len(self._early)) + SWEEP_FROM:
            self._line = [entry for entry in self._line if self._stands(entry)]
            heapq.heapify(self._line)

    def check(self, waiting: Iterable[RequestState]) -> None:
        assert sum(state.is_overtaken for state in waiting) == len(self._early), "turns were lost"

    def _take_turn(self) -> RequestState | None:
        while self._line:
            _, pushed, first = heapq.heappop(self._line)
            if pushed in self._early:
                self._early.remove(pushed)
                return None
            if first.pushed == pushed:
                first.is_overtaken = True
                return first
        return None

    def _stands(self, entry: tuple[int, int, RequestState]) -> bool:
        return entry[2].pushed == entry[1] or entry[1] in self._early
