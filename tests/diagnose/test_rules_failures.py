"""Requests that fail: named first, whatever else there is; told apart from refusals and from a start."""

import msgspec
import pytest
from test_rules_client import with_client
from test_rules_queue import names, poisson
from ward import Ward

from splittime.bench.book.records import Ending
from splittime.core.errors import ErrorInfo
from splittime.diagnose.doctor import diagnose

DIED = ErrorInfo("engine_error", "the engine process died: killed by signal 9", "engine_died", 500)
NOT_READY = ErrorInfo("overloaded_error", "the engine is not ready yet", "not_ready", 503)


def failing(books, wanted, error, reason="error"):
    accounts = tuple(
        msgspec.structs.replace(account, error=error, finish_reason=reason) if wanted(i) else account
        for i, account in enumerate(books.accounts)
    )
    return msgspec.structs.replace(books, accounts=accounts)


def test_an_engine_that_died_comes_first():
    ill = Ward(settings={"max_num_seqs": 2}).run(*poisson(25, 100))
    found = diagnose(failing(ill, lambda i: i == 50, DIED)).illnesses
    assert [finding.name for finding in found] == ["requests_fail", "slot_bound"]
    assert "signal 9" in found[0].claim


def test_who_came_before_the_successor_was_ready_failed_for_it():
    books = Ward().run(*poisson(10, 80))
    books = failing(failing(books, lambda i: i == 40, DIED), lambda i: i > 40, NOT_READY, "refused")
    first = diagnose(books).illnesses[0]
    assert first.name == "requests_fail"
    assert "40 of 80 requests" in first.claim


def test_before_the_first_readiness_it_is_a_start():
    books = failing(Ward().run(*poisson(10, 80)), lambda i: i < 20, NOT_READY, "refused")
    assert names(books) == ["cold_start"]


def test_one_odd_error_is_none():
    error = ErrorInfo("engine_error", "a step failed", "step_failed", 500)
    books = Ward().run(*poisson(10, 80))
    assert names(failing(books, lambda i: i == 3, error)) == []
    assert names(failing(books, lambda i: i % 10 == 3, error)) == ["requests_fail"]


def test_failures_seen_from_outside():
    books = with_client(Ward().run(*poisson(10, 80)), has_accounts=False)
    outcomes = tuple(
        msgspec.structs.replace(o, ending=Ending.TIMED_OUT, chunk_ns=()) if o.index % 4 == 0 else o
        for o in books.run.outcomes
    )
    run = msgspec.structs.replace(books.run, outcomes=outcomes)
    finding = diagnose(msgspec.structs.replace(books, run=run)).illnesses[0]
    assert finding.name == "requests_fail"
    assert "timed_out" in finding.claim


def test_what_never_reached_the_server_failed_too():
    """A proxy drops every fifth request: the server has no account of it."""
    books = with_client(Ward().run(*poisson(10, 80)))
    dropped = {o.request_id for o in books.run.outcomes if o.index % 5 == 0}
    outcomes = tuple(
        msgspec.structs.replace(o, ending=Ending.FAILED, chunk_ns=(), error="closed before an answer")
        if o.request_id in dropped
        else o
        for o in books.run.outcomes
    )
    accounts = tuple(account for account in books.accounts if account.request_id not in dropped)
    run = msgspec.structs.replace(books.run, outcomes=outcomes)
    first = diagnose(msgspec.structs.replace(books, run=run, accounts=accounts)).illnesses[0]
    assert first.name == "requests_fail"
    assert "16 of 80 requests failed; most often: closed before an answer" in first.claim
    reached = msgspec.structs.replace(books, run=run)  # whose fault it is then, its account says
    assert names(reached) == []


@pytest.mark.parametrize("has_accounts", [True, False])
def test_what_the_client_had_to_send_again_failed_at_first(has_accounts):
    """A proxy closes open connections on every fifth request: this client hides it, another one would not."""
    books = with_client(Ward().run(*poisson(10, 80)), has_accounts=has_accounts)
    outcomes = tuple(msgspec.structs.replace(o, resent=int(o.index % 5 == 0)) for o in books.run.outcomes)
    run = msgspec.structs.replace(books.run, outcomes=outcomes)
    first = diagnose(msgspec.structs.replace(books, run=run)).illnesses[0]
    assert first.name == "requests_fail"
    assert "16 of 80 requests failed, or did at first; most often: its connection was closed" in first.claim
    assert names(books) == []
