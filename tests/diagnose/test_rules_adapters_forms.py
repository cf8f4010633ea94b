"""Waits for an adapter's place and for a form."""

import msgspec
import pytest
from test_rules_queue import poisson
from ward import Case, Ward, ids

from splittime.diagnose.attribution import attribution
from splittime.diagnose.doctor import diagnose
from splittime.diagnose.rules.stated import forms_wait
from splittime.ledger.stages import Cause, Stage

SLOTS = {"max_num_seqs": 2}


def caused(books, cause: Cause, adapters: int = 0, max_loras: int = 2):
    """The waits for a slot, stated as of this cause. adapters: so many are asked for in turn, and the model."""
    accounts = []
    for i, account in enumerate(books.accounts):
        intervals = [
            msgspec.structs.replace(one, cause=cause) if one.cause is Cause.BATCH_SLOTS else one
            for one in account.intervals
        ]
        model = f"adapter-{i % adapters}" if adapters and i % 5 else account.model
        accounts.append(msgspec.structs.replace(account, intervals=tuple(intervals), model=model))
    facts = msgspec.structs.replace(books.facts, settings=books.facts.settings | {"max_loras": max_loras})
    return msgspec.structs.replace(books, accounts=tuple(accounts), facts=facts)


@pytest.mark.parametrize("adapters", [6, 12])
def test_adapters_that_take_turns(adapters):
    books = caused(Ward(settings=SLOTS).run(*poisson(25, 120)), Cause.LORA_SLOTS, adapters)
    first = diagnose(books).findings[0]
    assert first.name == "adapters_wait"
    assert first.cure.flags == ("--max-loras", str(most_at_once(books.accounts)))
    assert adapters - 1 <= most_at_once(books.accounts) <= adapters
    assert first.share_of_time > 0.3
    assert not first.is_limit


def test_more_adapters_than_a_step_can_have():
    cases = [Case(2 * i, ids(16, i), 8) for i in range(200)]
    first = diagnose(caused(Ward(settings=SLOTS).run(*cases), Cause.LORA_SLOTS, 100)).findings[0]
    assert first.cure.flags == ("--max-loras", "64")
    assert "one of several servers" in first.cure.sentence


def test_the_model_itself_needs_no_place():
    """Only two adapters are ever in flight at once, however many requests of the model run beside them."""
    books = Ward(settings=SLOTS).run(*(Case(40 * i, ids(16, i), 20) for i in range(60)))
    accounts = tuple(
        msgspec.structs.replace(account, model=f"adapter-{i}" if i % 10 == 0 else account.model)
        for i, account in enumerate(caused(books, Cause.LORA_SLOTS).accounts)
    )
    first = diagnose(msgspec.structs.replace(books, accounts=accounts)).findings[0]
    at_once = int(first.cure.flags[1])
    assert first.name == "adapters_wait"
    assert at_once == most_at_once(accounts)


def most_at_once(accounts) -> int:
    """Counted at every begin."""
    adapters = [account for account in accounts if account.model.startswith("adapter")]
    return max(len({b.model for b in adapters if b.start_ns <= a.start_ns < b.end_ns}) for a in adapters)


def test_a_form_that_is_compiled_before_the_first_token():
    first = diagnose(caused(Ward(settings=SLOTS).run(*poisson(25, 100)), Cause.GRAMMAR)).findings[0]
    assert first.name == "forms_wait"
    assert "to be compiled" in first.claim
    assert "same form with the same text" in first.cure.sentence
    assert not first.is_limit


def test_a_form_that_says_late_which_token_may_come():
    books = Ward().run(*poisson(10, 80, output=40))
    accounts = []
    for account in books.accounts:
        halves = []
        for one in account.intervals:
            half_ns = (one.begin_ns + one.end_ns) // 2
            is_decode = one.stage is Stage.DECODE
            halves.append(msgspec.structs.replace(one, end_ns=half_ns) if is_decode else one)
            if is_decode:
                stall = {"stage": Stage.DECODE_STALL, "cause": Cause.GRAMMAR, "begin_ns": half_ns}
                halves.append(msgspec.structs.replace(one, **stall))
        accounts.append(msgspec.structs.replace(account, intervals=tuple(halves)))
    first = diagnose(msgspec.structs.replace(books, accounts=tuple(accounts))).findings[0]
    assert first.name == "forms_wait"
    assert "say which token may come" in first.claim
    assert "Make the form smaller" in first.cure.sentence
    assert first.share_of_time == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("cause", [Cause.LORA_SLOTS, Cause.GRAMMAR])
def test_a_moment_of_it_is_no_illness(cause):
    assert diagnose(caused(Ward(settings={"max_num_seqs": 16}).run(*poisson(8, 80)), cause, 3)).illnesses == ()


def test_a_form_waits_beside_a_stopped_engine():
    """What was stopped is nobody's wait for a form, before the first token as after it."""
    stops = [(at, 120) for at in range(0, 6000, 300)]
    books = caused(Ward(settings=SLOTS, stops_ms=stops).run(*poisson(25, 100)), Cause.GRAMMAR)
    first = forms_wait(books)
    before, between = (fact.value for fact in first.evidence[:2])
    assert before + between == pytest.approx(sum(attribution(books).of(Cause.GRAMMAR).values()) / 1e6)
    assert (between, before > 0) == (pytest.approx(0, abs=0.01), True)
    assert "to be compiled" in first.claim
