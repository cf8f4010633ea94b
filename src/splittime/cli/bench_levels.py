"""One run after another on one server, at levels of a rate or a concurrency, and how they look side by side."""

import asyncio
import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.table import Table

from splittime.cli.bench_flags import spec_of
from splittime.cli.bench_live import shown_live
from splittime.cli.bench_run import USUAL_VOCAB_SIZE
from splittime.cli.options import talk, wide
from splittime.core.errors import ConfigError
from splittime.ledger.client_book import Run, save
from splittime.ledger.client_figures import summary
from splittime.ledger.client_metrics import shown, value_of
from splittime.loadgen.draw import draw
from splittime.loadgen.limits import Limits, server_limits
from splittime.loadgen.run import run_schedule
from splittime.loadgen.schedule import Schedule
from splittime.loadgen.search import Found, Swept, Trial, Verdict
from splittime.loadgen.slo import check_slo
from splittime.loadgen.target import RunOptions, Target

FIGURES = ("ttft_p50", "ttft_p99", "tpot_p99", "e2e_p99", "request_rate", "throughput", "error_rate")
STYLES = {Verdict.KEPT: "green", Verdict.BROKEN: "yellow", Verdict.VOID: "red"}


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What all runs have in common."""

    target: Target
    load: dict[str, Any]
    level: str  # the field of the load that a level is: rate or concurrency
    slo: dict[str, float]
    pause_s: float
    timeout_s: float
    vocab_size: int | None
    max_model_len: int | None
    out: Path | None
    stop_on_saturation: bool = False


class Runs:
    """One run after another on one server."""

    def __init__(self, setup: Setup, limits: Limits) -> None:
        self._setup, self._limits = setup, limits
        self._made: Counter[float] = Counter()
        self._console = talk()

    @classmethod
    async def on(cls, setup: Setup) -> "Runs":
        """Refuses what cannot be before anything is asked of the server."""
        if setup.out is not None and setup.out.is_file():
            raise ConfigError(f"{setup.out} is a file", param="out", value=str(setup.out), hint="Name a folder.")
        spec_of({**setup.load, setup.level: 1}).validate()
        return cls(setup, await server_limits(setup.target))

    async def measure(self, level: float) -> Run:
        setup = self._setup
        if self._made:
            await asyncio.sleep(setup.pause_s)
        schedule = self._schedule(level)
        self._made[level] += 1
        for note in schedule.notes if self._made.total() == 1 else ():
            self._console.print(f"note: {note}", markup=False)
        options = RunOptions(
            timeout_s=setup.timeout_s,
            workers=None,  # not in the process that draws the progress
            stop_on_saturation=setup.stop_on_saturation,
            slo=setup.slo,
            label=f"{setup.level} {level:g}",
        )
        with shown_live(self._console, setup.level == "concurrency") as on_progress:
            run = await run_schedule(schedule, [setup.target], options, on_progress)
        if setup.out is not None:
            save(run, setup.out / f"{self._made.total():02d}-{setup.level}-{level:g}.json")
        return run

    def _schedule(self, level: float) -> Schedule:
        """The same load at this level; run again, with another seed."""
        setup, limits = self._setup, self._limits
        seed = setup.load.get("seed", 0) + self._made[level]
        value = round(level) if setup.level == "concurrency" else level
        spec = spec_of({**setup.load, setup.level: value, "seed": seed})
        if spec.prompt_form is None and not limits.takes_ids:
            spec = msgspec.structs.replace(spec, prompt_form="text")
        return draw(
            spec,
            vocab_size=setup.vocab_size or limits.vocab_size or USUAL_VOCAB_SIZE,
            max_model_len=setup.max_model_len or limits.max_model_len,
            block_size=limits.block_size,
            salt=None if spec.reuse_prompts else secrets.token_hex(6),
        )

    def keeps(self, run: Run) -> bool:
        """A run that had to be stopped kept nothing."""
        if run.stopped is not None:
            return False
        return not self._setup.slo or all(result.ok for result in check_slo(run, self._setup.slo))

    def tell(self, trial: Trial) -> None:
        said = f"run {self._made.total():2}: {self._setup.level} {trial.level:g}: {trial.verdict.upper()}"
        why = f" ({trial.run.stopped})" if trial.run.stopped else ""
        values = ", ".join(f"{name} {text}" for name, text in _figures(trial.run, self._setup.slo).items())
        self._console.print(f"{said}{why}  {values}", style=STYLES[trial.verdict], markup=False)


def _figures(run: Run, slo: dict[str, float]) -> dict[str, str]:
    """The SLO's own terms first, as they would be written."""
    found = summary(run, limits=slo)
    wanted = [name for name in slo if name.rpartition("_")[2] != name or name in ("goodput", "throughput")]
    values = {name: value_of(found, name) for name in dict.fromkeys((*wanted, *FIGURES))}
    return {name: shown(name, value) for name, value in values.items() if value is not None}


def print_trials(setup: Setup, trials: Sequence[Trial], found: Found | Swept, sentence: str, as_json: bool) -> None:
    """Data to standard output: a table and the answer, or one JSON document."""
    if as_json:
        answer = msgspec.to_builtins(msgspec.structs.replace(found, trials=()))
        listed = [_as_json(trial, setup.slo) for trial in trials]
        whole = {**answer, "sentence": sentence, "level": setup.level, "trials": listed}
        sys.stdout.buffer.write(msgspec.json.encode(whole) + b"\n")
        return
    console = wide()
    console.print(_table(setup, trials))
    if sentence:
        console.print(sentence, markup=False)


def _table(setup: Setup, trials: Sequence[Trial]) -> Table:
    """A row for each run, in the order of the levels."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(setup.level, justify="right")
    table.add_column("verdict")
    for name in FIGURES:
        table.add_column(name, justify="right")
    for trial in sorted(trials, key=lambda one: one.level):
        figures = _figures(trial.run, {})
        verdict = f"[{STYLES[trial.verdict]}]{trial.verdict}[/]" if setup.slo or trial.run.is_void else ""
        table.add_row(f"{trial.level:g}", verdict, *(figures.get(name, "-") for name in FIGURES))
    return table


def _as_json(trial: Trial, slo: dict[str, float]) -> dict[str, Any]:
    found = summary(trial.run, limits=slo)
    return {
        "level": trial.level,
        "verdict": trial.verdict,
        "stopped": trial.run.stopped,
        "figures": {name: value_of(found, name) for name in FIGURES},
        "slo": check_slo(trial.run, slo) if slo else [],
        "schedule_digest": trial.run.schedule_digest,
    }
