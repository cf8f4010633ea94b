"""Processes of a cluster: a server's (`ReplicaProcess`), and one that runs for as long as `splittime up` (`UpProcess`).

A server's outlives whoever started it, and ends with whoever it is told to end with. Its files in a folder are what is
known of it: `NAME.json` (its process), `NAME.out` (what it prints when it is ready), `NAME.log` (its last words). So
another process finds it again after the one that started it was killed. A process id that the system has given to
another since is told by the instant at which that one began. An `UpProcess` is started again where it ends.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from splittime.core.files import write_whole

STARTED = """import signal, sys
from splittime.core.this_process import end_when_gone
end_when_gone(int(sys.argv.pop(1)), signal.SIGTERM)
from splittime.cli.entry import main
main()"""
MARKED = """import os, sys
from pathlib import Path
from splittime.cluster.replica_process import write_mark
write_mark(Path(sys.argv.pop(1)), os.getpid())
"""  # by itself, should whoever started it be killed before it can write that down
LAST_WORDS_BYTES = 2000
LOWERED = """from splittime.core import background
background.enter()
"""
OURS, KEYS = "SPLITTIME_", ("SPLITTIME_API_KEY", "SPLITTIME_KV_PEER_KEY")
ENDED_STATES = "ZX"


class ReplicaSeen(NamedTuple):
    """What can be told of a replica's process. url: None until it serves. words: the end of what it said."""

    is_alive: bool
    url: str | None
    words: str = ""


class ProcessMark(NamedTuple):
    """A process, and when it began, in the system's ticks."""

    pid: int
    began: int

    @classmethod
    def of(cls, pid: int) -> "ProcessMark | None":
        """Returns the mark of a process that runs; None if there is none, or it has ended and is not waited for."""
        try:
            told = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        fields = told.rpartition(")")[2].split()
        return None if fields[0] in ENDED_STATES else cls(pid, int(fields[19]))

    @property
    def is_alive(self) -> bool:
        return ProcessMark.of(self.pid) == self

    def signal(self, sign: signal.Signals) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sign)


def write_mark(path: Path, pid: int) -> None:
    mark = ProcessMark.of(pid)
    if mark is not None:
        write_whole(path, json.dumps(mark).encode())


def read_mark(path: Path) -> ProcessMark | None:
    """Returns the process that a file names; None if there is none, or it has ended."""
    try:
        mark = ProcessMark(*json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return mark if mark.is_alive else None


class ReplicaProcess:
    """The server of this name, whose files are in this folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self.name = folder, name
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def names(cls, folder: Path) -> list[str]:
        """Returns the names of those that this folder has files of."""
        return sorted(path.stem for path in folder.glob("*.json"))

    def begin(self, flags: Sequence[str], key: str | None, ends_with: int, *, in_background: bool = False) -> None:
        """Start it. key: that it asks for. ends_with: the process with which it ends."""
        program = MARKED + (LOWERED if in_background else "") + STARTED
        told = [str(self._path("json")), str(ends_with)]
        command = [sys.executable, "-c", program, *told, "serve", *flags, "--port", "0", "--json"]
        out, words = (self._path(kind).open("wb") for kind in ("out", "log"))
        with out, words:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=words,
                env=_environment(key),
                start_new_session=True,
            )
        write_mark(self._path("json"), self._process.pid)

    def look(self) -> ReplicaSeen:
        if self._process is not None:
            self._process.poll()  # else it would stay, ended, until this process ends
        is_alive = read_mark(self._path("json")) is not None
        return ReplicaSeen(is_alive, self._url(), "" if is_alive else self._words())

    def end(self, sign: signal.Signals = signal.SIGTERM) -> None:
        mark = read_mark(self._path("json"))
        if mark is not None:
            mark.signal(sign)

    def forget(self) -> None:
        """Take its files away; its log stays."""
        for kind in ("json", "out"):
            self._path(kind).unlink(missing_ok=True)

    def _path(self, kind: str) -> Path:
        return self._folder / f"{self.name}.{kind}"

    def _url(self) -> str | None:
        try:
            line, end, _ = self._path("out").read_text().partition("\n")
            return str(json.loads(line)["url"]) if end else None
        except (OSError, ValueError, KeyError):
            return None

    def _words(self) -> str:
        with contextlib.suppress(OSError), self._path("log").open("rb") as words:
            words.seek(0, os.SEEK_END)
            words.seek(max(0, words.tell() - LAST_WORDS_BYTES))
            return words.read().decode(errors="replace").strip()
        return ""


def _environment(key: str | None) -> Mapping[str, str]:
    """Returns this process's environment without settings of ours: the cluster's config alone has them."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return plain if key is None else plain | dict.fromkeys(KEYS, key)


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
