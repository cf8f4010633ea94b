"""The whole of a tune: measure what is, change what measuring alone can judge, search, prove, keep or take back.

    Tuner(measurer, load, budget, say).run() -> Tuned

1. The settings as they are, once. If they keep the SLO and serve all that was asked, nothing is touched.
2. Threads, where the servers are our own: a run of each, then the best against the present by turns. If the doctor
   names a knob of the scheduler, the search comes first, with that knob before the others, and once more after.
3. Scheduler and memory: the simulator, made from the present settings' own run (and one of larger steps, where they
   are narrow and no calibration is kept of this server), names finalists; each is verified on the real engine; the
   first that is BETTER is kept, and the search begins again from there. It ends when nothing more is predicted to gain,
   or when the finalists did not. What gained in a run made to learn from comes last, where the SLO is missed or
   nothing can be predicted.
4. What changes numbers (weights, the KV cache's type), likewise measured only; what is BETTER has to pass the gate.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from splittime.attach.simulators import simulator_of
from splittime.bench.book.records import Run
from splittime.core.errors import ConfigError, EngineError
from splittime.diagnose.books import books_from_run
from splittime.diagnose.comparison import Verdict
from splittime.diagnose.doctor import diagnose
from splittime.diagnose.sized import settings_of
from splittime.ledger.facts import ServerFacts
from splittime.plan.kept import KeptCalibration
from splittime.simulate.cost import OutOfRange
from splittime.simulate.fit import pace_of
from splittime.simulate.replica import AnyReplica
from splittime.tune.goal import (
    LOOKS,
    WORTH_IT,
    Score,
    Verified,
    best_of,
    best_terms,
    gain,
    has_all_that_was_asked,
    middle,
    quicker,
    score_of,
    verify,
)
from splittime.tune.knobs import KNOBS, Knob, changes_numbers, wide, words
from splittime.tune.measure import Load, Measurer, TimeBudget, VoidRun, limits_of_run, recorded_of, recorded_of_all
from splittime.tune.notebook import Outcome, Tuned, TuneTrial
from splittime.tune.search import Forecast, Forecaster, Say, finalists


def prescribed(run: Run) -> dict[str, Any]:
    """Returns a value by knob, that of the finding which explains most where several name one."""
    books = books_from_run(run)
    found: dict[str, Any] = {}
    for finding in diagnose(books).findings:
        try:
            settings = settings_of(finding, books) if finding.cure.flags else {}
        except ConfigError:  # a flag that no replay can turn
            continue
        for name, value in settings.items():
            if name in KNOBS:
                found.setdefault(name, value)
    return found


MOST_ROUNDS = 6
LEARNING_RUN = LOOKS[-1]  # its number: those below are of runs by turns
MOST_PACE = 2.0  # a calibration whose steps take so many times as long now is not believed

Gate = Callable[[Mapping[str, Any]], str | None]  # why a change that changes numbers is refused; None: it passes
Kept = Callable[[ServerFacts], KeptCalibration | None]


class Tuner:
    """load: what the runs ask, for the simulator. names: of the knobs that may be turned; None: all that can be. gate:
    judges what changes numbers; None: such changes are not tried. kept: finds the calibration of a server."""

    def __init__(
        self,
        measurer: Measurer,
        load: Load,
        budget: TimeBudget,
        say: Say,
        gate: Gate | None = None,
        names: tuple[str, ...] | None = None,
        kept: Kept = lambda facts: None,
    ) -> None:
        self._measurer, self._load, self._budget, self._say, self._gate = measurer, load, budget, say, gate
        self._kept = kept
        self._goal, self._notebook = measurer.goal, measurer.notebook
        self._left = [trial for trial in self._notebook.trials if trial.is_cut_off]
        self._knobs = [
            knob
            for knob in KNOBS.values()
            if (names is None or knob.name in names) and (knob.is_live or not measurer.maker.is_live)
        ]
        self._changes: dict[str, Any] = {}
        self._notes: list[str] = []
        self._lacked_time, self._unpredicted = False, ""  # why the latest search could predict nothing

    def run(self) -> Tuned:
        """Returns what it came to; of one that has ended by itself, what is in the notebook. Raises KeyboardInterrupt,
        and what the servers raise of the settings as they were asked for."""
        told = self._notebook.end(self._names)
        if told is not None:
            return told
        if not self._is_done():
            if any(KNOBS[name].is_predicted for name in prescribed(self._now()) if name in self._names):
                self._search()
            self._measure_all([knob for knob in self._knobs if not knob.is_predicted and not knob.changes_numbers])
            self._search()
            if self._gate is not None:
                self._measure_all([knob for knob in self._knobs if knob.changes_numbers])
        found = self._tuned()
        if found.outcome != "inconclusive":  # else the same command goes on
            self._notebook.add(found)
        return found

    def _has_time(self) -> bool:
        """Returns whether another pair of runs fits. Remembers if not: the search did not end by itself then."""
        has_time = self._budget.left_s > 2 * (self._measurer.seconds or 0.0)
        self._lacked_time = self._lacked_time or not has_time
        return has_time

    def _now(self) -> Run:
        return self._measurer.run(self._changes, 0)

    def _score(self) -> Score:
        """Returns that of the present settings: of all runs with them the middle one."""
        self._now()
        return middle(self._measurer.scores(self._changes))

    def _is_done(self) -> bool:
        return has_all_that_was_asked(self._now(), self._goal, self._score())

    def _measure_all(self, knobs: list[Knob]) -> None:
        """A run of each value of each knob; of those that gained, the first that is better is kept."""
        for knob in knobs:
            if not self._is_done() and self._has_time():
                any(self._try(change, None) for change in self._gained_in_one_run(knob) if self._has_time())

    def _gained_in_one_run(self, knob: Knob) -> list[dict[str, Any]]:
        """Returns the changes that made steps quicker and gained enough in one run, the best first."""
        scores: dict[str, Score] = {}
        values = {str(value): value for value in knob.values(self._settings())}
        for name, value in values.items():
            run = self._ran({**self._changes, knob.name: value}) if self._has_time() else None
            if run is not None and quicker(self._now(), run) >= WORTH_IT:
                scores[name] = score_of(run, self._goal)
        before = self._score()
        gained = {name: score for name, score in scores.items() if gain(before, score) >= WORTH_IT}
        return [{knob.name: values[name]} for name in best_of(gained)]

    def _search(self) -> None:
        """Search and prove, from where the last change has led."""
        if not self._is_done():
            self._widen()
        for _ in range(MOST_ROUNDS):
            if self._is_done() or not self._has_time() or not self._searched():
                return

    def _widen(self) -> None:
        """A run with larger steps, where the settings are too narrow to learn from what others would do, and no
        calibration knows it."""
        if self._calibration() is not None:
            return
        is_live = self._measurer.maker.is_live
        change = {name: value for name, value in wide(self._settings()).items() if KNOBS[name].is_live or not is_live}
        if change and self._has_time():
            self._ran({**self._changes, **change})

    def _ran(self, changes: Mapping[str, Any]) -> Run | None:
        """Returns a run; None, with a note, where a server does not start with these changes."""
        try:
            return self._measurer.run(changes, 0)
        except EngineError as error:
            hint = f" ({error.info.hint})" if error.info.hint else ""
            self._notes.append(f"{words(changes)} could not be tried: {error.info.message}{hint}")
            return None

    def _settings(self) -> dict[str, Any]:
        """Returns what a server has now."""
        facts = self._now().arms[0].facts
        return facts.settings if facts is not None else {}

    def _alike(self) -> list[Run]:
        """Returns the runs made so far in which a step takes as long as now."""
        mine = _of_steps(self._changes)
        alike = [one for one in self._notebook.measured if _of_steps(one.changes) == mine]
        return [run for one in alike if (run := self._notebook.run(one.changes, one.number)) is not None]

    def _searched(self) -> bool:
        """Returns whether a change was kept. First come trials left open, then the simulator's finalists. Where
        nothing can be predicted, or the SLO is still missed, what gained in a run to learn from is tried."""
        if any(self._has_time() and self._try(trial.change, trial.predicted) for trial in self._cut_off()):
            return True
        if any(self._has_time() and self._try(forecast.change, forecast) for forecast in self._finalists()):
            return True
        if not self._unpredicted and self._score().keeps:
            return False
        return any(self._has_time() and self._try(change, None) for change in self._gained_in_learning())

    def _cut_off(self) -> list[TuneTrial]:
        """Returns the trials of the present settings that an earlier tune left, of knobs that may be turned now."""
        return [one for one in self._left if one.base == self._changes and set(self._names).issuperset(one.change)]

    def _gained_in_learning(self) -> list[dict[str, Any]]:
        """Returns the changes to the present settings that gained enough in the runs so far, the best first."""
        before, changes, scores = self._score(), dict[str, dict[str, Any]](), dict[str, Score]()
        may_change = {knob.name for knob in self._knobs if knob.is_predicted}
        for one in self._notebook.measured:
            change = {name: value for name, value in one.changes.items() if name not in self._changes}
            is_of_these = {**self._changes, **change} == one.changes and may_change.issuperset(change)
            score = middle(self._measurer.scores(one.changes))
            if change and is_of_these and gain(before, score) >= WORTH_IT:
                changes[words(change)], scores[words(change)] = change, score
        return [changes[name] for name in best_of(scores)]

    def _finalists(self) -> list[Forecast]:
        """Returns what the simulator names. Where the runs so far have too few kinds of steps to predict the present
        settings from, it learns from one more run; if that is not enough, it names nothing, and a note says why."""
        self._unpredicted = ""
        try:
            return self._predicted()
        except OutOfRange as error:
            why = error.info.message
        if self._has_time() and self._calibration() is None:  # a calibration's steps are what they are
            with suppress(OutOfRange, VoidRun):
                self._measurer.run(self._changes, LEARNING_RUN)
                return self._predicted()
        self._unpredicted = why
        return []

    def _predicted(self) -> list[Forecast]:
        run, names = self._now(), [knob.name for knob in self._knobs if knob.is_predicted]
        forecaster = Forecaster(self._replica(run), self._load(limits_of_run(run)), self._goal, self._score())
        return finalists(forecaster, self._say, names, prescribed(run))

    def _calibration(self) -> KeptCalibration | None:
        """Returns that of the present server, with a note that says so; None where none is kept or it is no more
        true."""
        recorded = recorded_of(self._now())
        found = self._kept(recorded.facts)
        if found is None:
            return None
        factor = pace_of(found.replica.costs, recorded.steps)
        is_true = factor is not None and 1 / MOST_PACE <= factor <= MOST_PACE
        now = f"steps take {factor:.2f} times as long now" if factor else "it knows none of these steps"
        note = f"{'taken' if is_true else 'not taken'}: {found}; {now}"
        self._notes += [note] if note not in self._notes else []
        return found if is_true else None

    def _replica(self, run: Run) -> AnyReplica:
        """Returns the present server. A calibration knows more kinds of steps than a run of one load, which says how
        fast the machine is now."""
        recorded = recorded_of_all(run, self._alike())
        replica, kept = simulator_of(recorded.facts).to_replica(recorded), self._calibration()
        if kept is None:
            return replica
        factor = pace_of(kept.replica.costs, recorded_of(run).steps) or 1.0
        return msgspec.structs.replace(replica, costs=kept.replica.costs.times(factor))

    def _try(self, change: Mapping[str, Any], forecast: Forecast | None) -> bool:
        """Verifies a change and keeps it if it is better. Returns whether it is."""
        trial = self._notebook.trial(self._changes, change)
        if trial is None or trial.is_cut_off:  # the runs that it had are in the notebook
            trial = self._verified(change, forecast)
            self._notebook.add(trial)
        if trial.verdict is Verdict.BETTER:
            self._changes = {**self._changes, **change}
        return trial.verdict is Verdict.BETTER

    def _verified(self, change: Mapping[str, Any], forecast: Forecast | None) -> TuneTrial:
        begin_s, base = time.monotonic(), self._changes
        try:
            found = verify(self._measurer.run, base, {**base, **change}, self._goal, self._has_time)
        except VoidRun as error:
            found = Verified(verdict=Verdict.INCONCLUSIVE, why=f"{error.info.message}.", before=(), after=())
        verdict, why = found.verdict, found.why
        if verdict is Verdict.BETTER and changes_numbers(change):
            self._say(f"quality of {words(change)}", None)
            refusal = self._gate(change) if self._gate is not None else "there is no gate to ask."
            verdict, why = (verdict, why) if refusal is None else (Verdict.WORSE, f"faster, but refused: {refusal}")
        return TuneTrial(
            base=base,
            change=dict(change),
            predicted=forecast,
            measured=found.gain,
            before=middle(found.before) if found.before else None,
            after=middle(found.after) if found.after else None,
            runs=len(found.after),
            verdict=verdict,
            why=why,
            seconds=time.monotonic() - begin_s,
        )

    @property
    def _names(self) -> tuple[str, ...]:
        """Returns the names of the knobs that may be turned."""
        return tuple(knob.name for knob in self._knobs if self._gate is not None or not knob.changes_numbers)

    def _tuned(self) -> Tuned:
        after = self._score()
        unpredicted = [f"nothing more could be predicted: {self._unpredicted}"] if self._unpredicted else []
        return Tuned(
            outcome=self._outcome(after),
            knobs=self._names,
            changes=self._changes,
            before=middle(self._measurer.scores({})),
            after=after,
            best=best_terms([one.score for one in self._notebook.measured]),
            trials=tuple(self._notebook.trials),
            notes=(*self._notes, *unpredicted),
            seconds=self._budget.spent_s,
        )

    def _outcome(self, after: Score) -> Outcome:
        if after.keeps and self._changes:
            return "better"
        if self._lacked_time or self._unpredicted or any(trial.is_open for trial in self._notebook.trials):
            return "inconclusive"
        return "nothing to change" if after.keeps else "slo missed"


def _of_steps(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the changes that change what a step takes."""
    return {name: value for name, value in changes.items() if not KNOBS[name].is_predicted}
