"""Whom a request waited for: each nanosecond of its waits has one name, and what one is billed another has waited."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attribution import WARDS
from test_rules_queue import poisson
from ward import MS, Case, Ward, ids

from splittime.cli.doctor import diagnosis_text
from splittime.diagnose.attribution import owned
from splittime.diagnose.bill import HELD, between_keys, bill, billed_to
from splittime.diagnose.books import make_books
from splittime.diagnose.doctor import diagnose
from splittime.ledger.account import ClosedAccount, StageInterval
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord


def named(charges):
    return {charge.request_id: charge.ns for charge in charges}


@settings(max_examples=25, deadline=None)
@given(WARDS, st.integers(1, 60), st.integers(0, 39))
def test_bills_sum_to_the_waits_and_each_charge_stands_on_both_sides(ward, output, one):
    books = ward.run(*poisson(20, 40, prompt=80, output=output))
    holder = books.accounts[one % len(books.accounts)].request_id
    charged = {}
    for account, pieces in zip(books.accounts, owned(books, books.accounts), strict=True):
        charges = bill(account, books)
        waits_ns = sum(each.duration_ns for each in account.intervals if each.stage in HELD)
        beside_ns = sum(ns for each, owner, ns in pieces if each.stage not in HELD and owner == "others_prompts")
        assert abs(sum(charge.ns for charge in charges) - waits_ns - beside_ns) <= 1
        assert all(charge.ns > 0 for charge in charges)
        assert account.request_id not in named(charges), "nobody waits for himself"
        charged |= {(account.request_id, each.why): each.ns for each in charges if each.request_id == holder}
    (account,) = [each for each in books.accounts if each.request_id == holder]
    billed = {(each.request_id, each.why): each.ns for each in billed_to(account, books)}
    rounded = len(books.accounts)  # a bill of so many charges was rounded to its sum, a nanosecond of each at the most
    of_both = [{key: ns for key, ns in found.items() if ns > rounded} for found in (charged, billed)]
    near = [{key: found.get(key, 0) for key in of_both[0] | of_both[1]} for found in (charged, billed)]
    assert near[0] == pytest.approx(near[1], abs=rounded)


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
    told = diagnosis_text(msgspec.structs.replace(diagnose(books), waits=between_keys(books)), None).plain
    assert f"{held.share:.0%} requests of small waited for those of large\n" in told
    assert "of large waited" not in told, "too little to be told"


def step(at_ms, until_ms, *rows, decode=0, gap_ms=0, verified=()):
    """Of the device's time alone. rows: (request id, position, tokens)."""
    tokens = sum(row[2] for row in rows)
    zero = dict.fromkeys(("plan_ns", "launch_ns", "sample_ns", "commit_ns", "idle_ns", "kv_tokens_read"), 0)
    return StepRecord(
        step_id=at_ms,
        begin_ns=(at_ms + gap_ms) * MS,
        end_ns=until_ms * MS,
        device_ns=(until_ms - at_ms - gap_ms) * MS,
        host_gap_ns=gap_ms * MS,
        rows=rows,
        prefill_tokens=tokens - decode,
        decode_tokens=decode,
        blocks_used=0,
        num_running=len(rows),
        num_waiting=1,
        verified=verified,
        **zero,
    )


def account(name, *intervals, tenant=""):
    """intervals: (stage, cause, from ms, to ms), without a hole."""
    held = tuple(StageInterval(stage, cause, begin * MS, end * MS) for stage, cause, begin, end in intervals)
    return ClosedAccount(
        request_id=name,
        group_id=name,
        model="m",
        endpoint="completions",
        started_at_unix_ns=0,
        start_ns=held[0].begin_ns,
        end_ns=held[-1].end_ns,
        intervals=held,
        finish_reason="stop",
        tenant=tenant,
    )


def in_ms(charges):
    return {(charge.request_id, str(charge.why)): charge.ns / MS for charge in charges}


TWO_ROWS = (("a", 90, 10), ("b", 269, 31))  # 10 and 31 tokens, 100 and 300 positions


@pytest.mark.parametrize(
    ("stage", "cause", "of_a", "of_b"),
    [
        (Stage.QUEUE, Cause.BATCH_SLOTS, 20, 20),
        (Stage.QUEUE, Cause.KV_BLOCKS, 10, 30),
        (Stage.PREEMPTED, None, 10, 30),
        (Stage.QUEUE, Cause.TOKEN_BUDGET, 40 * 10 / 41, 40 * 31 / 41),
        (Stage.DECODE_STALL, Cause.TOKEN_BUDGET, 40 * 10 / 41, 40 * 31 / 41),
        (Stage.QUEUE, Cause.STEP_IN_FLIGHT, 40 * 10 / 41, 40 * 31 / 41),
        (Stage.QUEUE, Cause.POLICY, 0, 0),
        (Stage.QUEUE, Cause.LORA_SLOTS, 0, 0),
        (Stage.QUEUE, Cause.PAUSED, 0, 0),
    ],
)
def test_a_wait_is_divided_by_what_it_was_for(stage, cause, of_a, of_b):
    """Of 50 ms of a wait, a step covers the last 40 of its own 60, its gap among them."""
    late = account("late", (stage, cause, 10, 60), tenant="small")
    holders = [account(name, (Stage.DECODE, None, 0, 100), tenant="large") for name in ("a", "b")]
    books = make_books(None, [late, *holders], [step(20, 80, *TWO_ROWS, gap_ms=5)], "by hand")
    charges = bill(late, books)
    why = "preempted" if cause is None else str(cause)
    expected = {("a", why): of_a, ("b", why): of_b, ("", why): 50 - of_a - of_b}
    assert in_ms(charges) == pytest.approx({key: ms for key, ms in expected.items() if ms}, abs=1e-5)
    assert sum(charge.ns for charge in charges) == 50 * MS
    assert {charge.tenant for charge in charges if charge.request_id} <= {"large"}
    held = [charge for charge in billed_to(holders[0], books) if charge.request_id == "late"]
    assert in_ms(held) == pytest.approx({("late", why): of_a} if of_a else {}, abs=1e-5)
    assert {charge.tenant for charge in held} <= {"small"}


def test_of_others_prompts_neither_decoding_nor_guessing_is_charged():
    """A decodes in three steps: alone, beside a prompt of 30 tokens, and beside nine tokens that are eight guesses."""
    decoding = account("a", (Stage.DECODE, None, 0, 60))
    steps = [
        step(0, 10, ("a", 50, 1), decode=1),
        step(10, 50, ("a", 51, 1), ("p", 0, 30), ("d", 80, 1), decode=2),
        step(50, 60, ("a", 52, 1), ("g", 80, 9), decode=10, verified=(("g", 8, 3),)),
    ]
    charges = bill(decoding, make_books(None, [decoding], steps, "by hand"))
    assert {charge.request_id for charge in charges} == {"p"}
    assert charges[0].ns == pytest.approx(40 * MS * 30 / 32, rel=0.01)


def test_who_had_the_same_id_before_is_not_told_to_have_kept_anybody_waiting():
    first = account("mine", (Stage.DECODE, None, 0, 10))
    second = account("mine", (Stage.DECODE, None, 30, 60))
    late = account("late", (Stage.QUEUE, Cause.BATCH_SLOTS, 20, 50), (Stage.DECODE, None, 50, 51))
    steps = [step(0, 10, ("mine", 9, 1), decode=1), step(30, 60, ("mine", 9, 1), decode=1)]
    books = make_books(None, [first, second, late], steps, "by hand")
    assert billed_to(first, books) == []
    assert in_ms(billed_to(second, books)) == {("late", "batch_slots"): 20.0}


def test_who_comes_in_the_gap_before_his_first_step_is_billed_all_of_that_step():
    """A decodes beside a prompt of B, who arrived 3 ms into the 5 of the gap before the step that takes it."""
    decoding, late = account("a", (Stage.DECODE, None, 0, 60)), account("b", (Stage.PREFILL, None, 23, 80))
    steps = [step(0, 20, ("a", 50, 1), decode=1), step(20, 60, ("a", 51, 1), ("b", 0, 39), decode=1, gap_ms=5)]
    books = make_books(None, [decoding, late], steps, "by hand")
    (charge,) = bill(decoding, books)
    (billed,) = billed_to(late, books)
    assert (charge.request_id, billed.request_id, billed.ns) == ("b", "a", charge.ns)
    assert charge.ns > 30 * MS


def test_who_leaves_in_the_gap_before_a_step_has_waited_for_that_step_too():
    decoding = account("a", (Stage.DECODE, None, 0, 60))
    gone = account("b", (Stage.QUEUE, Cause.BATCH_SLOTS, 0, 23))
    steps = [step(0, 20, ("a", 50, 1), decode=1), step(20, 60, ("a", 51, 1), decode=1, gap_ms=5)]
    books = make_books(None, [decoding, gone], steps, "by hand")
    assert in_ms(bill(gone, books)) == {("a", "batch_slots"): 23}
    assert in_ms(billed_to(decoding, books)) == {("b", "batch_slots"): 23}


def test_numbers_of_any_size_and_steps_that_overlap_cost_no_sum():
    late = account("late", (Stage.QUEUE, Cause.KV_BLOCKS, 10, 60), (Stage.DECODE, None, 60, 61))
    steps = [step(0, 50, ("a", 2**70, 1), decode=1), step(20, 55, ("b", 5, 1), decode=1), step(55, 55, ("c", 5, 1))]
    charges = bill(late, make_books(None, [late], steps, "by hand"))
    assert in_ms(charges) == pytest.approx({("a", "kv_blocks"): 40, ("b", "kv_blocks"): 5, ("", "kv_blocks"): 5})
