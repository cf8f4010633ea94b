"""A server as a process that outlives whoever started it, and ends with whoever it is told to end with.

Its files in a folder are what is known of it: `NAME.json` (its process), `NAME.out` (what it prints when it is ready),
`NAME.log` (its last words). So another process finds it again after the one that started it was killed. A process id
that the system has given to another since is told by the instant at which that one began.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
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
from splittime.cluster.replica_process import ProcessMark
ProcessMark.of(os.getpid()).write(Path(sys.argv.pop(1)))
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

    def write(self, path: Path) -> None:
        write_whole(path, json.dumps(self).encode())


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
        mark = ProcessMark.of(self._process.pid)
        if mark is not None:
            mark.write(self._path("json"))

    def look(self) -> ReplicaSeen:
        if self._process is not None:
            self._process.poll()  # else it would stay, ended, until this process ends
        mark = self._mark()
        is_alive = mark is not None and mark.is_alive
        return ReplicaSeen(is_alive, self._url(), "" if is_alive else self._words())

    def end(self, sign: signal.Signals = signal.SIGTERM) -> None:
        mark = self._mark()
        if mark is not None:
            mark.signal(sign)

    def forget(self) -> None:
        """Take its files away; its log stays."""
        for kind in ("json", "out"):
            self._path(kind).unlink(missing_ok=True)

    def _path(self, kind: str) -> Path:
        return self._folder / f"{self.name}.{kind}"

    def _mark(self) -> ProcessMark | None:
        try:
            return ProcessMark(*json.loads(self._path("json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

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
