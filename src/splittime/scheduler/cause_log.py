"""One history of causes for all that wait for the same, so that nobody touches each of 10,000 requests at each step.

Each change of the cause goes into the log, (since when, cause). A request reads from when it joins; when it leaves, it
copies its part of the log into its account. What nobody will read any more is dropped.
"""

from collections import deque
from typing import Protocol

from splittime.ledger.account import Account
from splittime.ledger.stages import Cause, Stage

MOST_GONE = 64  # readers that have left and stand behind one that has not, before they are looked for


class CauseReader(Protocol):
    """What waits. waiting_stage: does not change while it reads a log. cause_log: which it reads; None: its account
    says why it waits. next_cause: the entry that it has not read yet."""

    account: Account
    cause_log: "CauseLog | None"
    next_cause: int

    @property
    def waiting_stage(self) -> Stage: ...


class CauseLog:
    """What the waiting wait for, as (since_ns, cause), and up to where each of them has copied it."""

    def __init__(self) -> None:
        self._entries: deque[tuple[int, Cause | None]] = deque()
        self._num_dropped = 0
        self._readers: deque[tuple[int, CauseReader]] = deque()  # by the entry each will read next
        self.num_readers = 0

    @property
    def _end(self) -> int:
        return self._num_dropped + len(self._entries)

    @property
    def cause(self) -> Cause | None:
        """Returns what its readers wait for now."""
        return self._entries[-1][1]

    def states(self, cause: Cause | None) -> bool:
        return bool(self._entries) and self._entries[-1][1] is cause

    def state_cause(self, now_ns: int, cause: Cause | None) -> None:
        if self.states(cause):
            return
        if not self._readers:  # nobody will ever read what was
            self._num_dropped += len(self._entries)
            self._entries.clear()
        self._entries.append((now_ns, cause))

    def join(self, state: CauseReader, now_ns: int) -> None:
        """From `now_ns` on, `state` waits for the log's last cause and whatever follows it."""
        state.account.enter(state.waiting_stage, now_ns, self._entries[-1][1])
        state.cause_log, state.next_cause = self, self._end
        self._readers.append((self._end, state))
        self.num_readers += 1

    def leave(self, state: CauseReader) -> None:
        """Copy what the log says since `state` joined into its account; it reads no further."""
        for i in range(state.next_cause - self._num_dropped, len(self._entries)):
            since_ns, cause = self._entries[i]
            state.account.enter(state.waiting_stage, since_ns, cause)
        state.cause_log = None
        self.num_readers -= 1
        self._forget_read_entries()
        if len(self._readers) > 2 * self.num_readers + MOST_GONE:
            self._readers = deque(reader for reader in self._readers if self._reads(*reader))

    def _forget_read_entries(self) -> None:
        while self._readers and not self._reads(*self._readers[0]):
            self._readers.popleft()
        keep_from = self._readers[0][0] if self._readers else self._end
        while self._num_dropped < keep_from - 1:  # the last entry is the current cause
            self._entries.popleft()
            self._num_dropped += 1

    def _reads(self, next_cause: int, state: CauseReader) -> bool:
        return state.cause_log is self and state.next_cause == next_cause


def leave_log(state: CauseReader) -> None:
    if state.cause_log is not None:
        state.cause_log.leave(state)
