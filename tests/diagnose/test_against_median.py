"""Why this one was slow: the difference is found, by stage and cause, and blamed on who caused it."""

import io

import msgspec
from rich.console import Console
from test_rules_queue import poisson
from ward import Case, Ward, ids

from splittime.diagnose.explain import MIN_OTHERS, compare, comparison_text
from splittime.ledger import derive
from splittime.ledger.stages import Cause, Stage


def plain(text) -> str:
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(text)
    return out.getvalue()


def spaced(count: int, output: int = 10) -> list[Case]:
    return [Case(200 * i, ids(30, i), output) for i in range(count)]


def test_a_wait_behind_a_long_prompt_is_blamed_on_it():
    ward = Ward(token_ms=0.1, settings={"max_num_batched_tokens": 256, "max_prefill_tokens": 128})
    books = ward.run(*spaced(20), Case(1020, ids(1800, 99), 1), Case(1040, ids(30, 77), 10))
    long = next(account for account in books.accounts if account.prompt_tokens == 1800)
    late = max((a for a in books.accounts if a.prompt_tokens == 30), key=derive.e2e_ns)
    comparison = compare(late, books)
    first = comparison.differences[0]
    assert (first.stage, first.cause) == (Stage.QUEUE, Cause.TOKEN_BUDGET)
    assert first.blamed[0].request_id == long.request_id
    assert f"the steps' tokens went to {long.request_id} (for 218.9 ms)." in first.sentence
    assert 1 <= len(comparison.differences) <= 3


def test_a_wait_for_a_slot_is_blamed_on_who_had_it():
    books = Ward(settings={"max_num_seqs": 1}).run(
        *spaced(20), Case(1001, ids(500, 99), 60), Case(1010, ids(30, 9), 10)
    )
    late = max((a for a in books.accounts if a.prompt_tokens == 30), key=derive.e2e_ns)
    long = next(account for account in books.accounts if account.prompt_tokens == 500)
    first = compare(late, books).differences[0]
    assert (first.stage, first.cause) == (Stage.QUEUE, Cause.BATCH_SLOTS)
    assert long.request_id in [blamed.request_id for blamed in first.blamed]
    assert "held by" in first.sentence


def test_a_longer_answer_is_no_fault():
    books = Ward().run(*spaced(20), Case(900, ids(30, 99), 100))
    longest = max(books.accounts, key=lambda account: account.output_tokens)
    first = compare(longest, books).differences[0]
    assert first.stage is Stage.DECODE
    assert "90 more tokens of output account for" in first.sentence


def test_the_usual_request_has_nothing_to_tell():
    books = Ward().run(*spaced(20))
    comparison = compare(books.accounts[7], books)
    assert comparison.differences == ()
    assert "Nothing took" in plain(comparison_text(comparison))


def test_too_few_others_are_said_to_be_too_few():
    books = Ward().run(*spaced(MIN_OTHERS))
    comparison = compare(books.accounts[0], books)
    assert comparison.thin == f"only {MIN_OTHERS - 1} others of 17-32 prompt tokens; it takes {MIN_OTHERS}"
    assert comparison.differences == ()
    assert compare(books.accounts[0], Ward().run(*spaced(MIN_OTHERS + 1))).thin is None


def test_those_of_other_lengths_and_the_aborted_do_not_count():
    books = Ward().run(*spaced(20), *poisson(3, 20, prompt=300))
    accounts = [
        msgspec.structs.replace(a, finish_reason="abort") if a.prompt_tokens == 30 else a for a in books.accounts
    ]
    one = next(a for a in books.accounts if a.prompt_tokens == 30)
    assert compare(one, msgspec.structs.replace(books, accounts=tuple(accounts))).num_others == 0
    assert compare(one, books).num_others == 19


def test_fits_80_columns():
    ward = Ward(token_ms=0.1, settings={"max_num_batched_tokens": 256, "max_prefill_tokens": 128})
    books = ward.run(*spaced(20), Case(1020, ids(1800, 99), 1), Case(1040, ids(30, 77), 10))
    shown = plain(comparison_text(compare(max(books.accounts, key=derive.e2e_ns), books)))
    shown += plain(comparison_text(compare(books.accounts[6], books)))
    assert max(map(len, shown.splitlines())) <= 80
