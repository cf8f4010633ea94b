"""`splittime gateway` in a process that watches its own event loop: how late that is, and whose the time was.

    python -m benchmarks.gateway.watched_gateway CONFIG FIGURES

It serves as the command does; besides, a timer knocks every `PERIOD_MS`. What it comes too late by is divided by what
Linux counts for the thread: `ran` is the loop's own turn before it (the collector's pauses are in it), `no_processor`
how long it was ready to run and others had the cores, and `other` what is left: another thread had the interpreter, or
nobody ran the machine. The figures are written when it has ended. A knock costs some 10 us, 0.5 % of a core.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from benchmarks.overload_client import spread
from splittime.cli.gateway import compare_arms
from splittime.core.clock import SystemClock
from splittime.drive.host_time import GcPauses, ProcessorTime, freeze_heap
from splittime.gateway.app import run
from splittime.gateway.config_file import read_config, secrets_of
from splittime.ledger.store import Ledger

PERIOD_MS = 2.0
TOLD_FROM_MS = 1.0  # a knock that is less late counts for nobody: timers of an event loop are a millisecond coarse


class Knock(NamedTuple):
    """In ms: how late it came, and how long the thread ran, and waited for a processor, since the one before."""

    late: float
    ran: float
    no_processor: float


class LoopWatch:
    """`begin` inside the loop."""

    def __init__(self) -> None:
        self._processor, self._pauses = ProcessorTime(), GcPauses(SystemClock())
        self._knocks: list[Knock] = []

    def begin(self) -> None:
        due_s, before = time.monotonic() + PERIOD_MS / 1e3, self._processor.now()

        def knock() -> None:
            late_ms, now = (time.monotonic() - due_s) * 1e3, self._processor.now()
            ran_ms, waited_ms = (now.ran_ns - before.ran_ns) / 1e6, (now.waited_ns - before.waited_ns) / 1e6
            self._knocks.append(Knock(max(0.0, late_ms), ran_ms, waited_ms))
            self.begin()

        asyncio.get_running_loop().call_later(PERIOD_MS / 1e3, knock)

    def figures(self) -> dict[str, Any]:
        late = [one for one in self._knocks if one.late > TOLD_FROM_MS]
        no_processor = [min(one.late, one.no_processor) for one in late]
        ran = [min(one.late - waited, one.ran) for one, waited in zip(late, no_processor, strict=True)]
        total = sum(one.late for one in late)
        whose = {"ran": sum(ran), "no_processor": sum(no_processor), "other": total - sum(ran) - sum(no_processor)}
        return {
            "late_ms": spread([one.late for one in self._knocks]),
            "late_ms_by": whose,
            "longest_ran_ms": max(ran, default=0.0),
            "collector": self._pauses.summary(),
        }


class Watched:
    """A gateway in a process of its own. loop: what it saw of its event loop; {} until it has ended."""

    def __init__(self, url: str, pid: int) -> None:
        self.url, self.pid = url, pid
        self.loop: dict[str, Any] = {}


@contextmanager
def watched(config: str) -> Iterator[Watched]:
    """Yields a gateway that serves this config; ends it with SIGTERM."""
    with tempfile.TemporaryDirectory() as folder:
        path, figures = Path(folder) / "gateway.toml", Path(folder) / "loop.json"
        path.write_text(config)
        command = [sys.executable, "-m", "benchmarks.gateway.watched_gateway", str(path), str(figures)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        try:
            found = Watched(f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid)
            yield found
        finally:
            process.terminate()
            process.wait(20)
        found.loop = json.loads(figures.read_text())


def main() -> None:
    config, figures = read_config(Path(sys.argv[1])), Path(sys.argv[2])
    watches: list[LoopWatch] = []

    def on_listening(port: int) -> None:
        freeze_heap()
        watches.append(LoopWatch())
        watches[0].begin()
        print(port, flush=True)

    with closing(Ledger()) as ledger:
        uvloop.run(run(config, secrets_of(config), ledger, compare=compare_arms, on_listening=on_listening))
    figures.write_text(json.dumps(watches[0].figures()))


if __name__ == "__main__":
    main()
