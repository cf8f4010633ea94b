"""A process that runs for as long as `splittime up` does: started, and started again where it ends."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from splittime.cluster.state import write_mark

POLL_S = 0.1
AGAIN_S = 1.0  # from the begin of a process until it is started again, at the least
WORDS = 500


class UpProcess:
    """A process that is to run for as long as the cluster does. out: what it prints, if that is read."""

    def __init__(self, folder: Path, name: str, command: Sequence[str], mark: Path | None = None) -> None:
        self.name, self._command, self._mark = name, command, mark
        self._log, self._out = folder / f"{name}.log", folder / f"{name}.out"
        self._process: subprocess.Popen[bytes] | None = None
        self._begun_s, self._has_ended = 0.0, False
        self.has_told = False

    def start(self) -> None:
        with self._log.open("ab") as words, self._out.open("wb") as out:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=out, stderr=words, start_new_session=True
            )
        self._begun_s, self._has_ended, self.has_told = time.monotonic(), False, False

    def attend(self) -> bool:
        """Start it again if it has ended; note whether it has told that it listens. Returns whether it has
        just ended."""
        if self.is_alive:
            if not self.has_told and self._out.read_bytes().endswith(b"\n"):
                self.has_told = True
                if self._mark is not None:
                    write_mark(self._mark, self.pid)
            return False
        if not self._has_ended:
            self._has_ended = True
            return True
        if time.monotonic() - self._begun_s > AGAIN_S:
            self.start()
        return False

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None, "started"
        return self._process.pid

    @property
    def printed(self) -> str:
        """Returns what it has printed."""
        return self._out.read_text().strip()

    @property
    def words(self) -> str:
        return self._log.read_text(errors="replace").strip()[-WORDS:]

    @property
    def last_line(self) -> str:
        return self.words.rpartition("\n")[2] or "it said nothing"

    def signal(self, sign: signal.Signals) -> None:
        if self.is_alive:
            os.kill(self.pid, sign)

    def wait(self, seconds: float, is_hurried: Callable[[], bool]) -> None:
        """Return when it has ended; kill it where that takes too long, or as soon as somebody is in a hurry."""
        until_s = time.monotonic() + seconds
        while self.is_alive and time.monotonic() < until_s and not is_hurried():
            time.sleep(POLL_S)
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
