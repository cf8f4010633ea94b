"""Measuring the machine's ceilings in short pieces, each while an engine has nothing else to do."""

from collections.abc import Iterator

from splittime.core.clock import Clock
from splittime.core.facts import Machine

Pieces = Iterator[Machine | None]
"""Each `next` is a short piece of the measurement; the last one yields the result."""


class Measuring:
    """pieces: what is to be done; None: nothing. ended_ns: the end of the latest piece; a request that came before that
    is told that it waited for it (`measuring`)."""

    def __init__(self, pieces: Pieces | None, clock: Clock) -> None:
        self.ended_ns = 0
        self._pieces, self._clock = pieces, clock

    @property
    def is_due(self) -> bool:
        return self._pieces is not None

    def measure_piece(self) -> Machine | None:
        """Do a piece; the last one gives the result."""
        machine = None if self._pieces is None else next(self._pieces)
        if machine is not None:
            self._pieces = None
        self.ended_ns = self._clock.now_ns()
        return machine

    def finish(self) -> Machine | None:
        """Do all that is left; None if nothing was."""
        machine = None
        while self._pieces is not None:
            machine = self.measure_piece()
        return machine
