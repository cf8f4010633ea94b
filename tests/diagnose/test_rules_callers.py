"""Callers who do not wait: those who ask the same again, those who are computed for though they left, and a client that
keeps its requests to itself."""

import msgspec
import pytest
from test_rules_client import with_client
from test_rules_queue import names, poisson
from ward import MS, Case, Ward, ids

from splittime.bench.book.records import Ending
from splittime.diagnose.doctor import diagnose
from splittime.diagnose.finding import Finding
from splittime.diagnose.rules.prompts import asked_again
from splittime.ledger.account import ClosedAccount


def left(account: ClosedAccount, at_ns: int, has_read: bool = False) -> ClosedAccount:
    """The same, given up at that instant. has_read: what there was of the answer."""
    kept = [one for one in account.intervals if one.begin_ns < at_ns]
    kept[-1] = msgspec.structs.replace(kept[-1], end_ns=at_ns)
    num_tokens = sum(ready_ns <= at_ns for ready_ns in account.token_ready_ns)
    return msgspec.structs.replace(
        account,
        intervals=tuple(kept),
        end_ns=at_ns,
        cancelled_ns=at_ns,
        freed_ns=at_ns,
        finish_reason="abort",
        output_tokens=num_tokens,
        token_steps=account.token_steps[:num_tokens],
        token_ready_ns=account.token_ready_ns[:num_tokens],
        token_written_ns=account.token_written_ns[:num_tokens] if has_read else (),
    )


def impatient(
    tries: int, wait_ms: float, pause_ms: float = 10, prompts: int = 20, is_same: bool = True, slots: int = 64
):
    """Each prompt is asked so often, and given up after `wait_ms` but for the last time."""
    cases = [
        Case(300 * i + (wait_ms + pause_ms) * n, ids(200, i if is_same else 1000 * n + i), 100)
        for i in range(prompts)
        for n in range(tries)
    ]
    books = Ward(token_ms=0.02, settings={"max_num_seqs": slots}).run(*cases)
    order = sorted(range(len(cases)), key=lambda at: cases[at].at_ms)
    is_last = {f"r{number}": at % tries == tries - 1 for number, at in enumerate(order)}
    accounts = tuple(
        account if is_last[account.request_id] else left(account, account.start_ns + int(wait_ms * MS))
        for account in books.accounts
    )
    return msgspec.structs.replace(books, accounts=accounts)


@pytest.mark.parametrize("tries", [2, 4])
def test_callers_who_ask_again_before_the_first_answer_is_there(tries):
    books = impatient(tries, 200)
    first = diagnose(books).illnesses[0]
    assert first.name == "asked_again"
    assert f"up to {tries} times" in first.claim
    assert f"{20 * (tries - 1)} of {20 * tries} requests were given up" in first.claim
    lost_ns = [a.end_ns - a.start_ns for a in books.accounts if a.cancelled_ns]
    assert first.share_of_time == pytest.approx(sum(lost_ns) / sum(a.end_ns - a.start_ns for a in books.accounts))
    assert "wait longer than 0.2 s" in first.cure.sentence
    assert len(first.request_ids) == min(tries, 5)
    assert first.cure.flags == ()


def test_choices_of_one_request_are_one_try():
    cases = [Case(300 * i + 210 * n, ids(200, i), 100, n=2) for i in range(20) for n in range(2)]
    books = Ward(token_ms=0.02).run(*cases)
    accounts = tuple(left(a, a.start_ns + 200 * MS) if is_first(a, books) else a for a in books.accounts)
    found = asked_again(msgspec.structs.replace(books, accounts=accounts))
    assert "20 of 40 requests were given up by their callers, and 20 of them asked again" in found.claim
    assert "up to 2 times" in found.claim


def is_first(account: ClosedAccount, books) -> bool:
    """Of those with its prompt."""
    return account.start_ns == min(a.start_ns for a in books.accounts if a.prefixes == account.prefixes)


def test_who_has_read_some_of_an_answer_was_not_waiting_for_it():
    books = Ward(token_ms=0.02).run(*[Case(300 * i + 210 * n, ids(200, i), 100) for i in range(20) for n in range(2)])
    read, unread = (
        tuple(left(a, a.start_ns + 200 * MS, has_read) if is_first(a, books) else a for a in books.accounts)
        for has_read in (True, False)
    )
    assert asked_again(msgspec.structs.replace(books, accounts=read)) is None
    assert isinstance(asked_again(msgspec.structs.replace(books, accounts=unread)), Finding)


def test_a_time_that_nobody_was_given_is_not_told_from_the_short_ones():
    """Each fourth try is of a short answer, and comes to its end in 0.15 s; all others are left after 0.2."""
    cases = [Case(700 * i + 210 * n, ids(200, i), 100 if n < 3 else 35) for i in range(20) for n in range(4)]
    books = Ward(token_ms=0.02).run(*cases)
    accounts = [left(a, a.start_ns + 200 * MS) if a.end_ns - a.start_ns > 200 * MS else a for a in books.accounts]
    sentence = asked_again(msgspec.structs.replace(books, accounts=tuple(accounts))).cure.sentence
    assert (
        "wait longer than 0.2 s: whole requests take at least that; nobody was let finish who needed longer" in sentence
    )


def test_those_who_leave_and_ask_for_something_else_did_not_ask_again():
    assert "asked_again" not in names(impatient(3, 200, is_same=False))


def test_the_same_prompt_beside_one_that_is_still_open_is_another_request():
    cases = [Case(250 * (i // 4) + i % 4, ids(200, i // 4), 60) for i in range(80)]
    assert "asked_again" not in names(Ward().run(*cases))


def test_a_minute_later_it_is_another_request():
    assert names(impatient(2, 200, pause_ms=61_000)) == []
    assert names(impatient(2, 200, pause_ms=10_000)) == ["asked_again"]


@pytest.mark.parametrize(("late_ms", "found"), [(40, ["asked_again"]), (900, [])])
def test_a_busy_server_notices_later_that_somebody_has_left(late_ms, found):
    """When the next try has come already."""
    assert names(impatient(2, 1000, pause_ms=-late_ms))[:1] == found


def test_a_few_who_ask_again_are_no_illness():
    books = impatient(2, 20, prompts=40)
    assert "asked_again" not in names(books)


def test_retries_come_before_the_crowd_that_they_make():
    diagnosis = diagnose(impatient(4, 200, prompts=40, slots=4))
    assert [one.name for one in diagnosis.illnesses][:2] == ["asked_again", "slot_bound"]


def unheard(books, after_ms: float, every: int = 2):
    """Every other caller left so long before the end, and nobody told the engine."""
    accounts = tuple(
        msgspec.structs.replace(a, cancelled_ns=a.end_ns - int(after_ms * MS), freed_ns=a.end_ns)
        if i % every == 0
        else a
        for i, a in enumerate(books.accounts)
    )
    return msgspec.structs.replace(books, accounts=accounts)


def test_answers_that_are_computed_for_nobody():
    first = diagnose(unheard(Ward().run(*poisson(8, 80, output=80)), 200)).illnesses[0]
    assert first.name == "computed_for_nobody"
    assert "40 of 80 requests" in first.claim
    assert "of these requests came to their own end" in [fact.what for fact in first.evidence]
    assert next(fact.value for fact in first.evidence if "own end" in fact.what) == 40
    assert first.share_of_time == pytest.approx(0.5 * 200 / 340, rel=0.2)


def test_what_goes_on_after_a_caller_left_is_no_gap_between_the_books():
    """Its own book ends with the hang-up, and the server's goes on: neither lacks anything."""
    books = with_client(unheard(Ward().run(*poisson(8, 80, output=80)), 200, every=1))
    outcomes = tuple(
        msgspec.structs.replace(o, ending=Ending.CANCELLED, end_ns=o.end_ns - 200 * MS, chunk_ns=o.chunk_ns[:30])
        for o in books.run.outcomes
    )
    diagnosis = diagnose(msgspec.structs.replace(books, run=msgspec.structs.replace(books.run, outcomes=outcomes)))
    assert not diagnosis.withheld
    assert diagnosis.illnesses[0].name == "computed_for_nobody"


@pytest.mark.parametrize("after_ms", [0, 5, 8])
def test_the_step_that_runs_when_a_caller_leaves_is_nobodys_fault(after_ms):
    """One that is planned ahead too: its tokens still come, however long the two take."""
    books = Ward(step_ms=4).run(*poisson(8, 80, output=10))
    assert names(unheard(books, after_ms, every=1)) == []


def test_two_long_steps_are_nobodys_fault_either():
    books = Ward(step_ms=40).run(*poisson(4, 60, output=4))
    assert "computed_for_nobody" not in names(unheard(books, 70, every=1))
    assert "computed_for_nobody" in names(unheard(books, 110, every=1))


def held(books, cap: int, served_ms: float, every_ms: float):
    """A client that has `cap` in flight at most, whose requests take so long, and should be sent as often."""
    seen = with_client(books)
    free_ns, outcomes = [0] * cap, []
    for i, outcome in enumerate(seen.run.outcomes):
        intended_ns, at = int(i * every_ms * MS), min(range(cap), key=free_ns.__getitem__)
        sent_ns = max(intended_ns, free_ns[at])
        free_ns[at] = sent_ns + int(served_ms * MS)
        took_ns = [ns - outcome.sent_ns for ns in (*outcome.chunk_ns, outcome.end_ns)]
        scale = served_ms * MS / took_ns[-1]
        times = [sent_ns + int(ns * scale) for ns in took_ns]
        outcomes.append(
            msgspec.structs.replace(
                outcome,
                intended_ns=intended_ns,
                held_ns=sent_ns - intended_ns,
                picked_up_ns=sent_ns,
                sent_ns=sent_ns,
                chunk_ns=tuple(times[:-1]),
                end_ns=times[-1],
            )
        )
    return msgspec.structs.replace(seen, run=msgspec.structs.replace(seen.run, outcomes=tuple(outcomes)))


@pytest.fixture(scope="module")
def healthy():
    return Ward().run(*poisson(8, 80, output=40))


def test_a_client_that_keeps_its_requests_to_itself(healthy):
    """One takes 0.16 s, so four in flight are 25 a second, and 50 are asked for."""
    served_ms = 160
    books = held(healthy, 4, served_ms, 20)
    books = msgspec.structs.replace(books, accounts=(), steps=(), facts=None)
    (first,) = diagnose(books).illnesses
    assert first.name == "client_backlog"
    assert "it has 4 in flight at most" in first.claim
    assert "25 requests a second" in first.cure.sentence
    turns = tuple(msgspec.structs.replace(o, turn=i % 2) for i, o in enumerate(books.run.outcomes))
    (told,) = diagnose(msgspec.structs.replace(books, run=msgspec.structs.replace(books.run, outcomes=turns))).illnesses
    assert "it has 4 in flight at most" in told.claim, "later turns are in flight too"
    mean_held_ms = sum(o.held_ns for o in books.run.outcomes) / 80e6
    assert first.share_of_time == pytest.approx(mean_held_ms / (mean_held_ms + served_ms), rel=0.01)


def test_a_cap_that_is_never_reached_holds_nobody(healthy):
    books = msgspec.structs.replace(held(healthy, 8, 160, 25), accounts=(), steps=(), facts=None)
    assert names(books) == []


def test_a_session_waits_for_its_own_answer(healthy):
    books = held(healthy, 1, 160, 20)
    outcomes = tuple(msgspec.structs.replace(o, session=0, turn=i) for i, o in enumerate(books.run.outcomes))
    run = msgspec.structs.replace(books.run, outcomes=outcomes)
    assert names(msgspec.structs.replace(books, run=run, accounts=(), steps=(), facts=None)) == []
