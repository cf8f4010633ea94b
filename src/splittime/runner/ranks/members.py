"""The other ranks as the first one has them: it starts them, watches them, and ends them all when one fails.

A thread starts each rank's process and waits for its end. The thread matters: a rank asks the system to be killed with
its parent (`follower`), and for Linux the parent is the thread that made it, so this one lives as long as the process
does.

No rank outlives us, not even a stopped one, whatever ends us (`Member`, `follower`). A dead rank is noticed at once by
the thread that waits for it, and by the collective that does (`RankLost`). A rank that hangs is noticed by the
collective alone, after its time-out. `cause` then finds out who began: ranks that end because they lost another say so
by their exit status.

What the first of several ranks does for a step besides its own part: it hands the plan on to the others, and watches
them.

When a rank fails, the step raises an `EngineError` that names it, all ranks are ended, and every later step raises the
same: an engine dies of it and is started anew. Between steps `watch` tells.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from splittime.core.errors import EngineError, SplittimeError, error_from_info
from splittime.core.step import PENDING, StepPlan, StepResult
from splittime.runner.batch import Slots
from splittime.runner.config import RunnerConfig
from splittime.runner.ranks import Arrived, Begin, Channel, Failed, encode
from splittime.runner.ranks.group import RankGroup, RankLost

LOST_STATUS = 3  # of a rank that ends because another did
MODULE = "splittime.runner.ranks.follower"
OnDeath = Callable[[int, int], None]  # rank, exit status as subprocess has it
_decoder = msgspec.msgpack.Decoder(Arrived | Failed)


class Member:
    """One other rank's process, and our end of its channel."""

    def __init__(self, index: int, on_death: OnDeath) -> None:
        self.index = index
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self._last_words: Failed | None = None
        self._is_started = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._live, args=(theirs, on_death), name=f"rank-{index}", daemon=True)
        self._thread.start()
        self._is_started.wait()
        if self._error is not None:
            raise EngineError(f"rank {index} cannot be started: {self._error}") from self._error

    def _live(self, theirs: socket.socket, on_death: OnDeath) -> None:
        command = [sys.executable, "-m", MODULE, str(theirs.fileno()), str(os.getpid())]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,  # a Ctrl-C in the terminal is ours to hear
            )
        except OSError as error:
            self._error = error
            return
        finally:
            theirs.close()
            self._is_started.set()
        on_death(self.index, self.process.wait())

    def await_arrival(self) -> bool:
        """Until its weights are loaded; False if it ended before."""
        return isinstance(self._hear(), Arrived)

    def _hear(self) -> Arrived | Failed | None:
        """Returns what it says next; None when it says no more."""
        content = self.channel.receive()
        said = None if content is None else _decoder.decode(content)
        if isinstance(said, Failed):
            self._last_words = said
        return said

    @property
    def name(self) -> str:
        return f"rank {self.index} (process {self.process.pid})"

    def explain(self, status: int) -> SplittimeError:
        """Why it ended, with this exit status."""
        while self._hear() is not None:
            pass
        if self._last_words is None:
            how = f"was killed by {_signal(-status)}" if status < 0 else f"ended with exit status {status}"
            return EngineError(f"{self.name} {how}", hint="its last lines are on standard error")
        if self._last_words.error is not None:
            return error_from_info(self._last_words.error)
        return EngineError(f"{self.name}: {self._last_words.message}\n{self._last_words.trace}".rstrip())

    def end(self) -> None:
        """End the process, a stopped one too; returns when it is gone."""
        self.process.kill()
        self._thread.join()
        self.channel.close()

    @property
    def is_stopped(self) -> bool:
        """By SIGSTOP, or by a debugger."""
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        except OSError:
            return False


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


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
        with self.ended_on_failure(OSError):
            for index in range(1, config.tensor_parallel_size):
                self._members.append(Member(index, self._note_death))
                self._members[-1].channel.send(encode(Begin(index, str(self.folder), config)))

    @contextmanager
    def ended_on_failure(self, lost: type[Exception]) -> Iterator[None]:
        """Ends all ranks where a part of the start fails, by an interrupt too: no rank may outlive it. lost: the error
        of which a rank's end is the reason; that is raised instead."""
        try:
            yield
        except lost as error:
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


class Lead:
    """The other ranks, as the runner of the first one has them."""

    def __init__(self, members: Members, group: RankGroup) -> None:
        self.members, self.group = members, group
        self.failure: SplittimeError | None = None

    def run(self, plan: StepPlan, slots: Slots, run: Callable[[StepPlan], StepResult]) -> StepResult:
        """run: carries out this rank's part of the step."""
        if self.failure is not None:
            raise self.failure
        try:
            plan = _with_tokens(plan, slots)
            self.members.send(encode(plan))
            result = run(plan)
            self.members.check()
            return msgspec.structs.replace(result, collective_ns=self.group.take_ns())
        except BaseException as error:  # an interrupt too: the others are in the middle of this step
            why = self._end(error)
            if why is error:
                raise
            raise why from error

    def watch(self, tell: Callable[[SplittimeError], None]) -> None:
        """Be told, in another thread, when a rank ends that was not meant to."""
        self.members.watch(tell)

    def close(self) -> None:
        """End the other ranks."""
        self.failure = self.failure or EngineError("this model has been closed")
        self.members.end()

    def _end(self, error: BaseException) -> BaseException:
        """End the other ranks; what to raise for `error`, and for every later step."""
        if isinstance(error, RankLost | OSError) or (isinstance(error, Exception) and self.members.has_dead):
            error = self.members.cause()
        why = error if isinstance(error, SplittimeError) else EngineError(f"a step was not finished: {error!r}")
        self.failure = why
        self.members.end()
        return error


def _with_tokens(plan: StepPlan, slots: Slots) -> StepPlan:
    """Returns the plan with the tokens that were chosen here, where it could not know them: those count."""
    if all(row.token_ids != (PENDING,) for row in plan.rows):
        return plan
    rows = (row if row.token_ids != (PENDING,) else slots[row.request_id].known(row) for row in plan.rows)
    known = tuple(new or row for new, row in zip(rows, plan.rows, strict=True))
    return msgspec.structs.replace(plan, rows=known)
