"""A whole tune on servers whose truth is known: the sick are cured, the healthy left alone, bad numbers refused."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from simulated_runs import HEALTHY, SimulatedRuns, load, measurer, replica_with

from splittime.bench.book.records import Run
from splittime.bench.book.slo import parse_slo
from splittime.core.errors import ConfigError
from splittime.diagnose.comparison import Verdict
from splittime.plan.kept import KeptCalibration
from splittime.tune.budget import TimeBudget
from splittime.tune.goal import Goal
from splittime.tune.notebook import Notebook
from splittime.tune.prescribed import prescribed
from splittime.tune.tuner import Gate, Tuned, Tuner
from splittime.tune.verify import PAIRS

GOAL = Goal(slo=parse_slo("ttft_p99=200ms,itl_p99=12ms"))


def tuned(
    runs: SimulatedRuns,
    names: tuple[str, ...],
    path: Path | None = None,
    gate: Gate | None = None,
    minutes: float = 5,
) -> Tuned:
    return Tuner(measurer(runs, path), load(), TimeBudget(minutes), lambda what, share: None, gate, names).run()


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
    assert [made for made in runs.made if not made[0]] == [({}, 0), ({}, PAIRS), ({}, 1)]  # the last is a run by turns
    assert found.outcome == "better"
    assert found.changes["max_num_seqs"] > 3


def test_what_no_run_tells_is_said() -> None:
    runs = ThinRuns(msgspec.structs.replace(HEALTHY, max_num_seqs=3), Goal(slo=parse_slo("ttft_p99=45ms")))
    runs.thin = PAIRS + 1
    found = tuned(runs, ("max_num_seqs",))
    assert found.outcome == "slo missed"
    assert not found.trials
    assert [made for made in runs.made if not made[0]] == [({}, 0), ({}, PAIRS)]
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
