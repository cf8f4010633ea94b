"""What a search or a sweep found: every run with its verdict, the two ends of the knee, and a sentence for people."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from splittime.ledger.client_book import Run


class Verdict(StrEnum):
    KEPT = "kept"
    BROKEN = "broken"
    VOID = "void"


class Trial(msgspec.Struct, frozen=True):
    """One run. `level` is its rate, or its concurrency in a sweep of those."""

    level: float
    verdict: Verdict
    run: Run


class Found(msgspec.Struct, frozen=True):
    """The knee is in [kept, broken]. None: not even `low` keeps, or not even `high` breaks. `stopped`: why the search
    ended before both ends were confirmed, if it did. is_unjudged: at `broken` the client was at fault each time, so
    that the knee may lie higher."""

    kept: float | None
    broken: float | None
    trials: tuple[Trial, ...]
    stopped: str | None = None
    is_unjudged: bool = False

    @property
    def is_void(self) -> bool:
        """Nothing was found but that the client is at fault."""
        return self.is_unjudged and self.kept is None

    @property
    def sentence(self) -> str:
        """For people."""
        runs = _counted(self.trials)
        if self.stopped is not None:
            return f"the search ended early: {self.stopped} {runs}{self._so_far}"
        if self.is_unjudged:
            kept = "nothing was found" if self.kept is None else f"{self.kept:g} requests/s keep the promise"
            fault = f"at {self.broken:g} the client itself was at fault, so nothing higher was judged"
            return f"{kept}; {fault} {runs}: {self._fault}"
        if self.kept is None:
            return f"not even {self.broken:g} requests/s keep the promise {runs}"
        if self.broken is None:
            return f"{self.kept:g} requests/s, the most that was asked for, keep the promise {runs}"
        return f"{self.kept:g} requests/s keep the promise, {self.broken:g} break it {runs}"

    @property
    def _fault(self) -> str:
        return next((_faults(one.run) for one in reversed(self.trials) if one.verdict is Verdict.VOID), "")

    @property
    def _so_far(self) -> str:
        """Which rates it had come to, though not both were confirmed."""
        ends = ((self.kept, "kept"), (None if self.is_unjudged else self.broken, "broke"))
        told = [f"{rate:g} requests/s {verb} the promise" for rate, verb in ends if rate is not None]
        return f"; so far {', '.join(told)}" if told else ""


class Swept(msgspec.Struct, frozen=True):
    """The runs in order; `stopped` if they did not all take place."""

    trials: tuple[Trial, ...]
    stopped: str | None = None

    @property
    def is_void(self) -> bool:
        """At some level the client was at fault each time."""
        return bool(self._unjudged)

    @property
    def sentence(self) -> str:
        """For people; empty if all is in the table."""
        if self.stopped is not None:
            return f"the sweep ended early: {self.stopped} {_counted(self.trials)}"
        if not self._unjudged:
            return ""
        last = self._unjudged[-1]
        levels = ", ".join(f"{one.level:g}" for one in self._unjudged)
        return f"at {levels} the client itself was at fault each time: {_faults(last.run)}"

    @property
    def _unjudged(self) -> list[Trial]:
        last = {trial.level: trial for trial in self.trials}
        return [trial for trial in last.values() if trial.verdict is Verdict.VOID]


def _counted(trials: Sequence[Trial]) -> str:
    return f"({len(trials)} run{'' if len(trials) == 1 else 's'})"


def _faults(run: Run) -> str:
    return "; ".join(check.sentence for check in run.checks if check.voids and not check.ok)
