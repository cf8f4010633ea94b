"""One run after another on one server, at levels of a rate or a concurrency: `find_rate` and `sweep_levels`.

Each run has prompts of its own; a level that is run again gets another seed. What was measured is never lost to what
came after: Ctrl-C, a server that is gone, or a file that cannot be written ends the series with the runs made so far.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from splittime.bench.book.figures import Summary, summary
from splittime.bench.book.metrics import failed_by_lateness, shown, value_of, void_for_more
from splittime.bench.book.records import Run, save
from splittime.bench.book.slo import SloResult, judge, limits_of, still_missed
from splittime.bench.draw import draw_for
from splittime.bench.run import run_schedule
from splittime.bench.search import SearchBounds, SearchResult, Stopped, Swept, Trial, highest_rate, sweep
from splittime.bench.share import OnProgress
from splittime.bench.spec import spec_of
from splittime.bench.spec_rules import check
from splittime.core.errors import ConfigError, SplittimeError
from splittime.wire.scrape import ServerLimits, server_limits
from splittime.wire.target import RunOptions, Target

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
