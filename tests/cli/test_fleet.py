"""`splittime fleet`: a fleet on paper from a calibration's file and a trace."""

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from splittime.cli.main import app
from splittime.core.facts import TokenCost
from splittime.simulate.data_sheet import replica_of_data_sheet
from splittime.simulate.replica import save_replica

COST = TokenCost(
    weight_bytes=16_000_000_000,
    kv_bytes_per_token=131_072,
    operations_per_token=15_000_000_000,
    operations_per_sample=1_000_000_000,
    operations_per_context_token=524_288,
)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    save_replica(replica_of_data_sheet("L40S", COST), tmp_path / "one.json")
    rng = random.Random(1)
    rows = [f"{number / 4},{rng.randint(10, 900)},{rng.randint(1, 90)}" for number in range(120)]
    (tmp_path / "trace.csv").write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]) + "\n")
    return [str(tmp_path / "one.json"), "--trace", str(tmp_path / "trace.csv")]


def called(*arguments: str):
    return CliRunner().invoke(app, ["fleet", *arguments], env={"NO_COLOR": "1"})


def test_a_fleet_is_told_as_a_table_and_as_json(files):
    flags = [*files, "--replicas", "4", "--copies", "3", "--region", "a", "--region", "b", "--speed-up", "0.5"]
    flags += ["--surge-at", "40s"]
    shown, told = called(*flags, "--price", "2"), called(*flags, "--json")
    assert shown.exit_code == told.exit_code == 0, shown.output
    figures = json.loads(told.stdout)
    assert sum(figures["endings"].values()) == figures["requests"] > 360
    assert f"{figures['requests']:,}" in shown.stdout
    assert "good answers" in shown.stdout
    assert "\u2588" * 10 in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "…" not in shown.stdout
    assert "at 2 an hour" in shown.stdout
    assert "surge" in shown.stdout
    assert sum(period["requests"] for period in figures["periods"]) == figures["requests"]


def test_what_cannot_be_is_said(files):
    for flags, words in (
        (["--routing", "nearest"], "routing"),
        (["--replicas", "0"], "replicas"),
        (["--max-replicas", "0"], "max_replicas"),
        (["--device", "L40S"], "--model-config"),
        (["--cold-start", "soon"], "--cold-start"),
        (["--surge-at", "20s"], "--surge-at"),
    ):
        done = called(*files, *flags)
        assert done.exit_code == 2, done.output
        assert words in done.stderr
