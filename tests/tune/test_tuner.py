"""A whole tune on servers whose truth is known: the sick are cured, the healthy left alone, bad numbers refused."""

import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from simulated_runs import COSTS, HEALTHY, SimulatedRuns, VoidRuns, load, measurer, replica_with

from splittime.bench.book.records import Phase, Run, RunCheck
from splittime.bench.book.slo import parse_slo
from splittime.core.errors import ConfigError
from splittime.diagnose.comparison import Verdict
from splittime.plan.kept import KeptCalibration
from splittime.tune.goal import LOOKS, Goal, fault_of, score_of
from splittime.tune.knobs import WIDE_SLOTS
from splittime.tune.measure import DrawnLoad, TimeBudget, VoidRun
from splittime.tune.notebook import Notebook, Tuned, TuneTrial
from splittime.tune.tuner import Gate, Tuner, prescribed
from splittime.wire.scrape import ServerLimits

GOAL = Goal(slo=parse_slo("ttft_p99=200ms,itl_p99=12ms"))
NEVER_DONE = Goal(slo=parse_slo("ttft_p99=10s"), seeks="e2e_mean")  # the SLO is kept, and more can always be had


def tuned(
    runs: SimulatedRuns,
    names: tuple[str, ...],
    path: Path | None = None,
    gate: Gate | None = None,
    minutes: float = 5,
    budget: TimeBudget | None = None,
) -> Tuned:
    budget = budget or TimeBudget(minutes)
    return Tuner(measurer(runs, path), load(), budget, lambda what, share: None, gate, names).run()


def test_a_healthy_server_is_left_alone() -> None:
    runs = SimulatedRuns(HEALTHY, GOAL)
    found = tuned(runs, ("max_num_seqs", "max_prefill_tokens", "num_threads"))
    assert (found.outcome, found.changes, found.exit_code) == ("nothing to change", {}, 0)
    assert runs.made == [({}, 0)]


def test_too_few_slots_are_found_and_proved() -> None:
    runs = SimulatedRuns(msgspec.structs.replace(HEALTHY, max_num_seqs=1), GOAL)
    found = tuned(runs, ("max_num_seqs", "policy"))
    assert found.outcome == "better"
    assert found.changes["max_num_seqs"] >= 2
    assert not found.before.keeps
    assert found.after.keeps
    trial = found.trials[0]
    assert trial.verdict is Verdict.BETTER
    assert trial.predicted is not None
    assert trial.predicted.low > 0
    assert trial.predicted.before.terms["ttft_p99"] == pytest.approx(trial.before.terms["ttft_p99"], rel=0.5)


def test_the_gain_on_a_busy_machine_is_predicted_with_its_long_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the time between steps is in one gap of twenty. A server that just keeps up queues for all of it: without
    that, its first token (p99) was simulated at 217 ms of 400."""
    gaps = tuple([0.5] * 190 + [10.5] * 10)
    busy = msgspec.structs.replace(COSTS, host=(*COSTS.host[:4], (4e5, 0.0, 0.0)), gap_noise=gaps)
    monkeypatch.setattr("simulated_runs.COSTS", busy)
    runs = SimulatedRuns(msgspec.structs.replace(HEALTHY, max_num_seqs=2), GOAL)
    trial = tuned(runs, ("max_num_seqs",)).trials[0]
    assert trial.verdict is Verdict.BETTER
    assert trial.predicted.before.terms["ttft_p99"] == pytest.approx(trial.before.terms["ttft_p99"], rel=0.2)
    assert trial.predicted.low <= trial.measured <= trial.predicted.high
    assert trial.predicted.gain == pytest.approx(trial.measured, abs=math.log(1.3))


class ThinRuns(SimulatedRuns):
    """Whose first runs, `thin` of each settings, have recorded no step of more than one row."""

    thin = 1

    def make(self, changes: Mapping[str, Any], number: int) -> Run:
        run = super().make(changes, number)
        if number >= self.thin:
            return run
        steps = tuple(step for step in run.arms[0].steps if len(step.rows) < 2)
        return msgspec.structs.replace(run, arms=(msgspec.structs.replace(run.arms[0], steps=steps),))


def test_what_one_run_does_not_tell_is_learnt_from_another() -> None:
    runs = ThinRuns(msgspec.structs.replace(HEALTHY, max_num_seqs=3), Goal(slo=parse_slo("ttft_p99=45ms")))
    found = tuned(runs, ("max_num_seqs",))
    made = [made for made in runs.made if not made[0]]
    assert made == [({}, 0), ({}, LOOKS[-1]), ({}, 1)]  # the last is a run by turns
    assert found.outcome == "better"
    assert found.changes["max_num_seqs"] > 3


def test_what_gained_in_a_run_to_learn_from_is_tried_where_nothing_is_predicted() -> None:
    runs = ThinRuns(msgspec.structs.replace(HEALTHY, max_num_seqs=3), Goal(slo=parse_slo("ttft_p99=45ms")))
    runs.thin = LOOKS[-1] + 1
    found = tuned(runs, ("max_num_seqs",))
    assert (found.outcome, found.changes) == ("better", {"max_num_seqs": WIDE_SLOTS})
    (trial,) = found.trials
    assert (trial.verdict, trial.predicted, trial.runs) == (Verdict.BETTER, None, LOOKS[0])


def test_what_no_run_tells_is_said() -> None:
    runs = ThinRuns(msgspec.structs.replace(HEALTHY, max_num_seqs=3), Goal(slo=parse_slo("ttft_p99=45ms")))
    runs.thin = LOOKS[-1] + 1
    found = tuned(runs, ("policy",))
    assert found.outcome == "inconclusive"
    assert not found.trials
    assert [made for made in runs.made if not made[0]] == [({}, 0), ({}, LOOKS[-1])]
    assert any(note.startswith("nothing more could be predicted: a step would have") for note in found.notes)


@pytest.mark.parametrize(("factor", "is_taken"), [(1.3, True), (5.0, False)])
def test_a_kept_calibration_spares_the_run_with_larger_steps(factor: float, is_taken: bool) -> None:
    runs = SimulatedRuns(msgspec.structs.replace(HEALTHY, max_num_seqs=1), GOAL)
    found = KeptCalibration(Path("kept.json"), replica_with(HEALTHY, factor), 7200.0)
    budget, names = TimeBudget(5), ("max_num_seqs", "policy")
    done = Tuner(measurer(runs), load(), budget, lambda what, share: None, None, names, lambda facts: found).run()
    assert done.outcome == "better"
    assert any(change.get("max_num_seqs", 0) > 8 for change, _ in runs.made[:2]) != is_taken
    assert any(note.startswith("taken: " if is_taken else "not taken: ") for note in done.notes)
    assert any("2 hours old" in note for note in done.notes)


def test_a_budget_too_large_for_the_gaps_is_cut() -> None:
    goal = Goal(slo=parse_slo("itl_p99=2.8ms,ttft_p99=1s"))
    runs = SimulatedRuns(msgspec.structs.replace(HEALTHY, max_num_batched_tokens=2048), goal)
    found = tuned(runs, ("max_prefill_tokens", "max_num_batched_tokens"))
    assert found.outcome == "better"
    assert set(found.changes) <= {"max_prefill_tokens", "max_num_batched_tokens"}
    assert min(found.changes.values()) < 64


def test_threads_are_measured() -> None:
    runs = SimulatedRuns(HEALTHY, Goal(slo=parse_slo("itl_p99=3ms,ttft_p99=1s")), {("num_threads", 2): 0.4})
    found = tuned(runs, ("num_threads",))
    assert found.changes == {"num_threads": 2}
    assert found.trials[0].predicted is None


@pytest.mark.parametrize(("refusal", "changes"), [(None, {"quantization": "int8"}), ("worse answers", {})])
def test_what_changes_numbers_has_to_pass_the_gate(refusal: str | None, changes: dict[str, Any]) -> None:
    asked = []

    def gate(change: Mapping[str, Any]) -> str | None:
        asked.append(dict(change))
        return refusal

    runs = SimulatedRuns(HEALTHY, Goal(slo=parse_slo("itl_p99=3ms,ttft_p99=1s")), {("quantization", "int8"): 0.3})
    found = tuned(runs, ("quantization",), gate=gate)
    assert found.changes == changes
    assert asked == [{"quantization": "int8"}]
    trial = found.trials[-1]
    assert (refusal is None) is (trial.verdict is Verdict.BETTER)
    assert refusal is None or refusal in trial.why


def test_an_slo_that_cannot_be_met_says_what_can() -> None:
    runs = SimulatedRuns(HEALTHY, Goal(slo=parse_slo("ttft_p99=1us")))
    found = tuned(runs, ("max_num_seqs",))
    assert (found.outcome, found.exit_code) == ("slo missed", 1)
    assert found.best["ttft_p99"] > 1000


def test_without_time_there_is_no_verdict() -> None:
    runs = SimulatedRuns(msgspec.structs.replace(HEALTHY, max_num_seqs=1), GOAL)
    found = tuned(runs, ("max_num_seqs",), minutes=1e-6)
    assert (found.outcome, found.exit_code, len(runs.made)) == ("inconclusive", 3, 1)


@pytest.mark.parametrize(("minutes", "outcome"), [(1e-6, "inconclusive"), (5, "nothing to change")])
def test_a_kept_slo_is_the_end_only_if_the_search_ended_by_itself(minutes: float, outcome: str) -> None:
    found = tuned(SimulatedRuns(HEALTHY, NEVER_DONE), ("policy",), minutes=minutes)
    assert (found.after.keeps, found.trials, found.outcome) == (True, (), outcome)


def test_a_kept_slo_is_not_the_end_if_nothing_could_be_predicted() -> None:
    runs = ThinRuns(msgspec.structs.replace(HEALTHY, max_num_seqs=3), NEVER_DONE)
    runs.thin = LOOKS[-1] + 1
    found = tuned(runs, ("policy",))
    assert any(note.startswith("nothing more could be predicted") for note in found.notes)
    assert (found.after.keeps, found.outcome, found.exit_code) == (True, "inconclusive", 3)


def open_trial(measured: float | None, runs: int) -> TuneTrial:
    return TuneTrial(
        base={},
        change={"max_num_seqs": 9},
        predicted=None,
        measured=measured,
        before=None,
        after=None,
        runs=runs,
        verdict=Verdict.INCONCLUSIVE,
        why="no time was left to measure it.",
        seconds=0.0,
    )


def test_a_trial_that_was_cut_off_before_its_first_pair_is_open() -> None:
    made, trial = measurer(SimulatedRuns(HEALTHY, NEVER_DONE)), open_trial(None, 0)
    made.notebook.add(trial)
    found = Tuner(made, load(), TimeBudget(5), lambda what, share: None, None, ("policy",)).run()
    assert (found.outcome, found.trials) == ("inconclusive", (trial,))


def test_a_trial_that_was_cut_off_is_ended_though_nothing_names_it_again() -> None:
    runs = SimulatedRuns(HEALTHY, NEVER_DONE)
    made, trial = measurer(runs), msgspec.structs.replace(open_trial(None, 0), change={"max_num_seqs": 60})
    made.notebook.add(trial)
    found = Tuner(made, load(), TimeBudget(5), lambda what, share: None, None, ("max_num_seqs",)).run()
    assert found.trials[0].change == trial.change
    assert found.trials[0].runs >= LOOKS[0]
    assert ({"max_num_seqs": 60}, 0) in runs.made


class TimeForRuns(TimeBudget):
    """Is up when so many runs were made."""

    def __init__(self, runs: SimulatedRuns, most: int) -> None:
        super().__init__(5)
        self._runs, self._most = runs, most

    @property
    def left_s(self) -> float:
        return super().left_s if len(self._runs.made) < self._most else 0.0


def test_a_trial_that_time_cut_off_gets_the_runs_that_it_lacks(tmp_path: Path) -> None:
    sick, path = msgspec.structs.replace(HEALTHY, max_num_seqs=1), tmp_path / "cut.jsonl"
    first, second = SimulatedRuns(sick, GOAL), SimulatedRuns(sick, GOAL)
    cut = tuned(first, ("max_num_seqs",), path, budget=TimeForRuns(first, 3))
    assert [(trial.verdict, trial.runs) for trial in cut.trials] == [(Verdict.INCONCLUSIVE, 1)]
    assert cut.outcome == "inconclusive"
    found = tuned(second, ("max_num_seqs",), path)
    assert found.outcome == "better"
    assert (found.trials[0].change, found.trials[0].verdict) == (cut.trials[0].change, Verdict.BETTER)
    assert not any(made in first.made for made in second.made)


def test_one_that_has_ended_says_the_same_again(tmp_path: Path) -> None:
    sick, path = msgspec.structs.replace(HEALTHY, max_num_seqs=1), tmp_path / "ended.jsonl"
    first, again = SimulatedRuns(sick, GOAL), SimulatedRuns(sick, GOAL)
    found = tuned(first, ("max_num_seqs",), path)
    assert (tuned(again, ("max_num_seqs",), path), again.made) == (found, [])
    tuned(again, ("max_num_seqs", "policy"), path)
    assert measurer(again, path).notebook.end(("max_num_seqs",)) is None, "another tune has ended since"


def test_without_a_change_before_is_after() -> None:
    found = tuned(SimulatedRuns(HEALTHY, Goal(slo=parse_slo("ttft_p99=1us"))), ("max_prefill_tokens", "max_num_seqs"))
    assert (found.changes, found.before) == ({}, found.after)


def test_a_run_whose_file_is_gone_is_made_again_once(tmp_path: Path) -> None:
    path = tmp_path / "gone.jsonl"
    tuned(SimulatedRuns(HEALTHY, NEVER_DONE), ("policy",), path, minutes=1e-6)
    (tmp_path / "gone.jsonl.runs" / "000.json").unlink()
    again = SimulatedRuns(HEALTHY, NEVER_DONE)
    tuned(again, ("policy",), path, minutes=1e-6)
    assert again.made == [({}, 0)]
    assert len(measurer(again, path).scores({})) == 1


def test_a_missed_slo_is_not_the_end_where_a_gain_could_not_be_judged() -> None:
    made = measurer(SimulatedRuns(HEALTHY, Goal(slo=parse_slo("ttft_p99=1us"))))
    made.notebook.add(open_trial(measured=0.5, runs=LOOKS[-1]))
    found = Tuner(made, load(), TimeBudget(5), lambda what, share: None, None, ("policy",)).run()
    assert (found.after.keeps, found.outcome, found.exit_code) == (False, "inconclusive", 3)


def test_a_void_run_is_made_again() -> None:
    runs = VoidRuns(HEALTHY, GOAL, number=0, has_changes=False, tries=1)
    assert tuned(runs, ("policy",)).outcome == "nothing to change"
    assert runs.made == [({}, 0), ({}, 0)]


def test_what_is_void_again_is_an_error_and_is_not_kept(tmp_path: Path) -> None:
    runs, path = VoidRuns(HEALTHY, GOAL, number=0, has_changes=False, tries=2), tmp_path / "void.jsonl"
    with pytest.raises(VoidRun, match="2 runs of the settings as they were were void: a worker died"):
        tuned(runs, ("policy",), path)
    assert len(path.read_bytes().splitlines()) == 1


def test_a_change_whose_runs_are_void_is_not_kept() -> None:
    goal = Goal(slo=parse_slo("itl_p99=3ms,ttft_p99=1s"))
    runs = VoidRuns(HEALTHY, goal, {("num_threads", 2): 0.4}, number=1, has_changes=True, tries=2)
    found = tuned(runs, ("num_threads",))
    assert found.changes == {}
    assert found.trials[0].verdict is Verdict.INCONCLUSIVE
    assert "a worker died" in found.trials[0].why


@pytest.mark.parametrize(("limit", "is_at_fault"), [(1.1, False), (0.9, True), (0.7, False)])
def test_lateness_is_a_fault_where_it_may_have_decided(limit: float, is_at_fault: bool) -> None:
    run = SimulatedRuns(HEALTHY, GOAL).make({}, 0)
    ttft_ns = score_of(run, GOAL).terms["ttft_p99"]
    late = RunCheck(name="loop_lag", ok=False, value=0.2 * ttft_ns / 1e6, sentence="it was late")
    run = msgspec.structs.replace(run, checks=(late,))
    assert fault_of(run, Goal(slo={"ttft_p99": limit * ttft_ns})) == ("it was late" if is_at_fault else None)


def test_a_warm_up_by_number_stands_alone() -> None:
    schedule = DrawnLoad({"rate": 5.0, "duration_s": 2.0, "warm_up_requests": 3})(ServerLimits(vocab_size=100))
    assert sum(one.phase is Phase.WARM_UP for one in schedule.requests) == 3


def test_an_interrupted_tune_goes_on_where_it_was(tmp_path: Path) -> None:
    sick = msgspec.structs.replace(HEALTHY, max_num_seqs=1)
    path = tmp_path / "cut.jsonl"
    first, second = SimulatedRuns(sick, GOAL), SimulatedRuns(sick, GOAL)
    first.stops_at = 2
    with pytest.raises(KeyboardInterrupt):
        tuned(first, ("max_num_seqs",), path)
    with path.open("ab") as file:
        file.write(b'{"type":"run","cut sh')
    found = tuned(second, ("max_num_seqs",), path)
    assert found.outcome == "better"
    assert len(first.made) == 2
    assert not any(made in first.made for made in second.made)
    third = SimulatedRuns(sick, GOAL)
    again = tuned(third, ("max_num_seqs",), path)
    assert (again.changes, again.trials, third.made) == (found.changes, found.trials, [])


def test_a_notebook_of_another_tune_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tune.jsonl"
    Notebook(path, {"load": 1, "version": "1"})
    with pytest.raises(ConfigError, match="version is 1 there and 2 here"):
        Notebook(path, {"load": 1, "version": "2"})
    live = tmp_path / "live.jsonl"
    Notebook(live, {"servers": {"url": "u", "knobs": {"policy": "fcfs", "max_num_seqs": 1}}})
    with pytest.raises(ConfigError, match=r"servers\.knobs\.max_num_seqs is 1 there and 4 here") as caught:
        Notebook(live, {"servers": {"url": "u", "knobs": {"policy": "fcfs", "max_num_seqs": 4}}})
    assert "set it back" in str(caught.value.info.hint)
    path.write_text("no notebook\n")
    with pytest.raises(ConfigError, match="is no notebook"):
        Notebook(path, {})


@pytest.mark.parametrize("data", [b'{"format":1,"label":"a run of bench, without a line end"}', b"words", b"\n"])
def test_a_file_that_is_no_notebook_is_left_as_it_is(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="is no notebook"):
        Notebook(path, {})
    assert path.read_bytes() == data


@pytest.mark.parametrize("data", [b"", b'{"ty', b'{"type":"tune","format":3,"ab'])
def test_a_notebook_whose_first_line_was_cut_off_begins_anew(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tune.jsonl"
    path.write_bytes(data)
    Notebook(path, {"load": 1})
    assert path.read_bytes() == b'{"type":"tune","format":3,"about":{"load":1}}\n'


def test_one_process_writes_a_notebook_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "tune.jsonl"
    Notebook(path, {})
    before = path.read_bytes()
    held = Notebook(path, {})
    code = (
        f"from pathlib import Path; from splittime.tune.notebook import Notebook; Notebook(Path({str(path)!r}), {{}})"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "another process writes" in other.stderr
    del held
    assert path.read_bytes() == before
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("path", ["/dev/full", "/tmp", "/proc/none/tune.jsonl"])
def test_a_notebook_that_cannot_be_written_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot write {path}"):
        Notebook(Path(path), {})


def test_the_doctor_s_values_are_tried() -> None:
    runs = SimulatedRuns(msgspec.structs.replace(HEALTHY, max_num_seqs=1), GOAL)
    assert prescribed(runs.make({}, 0))["max_num_seqs"] > 1
