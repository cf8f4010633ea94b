"""`splittime tune`: what cannot be is refused before anything is started, and says the way out."""

import io
import tomllib
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from splittime.cli.main import app
from splittime.cli.tune import as_toml, flags_of, profiles_table, show
from splittime.diagnose.comparison import Verdict
from splittime.tune.goal import Goal, Score
from splittime.tune.measure import FIGURES, ProfileFigures
from splittime.tune.notebook import Tuned, TuneTrial
from splittime.tune.servers import OwnServers

SLO = ["--slo", "ttft_p99=1s"]
RATE = [*SLO, "--rate", "5"]
SCORE = Score(0.1, 5.0, "ttft_p99", {"ttft_p99": 9e8}, 150.0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (SLO, "do not wait for answers (an open loop)"),
        ([*SLO, "--rate", "5", "--apply"], "--apply needs the --url"),
        ([*SLO, "--rate", "5", "--profile", "fastest"], "no profile 'fastest'"),
        (["--slo", "speed=1s", "--rate", "5"], "unknown slo 'speed'"),
        ([*SLO, "--rate", "5", "--url", "http://127.0.0.1:9", "--max-num-seqs", "4"], "has its settings already"),
        ([*SLO, "--rate", "5", "--ledger", "none.sqlite"], "a ledger is a load already"),
        ([*SLO, "--ledger", "none.sqlite"], "none.sqlite"),
        ([*SLO, "--trace", "t.jsonl", "--concurrency", "4"], "--concurrency 4 has them wait"),
        ([*RATE, "--compare-profiles", "--profile", "latency"], "--profile with --compare-profiles"),
        ([*RATE, "--compare-profiles", "--knob", "policy"], "--knob with --compare-profiles"),
        ([*RATE, "--compare-profiles", "--keep-numbers"], "--keep-numbers with --compare-profiles"),
        ([*RATE, "--compare-profiles", "--write-config", "a.toml"], "--write-config with --compare-profiles"),
        ([*RATE, "--compare-profiles", "--apply", "--url", "http://127.0.0.1:9"], "--apply with --compare-profiles"),
        ([*RATE, "--keep-numbers", "--knob", "policy", "--knob", "kv_cache_dtype"], "--knob kv_cache_dtype"),
    ],
)
def test_what_cannot_be_is_refused(flags: list[str], words: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["tune", *flags])
    assert result.exit_code == 2, result.output
    assert words in result.stderr


def test_the_profiles_fit_into_80_columns() -> None:
    values = dict.fromkeys(FIGURES, (123000000.0, 456000000.0, 789000000.0))
    beside = [
        ProfileFigures(name=name, purpose="", settings={}, kept=(True, False, True), figures=values)
        for name in ("latency", "throughput", "balanced")
    ]
    out = io.StringIO()
    Console(file=out, width=80).print(profiles_table(beside))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines[1].split() == ["SLO", "kept,", "runs", *("2", "of", "3") * 3]
    assert sum(line.count("(123.0ms to 789.0ms)") for line in lines) == 3 * (len(FIGURES) - 1)


def test_a_missed_slo_is_told_without_calling_what_kept_it_a_miss(capsys: pytest.CaptureFixture[str]) -> None:
    trial = TuneTrial(
        base={},
        change={"quantization": "int8"},
        predicted=None,
        measured=0.5,
        before=SCORE,
        after=SCORE,
        runs=2,
        verdict=Verdict.WORSE,
        why="faster, but refused.",
        seconds=3.0,
    )
    best, trials = {"ttft_p99": 9e8}, (trial,)
    found = Tuned(
        outcome="slo missed",
        changes={},
        knobs=(),
        before=SCORE,
        after=SCORE,
        best=best,
        trials=trials,
        notes=(),
        seconds=1.0,
    )
    show(found, "splittime serve", [], Goal(slo={"ttft_p99": 1e9}), is_applied=False)
    said = " ".join(capsys.readouterr().out.split())
    assert "SLO MISSED: no change that could be kept meets the SLO (1 s)." in said
    assert "in brackets the range of the middle 5" in said


def test_what_was_found_is_written_as_settings_that_are_read_again() -> None:
    servers = OwnServers("a model", {"max_num_seqs": 2, "policy": "fcfs"})
    servers.block_bytes = 1024
    changes = {"max_num_seqs": 8, "num_blocks": 3, "enable_prefix_caching": False}
    found = Tuned(
        outcome="better",
        changes=changes,
        knobs=(),
        before=SCORE,
        after=SCORE,
        best={},
        trials=(),
        notes=(),
        seconds=1.0,
    )
    assert tomllib.loads(as_toml(servers, found)) == {
        **{"max_num_seqs": 8, "policy": "fcfs", "enable_prefix_caching": False},
        "kv_cache_memory_bytes": 3072,
    }
    assert flags_of(servers, found)[:3] == ["a model", "--max-num-seqs", "8"]
