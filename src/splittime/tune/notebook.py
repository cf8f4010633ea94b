"""What was tried, kept as it goes: a line of JSON for each run and each verdict, and each run whole beside it.

    tune.jsonl         what is tuned, then runs and trials in the order in which they were made
    tune.jsonl.runs/   the runs themselves, as `splittime bench run --out` writes them (`bench compare` reads them)

One process writes a notebook at a time. A tune that finds its notebook takes each run that is in it from there, so that
one that was interrupted goes on where it was, and one that had ended says the same again without a server. A notebook
of something else is refused. A line that was cut short by the end of a process is dropped.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import msgspec

from splittime.bench.book.records import Run, load_run, save
from splittime.core.errors import ConfigError
from splittime.core.files import check_writable
from splittime.diagnose.comparison import Verdict
from splittime.tune.goal import WORTH_IT, Score, runs_for
from splittime.tune.search import Forecast

FORMAT = 3
Outcome = Literal["better", "nothing to change", "slo missed", "inconclusive"]
EXIT_CODES: dict[Outcome, int] = {"better": 0, "nothing to change": 0, "slo missed": 1, "inconclusive": 3}
BEGINS = b'{"type":"tune"'  # each notebook, also one whose first line was cut off


class TuneBegun(msgspec.Struct, frozen=True, kw_only=True, tag="tune"):
    """The first line. about: the servers, the load, the goal, this version and this machine; another is refused."""

    format: int = FORMAT
    about: dict[str, Any]


class MeasuredRun(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """A run of the load. changes: to the settings as they were asked for. number: of the runs with these, from 0.
    seconds: with the server's start. file: in the folder beside."""

    changes: dict[str, Any]
    number: int
    seconds: float
    score: Score
    file: str


class TuneTrial(msgspec.Struct, frozen=True, kw_only=True, tag="trial"):
    """A change that was compared on the real engine. base: the changes that both sides had. predicted: the logarithm of
    the gain with its interval, where the simulator can tell; measured: likewise, without one. before, after: a run of
    each side in the middle of its runs. seconds: what it cost."""

    base: dict[str, Any]
    change: dict[str, Any]
    predicted: Forecast | None
    measured: float | None
    before: Score | None
    after: Score | None
    runs: int
    verdict: Verdict
    why: str
    seconds: float

    @property
    def is_cut_off(self) -> bool:
        """Returns whether it ended before all of its runs were made, without a verdict."""
        return self.verdict is Verdict.INCONCLUSIVE and self.runs < runs_for(self.runs, self.measured)

    @property
    def is_open(self) -> bool:
        """Returns whether the change may be better, but could not be judged."""
        gained = self.verdict is Verdict.INCONCLUSIVE and (self.measured or 0) > WORTH_IT
        return gained or self.is_cut_off


class Tuned(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """What a tune came to, the last line of one that ended by itself. knobs: that it could turn. changes: to the
    settings as they were asked for. before, after: the middle one of all runs without them, and with them. best: what
    was reached of each term of the SLO, on its own. seconds: all of it."""

    outcome: Outcome
    knobs: tuple[str, ...]
    changes: dict[str, Any]
    before: Score
    after: Score
    best: dict[str, float]
    trials: tuple[TuneTrial, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]


Line = TuneBegun | MeasuredRun | TuneTrial | Tuned


class Notebook:
    """path: of the file; None keeps all in memory."""

    def __init__(self, path: Path | None, about: Mapping[str, Any]) -> None:
        """Raises ConfigError for a file that is of another tune, is no notebook, cannot be written, or is being written
        by another process."""
        self._path, self._runs = path, dict[str, Run]()
        self._file = _opened(path) if path is not None else None
        self.lines: list[Line] = _read(path, self._file) if path is not None and self._file is not None else []
        begun = TuneBegun(about=msgspec.json.decode(msgspec.json.encode(dict(about))))
        if not self.lines:
            self.add(begun)
        elif self.lines[0] != begun:
            raise _of_another(path, self.lines[0], begun)

    @property
    def trials(self) -> list[TuneTrial]:
        """Returns the last of each change: one that was cut off is tried again."""
        trials = [line for line in self.lines if isinstance(line, TuneTrial)]
        return list({(str(trial.base), str(trial.change)): trial for trial in trials}.values())

    @property
    def measured(self) -> list[MeasuredRun]:
        """Returns the last of each run: one whose file is gone is made again."""
        runs = [line for line in self.lines if isinstance(line, MeasuredRun)]
        return list({(str(run.changes), run.number): run for run in runs}.values())

    def end(self, knobs: tuple[str, ...]) -> Tuned | None:
        """Returns what a tune of these knobs came to, if one has ended by itself and nothing was done since."""
        last = self.lines[-1]
        return last if isinstance(last, Tuned) and last.knobs == knobs else None

    def run(self, changes: Mapping[str, Any], number: int) -> Run | None:
        """Returns a run that was made; None if it was not, or its file is gone."""
        found = next((each for each in self.measured if each.changes == changes and each.number == number), None)
        if found is None:
            return None
        if found.file not in self._runs:
            file = self._folder / found.file
            if not file.is_file():
                return None
            self._runs[found.file] = load_run(file)
        return self._runs[found.file]

    def add_run(self, changes: Mapping[str, Any], number: int, run: Run, score: Score, seconds: float) -> None:
        file = f"{sum(isinstance(line, MeasuredRun) for line in self.lines):03d}.json"
        self._runs[file] = run
        if self._path is not None:
            save(run, self._folder / file)
        self.add(MeasuredRun(changes=dict(changes), number=number, seconds=seconds, score=score, file=file))

    def trial(self, base: Mapping[str, Any], change: Mapping[str, Any]) -> TuneTrial | None:
        """Returns the last verdict that was reached, if one was."""
        return next((each for each in self.trials if each.base == base and each.change == change), None)

    @property
    def _folder(self) -> Path:
        assert self._path is not None
        return self._path.with_name(f"{self._path.name}.runs")

    def add(self, line: Line) -> None:
        """Raises ConfigError where it cannot be written."""
        self.lines.append(line)
        if self._file is None:
            return
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            words = f"cannot write {self._path}: {error.strerror}"
            raise ConfigError(words, param="notebook", value=str(self._path)) from error


def _opened(path: Path) -> FileIO:
    """Returns the file, which no other process writes until this one ends."""
    check_writable(path, "notebook", replaces=False)
    try:
        file = FileIO(path, "a+")
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        is_held = isinstance(error, BlockingIOError | PermissionError) and path.is_file() and os.access(path, os.W_OK)
        words = f"another process writes {path}" if is_held else f"cannot write {path}: {error.strerror}"
        hint = "Wait for it, or name another file with --notebook." if is_held else None
        raise ConfigError(words, param="notebook", value=str(path), hint=hint) from None
    return file


def _read(path: Path, file: FileIO) -> list[Line]:
    """Returns the whole lines of a notebook. What follows the last of them is cut off."""
    file.seek(0)
    data = file.readall()
    whole = data[: data.rfind(b"\n") + 1]
    try:
        if not data.startswith(BEGINS) and not BEGINS.startswith(data):
            raise ValueError("it does not begin as one")
        lines = [msgspec.json.decode(line, type=Line) for line in whole.splitlines()]
    except (msgspec.ValidationError, msgspec.DecodeError, ValueError) as error:
        hint = "Name another file."
        raise ConfigError(f"{path} is no notebook: {error}", param="notebook", value=str(path), hint=hint) from None
    if len(whole) < len(data):
        file.truncate(len(whole))
    return lines


def _of_another(path: Path | None, found: Line, wanted: TuneBegun) -> ConfigError:
    assert isinstance(found, TuneBegun)
    name, there, here = next(_differing(found.about, wanted.about), ("format", found.format, wanted.format))
    what = f"{path} is of another tune: {name} is {there} there and {here} here"
    hint = "Name another file with --notebook."
    if name.startswith("servers.knobs."):
        hint = f"If a tune was killed there, it left that: set it back (PATCH /knobs), and go on. Else: {hint}"
    return ConfigError(what, param="notebook", value=str(path), hint=hint)


def _differing(there: Any, here: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields the names of what differs, with the value on either side."""
    if isinstance(there, dict) and isinstance(here, dict):
        for each in sorted({*there, *here}):
            yield from _differing(there.get(each), here.get(each), f"{name}.{each}" if name else each)
    elif there != here:
        yield name, there, here
