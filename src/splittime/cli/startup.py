"""The start-up timeline: what began and ended when, in ms from the start of the process."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from splittime.core.process_start import process_start_ns


class StartPhase(NamedTuple):
    name: str
    begin_ms: float
    end_ms: float


class StartTimeline:
    """Phases of this process and of its engine process, on one clock."""

    def __init__(self) -> None:
        self.start_ns = process_start_ns()
        self._phases: list[tuple[str, int, int]] = [("import", self.start_ns, time.monotonic_ns())]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self._phases.append((name, begin_ns, time.monotonic_ns()))

    def extend(self, phases: tuple[tuple[str, int, int], ...]) -> None:
        """Phases of the engine process."""
        self._phases += [(f"engine: {name}", begin_ns, end_ns) for name, begin_ns, end_ns in phases]

    def ready(self) -> None:
        now_ns = time.monotonic_ns()
        self._phases.append(("ready", now_ns, now_ns))

    def phases(self) -> list[StartPhase]:
        """In order of their ends."""
        ordered = sorted(self._phases, key=lambda phase: phase[2])
        return [StartPhase(name, self._ms(begin_ns), self._ms(end_ns)) for name, begin_ns, end_ns in ordered]

    def _ms(self, instant_ns: int) -> float:
        return round((instant_ns - self.start_ns) / 1e6, 1)
