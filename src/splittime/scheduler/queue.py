"""The queue of waiting requests: of the key that has had least (`core.shares`), best rank first, but its longest
waiting first once that is overdue.

It also writes down why they wait without touching each of 10,000 waiting requests at each step. All but the first wait
for one and the same cause, so each change of it goes into a log, (since when, cause), and a request copies its part of
the log into its account when it leaves. The first can have a cause of its own (`kv_blocks`: it is this one that does
not fit) and is marked directly for as long as it is first. Those that were overtaken (`ArrivalOrder`) have a log of
their own, which says `policy`. Who waits for something of its own stands elsewhere (`HeldSet`).

    log           token_budget@10   batch_slots@25   token_budget@90
    a request     pushed @12 ........joins @25 (next plan).......... leaves @95: batch_slots 25..90, token_budget 90..95

What nobody will read any more of a log is dropped.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from splittime.core.shares import KeyShare, KeyShares
from splittime.ledger.stages import Cause
from splittime.scheduler.state import CauseLog, Rank, RequestState, leave_log, overdue_rank

Entry = TypeVar("Entry", bound=tuple)
SWEEP_FROM = 64  # dead entries that are not worth a sweep


class MortalHeap(Generic[Entry]):
    """A heap whose entries may die where they are. All operations are O(log n), over many calls.

    Taking an entry out of the middle of a heap costs O(n). So it stays: `is_alive` tells the living from the dead, the
    dead are skipped when they come to the top, and they are swept out when they are the most (one at the bottom might
    never come to the top). Entries are ordered as tuples are.
    """

    def __init__(self, is_alive: Callable[[Entry], bool]) -> None:
        self._entries: list[Entry] = []
        self._is_alive = is_alive

    def __iter__(self) -> Iterator[Entry]:
        """The living, in no order."""
        return filter(self._is_alive, self._entries)

    @property
    def num_kept(self) -> int:
        """Entries, the dead among them."""
        return len(self._entries)

    def push(self, entry: Entry) -> None:
        heapq.heappush(self._entries, entry)

    def first(self) -> Entry | None:
        """The least of the living; it stays."""
        entries = self._entries
        while entries and not self._is_alive(entries[0]):
            heapq.heappop(entries)
        return entries[0] if entries else None

    def pop(self) -> Entry | None:
        """The least of the living; it leaves."""
        return None if self.first() is None else heapq.heappop(self._entries)

    def sweep(self, num_alive: int) -> None:
        """Forget the dead, once they outnumber so many living ones."""
        if len(self._entries) > 2 * num_alive + SWEEP_FROM:
            self.fill(list(self))

    def fill(self, entries: Iterable[Entry]) -> None:
        """Hold these entries and no others."""
        self._entries = list(entries)
        heapq.heapify(self._entries)


class ArrivalOrder:
    """Who is overtaken, and so waits for `policy`: the order of arrivals, beside what the policy does.

    A slot that comes free is one turn. By arrival the oldest of the waiting would take it; if the policy gives it to a
    younger one, the oldest that had not been passed over yet is overtaken, and stays so until it is admitted: without
    the policy it would be running now. The others wait for what they would have waited for anyway (`batch_slots`, ...).

        waiting, by arrival     long  b  c        c is admitted: long is overtaken; b is not, it would still wait
                                long  b           b is admitted: that was the turn that c had left over; nobody is new
                                long              long is admitted

    As many are overtaken as have been admitted before their turn and still have their place in the order; `check`
    verifies it. Each departure costs O(log n).
    """

    def __init__(self) -> None:
        self._order: MortalHeap[tuple[int, int, RequestState]] = MortalHeap(self._stands)  # arrival, push
        self._early: set[int] = set()  # pushes of those that were admitted before their turn

    def join(self, state: RequestState) -> None:
        """Let a request wait; its `pushed` is new."""
        state.is_overtaken = False
        self._order.push((state.arrival, state.pushed, state))

    def leave(self, state: RequestState, is_admitted: bool) -> RequestState | None:
        """Take a request out (its `pushed` still says which push that was).

        Returns whom that overtakes, if anybody. One that goes away without a turn takes none; one that was overtaken
        had its turn already."""
        if not (is_admitted or state.is_overtaken):
            return None
        if not state.is_overtaken:
            self._early.add(state.pushed)
        return self._take_turn()

    def sweep(self, num_alive: int) -> None:
        """Forget who went away before their turn, once they are the most."""
        self._order.sweep(num_alive + len(self._early))

    def check(self, waiting: Iterable[RequestState]) -> None:
        assert sum(state.is_overtaken for state in waiting) == len(self._early), "turns were lost"

    def _take_turn(self) -> RequestState | None:
        first = self._order.pop()
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


class KeyLine:
    """The waiting of one key."""

    def __init__(self) -> None:
        self.by_rank: MortalHeap[tuple[Rank, int, RequestState]] = MortalHeap(_waits)
        self.by_age: MortalHeap[tuple[int, int, RequestState]] = MortalHeap(_waits)

    def push(self, state: RequestState, now_ns: int) -> None:
        self.by_rank.push((state.rank, state.pushed, state))
        self.by_age.push((now_ns, state.pushed, state))

    def peek(self, now_ns: int, starvation_bound_ns: float) -> RequestState | None:
        """Returns who goes first. An overdue request gets the overdue rank, and keeps it."""
        best, oldest = self.by_rank.first(), self.by_age.first()
        if best is None or oldest is None:
            return None
        since_ns, _, state = oldest
        if now_ns - since_ns <= starvation_bound_ns:
            return best[2]
        state.rank = overdue_rank(state.arrival)
        return state

    def sweep(self, num_alive: int) -> None:
        self.by_rank.sweep(num_alive)
        self.by_age.sweep(num_alive)

    def rerank(self, new_rank: Callable[[RequestState], Rank]) -> None:
        alive = [state for _, _, state in self.by_rank]
        for state in alive:
            state.rank = new_rank(state)
        self.by_rank.fill((state.rank, state.pushed, state) for state in alive)


class WaitingQueue:
    """All operations are O(log n), over many calls, and grow with the keys that wait."""

    def __init__(self) -> None:
        self.shares = KeyShares()
        self._lines: dict[str, KeyLine] = {}  # by key, of those that wait
        self._num_pushes = 0
        self._length = 0
        self._fresh: dict[RequestState, None] = {}  # pushed since the last plan, in order
        self._log = CauseLog()
        self._arrivals = ArrivalOrder()
        self._overtaken_log = CauseLog()
        self._overtaken: list[RequestState] = []  # since the last plan
        self._first: RequestState | None = None
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[RequestState]:
        return (state for line in self._lines.values() for _, _, state in line.by_rank)

    def push(self, state: RequestState, now_ns: int) -> None:
        """From the next plan on, or from this one if it was preempted for it, `wait` says why."""
        self._num_pushes += 1
        state.pushed = self._num_pushes
        state.share = self.shares.of(state.request.tenant, state.request.weight)
        self.shares.wait(state.share)
        self._lines.setdefault(state.share.name, KeyLine()).push(state, now_ns)
        self._fresh[state] = None
        self._arrivals.join(state)
        self._length += 1
        self.num_tokens += state.num_pending

    def peek(self, now_ns: int, starvation_bound_ns: float, share: KeyShare | None = None) -> RequestState | None:
        """Returns who goes first: of this key, or of the one whose turn it is."""
        share = share or self.shares.first()
        line = None if share is None else self._lines.get(share.name)
        return None if line is None else line.peek(now_ns, starvation_bound_ns)

    def leave(self, state: RequestState, is_admitted: bool) -> None:
        """Take a request out: to be computed, which may overtake another, or otherwise (aborted, expired, held). Its
        account learns why it waited."""
        leave_log(state)
        self._fresh.pop(state, None)
        if state is self._first:
            self._first = None
        overtaken = self._arrivals.leave(state, is_admitted)
        if overtaken is not None:
            self._overtaken.append(overtaken)
        state.pushed = 0
        self._length -= 1
        self.num_tokens -= state.num_pending
        if not self._length:  # else a server that never queues would remember everybody
            self._overtaken.clear()
        self._leave_line(state.share, is_admitted)
        self._arrivals.sweep(self._length)

    def _leave_line(self, share: KeyShare, is_served: bool) -> None:
        self.shares.leave(share, is_served=is_served)
        if share.num_waiting:
            self._lines[share.name].sweep(share.num_waiting)
        else:
            del self._lines[share.name]

    def wait(self, now_ns: int, first: RequestState, first_cause: Cause, rest_cause: Cause) -> None:
        """State why everybody still here waits from `now_ns` on: `first` for its own cause, the overtaken for the
        policy, the rest for theirs."""
        leave_log(first)
        once_each = dict.fromkeys((self._first, *self._overtaken, *self._fresh))  # in no log, or in another one by now
        moving = [state for state in once_each if state is not None and state is not first and state.pushed]
        for state in moving:
            leave_log(state)
        self._log.state_cause(now_ns, rest_cause)
        self._overtaken_log.state_cause(now_ns, _overtaken_cause(rest_cause))
        for state in moving:
            (self._overtaken_log if state.is_overtaken else self._log).join(state, now_ns)
        self._fresh.clear()
        self._overtaken.clear()
        self._first = first
        cause = _overtaken_cause(first_cause) if first.is_overtaken else first_cause
        first.account.enter(first.waiting_stage, now_ns, cause)

    def has_said(self, first: RequestState, first_cause: Cause, rest_cause: Cause) -> bool:
        """Returns whether all would wait on as they do if `wait` gave these causes."""
        own = _overtaken_cause(first_cause) if first.is_overtaken else first_cause
        is_same = self._first is first and first.account.cause is own and self._log.states(rest_cause)
        return is_same and not self._fresh and not self._overtaken

    def overdue_from_ns(self, now_ns: int, starvation_bound_ns: float) -> float:
        """Up to which instant `peek` gives the same as now, while nobody comes or goes and one key alone waits."""
        share = self.shares.first()
        oldest = None if share is None else self._lines[share.name].by_age.first()
        if oldest is None or now_ns - oldest[0] > starvation_bound_ns or math.isinf(starvation_bound_ns):
            return math.inf
        return oldest[0] + math.floor(starvation_bound_ns)

    def waiting_for(self) -> Counter[Cause | None]:
        """Returns how many wait for what now, in O(arrivals since the last plan)."""
        alone = (state for state in (*self._fresh, self._first) if state is not None)
        found = Counter(state.account.cause for state in alone if state.pushed)
        for log in (self._log, self._overtaken_log):
            if log.num_readers:
                found[log.cause] += log.num_readers
        return found

    def check(self) -> None:
        """Raise AssertionError if the books disagree."""
        waiting = list(self)
        assert len(waiting) == self._length
        assert self.num_tokens == sum(state.num_pending for state in waiting)
        assert Counter(state.share.name for state in waiting) == {
            name: share.num_waiting for name, share in self.shares.waiting.items()
        }
        assert sum(self.waiting_for().values()) == self._length
        self._arrivals.check(waiting)

    def rerank(self, new_rank: Callable[[RequestState], Rank]) -> None:
        """Rank everybody anew: the policy has changed."""
        for line in self._lines.values():
            line.rerank(new_rank)


def _waits(entry: tuple[Any, int, RequestState]) -> bool:
    return entry[2].pushed == entry[1]


def _overtaken_cause(cause: Cause) -> Cause:
    """Returns what one that was overtaken waits for, where another would wait for `cause`: had it been admitted in its
    turn, neither slots nor budget would hold it up. Whether its blocks would have been there nobody knows."""
    return Cause.POLICY if cause in (Cause.BATCH_SLOTS, Cause.TOKEN_BUDGET) else cause
