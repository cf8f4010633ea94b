"""The highest rate that keeps a promise, and sweeps: which runs to make next, from the verdicts of those made.

Near the knee a run's verdict is a coin with a bias: the same server kept a p99 of 700 ms in one run and missed 1,700 ms
in the next (NVIDIA/aicr, issue 1196). So no single run decides:

    bracket   double the rate from `low` until a run breaks
    narrow    halve the bracket's ratio until it is at most 1 + `resolution`
    confirm   both ends are run again until `confirmations` runs of each agree; an end that turns out otherwise moves,
              and the bracket is narrowed again

The kept end is the highest rate below the lowest broken one, so a lucky run above the knee claims nothing. The answer
is the interval, with every run's verdict. A void run, of which nobody can tell whether the promise was kept because the
client itself was at fault, says nothing about the server: it is made again once, and if the client fails again, the
rate counts as the lowest that this client cannot judge. The search goes on below it, and says so.
`tests/loadgen/test_search.py` holds it against a noisy queue.
"""

import math
from collections.abc import Awaitable, Callable, Sequence

from splittime.core.errors import ConfigError
from splittime.ledger.client_book import Run
from splittime.loadgen.search_found import Found, Swept, Trial, Verdict

MIN_RESOLUTION = 0.005
MAX_RUNS = 40
VOIDS_AT_A_LEVEL = 2

Measure = Callable[[float], Awaitable[Run]]
Keeps = Callable[[Run], bool | None]  # None: nobody can tell


OnTrial = Callable[[Trial], None]


class Stopped(Exception):
    """For `measure` to raise: no more runs can be made, and the text says why. Those that were made are kept."""


async def sweep(
    measure: Measure, levels: Sequence[float], keeps: Keeps | None = None, on_trial: OnTrial | None = None
) -> Swept:
    """A run for each level in order, a second where the first is void. Without `keeps` every run that is not void
    counts as kept."""
    trials: list[Trial] = []
    for level in levels:
        for _ in range(VOIDS_AT_A_LEVEL):
            try:
                trials.append(await _try(measure, keeps or is_usable, level, on_trial))
            except Stopped as end:
                return Swept(tuple(trials), str(end))
            if trials[-1].verdict is not Verdict.VOID:
                break
    return Swept(tuple(trials))


def is_usable(run: Run) -> bool | None:
    """What counts as kept where nothing is asked."""
    return None if run.is_void else True


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
            return votes.found()
        try:
            votes.trials.append(await _try(measure, keeps, rate, on_trial))
        except Stopped as end:
            return votes.found(str(end))
    return votes.found(f"{max_runs} runs did not agree; make them longer, or the resolution coarser")


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

    def is_unjudged(self, rate: float) -> bool:
        """Void so often, and never anything else."""
        voids = self.count(rate, Verdict.VOID)
        return voids >= VOIDS_AT_A_LEVEL and voids == sum(trial.level == rate for trial in self.trials)

    def is_settled(self, rate: float) -> bool:
        most = max(self.count(rate, verdict) for verdict in (Verdict.KEPT, Verdict.BROKEN))
        return most >= self._confirmations or self.is_unjudged(rate)

    def ends(self) -> tuple[float | None, float | None]:
        """The highest kept rate below the lowest broken one, and that one, or one that this client cannot judge."""
        judged = {trial.level for trial in self.trials if trial.verdict is not Verdict.VOID}
        rates = judged | {trial.level for trial in self.trials if self.is_unjudged(trial.level)}
        broken = min((rate for rate in rates if not self.is_kept(rate)), default=None)
        kept = max((rate for rate in rates if broken is None or rate < broken), default=None)
        return kept, broken

    def found(self, stopped: str | None = None) -> Found:
        kept, broken = self.ends()
        is_unjudged = broken is not None and self.is_unjudged(broken)
        return Found(kept, broken, tuple(self.trials), stopped, is_unjudged)


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
    is_kept = keeps(run)
    verdict = Verdict.VOID if is_kept is None else Verdict.KEPT if is_kept else Verdict.BROKEN
    trial = Trial(level, verdict, run)
    if on_trial is not None:
        on_trial(trial)
    return trial
