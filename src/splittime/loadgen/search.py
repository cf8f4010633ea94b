"""The highest rate that keeps a promise, and sweeps: which runs to make next, from the verdicts of those made.

Near the knee a run's verdict is a coin with a bias: the same server kept a p99 of 700 ms in one run and missed 1,700 ms
in the next (NVIDIA/aicr, issue 1196). So no single run decides:

    bracket   double the rate from `low` until a run breaks
    narrow    halve the bracket's ratio until it is at most 1 + `resolution`
    confirm   both ends are run again until `confirmations` runs of each agree; an end that turns out otherwise moves,
              and the bracket is narrowed again

The kept end is the highest rate below the lowest broken one, so a lucky run above the knee claims nothing. The answer
is the interval, with every run's verdict. A void run, whose client was at fault, says nothing about the server: it is
run again once, and if the client fails again, the search ends there. `tests/loadgen/test_search.py` holds it against a
noisy queue.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum

import msgspec

from splittime.core.errors import ConfigError
from splittime.ledger.client_book import Run

MIN_RESOLUTION = 0.005
MAX_RUNS = 40
VOIDS_IN_A_ROW = 2

Measure = Callable[[float], Awaitable[Run]]
Keeps = Callable[[Run], bool]


class Verdict(StrEnum):
    KEPT = "kept"
    BROKEN = "broken"
    VOID = "void"


class Trial(msgspec.Struct, frozen=True):
    """One run. `level` is its rate, or its concurrency in a sweep of those."""

    level: float
    verdict: Verdict
    run: Run


OnTrial = Callable[[Trial], None]


class Stopped(Exception):
    """For `measure` to raise: no more runs can be made, and the text says why. Those that were made are kept."""


class Found(msgspec.Struct, frozen=True):
    """The knee is in [kept, broken]. None: not even `low` keeps, or not even `high` breaks. `stopped`: why the search
    ended before both ends were confirmed, if it did."""

    kept: float | None
    broken: float | None
    trials: tuple[Trial, ...]
    stopped: str | None = None

    @property
    def is_void(self) -> bool:
        return _ends_void(self.trials)

    @property
    def sentence(self) -> str:
        """For people."""
        runs = _counted(self.trials)
        if self.stopped is not None:
            return f"the search ended early: {self.stopped} {runs}{self._so_far}"
        if self.kept is None:
            return f"not even {self.broken:g} requests/s keep the promise {runs}"
        if self.broken is None:
            return f"{self.kept:g} requests/s, the most that was asked for, keep the promise {runs}"
        return f"{self.kept:g} requests/s keep the promise, {self.broken:g} break it {runs}"

    @property
    def _so_far(self) -> str:
        """Which rates it had come to, though not both were confirmed."""
        ends = ((self.kept, "kept"), (self.broken, "broke"))
        told = [f"{rate:g} requests/s {verb} the promise" for rate, verb in ends if rate is not None]
        return f"; so far {', '.join(told)}" if told else ""


class Swept(msgspec.Struct, frozen=True):
    """The runs in order; `stopped` if they did not all take place."""

    trials: tuple[Trial, ...]
    stopped: str | None = None

    @property
    def is_void(self) -> bool:
        return _ends_void(self.trials)

    @property
    def sentence(self) -> str:
        """For people; empty if all is in the table."""
        return "" if self.stopped is None else f"the sweep ended early: {self.stopped} {_counted(self.trials)}"


def _counted(trials: Sequence[Trial]) -> str:
    return f"({len(trials)} run{'' if len(trials) == 1 else 's'})"


def _ends_void(trials: Sequence[Trial]) -> bool:
    last = trials[-VOIDS_IN_A_ROW:]
    return len(last) == VOIDS_IN_A_ROW and all(trial.verdict is Verdict.VOID for trial in last)


async def sweep(
    measure: Measure, levels: Sequence[float], keeps: Keeps | None = None, on_trial: OnTrial | None = None
) -> Swept:
    """A run for each level in order. Without `keeps` every run that is not void counts as kept."""
    trials: list[Trial] = []
    for level in levels:
        is_void = True
        while is_void:
            try:
                trials.append(await _try(measure, keeps or (lambda _: True), level, on_trial))
            except Stopped as end:
                return Swept(tuple(trials), str(end))
            is_void = trials[-1].verdict is Verdict.VOID
            if _ends_void(trials):
                return Swept(tuple(trials), _void_sentence(trials[-1]))
    return Swept(tuple(trials))


async def highest_rate(
    measure: Measure,
    keeps: Keeps,
    low: float,
    high: float,
    resolution: float = 0.05,
    confirmations: int = 2,
    max_runs: int = MAX_RUNS,
    on_trial: OnTrial | None = None,
) -> Found:
    """Raises `ConfigError` for bounds that are none, and what `measure` raises."""
    check_search(low, high, resolution, confirmations, max_runs)
    votes = _Votes(confirmations)
    while len(votes.trials) < max_runs:
        rate = _next_rate(votes, low, high, resolution)
        if rate is None:
            return Found(*votes.ends(), tuple(votes.trials))
        try:
            votes.trials.append(await _try(measure, keeps, rate, on_trial))
        except Stopped as end:
            return Found(*votes.ends(), tuple(votes.trials), str(end))
        if _ends_void(votes.trials):
            return Found(*votes.ends(), tuple(votes.trials), _void_sentence(votes.trials[-1]))
    why = f"{max_runs} runs did not agree; make them longer, or the resolution coarser"
    return Found(*votes.ends(), tuple(votes.trials), why)


def check_search(low: float, high: float, resolution: float, confirmations: int, max_runs: int) -> None:
    """Raises `ConfigError` for bounds that are none."""
    if not 0 < low < high < math.inf:
        hint = "The lower one is above 0 and below the higher one."
        raise ConfigError(f"no rates lie between {low:g} and {high:g}", param="low", value=low, limit=high, hint=hint)
    if not MIN_RESOLUTION <= resolution < 1:
        limit = f"{MIN_RESOLUTION} to 1"
        what = f"the resolution is {resolution:g}; it must be {limit}"
        raise ConfigError(what, param="resolution", value=resolution, limit=limit, hint="0.05 is 5%.")
    if confirmations < 1:
        what = f"an end is run at least once, not {confirmations} times"
        raise ConfigError(what, param="confirmations", value=confirmations, limit=1)
    if max_runs < confirmations:
        what = f"{max_runs} runs cannot confirm anything {confirmations} times"
        raise ConfigError(what, param="max_runs", value=max_runs, limit=confirmations, hint="Allow more --max-runs.")


class _Votes:
    """What the runs said, by rate. A rate is settled when `confirmations` of its runs agree."""

    def __init__(self, confirmations: int) -> None:
        self._confirmations = confirmations
        self.trials: list[Trial] = []

    def count(self, rate: float, verdict: Verdict) -> int:
        return sum(trial.level == rate and trial.verdict is verdict for trial in self.trials)

    def is_kept(self, rate: float) -> bool:
        """By majority; a tie is not."""
        return self.count(rate, Verdict.KEPT) > self.count(rate, Verdict.BROKEN)

    def is_settled(self, rate: float) -> bool:
        return max(self.count(rate, verdict) for verdict in (Verdict.KEPT, Verdict.BROKEN)) >= self._confirmations

    def ends(self) -> tuple[float | None, float | None]:
        """The highest kept rate below the lowest broken one, and that one."""
        rates = {trial.level for trial in self.trials if trial.verdict is not Verdict.VOID}
        broken = min((rate for rate in rates if not self.is_kept(rate)), default=None)
        kept = max((rate for rate in rates if broken is None or rate < broken), default=None)
        return kept, broken


def _next_rate(votes: _Votes, low: float, high: float, resolution: float) -> float | None:
    """What to run next; None: both ends are close enough, and settled."""
    kept, broken = votes.ends()
    if kept is None and broken is None:
        return low
    if broken is None and kept is not None and kept < high:
        return min(_rounded(2 * kept), high)
    if kept is not None and broken is not None and broken / kept > 1 + resolution:
        return _rounded(math.sqrt(kept * broken))
    return next((end for end in (kept, broken) if end is not None and not votes.is_settled(end)), None)


def _rounded(rate: float) -> float:
    """Four digits are enough for people, and finer than any resolution."""
    return float(f"{rate:.4g}")


async def _try(measure: Measure, keeps: Keeps, level: float, on_trial: OnTrial | None) -> Trial:
    run = await measure(level)
    verdict = Verdict.VOID if run.is_void else Verdict.KEPT if keeps(run) else Verdict.BROKEN
    trial = Trial(level, verdict, run)
    if on_trial is not None:
        on_trial(trial)
    return trial


def _void_sentence(trial: Trial) -> str:
    faults = "; ".join(check.sentence for check in trial.run.checks if check.voids and not check.ok)
    return f"the run at {trial.level:g} is VOID again, the client was at fault: {faults}"
