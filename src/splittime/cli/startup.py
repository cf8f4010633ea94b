"""The start-up timeline: what began and ended when, in ms from the start of the process."""

import time
from typing import NamedTuple

from splittime.core.sleep import Part
from splittime.core.this_process import process_start_ns


class StartPhase(NamedTuple):
    name: str
    begin_ms: float
    end_ms: float


class StartTimeline:
    """Phases of this process, which touch, and of its engine process, on one clock."""

    def __init__(self) -> None:
        self.start_ns = self._at_ns = process_start_ns()
        self._phases: list[Part] = []
        self._of_engine: list[Part] = []
        self.mark("import")

    def mark(self, name: str) -> None:
        """What was done since the last mark is called so."""
        begin_ns, self._at_ns = self._at_ns, time.monotonic_ns()
        self._phases.append((name, begin_ns, self._at_ns))

    @property
    def own(self) -> tuple[Part, ...]:
        """Returns the phases of this process."""
        return tuple(self._phases)

    def extend(self, phases: tuple[Part, ...]) -> None:
        """Phases of the engine process."""
        self._of_engine += [(f"engine: {name}", begin_ns, end_ns) for name, begin_ns, end_ns in phases]

    def phases(self) -> list[StartPhase]:
        """In order of their ends."""
        ordered = sorted((*self._phases, *self._of_engine), key=lambda phase: phase[2])
        return [StartPhase(name, self._ms(begin_ns), self._ms(end_ns)) for name, begin_ns, end_ns in ordered]

    def _ms(self, instant_ns: int) -> float:
        return round((instant_ns - self.start_ns) / 1e6, 1)
