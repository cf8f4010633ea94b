"""`splittime bench books`: tables, JSON, one request, and words for what is not there."""

from pathlib import Path

import msgspec
import orjson
import pytest
import typer
from typer.testing import CliRunner

from splittime.bench.book.records import Arm, Ending, Outcome, Phase, Run, save
from splittime.cli import bench_compare
from splittime.ledger.account import Account, ClosedAccount
from splittime.ledger.stages import Stage

app = typer.Typer()
app.command(name="books")(bench_compare.books)
MS = 1_000_000


def a_run(kind: str) -> Run:
    book = Account("r-0", 0, Stage.RECEIVE)
    book.enter(Stage.PREFILL, MS)
    book.close(9 * MS)
    account = ClosedAccount(
        request_id="r-0",
        group_id="cmpl-r-0",
        model="m",
        endpoint="completions",
        started_at_unix_ns=0,
        start_ns=0,
        end_ns=9 * MS,
        intervals=tuple(book.intervals()),
        finish_reason="stop",
        prompt_tokens=5,
        output_tokens=1,
        token_steps=(1,),
        token_ready_ns=(8 * MS,),
        token_written_ns=(9 * MS,),
    )
    instants = {"intended_ns": 0, "picked_up_ns": 0, "sent_ns": 0, "chunk_ns": (10 * MS,), "end_ns": 11 * MS}
    outcome = Outcome(index=0, request_id="r-0", phase=Phase.MEASURED, ending=Ending.COMPLETE, **instants)
    accounts = (account,) if kind == "splittime" else ()
    arm = Arm(url="http://a", kind=kind, accounts=accounts, round_trip_ns=(MS,))
    window = {"begin_ns": 0, "begin_unix_ns": 0, "measured_from_ns": 0, "measured_until_ns": 10**9}
    return Run(arms=(arm,), outcomes=(outcome,), **window)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    save(a_run("splittime"), tmp_path / "run.json")
    return tmp_path / "run.json"


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_tables(run_file: Path) -> None:
    result = invoke(run_file)
    assert result.exit_code == 0
    assert "TTFT from the intended start, 1 request in both books" in result.stdout
    assert "prefill" in result.stdout


def test_json_has_every_request_and_line(run_file: Path) -> None:
    (joined,) = orjson.loads(invoke(run_file, "--json").stdout)["books"]
    (request,) = joined["requests"]
    assert sum(ns for _, _, ns in request["ttft"]["lines"]) == request["ttft"]["total_ns"] == 10 * MS
    assert request == orjson.loads(invoke(run_file, "--json", "--request", "r-0").stdout)


def test_one_request_by_number(run_file: Path) -> None:
    assert "r-0: 5 prompt tokens" in " ".join(invoke(run_file, "--request", "0").stdout.split())


def test_a_request_that_is_not_there(run_file: Path) -> None:
    result = invoke(run_file, "--request", "other")
    assert result.exit_code != 0
    assert "no request 'other' in both books" in result.stderr


def test_no_such_file(tmp_path: Path) -> None:
    assert invoke(tmp_path / "none.json").exit_code != 0


def test_other_servers_and_servers_without_accounts(tmp_path: Path) -> None:
    save(a_run("vllm"), tmp_path / "vllm.json")
    assert "vllm" in invoke(tmp_path / "vllm.json").stdout
    bare = a_run("splittime")
    save(msgspec.structs.replace(bare, arms=(Arm(url="http://a", kind="splittime"),)), tmp_path / "bare.json")
    assert "1 no account" in " ".join(invoke(tmp_path / "bare.json").stdout.split())
