"""What a notebook gives back is what was written, each run and verdict by its own name."""

from pathlib import Path
from typing import Any

import client_runs
import msgspec
import pytest

from splittime.bench.book.records import Run
from splittime.core.errors import ConfigError
from splittime.diagnose.comparison import Verdict
from splittime.tune import notebook as notebooks
from splittime.tune.goal import LOOKS, WORTH_IT, Score
from splittime.tune.notebook import EXIT_CODES, Notebook, Tuned, TuneTrial

SCORE = Score(0.5, -1.0, "ttft_p99", {"ttft_p99": 1e6}, 3.0)


def a_run(label: str) -> Run:
    return client_runs.run([client_runs.outcome()], label=label)


def a_trial(base: dict[str, Any], change: dict[str, Any], why: str) -> TuneTrial:
    known = {"predicted": None, "measured": 0.1, "before": SCORE, "after": SCORE, "runs": 4, "seconds": 9.0}
    return TuneTrial(base=base, change=change, verdict=Verdict.EQUIVALENT, why=why, **known)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tune.jsonl"


def label_of(notebook: Notebook, changes: dict[str, Any], number: int) -> str | None:
    found = notebook.run(changes, number)
    return None if found is None else found.label


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_each_run_is_found_by_its_changes_and_its_number(is_in_memory: bool, path: Path) -> None:
    notebook = Notebook(None if is_in_memory else path, {})
    asked = [({"policy": "fcfs"}, 0), ({"policy": "fcfs"}, 1), ({}, 0), ({}, 1)]
    for changes, number in asked:
        notebook.add_run(changes, number, a_run(f"{changes} {number}"), SCORE, 2.5)
    again = notebook if is_in_memory else Notebook(path, {})
    assert [label_of(again, *one) for one in asked] == [f"{changes} {number}" for changes, number in asked]
    assert again.run({"policy": "fcfs"}, 2) is None
    assert [(one.changes, one.number, one.score, one.seconds) for one in again.measured] == [
        (changes, number, SCORE, 2.5) for changes, number in asked
    ]


def test_a_run_whose_file_is_gone_was_not_made(path: Path) -> None:
    notebook = Notebook(path, {})
    notebook.add_run({}, 0, a_run("gone"), SCORE, 1.0)
    notebook.add_run({}, 1, a_run("here"), SCORE, 1.0)
    (path.parent / "tune.jsonl.runs" / notebook.measured[0].file).unlink()
    again = Notebook(path, {})
    assert (again.run({}, 0), label_of(again, {}, 1)) == (None, "here")


def test_a_verdict_is_of_a_change_to_these_settings_and_the_last_counts(path: Path) -> None:
    notebook = Notebook(path, {})
    change = {"policy": "fcfs"}
    for base, why in (({}, "first"), ({"max_num_seqs": 8}, "other"), ({}, "last")):
        notebook.add(a_trial(base, change, why))
    for each in (notebook, Notebook(path, {})):
        found = [each.trial(base, change) for base in ({}, {"max_num_seqs": 8})]
        assert [trial.why for trial in found if trial is not None] == ["last", "other"]
        assert {trial.why for trial in each.trials} == {"last", "other"}
        assert each.trial({"max_num_seqs": 9}, change) is None
        assert each.trial({}, {"policy": "shortest_prefill"}) is None


@pytest.mark.parametrize("cut", [b'{"type":"run","cha', b"", b'{"type":"trial"}'])
def test_only_a_line_that_was_cut_short_is_dropped(cut: bytes, path: Path) -> None:
    notebook = Notebook(path, {"load": 1})
    notebook.add(a_trial({}, {"policy": "fcfs"}, "one"))
    whole = path.read_bytes()
    path.write_bytes(whole + cut)
    again = Notebook(path, {"load": 1})
    assert path.read_bytes() == whole
    assert again.lines == notebook.lines
    again.add(a_trial({}, {"policy": "fcfs"}, "two"))
    assert [trial.why for trial in Notebook(path, {"load": 1}).trials] == ["two"]
    assert len(path.read_bytes().splitlines()) == 3


def test_a_notebook_of_another_format_is_refused(path: Path) -> None:
    begun = Notebook(path, {}).lines[0]
    path.write_bytes(path.read_bytes().replace(b'"format":%d' % begun.format, b'"format":77'))
    with pytest.raises(ConfigError, match=f"format is 77 there and {begun.format} here"):
        Notebook(path, {})


@pytest.mark.parametrize(
    ("there", "here", "name", "says_back"),
    [
        ({"url": "u", "knobs": {"policy": "a"}}, {"url": "v", "knobs": {"policy": "a"}}, r"servers\.url", False),
        ({"url": "u", "knobs": {"policy": "a"}}, {"url": "u", "knobs": {}}, r"servers\.knobs\.policy", True),
    ],
)
def test_what_differs_is_named_whole(
    there: dict[str, Any], here: dict[str, Any], name: str, says_back: bool, path: Path
) -> None:
    Notebook(path, {"servers": there})
    with pytest.raises(ConfigError, match=f"another tune: {name} is") as caught:
        Notebook(path, {"servers": here})
    assert ("set it back" in str(caught.value.info.hint)) is says_back
    assert "--notebook" in str(caught.value.info.hint)


@pytest.mark.parametrize(
    ("error", "words", "says_wait"),
    [(BlockingIOError(11, "taken"), "another process writes", True), (OSError(5, "broken"), "cannot write", False)],
)
def test_only_a_held_notebook_is_worth_a_wait(
    error: OSError, words: str, says_wait: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lockf(file: object, how: int) -> None:
        raise error

    monkeypatch.setattr(notebooks.fcntl, "lockf", lockf)
    with pytest.raises(ConfigError, match=words) as caught:
        Notebook(path, {})
    assert ("Wait for it" in str(caught.value.info.hint)) is says_wait


@pytest.mark.parametrize(
    ("verdict", "runs", "measured", "is_cut_off", "is_open"),
    [
        (Verdict.INCONCLUSIVE, 0, None, True, True),
        (Verdict.INCONCLUSIVE, LOOKS[-2] - 1, 0.0, True, True),
        (Verdict.INCONCLUSIVE, LOOKS[-2], WORTH_IT * 0.9, False, False),
        (Verdict.INCONCLUSIVE, LOOKS[-2], WORTH_IT * 1.1, True, True),
        (Verdict.INCONCLUSIVE, LOOKS[-2] + 2, WORTH_IT * 0.9, True, True),
        (Verdict.INCONCLUSIVE, LOOKS[-1] - 1, WORTH_IT * 1.1, True, True),
        (Verdict.INCONCLUSIVE, LOOKS[-1], WORTH_IT * 1.1, False, True),
        (Verdict.EQUIVALENT, 2, WORTH_IT * 1.1, False, False),
        (Verdict.WORSE, 2, WORTH_IT * 1.1, False, False),
    ],
)
def test_what_was_not_judged_is_open_if_it_may_gain(
    verdict: Verdict, runs: int, measured: float | None, is_cut_off: bool, is_open: bool
) -> None:
    changes = {"verdict": verdict, "runs": runs, "measured": measured}
    trial = msgspec.structs.replace(a_trial({}, {"policy": "fcfs"}, "why"), **changes)
    assert (trial.is_cut_off, trial.is_open) == (is_cut_off, is_open)


def test_a_run_that_was_made_again_counts_once(path: Path) -> None:
    notebook = Notebook(path, {})
    for label, seconds in (("gone", 1.0), ("new", 2.0)):
        notebook.add_run({}, 0, a_run(label), SCORE, seconds)
    for each in (notebook, Notebook(path, {})):
        assert [one.seconds for one in each.measured] == [2.0]
        assert label_of(each, {}, 0) == "new"


def test_an_end_is_of_these_knobs_with_nothing_behind_it(path: Path) -> None:
    notebook, trial = Notebook(path, {}), a_trial({}, {"policy": "fcfs"}, "one")
    known = {"changes": {}, "before": SCORE, "after": SCORE, "best": {}, "notes": (), "seconds": 9.0}
    end = Tuned(outcome="better", knobs=("policy",), trials=(trial,), **known)
    notebook.add(end)
    assert Notebook(path, {}).end(("policy",)) == end
    assert notebook.end(("policy", "max_num_seqs")) is None
    notebook.add(trial)
    assert notebook.end(("policy",)) is None


def test_each_outcome_has_its_exit_code() -> None:
    assert EXIT_CODES == {"better": 0, "nothing to change": 0, "slo missed": 1, "inconclusive": 3}
