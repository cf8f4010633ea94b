"""What a client knows of its engine process: what it said at `Ready`, and what came after (ceilings, pauses, knobs).

A successor of a dead process says it all again; the ceilings of its predecessor hold until it has its own.
"""

from typing import Any

import msgspec

from splittime.core.facts import Machine
from splittime.core.sleep import SleepReport
from splittime.drive.gc_pauses import MAX_KEPT
from splittime.drive.messages import Ready
from splittime.ledger.facts import Process, ServerFacts

Pauses = tuple[tuple[int, int], ...]
MAX_SLEEPS = 32


class KnownFacts:
    """Values only: whoever asks may keep what `now` returns, in any thread."""

    def __init__(self) -> None:
        self._said: ServerFacts | None = None
        self._process: Process | None = None
        self._machine: Machine | None = None

    def take_ready(self, ready: Ready, started_ns: int, restarts: int) -> None:
        self._said = ready.facts
        sleeps = self._process.sleeps if self._process is not None else ()
        self._process = Process(
            name="engine", started_ns=started_ns, ready_ns=ready.stats.now_ns, restarts=restarts, sleeps=sleeps
        )

    def take_machine(self, machine: Machine) -> None:
        self._machine = machine

    def add_pauses(self, pauses: Pauses) -> None:
        if pauses and self._process is not None:
            kept = (*self._process.pauses, *pauses)[-MAX_KEPT:]
            self._process = msgspec.structs.replace(self._process, pauses=kept)

    def add_sleep(self, report: SleepReport) -> None:
        if report.changed and self._process is not None:
            sleeps = (*self._process.sleeps, report)[-MAX_SLEEPS:]
            self._process = msgspec.structs.replace(self._process, sleeps=sleeps)

    def now(self, knobs: dict[str, Any]) -> ServerFacts | None:
        """With these knobs among the settings; None if the engine has not said anything yet."""
        said, process = self._said, self._process
        if said is None or process is None:
            return None
        machine = max(filter(None, (said.machine, self._machine)), key=_measured_at_unix_ns, default=None)
        return msgspec.structs.replace(said, settings=said.settings | knobs, machine=machine, processes=(process,))


def _measured_at_unix_ns(machine: Machine) -> int:
    return machine.measured_at_unix_ns or 0
