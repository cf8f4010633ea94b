"""Books come out the same from a ledger file, a run and a live server's answers, and what is none is refused."""

import json
import sqlite3
from contextlib import closing

import books as made
import msgspec
import orjson
import pytest
from test_rules_queue import poisson
from ward import Ward

from splittime.bench.book.records import Arm, Run, save
from splittime.core.errors import ConfigError, NotFound
from splittime.diagnose.books import (
    LIVE_ACCOUNTS,
    LIVE_STEPS,
    AccountQuestion,
    accounts_from_file,
    books_from_answers,
    books_from_file,
    books_from_run,
)
from splittime.diagnose.doctor import diagnose
from splittime.ledger.account_json import account_json
from splittime.ledger.facts import Process, ServerFacts
from splittime.ledger.sqlite import LedgerFile
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import Ledger
from splittime.server import routes_dashboard

FACTS = ServerFacts(
    version="1",
    model="code",
    max_model_len=2048,
    settings={"max_num_seqs": 4},
    processes=(Process(name="server", started_ns=500, ready_ns=900, pauses=((1000, 2_000_000),)),),
)


def accounts_and_steps():
    parts = ((7, 0, 64), (8, 64, 20))
    accounts = [
        msgspec.structs.replace(made.example(f"cmpl-{i}", start_ns=i * 10**9 + 1000), prompt_parts=parts)
        for i in range(3)
    ]
    return accounts, [made.step(i, i * 10**9 + 1000) for i in range(3)]


def a_run(accounts, steps) -> Run:
    arm = Arm(url="http://a", kind="splittime", accounts=tuple(accounts), steps=tuple(steps), facts=FACTS)
    return Run(
        begin_ns=0, begin_unix_ns=0, measured_from_ns=0, measured_until_ns=1, arms=(arm,), outcomes=(), label="x"
    )


def check(books, accounts, steps) -> None:
    assert books.facts == FACTS
    assert list(books.accounts) == accounts
    assert list(books.steps) == steps


def test_from_a_ledger_file(tmp_path):
    accounts, steps = accounts_and_steps()
    ledger = Ledger(tmp_path / "l.sqlite")
    for record in [made.example("cmpl-old", start_ns=100)]:
        ledger.add_account(record)  # of a server before this one, which the facts say nothing about
    for account, step in zip(accounts, steps, strict=True):
        ledger.add_account(account)
        ledger.add_step(step)
    ledger.describe_by(lambda: FACTS)
    ledger.close()
    check(books_from_file(tmp_path / "l.sqlite"), accounts, steps)


def test_from_a_run(tmp_path):
    accounts, steps = accounts_and_steps()
    run = a_run(accounts, steps)
    save(run, tmp_path / "run.json")
    books = books_from_file(tmp_path / "run.json")
    check(books, accounts, steps)
    assert books.run == run
    assert books.served == run.arms[0]
    assert "run.json" in books.source
    with pytest.raises(NotFound):
        books_from_run(run, arm=1)


def test_from_a_live_servers_answers():
    accounts, steps = accounts_and_steps()
    facts = json.loads(msgspec.json.encode(FACTS))
    requests = orjson.loads(orjson.dumps({"accounts": [account_json(account) for account in reversed(accounts)]}))
    answered = {"steps": [msgspec.to_builtins(step) for step in steps]}
    check(books_from_answers(facts, requests, orjson.loads(orjson.dumps(answered)), "http://a"), accounts, steps)
    assert books_from_answers(None, requests, answered, "http://a").facts is None


@pytest.mark.parametrize(
    "answers", [({}, {"accounts": []}, {"steps": []}), (None, {}, {"steps": []}), (None, [], None)]
)
def test_what_no_splittime_server_answers_is_refused(answers):
    with pytest.raises(ConfigError, match="http://a"):
        books_from_answers(*answers, "http://a")


def test_what_is_neither_is_refused(tmp_path):
    with pytest.raises(NotFound):
        books_from_file(tmp_path / "none")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigError, match="neither"):
        books_from_file(tmp_path / "text")
    (tmp_path / "json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="not a run"):
        books_from_file(tmp_path / "json")
    other = sqlite3.connect(tmp_path / "other.sqlite")
    other.execute("CREATE TABLE t(x)")
    other.close()
    with pytest.raises(ConfigError, match="not a readable ledger file"):
        books_from_file(tmp_path / "other.sqlite")


def test_the_page_and_the_command_line_say_the_same(tmp_path):
    """One window, one function: more steps than it holds, and requests of which the beginning is not in it."""
    made = Ward(step_ms=1, settings={"max_num_seqs": 2}).run(*poisson(12, 300, output=80))
    assert len(made.steps) > LIVE_STEPS
    ledger = Ledger()
    for account in made.accounts:
        ledger.add_account(account)
    for step in made.steps:
        ledger.add_step(step)
    page = orjson.loads(routes_dashboard._diagnose(ledger, made.facts))
    accounts = [account_json(account) for account in ledger.accounts(None, LIVE_ACCOUNTS)]
    steps = {"steps": msgspec.to_builtins(ledger.steps(LIVE_STEPS))}
    told = books_from_answers(msgspec.to_builtins(made.facts), {"accounts": accounts}, steps, "the live ledger")
    assert page == orjson.loads(msgspec.json.encode(diagnose(told)))
    assert page["findings"][0]["name"] == "slot_bound"
    assert len(told.accounts) < len(made.accounts)


@pytest.mark.parametrize("num_before", [100, 10_000])
def test_of_a_long_file_the_steps_of_the_latest_requests_are_read_alone(tmp_path, monkeypatch, num_before):
    """However many there were before: a day has millions."""
    path, read = tmp_path / "l.sqlite", []
    with closing(Ledger(path)) as ledger:
        for number in range(1, num_before + 31):
            ledger.add_step(made.step(number, 100 * number))
        begin_ns = 100 * num_before + 150
        ledger.add_account(made.example("cmpl-a", start_ns=begin_ns))
    records = LedgerFile._records

    def counted(file, query, values, kind):
        found = records(file, query, values, kind)
        read.extend(found if kind is StepRecord else ())
        return found

    monkeypatch.setattr(LedgerFile, "_records", counted)
    books = books_from_file(path)
    assert len(read) <= len(books.steps) + 1 <= 31
    found = accounts_from_file(path, AccountQuestion("cmpl-a", None))
    assert {step.step_id for step in found.books.steps} == {step.step_id for step in books.steps}
    assert len(read) <= 3 * 31
