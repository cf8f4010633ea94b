"""The other ranks as the first one has them: it starts them, watches them, and ends them all when one fails.

No rank outlives us, not even a stopped one, whatever ends us (`member`, `follower`). A dead rank is noticed at once by
the thread that waits for it, and by the collective that does (`RankLost`). A rank that hangs is noticed by the
collective alone, after its time-out. `cause` then finds out who began: ranks that end because they lost another say so
by their exit status.
"""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from splittime.core.errors import EngineError, SplittimeError
from splittime.runner.config import RunnerConfig
from splittime.runner.ranks.channel import Begin, encode
from splittime.runner.ranks.member import LOST_STATUS, Member

CAUSE_PATIENCE_S = 10.0  # for the system to tell of a death that a collective has already felt


class Members:
    """All other ranks. Starts them at once; raises `EngineError` where the system will not."""

    def __init__(self, config: RunnerConfig) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="splittime-ranks-"))
        self._deaths: dict[int, int] = {}  # exit status by rank, in the order of their ends
        self._changed = threading.Condition()
        self._is_over = False
        self._cause: SplittimeError | None = None
        self._finding = threading.Lock()
        self._tell: Callable[[SplittimeError], None] | None = None
        self._let_go: Callable[[], None] | None = None
        self._members: list[Member] = []
        try:
            for index in range(1, config.tensor_parallel_size):
                self._members.append(Member(index, self._note_death))
                self._members[-1].channel.send(encode(Begin(index, str(self.folder), config)))
        except OSError as error:
            cause = self.cause()
            self.end()
            raise cause from error
        except BaseException:
            self.end()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(member.process.pid for member in self._members)

    def watch(self, tell: Callable[[SplittimeError], None]) -> None:
        """Be told, in another thread, when a rank ends that was not meant to."""
        self._tell = tell
        if self.has_dead:
            tell(self.cause())

    def on_death(self, let_go: Callable[[], None]) -> None:
        """What lets go of that which waits for a dead rank."""
        self._let_go = let_go

    def meet(self) -> None:
        """Return when every rank has its weights. Raises what kept one from it."""
        for member in self._members:
            if not member.await_arrival():
                raise self.cause()

    def set_timeout(self, timeout_s: float) -> None:
        """For a rank to take a plan in."""
        for member in self._members:
            member.channel.end.settimeout(timeout_s)

    @property
    def has_dead(self) -> bool:
        return bool(self._deaths)

    def check(self) -> None:
        """Raises `EngineError` if a rank has ended."""
        if self.has_dead:
            raise self.cause()

    def send(self, content: bytes) -> None:
        """To every rank. Raises OSError."""
        for member in self._members:
            member.channel.send(content)

    def end(self) -> None:
        """End every rank, now; returns when they are gone. Any thread, any number of times."""
        self._is_over = True
        for member in self._members:
            member.end()
        self.forget_meeting()

    def forget_meeting(self) -> None:
        """Remove the folder where ranks meet: they have, or never will."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _note_death(self, index: int, status: int) -> None:
        with self._changed:
            self._deaths[index] = status
            self._changed.notify_all()
        if not self._is_over:
            if self._let_go is not None:
                self._let_go()
            if self._tell is not None:
                self._tell(self.cause())

    # ---- who began

    def cause(self) -> SplittimeError:
        """Why the ranks cannot go on, as an error that names the one with which it began. Any thread."""
        with self._finding:
            self._cause = self._cause or self._find_cause()
            return self._cause

    def _find_cause(self) -> SplittimeError:
        stopped = next((member for member in self._members if member.is_stopped), None)
        if stopped is not None:
            return EngineError(f"{stopped.name} is stopped")
        index = self._first_death()
        if index is not None:
            return self._members[index - 1].explain(self._deaths[index])
        silent = [member.name for member in self._members if member.index not in self._deaths]
        if silent:
            return EngineError(f"{' and '.join(silent)} did not answer in time", hint="see collective_timeout_s")
        return EngineError("the other ranks waited for the first in vain", hint="see collective_timeout_s")

    def _first_death(self) -> int | None:
        """The first that did not end because of another; waits a little, since deaths are told of late."""
        deadline = time.monotonic() + CAUSE_PATIENCE_S
        with self._changed:
            while True:
                own = [index for index, status in self._deaths.items() if status != LOST_STATUS]
                left_s = deadline - time.monotonic()
                if own or left_s <= 0 or len(self._deaths) == len(self._members):
                    return own[0] if own else None
                self._changed.wait(left_s)
