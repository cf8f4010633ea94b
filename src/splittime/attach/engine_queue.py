"""The requests of an engine that wait, and why, without touching each of 10,000 at each plan.

All that stand behind the point where the scheduler's loop stopped wait for the same: they share one history
(`scheduler.cause_log`), and each copies its stretch of it into its account when it leaves. Beside it stands alone who
has a cause of its own: the first, whoever waits for something of its own, and who has come since the last plan.
"""

from collections import Counter
from collections.abc import Iterable

from splittime.attach.request_book import WAITING, EngineBook
from splittime.ledger.stages import Cause
from splittime.scheduler.cause_log import CauseLog, leave_log


class EngineQueue:
    """The work of a plan goes with who comes, who leaves and who has a cause of its own."""

    def __init__(self) -> None:
        self._log = CauseLog()
        self._alone: dict[EngineBook, None] = {}

    def __len__(self) -> int:
        return len(self._alone) + self._log.num_readers

    def join(self, book: EngineBook) -> None:
        """Takes in one that waits from now on; the next `wait` says why. Nothing happens if it waits already."""
        if not book.waits:
            book.waits = True
            self._alone[book] = None

    def leave(self, book: EngineBook) -> None:
        """Lets one go, whose account learns why it waited. Nothing happens if it does not wait."""
        if book.waits:
            book.waits = False
            leave_log(book)
            self._alone.pop(book, None)

    def wait(self, told: Iterable[tuple[EngineBook, Cause | None]], rest: Cause | None, now_ns: int) -> None:
        """States why all wait from `now_ns` on: these for causes of their own, the rest for theirs."""
        alone: dict[EngineBook, None] = {}
        for book, cause in told:
            leave_log(book)
            book.waits = True
            book.wait(cause, now_ns)
            alone[book] = None
        self._log.state_cause(now_ns, rest)
        for book in self._alone:
            if book not in alone:
                self._log.join(book, now_ns)
        self._alone = alone

    def pause(self, now_ns: int) -> None:
        """All wait for the pause's end, whatever else they wait for."""
        self.wait((), Cause.PAUSED, now_ns)

    def waiting_for(self) -> Counter[Cause | None]:
        """Returns how many wait for what. May be called from another thread."""
        found = Counter(book.account.cause for book in list(self._alone) if book.account.stage in WAITING)
        if self._log.num_readers:
            found[self._log.cause] += self._log.num_readers
        return found
