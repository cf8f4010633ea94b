"""One other rank's process, as the first rank has it: its start, its channel, its end, and what became of it.

A thread starts the process and waits for its end. The thread matters: a rank asks the system to be killed with its
parent (`follower`), and for Linux the parent is the thread that made it, so this one lives as long as the process does.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from splittime.core.errors import EngineError, SplittimeError, error_from_info
from splittime.runner.ranks.channel import Arrived, Channel, Failed

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
        """What it says next; None when it says no more."""
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
        return _death_error(self.name, self._last_words, status)

    def end(self) -> None:
        """Also of a stopped process; returns when it is gone."""
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


def _death_error(name: str, words: Failed | None, status: int) -> SplittimeError:
    if words is None:
        how = f"was killed by {_signal(-status)}" if status < 0 else f"ended with exit status {status}"
        return EngineError(f"{name} {how}", hint="its last lines are on standard error")
    if words.error is not None:
        return error_from_info(words.error)
    return EngineError(f"{name}: {words.message}\n{words.trace}".rstrip())


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
