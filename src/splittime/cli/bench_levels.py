"""One run after another on one server, at levels of a rate or a concurrency, and how they look side by side.

What was measured is never lost to what came after: Ctrl-C, a server that is gone, or a file that cannot be written ends
the series with the runs made so far.
"""

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.table import Table

from splittime.cli.bench_draw import corrected, drawn
from splittime.cli.bench_exit import interrupted
from splittime.cli.bench_flags import spec_of, time_ns
from splittime.cli.bench_live import shown_live
from splittime.cli.bench_options import SeriesOptions
from splittime.cli.options import talk, wide
from splittime.core.errors import ConfigError, SplittimeError
from splittime.core.fitted import Fitted
from splittime.ledger.client_book import Run, save
from splittime.ledger.client_figures import Summary, summary
from splittime.ledger.client_lateness import failed_by_lateness, void_for_more
from splittime.ledger.client_metrics import shown, value_of
from splittime.loadgen.limits import Limits, server_limits
from splittime.loadgen.run import run_schedule
from splittime.loadgen.schedule import Schedule
from splittime.loadgen.search import Found, Stopped, Swept, Trial, Verdict
from splittime.loadgen.slo import SloResult, check_terms, judge, limits_of, parse_slo, still_missed
from splittime.loadgen.target import RunOptions, Target

FIGURES = ("ttft_p50", "ttft_p99", "tpot_p99", "e2e_p99", "request_rate", "throughput", "error_rate")
STYLES = {Verdict.KEPT: "green", Verdict.BROKEN: "yellow", Verdict.VOID: "red"}
USUAL = {"duration_s": 30.0, "warm_up_s": 5.0, "cool_down_s": 5.0}  # of each run of a rate, where not said


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What all runs have in common. level: the field of the load that differs, rate or concurrency. `summary_of` makes
    each run's figures once: their intervals take a quarter of a second."""

    target: Target
    load: dict[str, Any]
    level: str
    slo: dict[str, float]
    pause_s: float
    options: RunOptions
    vocab_size: int | None
    max_model_len: int | None
    out: Path | None
    summaries: dict[int, tuple[Run, Summary]] = msgspec.field(default_factory=dict)

    def summary_of(self, run: Run) -> Summary:
        """By identity, which is unique as long as the run is kept here."""
        if id(run) not in self.summaries:
            self.summaries[id(run)] = run, summary(run, limits=limits_of(self.slo, run.slo))
        return self.summaries[id(run)][1]

    def results_of(self, run: Run) -> list[SloResult]:
        """Of the SLO's terms; none without an SLO."""
        return judge(self.summary_of(run), self.slo) if self.slo else []


def setup(
    given: SeriesOptions, load: dict[str, Any], level: str, slo: str | None, stop_on_saturation: bool = False
) -> Setup:
    """Raises `ConfigError` for a flag that cannot be."""
    terms = parse_slo(slo) if slo is not None else {}
    check_terms(terms)
    options = RunOptions(
        timeout_s=given.timeout_s,
        workers=None,  # not in the process that draws the progress
        stop_on_saturation=stop_on_saturation,
        slo=terms,
    )
    options.validate()
    return Setup(
        target=given.target(given.url),
        load=_with_usual(load) if level == "rate" else load,
        level=level,
        slo=terms,
        pause_s=time_ns(given.pause, "--pause") / 1e9,
        options=options,
        vocab_size=given.vocab_size,
        max_model_len=given.max_model_len,
        out=given.out,
    )


def _with_usual(load: dict[str, Any]) -> dict[str, Any]:
    """A window and what is around it, for whoever says nothing of them."""
    says_length = {"duration_s", "num_requests"} & set(load)
    usual = {name: value for name, value in USUAL.items() if name != "duration_s" or not says_length}
    if "warm_up_requests" in load:
        usual.pop("warm_up_s")
    return {**usual, **load}


class Runs:
    """One run after another on one server."""

    def __init__(self, setup: Setup, limits: Limits) -> None:
        self._setup, self._limits = setup, limits
        self._made: Counter[float] = Counter()
        self._console = talk()
        self._stop = interrupted()

    @classmethod
    async def on(cls, setup: Setup, levels: Sequence[float]) -> "Runs":
        """Refuses what cannot be at any of these levels before anything is asked of the server."""
        if setup.out is not None and setup.out.exists() and not setup.out.is_dir():
            raise ConfigError(f"{setup.out} is a file", param="out", value=str(setup.out), hint="Name a folder.")
        for level in levels:
            spec_of({**setup.load, setup.level: _value(setup, level)}).validate()
        limits = await server_limits(setup.target)
        return cls(setup, corrected(limits, setup.vocab_size, setup.max_model_len))

    @property
    def is_interrupted(self) -> bool:
        return self._stop.is_set()

    async def measure(self, level: float) -> Run:
        """Raises `Stopped` where the series cannot go on; of the first run, what was the matter."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), self._setup.pause_s if self._made else 0)
        if self.is_interrupted:
            raise Stopped("interrupted")
        try:
            run = await self._carried_out(level)
        except SplittimeError as error:
            if not self._made:
                raise
            raise Stopped(self._cut_short(level) if self.is_interrupted else error.info.message) from error
        if self.is_interrupted:
            raise Stopped(self._cut_short(level))
        return run

    @staticmethod
    def _cut_short(level: float) -> str:
        return f"interrupted; the run at {level:g} was cut short and is left out"

    async def _carried_out(self, level: float) -> Run:
        setup, schedule = self._setup, self._schedule(level)
        for note in () if self._made else schedule.notes:
            self._console.print(f"note: {note}", markup=False)
        options = msgspec.structs.replace(setup.options, label=f"{setup.level} {level:g}")
        with shown_live(self._console, setup.level == "concurrency") as on_progress:
            run = await run_schedule(schedule, [setup.target], options, on_progress, self._stop)
        self._made[level] += 1
        if setup.out is not None:
            save(run, setup.out / f"{self._made.total():02d}-{setup.level}-{level:g}.json")
        return run

    def _schedule(self, level: float) -> Schedule:
        """The same load at this level; run again, with another seed."""
        setup = self._setup
        seed = setup.load.get("seed", 0) + self._made[level]
        return drawn({**setup.load, setup.level: _value(setup, level), "seed": seed}, self._limits)

    def keeps(self, run: Run) -> bool | None:
        """A run that had to be stopped kept nothing. None where the client's own fault may have decided it: lateness
        only lengthens times, so what was kept with it was kept, and what is missed without it was missed."""
        if void_for_more(run):
            return None
        if failed_by_lateness(run):
            return self._despite_lateness(run)
        return run.stopped is None and all(result.ok for result in self._setup.results_of(run))

    def _despite_lateness(self, run: Run) -> bool | None:
        results = self._setup.results_of(run)
        if any(still_missed(run, result) for result in results):
            return False
        is_kept = run.stopped is None and all(result.ok for result in results)
        return True if is_kept and (results or not run.is_void) else None

    def tell(self, trial: Trial) -> None:
        said = f"run {self._made.total():2}: {self._setup.level} {trial.level:g}: {trial.verdict.upper()}"
        why = f" ({trial.run.stopped})" if trial.run.stopped else ""
        values = ", ".join(f"{name} {text}" for name, text in _figures(self._setup, trial.run).items())
        in_a_log = not self._console.is_terminal  # one line for each run, however long
        style = STYLES[trial.verdict]
        self._console.print(f"{said}{why}  {values}", style=style, markup=False, soft_wrap=in_a_log)


def _value(setup: Setup, level: float) -> float:
    return round(level) if setup.level == "concurrency" else level


def _figures(setup: Setup, run: Run) -> dict[str, str]:
    """The SLO's own terms first, as they would be written."""
    found = setup.summary_of(run)
    wanted = [name for name in setup.slo if name.rpartition("_")[2] != name or name in ("goodput", "throughput")]
    values = {name: value_of(found, name) for name in dict.fromkeys((*wanted, *FIGURES))}
    return {name: shown(name, value) for name, value in values.items() if value is not None}


def print_trials(setup: Setup, trials: Sequence[Trial], found: Found | Swept, sentence: str, as_json: bool) -> None:
    """Data to standard output: a table and the answer, or one JSON document."""
    if as_json:
        answer = msgspec.to_builtins(msgspec.structs.replace(found, trials=()))
        listed = [_as_json(setup, trial) for trial in trials]
        whole = {**answer, "sentence": sentence, "level": setup.level, "trials": listed}
        sys.stdout.buffer.write(msgspec.json.encode(whole) + b"\n")
        return
    console = wide()
    console.print(Fitted(_table(setup, trials, "_", 1), _table(setup, trials, "\n", 1), _table(setup, trials, "\n", 0)))
    if sentence:
        console.print(sentence, markup=False)


def _table(setup: Setup, trials: Sequence[Trial], between: str, padding: int) -> Table:
    """A row for each run, in the order of the levels. between: the words of a heading."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, padding, 0, 0))
    table.add_column(setup.level, justify="right", overflow="fold")
    table.add_column("verdict", overflow="fold")
    for name in FIGURES:
        table.add_column(name.replace("_", between), justify="right", overflow="fold")
    for trial in sorted(trials, key=lambda one: one.level):
        figures = _figures(setup, trial.run)
        verdict = f"[{STYLES[trial.verdict]}]{trial.verdict}[/]" if setup.slo or trial.verdict is Verdict.VOID else ""
        table.add_row(f"{trial.level:g}", verdict, *(figures.get(name, "-") for name in FIGURES))
    return table


def _as_json(setup: Setup, trial: Trial) -> dict[str, Any]:
    found = setup.summary_of(trial.run)
    return {
        "level": trial.level,
        "verdict": trial.verdict,
        "stopped": trial.run.stopped,
        "figures": {name: value_of(found, name) for name in FIGURES},
        "slo": setup.results_of(trial.run),
        "schedule_digest": trial.run.schedule_digest,
    }
