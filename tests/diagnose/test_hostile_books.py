"""Books that lie, are cut off, or were written to harm who reads them: each gets a sentence and its exit code."""

import sqlite3

import msgspec
import pytest
from kept import ledger_file
from test_rules_client import with_client
from test_rules_queue import poisson
from typer.testing import CliRunner
from ward import Ward

from splittime.bench.book.records import Ending, RunCheck, save
from splittime.cli.main import app
from splittime.core.errors import NotFound
from splittime.diagnose.books import make_books
from splittime.diagnose.doctor import diagnose
from splittime.diagnose.finding import CANNOT_TELL, FOUND
from splittime.ledger.account_json import account_json

HOSTILE = "\x1b[31mred\x1b]0;title\x07\x9b2J\r\u202e[bold]"
USAGE = 2


@pytest.fixture(scope="module")
def ill():
    return Ward(settings={"max_num_seqs": 2}).run(*poisson(25, 60))


def told(*words: object, code: int) -> str:
    """What a command says; the same exit code with --json."""
    for more in ((), ("--json",)):
        result = CliRunner().invoke(app, [*map(str, words), *more])
        assert result.exit_code == code, (words, more, result.stderr)
        assert "Traceback" not in result.stderr
        assert more or "\x1b" not in result.stdout + result.stderr
        if not more:
            said = " ".join((result.stdout + result.stderr).split())
    return said


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.5])
def test_a_ledger_file_that_was_cut_off(ill, tmp_path, share):
    whole = ledger_file(ill, tmp_path / "l.sqlite").read_bytes()
    (tmp_path / "t.sqlite").write_bytes(whole[: int(len(whole) * share)])
    assert "ledger file" in told("doctor", tmp_path / "t.sqlite", code=USAGE)
    assert "ledger file" in told("explain", "--slowest", 1, "--ledger", tmp_path / "t.sqlite", code=USAGE)


def test_a_ledger_file_of_a_later_version(ill, tmp_path):
    path = ledger_file(ill, tmp_path / "l.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=99")
    assert "format 99" in told("doctor", path, code=USAGE)
    assert "format 99" in told("explain", "--slowest", 1, "--ledger", path, code=USAGE)


def test_empty_and_almost_empty_ones(ill, tmp_path):
    none = ledger_file(msgspec.structs.replace(ill, accounts=(), steps=()), tmp_path / "none.sqlite")
    one = ledger_file(msgspec.structs.replace(ill, accounts=ill.accounts[:1]), tmp_path / "one.sqlite")
    assert "too little" in told("doctor", none, code=CANNOT_TELL)
    assert "no request" in told("explain", "--slowest", 1, "--ledger", none, code=USAGE)
    assert "requests served: only 1" in told("doctor", one, code=CANNOT_TELL)
    assert "Not compared" in told("explain", "--slowest", 1, "--ledger", one, code=0)


def test_a_clock_that_jumps_is_noticed(ill):
    def jumped(account):
        ready = tuple(at_ns - 10**12 * (i % 2) for i, at_ns in enumerate(account.token_ready_ns))
        return msgspec.structs.replace(account, token_ready_ns=ready)

    half = [jumped(account) if i % 2 else account for i, account in enumerate(ill.accounts)]
    books = make_books(ill.facts, half, ill.steps, "a test")
    diagnosis = diagnose(books)
    assert books.num_unsound == 30
    assert diagnosis.num_requests == 30
    assert "30 accounts or steps contradict" in next(a.why for a in diagnosis.abstentions if a.name == "clocks")
    backwards = [msgspec.structs.replace(account, end_ns=account.start_ns - 1) for account in ill.accounts]
    assert diagnose(make_books(ill.facts, backwards, ill.steps, "a test")).thin


def test_ids_that_would_move_the_terminal(ill, tmp_path):
    accounts = tuple(
        msgspec.structs.replace(a, request_id=f"{HOSTILE}{i}", group_id=HOSTILE, model=HOSTILE)
        for i, a in enumerate(ill.accounts)
    )
    path = ledger_file(msgspec.structs.replace(ill, accounts=accounts), tmp_path / "l.sqlite")
    assert "\N{REPLACEMENT CHARACTER}[31mred" in told("doctor", path, code=FOUND)
    assert "[bold]" in told("explain", "--slowest", 1, "--ledger", path, code=0)
    told("explain", HOSTILE, "--ledger", path, code=0)
    told("doctor", f"/{HOSTILE}", code=USAGE)


def test_a_server_that_is_restarted_between_two_reads(ill, monkeypatch):
    from splittime.cli import doctor

    facts = msgspec.to_builtins(ill.facts)
    later = {**facts, "processes": [{**facts["processes"][0], "started_ns": 7}]}
    answers = {
        "requests": {"accounts": [account_json(account) for account in ill.accounts]},
        "steps": {"steps": [msgspec.to_builtins(step) for step in ill.steps]},
    }

    def ask(told_facts):
        remaining = list(told_facts)

        def get(url, api_key, nobody):
            if url.endswith("/stats"):
                raise NotFound("an older server has no such page")
            name = url.split("/ledger/")[1].split("?")[0]
            return remaining.pop(0) if name == "facts" else answers[name]

        return get

    for told_facts, code in (([facts, facts] * 2, FOUND), ([facts, later] * 2, CANNOT_TELL)):
        monkeypatch.setattr(doctor, "get_json", ask(told_facts))
        said = told("doctor", "http://127.0.0.1:1", code=code)
    assert "was restarted while it was read" in said


def test_runs_of_which_nothing_can_be_told(ill, tmp_path):
    run, path = with_client(ill, has_accounts=False).run, tmp_path / "run.json"
    unsent = {"sent_ns": None, "end_ns": None, "chunk_ns": (), "ending": Ending.UNSENT}
    outcomes = tuple(msgspec.structs.replace(outcome, **unsent) for outcome in run.outcomes)
    save(msgspec.structs.replace(run, outcomes=outcomes), path)
    assert "requests in the run: only 0" in told("doctor", path, code=CANNOT_TELL)
    save(msgspec.structs.replace(run, outcomes=()), path)
    told("doctor", path, code=CANNOT_TELL)
    save(msgspec.structs.replace(run, arms=()), path)
    assert "0 servers" in told("doctor", path, code=USAGE)
    for text in ("{}", "", "[]", '{"format":9}', "\x00" * 100):
        path.write_text(text)
        told("doctor", path, code=USAGE)


def test_requests_that_never_ended(ill, tmp_path):
    run = with_client(ill, has_accounts=False).run
    outcomes = tuple(msgspec.structs.replace(o, end_ns=None, ending=Ending.TIMED_OUT) for o in run.outcomes)
    save(msgspec.structs.replace(run, outcomes=outcomes), tmp_path / "run.json")
    assert "60 of 60 requests failed; most often: timed_out" in told("doctor", tmp_path / "run.json", code=FOUND)


def test_a_void_run_of_another_server_tells_nothing(tmp_path):
    run = with_client(Ward().run(*poisson(8, 60)), has_accounts=False).run
    check = RunCheck(name="loop_lag", ok=False, value=40.0, limit=2.0, unit="ms", sentence=f"late {HOSTILE}")
    save(msgspec.structs.replace(run, checks=(check,)), tmp_path / "run.json")
    assert "VOID" in told("doctor", tmp_path / "run.json", code=CANNOT_TELL)
