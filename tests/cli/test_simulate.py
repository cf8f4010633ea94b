"""`splittime simulate`: a table, JSON, a ledger that says what it is, and errors that name what is missing."""

import json
import re
from pathlib import Path

import msgspec
import pytest
from known_runs import TIGHT, record_run
from typer.testing import CliRunner, Result

from splittime.cli.main import app
from splittime.core.errors import ConfigError
from splittime.scheduler.config import SchedulerConfig
from splittime.simulate import what_if
from splittime.simulate.recorded import Recorded, read_ledger, written_ledger

CONFIG = msgspec.structs.replace(TIGHT, max_num_seqs=4, num_blocks=60)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)], env={"COLUMNS": "100", "NO_COLOR": "1"})


def write(recorded: Recorded, path: Path) -> None:
    with written_ledger(recorded.facts, path) as ledger:
        for account in recorded.accounts:
            ledger.add_account(account)
        for step in recorded.steps:
            ledger.add_step(step)


def recorded_run(config: SchedulerConfig = CONFIG) -> Recorded:
    return record_run(config, seed=9, count=80, have_deadlines=False)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("ledgers") / "run.sqlite"
    write(recorded_run(), path)
    return path


def test_a_ledger_comes_back_as_it_was_written(ledger: Path) -> None:
    written, read = recorded_run(), read_ledger(ledger)
    assert read.steps == list(written.steps)
    assert sorted(read.accounts, key=lambda a: a.request_id) == sorted(written.accounts, key=lambda a: a.request_id)
    assert read.facts == written.facts


def test_a_change_is_told_beside_what_was(ledger: Path) -> None:
    result = invoke(ledger, "--max-num-seqs", 8, "--draws", 2)
    assert result.exit_code == 0, result.output
    head, first = result.stdout.splitlines()[:2]
    assert head.split() == ["recorded", "simulated", "changed", "change"]
    assert re.fullmatch(r"first token p50, ms +\S+ +\S+ +\S+ \([\d.,]+-[\d.,]+\) +[\d.]+x \([\d.]+-[\d.]+\) *", first)
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    assert "changed: max_num_seqs 8" in result.stderr
    assert "In brackets: where 33 % of runs with the change would lie" in result.stderr
    assert "80 requests; they come when they came" in result.stderr
    alone = invoke(ledger, "--max-num-seqs", 8, "--draws", 1)
    assert "(" not in alone.stdout, "one draw makes no interval"
    assert "In brackets" not in alone.stderr


def test_an_interval_that_finds_no_room_is_folded_and_not_cut(ledger: Path) -> None:
    words = ["simulate", str(ledger), "--max-num-seqs", "8", "--draws", "2"]
    narrow = CliRunner().invoke(app, words, env={"COLUMNS": "60", "NO_COLOR": "1"})
    assert narrow.exit_code == 0, narrow.output
    assert "\N{HORIZONTAL ELLIPSIS}" not in narrow.stdout
    assert narrow.stdout.count("(") == narrow.stdout.count(")") > 0


def test_without_a_change_it_shows_how_well_it_does(ledger: Path) -> None:
    result = invoke(ledger, "--draws", 1)
    assert result.stdout.splitlines()[0].split() == ["recorded", "simulated"]
    assert "the settings as they were recorded" in result.stderr


def test_another_load_is_compared_with_itself(ledger: Path) -> None:
    load = ("--rate", 2_000, "--duration", "50ms", "--input-tokens", 24, "--output-tokens", 4)
    told = json.loads(invoke(ledger, *load, "--max-num-seqs", 2, "--draws", 2, "--json").stdout)
    assert 60 < told["num_requests"] < 140
    by_name = {figure["name"]: figure for figure in told["figures"]}
    assert by_name["ttft_ms_p50"]["recorded"] is None
    assert by_name["mean_running"]["after"] <= 2
    shown = invoke(ledger, *load, "--draws", 1)
    assert shown.stdout.splitlines()[0].split() == ["simulated"]
    assert "they come when they are meant to come" in shown.stderr
    lengths = ("--input-tokens", 24, "--output-tokens", 4)
    closed = invoke(ledger, "--concurrency", 2, "--num-requests", 20, *lengths, "--draws", 1)
    assert "each comes when an answer has ended" in closed.stderr
    checked = invoke(ledger, *load, "--check")
    assert checked.exit_code == 2
    assert "takes no change" in checked.stderr


def test_a_ledger_with_drafts_is_checked_and_simulated(tmp_path: Path) -> None:
    recorded = record_run(CONFIG, seed=9, count=80, have_deadlines=False, stops=0.0, guess_ns=3)
    recorded.facts.settings["speculative_config"] = '{"method": "suffix"}'
    path, out = tmp_path / "run.sqlite", tmp_path / "out.sqlite"
    write(recorded, path)
    checked = invoke(path, "--check")
    assert (checked.exit_code, checked.stdout) == (
        0,
        f"All {len(recorded.steps):,} steps are decided as they were recorded.\n",
    )
    shown = invoke(path, "--max-num-seqs", 2, "--draws", 1, "--out", out)
    assert shown.exit_code == 0, shown.stderr
    assert "guesses" not in shown.stderr
    simulated = read_ledger(out)
    assert any(step.verified for step in simulated.steps)
    again = invoke(out, "--draws", 1)
    assert again.exit_code == 0, again.stderr
    load = ("--rate", 2_000, "--duration", "20ms", "--input-tokens", 24, "--output-tokens", 4)
    assert "Nobody knows what it would guess of these requests" in invoke(path, *load, "--draws", 1).stderr
    early = msgspec.structs.replace(
        recorded, steps=[msgspec.structs.replace(step, drafts=msgspec.UNSET) for step in recorded.steps]
    )
    write(early, tmp_path / "early.sqlite")
    for flags in (("--check",), ("--draws", 1)):
        refused = invoke(tmp_path / "early.sqlite", *flags)
        assert refused.exit_code == 2
        assert "does not say what was told of them" in " ".join(refused.stderr.split())
        assert "an early version wrote it" in " ".join(refused.stderr.split())


def test_json_has_every_figure_and_the_model(ledger: Path) -> None:
    told = json.loads(invoke(ledger, "--speed", 2, "--draws", 2, "--json").stdout)
    assert told["change"] == {"settings": {}, "speed": 2.0}
    assert {"name", "recorded", "before", "after", "ratio", "low", "high"} <= set(told["figures"][0])
    assert told["model"]["num_steps"] == told["num_steps"] > 100


def test_the_same_decisions(ledger: Path, tmp_path: Path) -> None:
    assert invoke(ledger, "--check").exit_code == 0
    assert json.loads(invoke(ledger, "--check", "--json").stdout)["divergence"] is None
    run = recorded_run()
    facts = msgspec.structs.replace(run.facts, settings=run.facts.settings | {"max_num_seqs": 2})
    write(msgspec.structs.replace(run, facts=facts), tmp_path / "other.sqlite")
    result = invoke(tmp_path / "other.sqlite", "--check")
    assert result.exit_code == 1
    assert "is decided otherwise" in result.stdout


def test_another_file_is_refused_with_what_a_ledger_is(tmp_path: Path) -> None:
    run = tmp_path / "run.json"
    run.write_text("{}" * 100)
    refused = invoke(run, "--max-num-seqs", 2)
    assert (refused.exit_code, "does not describe a server" in refused.stderr) == (2, True)
    assert "serve --ledger-file" in refused.stderr
    assert "no decisions to check" in invoke(run, "--check").stderr
    run.write_bytes(b'{"source": "\xff"}')
    assert "does not describe a server" in invoke(run, "--rate", 2).stderr
    explained = CliRunner().invoke(app, ["explain", "--slowest", "1", "--ledger", str(run)])
    assert "not a readable ledger file" in explained.stderr
    assert "serve --ledger-file" in explained.stderr


def test_a_simulated_ledger_says_so_wherever_it_is_read(ledger: Path, tmp_path: Path) -> None:
    out = tmp_path / "simulated.sqlite"
    assert invoke(ledger, "--max-num-seqs", 2, "--draws", 1, "--out", out).exit_code == 0
    made = read_ledger(out)
    assert (made.facts.simulated, made.facts.settings["max_num_seqs"]) == ("max_num_seqs 2", 2)
    assert len(made.accounts) == 80
    assert max(len(step.rows) for step in made.steps) == 2
    shown = CliRunner().invoke(app, ["explain", "--slowest", "1", "--ledger", str(out)]).stdout
    assert "Simulated, with max_num_seqs 2" in shown
    diagnosed = CliRunner().invoke(app, ["doctor", str(out)]).stdout
    assert "simulated with max_num_seqs 2" in " ".join(diagnosed.split())
    again = invoke(ledger, "--draws", 1, "--out", out)
    assert (again.exit_code, "is there already" in again.stderr) == (2, True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--check", "--max-num-seqs", 2), "takes no change"),
        (("--check", "--speed", 2), "takes no change"),
        (("--check", "--out", "x.sqlite"), "no --out"),
        (("--policy", "best"), "bad setting"),
        (("--num-blocks", 1), "num_blocks is 1"),
        (("--max-num-batched-tokens", 2), "at least max_num_seqs"),
        (("--quantization", "int8"), "--quantization cannot be simulated"),
        (("--num-threads", 2), "What can be simulated: --max-num-seqs"),
        (("--kv-cache-dtype", "int8"), "nobody knows how many blocks"),
    ],
)
def test_what_cannot_be_is_refused_with_2(ledger: Path, flags: tuple[object, ...], words: str) -> None:
    result = invoke(ledger, *flags, "--draws", 1)
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_cache_of_other_numbers_is_so_many_blocks(tmp_path: Path) -> None:
    recorded = recorded_run()
    of_cache = {"kv_cache_dtype": "bfloat16", "kv_bytes_per_block": 2048, "dtype": "bfloat16"}
    recorded.facts.settings.update(of_cache)
    write(recorded, tmp_path / "run.sqlite")
    result = invoke(tmp_path / "run.sqlite", "--kv-cache-dtype", "int8", "--draws", 1, "--json")
    assert json.loads(result.stdout)["change"]["settings"] == {"num_blocks": int(60 * 2 / (1 + 4 / 64))}
    assert "112 blocks for 60 bfloat16 ones; steps as quick as recorded" in " ".join(result.stderr.split())
    same = invoke(tmp_path / "run.sqlite", "--kv-cache-dtype", "auto", "--draws", 1, "--json")
    assert json.loads(same.stdout)["change"]["settings"] == {"num_blocks": 60}
    smaller = invoke(tmp_path / "run.sqlite", "--kv-cache-memory-bytes", "80KiB", "--draws", 1, "--json")
    assert json.loads(smaller.stdout)["change"]["settings"] == {"num_blocks": 40}
    both = invoke(tmp_path / "run.sqlite", "--kv-cache-memory-bytes", "80KiB", "--num-blocks", 40)
    assert "Give one of them" in both.stderr
    assert "many is no size" in invoke(tmp_path / "run.sqlite", "--kv-cache-memory-bytes", "many").stderr


def test_nothing_is_kept_of_what_could_not_be_simulated(ledger: Path, tmp_path: Path, monkeypatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise ConfigError("a step would have 99 rows")

    monkeypatch.setattr(what_if, "predict_of", refuse)
    assert invoke(ledger, "--max-num-seqs", 8, "--out", tmp_path / "out.sqlite").exit_code == 2
    assert not (tmp_path / "out.sqlite").exists()


def test_what_is_no_ledger_is_refused_with_2(tmp_path: Path) -> None:
    assert invoke(tmp_path / "none.sqlite").exit_code == 2
    kept = invoke(tmp_path / "none.sqlite", "--out", "/proc/none/out.sqlite")
    assert "cannot write /proc/none/out.sqlite" in kept.stderr, "before the ledger is read"
    (tmp_path / "text.sqlite").write_text("no")
    result = invoke(tmp_path / "text.sqlite")
    assert (result.exit_code, "not a readable ledger" in result.stderr) == (2, True)


def test_who_names_no_ledger_is_told_so() -> None:
    result = invoke()
    assert result.exit_code == 2
    assert result.stderr.startswith("error: no ledger is named: there is nothing to simulate\nhint:  Name a ledger")
