"""Who is overtaken, and so waits for `policy`: the line of arrivals, beside what the policy does.

A slot that comes free is one turn. By arrival the oldest of the waiting would take it; if the policy gives it to a
younger one, the oldest that had not been passed over yet is overtaken, and stays so until it is admitted: without the
policy it would be running now. The others wait for what they would have waited for anyway (`batch_slots`, ...).

    waiting, by arrival     long  b  c        c is admitted: long is overtaken; b is not, it would still wait
                            long  b           b is admitted: that was the turn that c had left over; nobody is new
                            long              long is admitted

As many are overtaken as have been admitted before their turn and still stand in the line; `check` verifies it. Each
departure costs O(log n).
"""

from collections.abc import Iterable

from splittime.scheduler.heap import MortalHeap
from splittime.scheduler.state import RequestState


class ArrivalLine:
    def __init__(self) -> None:
        self._line: MortalHeap[tuple[int, int, RequestState]] = MortalHeap(self._stands)  # arrival, push
        self._early: set[int] = set()  # pushes of those that were admitted before their turn

    def join(self, state: RequestState) -> None:
        """It waits; its `pushed` is new."""
        state.is_overtaken = False
        self._line.push((state.arrival, state.pushed, state))

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
        self._line.sweep(num_alive + len(self._early))

    def check(self, waiting: Iterable[RequestState]) -> None:
        assert sum(state.is_overtaken for state in waiting) == len(self._early), "turns were lost"

    def _take_turn(self) -> RequestState | None:
        first = self._line.pop()
        if first is None:
            return None
        _, pushed, state = first
        if pushed in self._early:
            self._early.remove(pushed)
            return None
        state.is_overtaken = True
        return state

    def _stands(self, entry: tuple[int, int, RequestState]) -> bool:
        return entry[2].pushed == entry[1] or entry[1] in self._early
