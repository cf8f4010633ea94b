"""`bench compare` and `bench report` as a script sees them: what goes where, exit codes, and errors that help."""

import client_runs as runs
import msgspec
import orjson
import pytest
import typer
from typer.testing import CliRunner

from splittime.bench.book.records import Arm, RunCheck, save
from splittime.cli import bench_compare

app = typer.Typer()
app.command(name="compare", epilog=bench_compare.EXAMPLES)(bench_compare.compare)
app.command(name="report", epilog=bench_compare.REPORT_EXAMPLES)(bench_compare.report)


@pytest.fixture
def folder(tmp_path):
    """a, slower and apart: the same requests served alike, 1.5 times slower, and others; both: a and slower in one."""
    a = runs.drawn_run(1, 150, schedule_digest="d", noise=1)
    slower = runs.drawn_run(1, 150, 1.5, schedule_digest="d", noise=2)
    second = tuple(msgspec.structs.replace(one, arm=1) for one in slower.outcomes)
    arms = (Arm(url="http://a", kind="mock"), Arm(url="http://b", kind="mock"))
    bad = RunCheck(name="cpu", ok=False, value=1.0, limit=0.9, unit="", sentence="the client used all of a core")
    made = {
        "a": a,
        "again": runs.drawn_run(1, 150, schedule_digest="d", noise=3),
        "slower": slower,
        "slow": runs.drawn_run(1, 150, 1.5, schedule_digest="d", noise=4),
        "few": runs.drawn_run(2, 30),
        "both": msgspec.structs.replace(a, arms=arms, outcomes=a.outcomes + second),
        "void": msgspec.structs.replace(a, checks=(bad,)),
    }
    for name, run in made.items():
        save(run, tmp_path / f"{name}.json")
    return tmp_path


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def compare(folder, *names_and_flags):
    """Names of the folder's runs, then flags."""
    names = [folder / f"{name}.json" if (folder / f"{name}.json").exists() else name for name in names_and_flags]
    return call("compare", *names)


@pytest.mark.parametrize(
    ("names", "verdict", "exit_code"),
    [
        (("a", "slower"), "WORSE", 1),
        (("slower", "a"), "BETTER", 0),
        (("a", "again", "--metric", "e2e_mean", "--margin", "10%"), "EQUIVALENT", 0),
        (("a", "few"), "INCONCLUSIVE", 2),
        (("a", "void"), "INCONCLUSIVE", 2),
        (("both",), "WORSE", 1),
    ],
)
def test_the_exit_code_says_the_verdict(folder, names, verdict, exit_code):
    result = compare(folder, *names)
    assert f"B against A: {verdict}" in result.stdout
    assert result.exit_code == exit_code


def test_runs_in_turn_are_two_sides(folder):
    result = compare(folder, "a", "slower", "again", "slow")
    assert "2 runs against 2" in result.stdout
    assert "SLO" not in result.stdout


def test_json_is_one_document_with_everything(folder):
    result = compare(folder, "a", "slower", "--json", "--slo", "ttft_p50=1s,throughput=1")
    found = orjson.loads(result.stdout)
    assert (found["exit_code"], result.exit_code) == (1, 1)
    assert found["comparison"]["verdict"] == "WORSE"
    assert found["comparison"]["metrics"][0]["name"] == "e2e_mean"
    assert [(one["name"], one["ok"]) for one in found["slo"]] == [
        ("ttft_p50", True),
        ("throughput", True),
        ("error_rate", True),
    ]


def test_a_missed_slo_is_a_failure_whatever_got_better(folder):
    result = compare(folder, "slower", "a", "--slo", "ttft_p50=1ms")
    assert result.exit_code == 1
    assert "B against A: BETTER" in result.stdout
    assert "SLO MISSED: ttft_p50" in result.stdout


def test_limits_of_each_request_serve_the_goodput(folder):
    result = compare(folder, "a", "slower", "--metric", "goodput", "--slo", "ttft=60ms,goodput=1%")
    assert "goodput" in result.stdout
    assert "WORSE" in result.stdout


@pytest.mark.parametrize(
    ("names", "message", "hint"),
    [
        (("a", "missing.json"), "no run file", ""),
        (("a",), "1 server(s), not two", "two runs"),
        (("a", "again", "slower"), "3 runs cannot be two sides", "in turn"),
        (("a", "a"), "a.json is named twice", "another run"),
        (("a", "slower", "again", "slower"), "slower.json is named twice", "another run"),
        (("a", "slower", "--metric", "tfft_p99"), "tfft_p99", "did you mean 'ttft_p99'"),
        (("a", "slower", "--margin", "much"), "'much' is no share", "--margin 5%"),
        (("a", "slower", "--margin", "5"), "between 0 and 1", ""),
        (("a", "slower", "--slo", "ttft"), "no term of an SLO", "name=value"),
    ],
)
def test_errors_name_the_way_out(folder, names, message, hint):
    result = compare(folder, *names)
    assert result.exit_code == 2
    assert message in result.stderr
    assert hint in result.stderr


def test_a_file_that_is_no_run_is_refused(folder):
    (folder / "other.json").write_text('{"a": 1}')
    result = call("compare", folder / "other.json", folder / "a.json")
    assert result.exit_code == 2
    assert "is not a run of splittime bench" in result.stderr


def test_report_shows_a_run_writes_csv_and_judges(folder):
    path = folder / "a.json"
    shown = call("report", path).stdout
    assert "TTFT, response" in shown
    assert max(map(len, shown.splitlines())) <= 80  # a pipe is a terminal of 80 columns
    written = call("report", path, "--csv", folder / "a.csv")
    assert (folder / "a.csv").read_text().startswith("index,")
    assert written.stdout == ""
    both = call("report", path, "--csv", folder / "b.csv", "--definitions").stdout
    assert both == call("report", path, "--definitions").stdout != call("report", path).stdout
    assert (folder / "b.csv").read_bytes() == (folder / "a.csv").read_bytes()
    assert call("report", path, "--slo", "ttft_p99=10s").exit_code == 0
    assert call("report", path, "--slo", "ttft_p99=1us").exit_code == 1
    assert call("report", folder / "void.json", "--slo", "ttft_p99=10s").exit_code == 3
    assert "VOID" in call("report", folder / "void.json").stdout


def test_report_as_json_has_every_arm(folder):
    found = orjson.loads(call("report", folder / "both.json", "--json", "--slo", "ttft_p99=1us").stdout)
    assert [one["arm"] for one in found["summaries"]] == [0, 1]
    assert found["slo"][1][0]["ok"] is False
    assert "TPOT" in found["definitions"]
