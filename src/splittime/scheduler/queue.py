"""The queue of waiting requests: best rank first, but the longest waiting first once it is overdue.

It also writes down why they wait without touching each of 10,000 waiting requests at each step. All but the first wait
for one and the same cause, so each change of it goes into a log, (since when, cause), and a request copies its part of
the log into its account when it leaves. The first can have a cause of its own (`kv_blocks`: it is this one that does
not fit) and is marked directly for as long as it is first. Those that were overtaken (`overtaking`) have a log of their
own, which says `policy`. Who waits for something of its own stands elsewhere (`held`).

    log           token_budget@10   batch_slots@25   token_budget@90
    a request     pushed @12 ........joins @25 (next plan).......... leaves @95: batch_slots 25..90, token_budget 90..95
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

from splittime.ledger.stages import Cause
from splittime.scheduler.heap import MortalHeap
from splittime.scheduler.overtaking import ArrivalLine
from splittime.scheduler.policy import overdue_rank
from splittime.scheduler.state import Rank, RequestState


class CauseLog:
    """What the waiting wait for, as (since_ns, cause), and up to where each of them has copied it."""

    def __init__(self) -> None:
        self._entries: deque[tuple[int, Cause]] = deque()
        self._num_dropped = 0
        self._readers: deque[tuple[int, RequestState]] = deque()  # by the entry each will read next
        self.num_readers = 0

    @property
    def _end(self) -> int:
        return self._num_dropped + len(self._entries)

    @property
    def cause(self) -> Cause:
        """What its readers wait for now."""
        return self._entries[-1][1]

    def state_cause(self, now_ns: int, cause: Cause) -> None:
        if self._entries and self._entries[-1][1] is cause:
            return
        if not self._readers:  # nobody will ever read what was
            self._num_dropped += len(self._entries)
            self._entries.clear()
        self._entries.append((now_ns, cause))

    def join(self, state: RequestState, now_ns: int) -> None:
        """From `now_ns` on, `state` waits for the log's last cause and whatever follows it."""
        state.account.enter(state.waiting_stage, now_ns, self._entries[-1][1])
        state.cause_log, state.next_cause = self, self._end
        self._readers.append((self._end, state))
        self.num_readers += 1

    def leave(self, state: RequestState) -> None:
        """Copy what the log says since `state` joined into its account; it reads no further."""
        for i in range(state.next_cause - self._num_dropped, len(self._entries)):
            since_ns, cause = self._entries[i]
            state.account.enter(state.waiting_stage, since_ns, cause)
        state.cause_log = None
        self.num_readers -= 1
        self._forget_read_entries()

    def _forget_read_entries(self) -> None:
        while self._readers and not self._reads(*self._readers[0]):
            self._readers.popleft()
        keep_from = self._readers[0][0] if self._readers else self._end
        while self._num_dropped < keep_from - 1:  # the last entry is the current cause
            self._entries.popleft()
            self._num_dropped += 1

    def _reads(self, next_cause: int, state: RequestState) -> bool:
        return state.cause_log is self and state.next_cause == next_cause


class WaitingQueue:
    """All operations are O(log n), over many calls."""

    def __init__(self) -> None:
        self._by_rank: MortalHeap[tuple[Rank, int, RequestState]] = MortalHeap(_waits)
        self._by_age: MortalHeap[tuple[int, int, RequestState]] = MortalHeap(_waits)
        self._num_pushes = 0
        self._length = 0
        self._fresh: dict[RequestState, None] = {}  # pushed since the last plan, in order
        self._log = CauseLog()
        self._line = ArrivalLine()
        self._overtaken_log = CauseLog()
        self._overtaken: list[RequestState] = []  # since the last plan
        self._first: RequestState | None = None
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[RequestState]:
        return (state for _, _, state in self._by_rank)

    def push(self, state: RequestState, now_ns: int) -> None:
        """From the next plan on, or from this one if it was preempted for it, `wait` says why."""
        self._num_pushes += 1
        state.pushed = self._num_pushes
        self._by_rank.push((state.rank, state.pushed, state))
        self._by_age.push((now_ns, state.pushed, state))
        self._fresh[state] = None
        self._line.join(state)
        self._length += 1
        self.num_tokens += state.num_pending

    def peek(self, now_ns: int, starvation_bound_ns: float) -> RequestState | None:
        """Who goes first. An overdue request gets the overdue rank, and keeps it."""
        best, oldest = self._by_rank.first(), self._by_age.first()
        if best is None or oldest is None:
            return None
        since_ns, _, state = oldest
        if now_ns - since_ns <= starvation_bound_ns:
            return best[2]
        state.rank = overdue_rank(state.arrival)
        return state

    def admit(self, state: RequestState) -> None:
        """It leaves to be computed; another may be overtaken by that."""
        self._leave(state, is_admitted=True)

    def remove(self, state: RequestState) -> None:
        """It leaves otherwise (aborted, expired, held)."""
        self._leave(state, is_admitted=False)

    def _leave(self, state: RequestState, is_admitted: bool) -> None:
        """Its account learns why it waited."""
        leave_log(state)
        self._fresh.pop(state, None)
        if state is self._first:
            self._first = None
        overtaken = self._line.leave(state, is_admitted)
        if overtaken is not None:
            self._overtaken.append(overtaken)
        state.pushed = 0
        self._length -= 1
        self.num_tokens -= state.num_pending
        if not self._length:  # else a server that never queues would remember everybody
            self._overtaken.clear()
        self._by_rank.sweep(self._length)
        self._by_age.sweep(self._length)
        self._line.sweep(self._length)

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
            self._log_of(state).join(state, now_ns)
        self._fresh.clear()
        self._overtaken.clear()
        self._first = first
        cause = _overtaken_cause(first_cause) if first.is_overtaken else first_cause
        first.account.enter(first.waiting_stage, now_ns, cause)

    def _log_of(self, state: RequestState) -> CauseLog:
        return self._overtaken_log if state.is_overtaken else self._log

    def waiting_for(self) -> Counter[Cause | None]:
        """How many wait for what now, in O(arrivals since the last plan)."""
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
        assert sum(self.waiting_for().values()) == self._length
        self._line.check(waiting)

    def rerank(self, new_rank: Callable[[RequestState], Rank]) -> None:
        """Rank everybody anew: the policy has changed."""
        alive = list(self)
        for state in alive:
            state.rank = new_rank(state)
        self._by_rank.fill((state.rank, state.pushed, state) for state in alive)


def _waits(entry: tuple[Any, int, RequestState]) -> bool:
    return entry[2].pushed == entry[1]


def leave_log(state: RequestState) -> None:
    if state.cause_log is not None:
        state.cause_log.leave(state)


def _overtaken_cause(cause: Cause) -> Cause:
    """What one that was overtaken waits for, where another would wait for `cause`: had it been admitted in its turn,
    neither slots nor budget would hold it up. Whether its blocks would have been there nobody knows."""
    return Cause.POLICY if cause in (Cause.BATCH_SLOTS, Cause.TOKEN_BUDGET) else cause
