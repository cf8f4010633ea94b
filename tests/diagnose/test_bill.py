"""Whom a request waited for: each nanosecond of its waits has one name, and what one is billed another has waited."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attribution import WARDS
from test_rules_queue import poisson
from ward import MS, Case, Ward, ids

from splittime.cli.doctor import diagnosis_text
from splittime.diagnose.attribution import owned
from splittime.diagnose.bill import WAITS, between_keys, bill, billed_to
from splittime.diagnose.doctor import diagnose
from splittime.ledger.stages import Cause, Stage


def named(charges):
    return {charge.request_id: charge.ns for charge in charges}


@settings(max_examples=25, deadline=None)
@given(WARDS, st.integers(1, 60))
def test_bills_sum_to_the_waits_and_each_charge_stands_on_both_sides(ward, output):
    books = ward.run(*poisson(20, 40, prompt=80, output=output))
    waited, billed = Counter(), Counter()
    for account in books.accounts:
        charges = bill(account, books)
        pieces = next(owned(books, [account]))
        waits_ns = sum(each.duration_ns for each in account.intervals if each.stage in WAITS)
        beside_ns = sum(ns for each, owner, ns in pieces if each.stage not in WAITS and owner == "others_prompts")
        assert sum(charge.ns for charge in charges) == round(waits_ns + beside_ns)
        assert all(charge.ns >= 0 for charge in charges)
        assert account.request_id not in named(charges), "nobody waits for himself"
        waited.update({(account.request_id, each.request_id, each.why): each.ns for each in charges})
        billed.update({(each.request_id, account.request_id, each.why): each.ns for each in billed_to(account, books)})
    assert {key: ns for key, ns in waited.items() if key[1]} == billed


def test_who_had_the_only_slot_has_the_whole_wait():
    books = Ward(settings={"max_num_seqs": 1}).run(Case(0, ids(30), 50), Case(20, ids(30, 1), 1))
    first, late = sorted(books.accounts, key=lambda account: account.start_ns)
    (slot_ns,) = [each.duration_ns for each in late.intervals if each.cause is Cause.BATCH_SLOTS]
    charges = {(charge.request_id, charge.why): charge.ns for charge in bill(late, books)}
    assert charges[first.request_id, Cause.BATCH_SLOTS] == pytest.approx(slot_ns, abs=MS / 10)
    assert slot_ns > 20 * MS
    (mirrored,) = [charge for charge in billed_to(first, books) if charge.why == Cause.BATCH_SLOTS]
    assert (mirrored.request_id, mirrored.ns) == (late.request_id, charges[first.request_id, Cause.BATCH_SLOTS])


def test_two_in_the_slots_share_a_wait_and_tokens_are_by_tokens():
    books = Ward(settings={"max_num_seqs": 2}).run(*[Case(0, ids(30, at), 80) for at in (1, 2)], Case(20, ids(30), 1))
    *both, late = sorted(books.accounts, key=lambda account: (account.start_ns, account.request_id))
    charges = named(bill(late, books, (Stage.QUEUE, Cause.BATCH_SLOTS)))
    assert charges[both[0].request_id] == pytest.approx(charges[both[1].request_id], rel=0.05)

    budget = Ward(token_ms=0.1, settings={"max_num_batched_tokens": 256, "max_prefill_tokens": 128})
    books = budget.run(Case(0, ids(30, 5), 400), Case(20, ids(1800, 99), 1), Case(40, ids(30, 77), 10))
    decoding, long, late = sorted(books.accounts, key=lambda account: account.start_ns)
    charges = named(bill(late, books, (Stage.QUEUE, Cause.TOKEN_BUDGET)))
    assert charges[long.request_id] > 100 * charges[decoding.request_id] > 0


def test_others_prompts_are_a_decoding_requests_bill_and_a_stop_is_nobodys():
    books = Ward(token_ms=0.2, stops_ms=[(300.0, 100.0)]).run(Case(0, ids(20), 100), Case(40, ids(200, 3), 1))
    first, second = sorted(books.accounts, key=lambda account: account.start_ns)
    (charge,) = bill(first, books)
    assert (charge.request_id, charge.why) == (second.request_id, "others_prompts")
    assert charge.ns == pytest.approx(200 * 0.2 * MS, rel=0.1)

    stopped = Ward(settings={"max_num_seqs": 1}, stops_ms=[(30.0, 100.0)]).run(
        Case(0, ids(30), 50), Case(20, ids(9), 1)
    )
    late = max(stopped.accounts, key=lambda account: account.start_ns)
    nobodys = {charge.why: charge.ns for charge in bill(late, stopped) if not charge.request_id}
    assert nobodys["engine_stopped"] == pytest.approx(100 * MS, rel=0.05)


def test_a_key_that_holds_the_slots_is_told_to_have_kept_the_other_waiting():
    cases = [Case(at, ids(30, at), 50) for at in range(3)] + [Case(3 + at, ids(9, at), 5) for at in range(20)]
    books = Ward(settings={"max_num_seqs": 1}).run(*cases)
    assert between_keys(books) == (), "all have one key"
    keys = ["small" if account.prompt_tokens == 9 else "large" for account in books.accounts]
    keyed = [msgspec.structs.replace(each, tenant=key) for each, key in zip(books.accounts, keys, strict=True)]
    books = msgspec.structs.replace(books, accounts=tuple(keyed))
    found = {(wait.waited, wait.had_it): wait for wait in between_keys(books)}
    large = {account.request_id for account in books.accounts if account.tenant == "large"}
    waited = [charge for each in keyed if each.tenant == "small" for charge in bill(each, books)]
    held = found["small", "large"]
    assert held.ns == sum(charge.ns for charge in waited if charge.request_id in large) > 0
    assert held.share == pytest.approx(held.ns / sum(account.end_ns - account.start_ns for account in keyed))
    told = diagnosis_text(diagnose(books), None).plain
    assert f"{held.share:.0%} requests of small waited for those of large\n" in told
    assert "of large waited" not in told, "too little to be told"
