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
`tests/bench/test_search.py` holds it against a noisy queue.

`SearchResult` and `Swept` hold every run with its verdict, the two ends of the knee, and a sentence for people.

One run after another on one server, at levels of a rate or a concurrency: `find_rate` and `sweep_levels`.

Each run has prompts of its own; a level that is run again gets another seed. What was measured is never lost to what
came after: Ctrl-C, a server that is gone, or a file that cannot be written ends the series with the runs made so far.
"""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import msgspec

from splittime.bench.book.figures import Summary, summary
from splittime.bench.book.metrics import failed_by_lateness, shown, value_of, void_for_more
from splittime.bench.book.records import Run, save
from splittime.bench.book.slo import SloResult, judge, limits_of, still_missed
from splittime.bench.draw import draw_for
from splittime.bench.run import run_schedule
from splittime.bench.share import OnProgress
from splittime.bench.spec import spec_of
from splittime.bench.spec_rules import check
from splittime.core.errors import ConfigError, SplittimeError
from splittime.wire.scrape import ServerLimits, server_limits
from splittime.wire.target import RunOptions, Target


class LevelVerdict(StrEnum):
    KEPT = "kept"
    BROKEN = "broken"
    VOID = "void"


class Trial(msgspec.Struct, frozen=True):
    """One run. `level` is its rate, or its concurrency in a sweep of those."""

    level: float
    verdict: LevelVerdict
    run: Run


class SearchResult(msgspec.Struct, frozen=True):
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
        """All that was found is that the client is at fault."""
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
        return next((_faults(one.run) for one in reversed(self.trials) if one.verdict is LevelVerdict.VOID), "")

    @property
    def _so_far(self) -> str:
        """Returns which rates it had come to, though not both were confirmed."""
        ends = ((self.kept, "kept"), (None if self.is_unjudged else self.broken, "broke"))
        known = [f"{rate:g} requests/s {verb} the promise" for rate, verb in ends if rate is not None]
        return f"; so far {', '.join(known)}" if known else ""


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
        return [trial for trial in last.values() if trial.verdict is LevelVerdict.VOID]


def _counted(trials: Sequence[Trial]) -> str:
    return f"({len(trials)} run{'' if len(trials) == 1 else 's'})"


def _faults(run: Run) -> str:
    return "; ".join(check.sentence for check in run.checks if check.voids and not check.ok)


MIN_RESOLUTION = 0.005
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
            if trials[-1].verdict is not LevelVerdict.VOID:
                break
    return Swept(tuple(trials))


def is_usable(run: Run) -> bool | None:
    """Returns what counts as kept where nothing is asked."""
    return None if run.is_void else True


class SearchBounds(msgspec.Struct, frozen=True):
    """What a search keeps to."""

    low: float = 1.0
    high: float = 1000.0
    resolution: float = 0.05
    confirmations: int = 2
    max_runs: int = 40

    def check(self) -> None:
        """Raises `ConfigError` for bounds that are none."""
        low, high, resolution, confirmations, max_runs = msgspec.structs.astuple(self)
        if not 0 < low < high < math.inf:
            hint = "The lower one is above 0 and below the higher one."
            what = f"no rates lie between {low:g} and {high:g}"
            raise ConfigError(what, param="low", value=low, limit=high, hint=hint)
        if not MIN_RESOLUTION <= resolution < 1:
            limit = f"{MIN_RESOLUTION} to 1"
            what = f"the resolution is {resolution:g}; it must be {limit}"
            raise ConfigError(what, param="resolution", value=resolution, limit=limit, hint="0.05 is 5%.")
        if confirmations < 1:
            what = f"an end is run at least once, not {confirmations} times"
            raise ConfigError(what, param="confirmations", value=confirmations, limit=1)
        if max_runs < confirmations:
            what = f"{max_runs} runs cannot confirm anything {confirmations} times"
            hint = "Allow more --max-runs."
            raise ConfigError(what, param="max_runs", value=max_runs, limit=confirmations, hint=hint)


async def highest_rate(
    measure: Measure, keeps: Keeps, bounds: SearchBounds, on_trial: OnTrial | None = None
) -> SearchResult:
    """Raises `ConfigError` for bounds that are none, and what `measure` raises."""
    bounds.check()
    votes = _Votes(bounds.confirmations)
    while len(votes.trials) < bounds.max_runs:
        rate = _next_rate(votes, bounds)
        if rate is None:
            return votes.found()
        try:
            votes.trials.append(await _try(measure, keeps, rate, on_trial))
        except Stopped as end:
            return votes.found(str(end))
    return votes.found(f"{bounds.max_runs} runs did not agree; make them longer, or the resolution coarser")


class _Votes:
    """What the runs said, by rate. A rate is settled when `confirmations` of its runs agree."""

    def __init__(self, confirmations: int) -> None:
        self._confirmations = confirmations
        self.trials: list[Trial] = []

    def count(self, rate: float, verdict: LevelVerdict) -> int:
        return sum(trial.level == rate and trial.verdict is verdict for trial in self.trials)

    def is_kept(self, rate: float) -> bool:
        """By majority; a tie is not."""
        return self.count(rate, LevelVerdict.KEPT) > self.count(rate, LevelVerdict.BROKEN)

    def is_unjudged(self, rate: float) -> bool:
        """Void so often, and never anything else."""
        voids = self.count(rate, LevelVerdict.VOID)
        return voids >= VOIDS_AT_A_LEVEL and voids == sum(trial.level == rate for trial in self.trials)

    def is_settled(self, rate: float) -> bool:
        most = max(self.count(rate, verdict) for verdict in (LevelVerdict.KEPT, LevelVerdict.BROKEN))
        return most >= self._confirmations or self.is_unjudged(rate)

    def ends(self) -> tuple[float | None, float | None]:
        """The highest kept rate below the lowest broken one, and that one, or one that this client cannot judge."""
        judged = {trial.level for trial in self.trials if trial.verdict is not LevelVerdict.VOID}
        rates = judged | {trial.level for trial in self.trials if self.is_unjudged(trial.level)}
        broken = min((rate for rate in rates if not self.is_kept(rate)), default=None)
        kept = max((rate for rate in rates if broken is None or rate < broken), default=None)
        return kept, broken

    def found(self, stopped: str | None = None) -> SearchResult:
        kept, broken = self.ends()
        is_unjudged = broken is not None and self.is_unjudged(broken)
        return SearchResult(kept, broken, tuple(self.trials), stopped, is_unjudged)


def _next_rate(votes: _Votes, bounds: SearchBounds) -> float | None:
    """Returns what to run next; None: both ends are close enough, and settled."""
    kept, broken = votes.ends()
    if kept is None and broken is None:
        return bounds.low
    if broken is None and kept is not None and kept < bounds.high:
        return min(_rounded(2 * kept), bounds.high)
    if kept is not None and broken is not None and broken / kept > 1 + bounds.resolution:
        return _rounded(math.sqrt(kept * broken))
    return next((end for end in (kept, broken) if end is not None and not votes.is_settled(end)), None)


def _rounded(rate: float) -> float:
    """Four digits are enough for people, and finer than any resolution."""
    return float(f"{rate:.4g}")


async def _try(measure: Measure, keeps: Keeps, level: float, on_trial: OnTrial | None) -> Trial:
    run = await measure(level)
    is_kept = keeps(run)
    verdict = LevelVerdict.VOID if is_kept is None else LevelVerdict.KEPT if is_kept else LevelVerdict.BROKEN
    trial = Trial(level, verdict, run)
    if on_trial is not None:
        on_trial(trial)
    return trial


FIGURES = ("ttft_p50", "ttft_p99", "tpot_p99", "e2e_p99", "request_rate", "throughput", "error_rate")
USUAL = {"duration_s": 30.0, "warm_up_s": 5.0, "cool_down_s": 5.0}  # of each run of a rate, where not said


class SeriesDisplay(Protocol):
    """Whoever shows a series while it goes on."""

    def note(self, text: str) -> None: ...

    def live(self, is_closed: bool) -> AbstractContextManager[OnProgress | None]:
        """Around each load."""
        ...

    def trial(self, number: int, trial: Trial) -> None: ...


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """What all runs have in common. level: the field of the load that differs, rate or concurrency. slo: its terms; {}
    judges nothing. out: a folder where each run is saved. `summary_of` makes each run's figures once: their intervals
    take a quarter of a second."""

    target: Target
    load: dict[str, Any]
    level: str
    slo: dict[str, float] = {}
    pause_s: float = 1.0
    options: RunOptions = RunOptions(workers=None)
    vocab_size: int | None = None
    max_model_len: int | None = None
    out: Path | None = None
    summaries: dict[int, tuple[Run, Summary]] = msgspec.field(default_factory=dict)

    def load_at(self, level: float) -> dict[str, Any]:
        """Returns the load of a run at this level: one of a rate has a window and what is around it, also where nobody
        said so."""
        if self.level == "concurrency":
            return {**self.load, "concurrency": round(level)}
        says_length = {"duration_s", "num_requests"} & set(self.load)
        usual = {name: value for name, value in USUAL.items() if name != "duration_s" or not says_length}
        if "warm_up_requests" in self.load:
            usual.pop("warm_up_s")
        return {**usual, **self.load, self.level: level}

    def summary_of(self, run: Run) -> Summary:
        """Returns the run's figures, by its identity, which is unique as long as the run is kept here."""
        if id(run) not in self.summaries:
            self.summaries[id(run)] = run, summary(run, limits=limits_of(self.slo, run.slo))
        return self.summaries[id(run)][1]

    def results_of(self, run: Run) -> list[SloResult]:
        """Returns what became of the SLO's terms; none without an SLO."""
        return judge(self.summary_of(run), self.slo) if self.slo else []

    def figures_of(self, run: Run) -> dict[str, str]:
        """Returns the run's figures in words, the SLO's own terms first, as they would be written."""
        found = self.summary_of(run)
        wanted = [name for name in self.slo if "_" in name or name in ("goodput", "throughput")]
        values = {name: value_of(found, name) for name in dict.fromkeys((*wanted, *FIGURES))}
        return {name: shown(name, value) for name, value in values.items() if value is not None}

    def as_json(self, found: SearchResult | Swept) -> dict[str, Any]:
        """Returns the answer, with the figures of each run instead of the run."""
        answer = msgspec.to_builtins(msgspec.structs.replace(found, trials=()))
        trials = [self._trial_as_json(trial) for trial in found.trials]
        return {**answer, "sentence": found.sentence, "level": self.level, "trials": trials}

    def _trial_as_json(self, trial: Trial) -> dict[str, Any]:
        return {
            "level": trial.level,
            "verdict": trial.verdict,
            "stopped": trial.run.stopped,
            "figures": {name: value_of(self.summary_of(trial.run), name) for name in FIGURES},
            "slo": self.results_of(trial.run),
            "schedule_digest": trial.run.schedule_digest,
        }


async def find_rate(series: Series, bounds: SearchBounds, display: SeriesDisplay, stop: asyncio.Event) -> SearchResult:
    """Returns the highest rate that keeps the series' SLO. `stop` ends the search with the runs made so far."""
    runs = await _runs(series, [bounds.low], display, stop)
    return await highest_rate(runs.measure, runs.keeps, bounds, runs.show)


async def sweep_levels(series: Series, levels: Sequence[float], display: SeriesDisplay, stop: asyncio.Event) -> Swept:
    """Returns a run at each level. `stop` ends the sweep with the runs made so far."""
    runs = await _runs(series, levels, display, stop)
    return await sweep(runs.measure, levels, runs.keeps, on_trial=runs.show)


async def _runs(series: Series, levels: Sequence[float], display: SeriesDisplay, stop: asyncio.Event) -> "_Runs":
    """Refuses what cannot be at any of these levels before anything is asked of the server."""
    if series.out is not None and series.out.exists() and not series.out.is_dir():
        raise ConfigError(f"{series.out} is a file", param="out", value=str(series.out), hint="Name a folder.")
    for level in levels:
        check(spec_of(series.load_at(level)))
    limits = await server_limits(series.target)
    return _Runs(series, limits.corrected(series.vocab_size, series.max_model_len), display, stop)


class _Runs:
    """The runs of a series as they are made."""

    def __init__(self, series: Series, limits: ServerLimits, display: SeriesDisplay, stop: asyncio.Event) -> None:
        self._series, self._limits, self._display, self._stop = series, limits, display, stop
        self._made: Counter[float] = Counter()

    async def measure(self, level: float) -> Run:
        """Raises `Stopped` where the series cannot go on; of the first run, what was the matter."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), self._series.pause_s if self._made else 0)
        if self._stop.is_set():
            raise Stopped("interrupted")
        cut_short = f"interrupted; the run at {level:g} was cut short and is left out"
        try:
            run = await self._carried_out(level)
        except SplittimeError as error:
            if not self._made:
                raise
            raise Stopped(cut_short if self._stop.is_set() else error.info.message) from error
        if self._stop.is_set():
            raise Stopped(cut_short)
        return run

    async def _carried_out(self, level: float) -> Run:
        series = self._series
        seed = series.load.get("seed", 0) + self._made[level]
        schedule = draw_for({**series.load_at(level), "seed": seed}, self._limits)
        for note in () if self._made else schedule.notes:
            self._display.note(note)
        options = msgspec.structs.replace(series.options, label=f"{series.level} {level:g}")
        with self._display.live(series.level == "concurrency") as on_progress:
            run = await run_schedule(schedule, [series.target], options, on_progress, self._stop)
        self._made[level] += 1
        if series.out is not None:
            save(run, series.out / f"{self._made.total():02d}-{series.level}-{level:g}.json")
        return run

    def keeps(self, run: Run) -> bool | None:
        """Returns whether the run kept the SLO; one that had to be stopped kept nothing. None where the client's own
        fault may have decided it: lateness only lengthens times, so what was kept with it was kept, and what is missed
        without it was missed."""
        if void_for_more(run):
            return None
        results = self._series.results_of(run)
        is_kept = run.stopped is None and all(result.ok for result in results)
        if not failed_by_lateness(run):
            return is_kept
        if any(still_missed(run, result) for result in results):
            return False
        return True if is_kept and (results or not run.is_void) else None

    def show(self, trial: Trial) -> None:
        self._display.trial(self._made.total(), trial)
