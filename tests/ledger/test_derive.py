"""The definitions of TTFT and the rest, on accounts whose figures are known by hand, and as laws."""

import books
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.ledger import derive
from splittime.ledger.account import Account
from splittime.ledger.stages import Cause, Stage


def test_figures_of_a_plain_request():
    account = books.example(num_tokens=4, gap_ns=5_000_000)
    assert derive.e2e_ns(account) == 35_100_000
    assert derive.ttft_ns(account) == 20_050_000
    assert derive.tpot_ns(account) == (35_100_000 - 20_050_000) / 3
    assert derive.itl_ns(account) == [5_000_000] * 3
    assert derive.queue_ns_by_cause(account) == {Cause.KV_BLOCKS: 9_500_000}
    assert derive.send_lag_ns(account) == [50_000] * 4


def test_tpot_of_the_one_token_after_the_first():
    assert derive.tpot_ns(books.example(num_tokens=2, gap_ns=5_000_000)) == 5_050_000
    in_chunks = msgspec.structs.replace(books.example(num_tokens=4, gap_ns=5_000_000), first_chunk_tokens=3)
    assert derive.tpot_ns(in_chunks) == 15_050_000


def test_max_stall_names_the_step():
    account = Account("r", 0, Stage.DECODE)
    account.close(100)
    stalled = books.closed(account, token_steps=(3, 4, 9), token_ready_ns=(10, 20, 90), output_tokens=3)
    assert derive.max_stall(stalled) == derive.Stall(duration_ns=70, token_index=2, step_id=9)


def test_missing_is_none():
    account = Account("r", 0, Stage.RECEIVE)
    account.close(10)
    nothing = books.closed(account)
    assert derive.ttft_ns(nothing) is derive.tpot_ns(nothing) is derive.max_stall(nothing) is None
    assert derive.cancel_to_freed_ns(nothing) is None
    assert derive.percentile([], 50) is None
    one_chunk = books.closed(account, output_tokens=5, first_chunk_tokens=5, token_written_ns=(9,) * 5)
    assert derive.ttft_ns(one_chunk) == 9
    assert derive.tpot_ns(one_chunk) is None


@given(books.accounts())
def test_totals_sum_to_e2e(account):
    assert sum(derive.stage_totals_ns(account).values()) == derive.e2e_ns(account)
    assert sum(derive.stage_ns(account).values()) == derive.e2e_ns(account)


@given(st.lists(st.integers(), min_size=1), st.floats(0, 100))
def test_a_percentile_is_a_value_that_occurred(values, percent):
    found = derive.percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) * 100 >= percent * len(values) - 1e-6


def test_percentiles_by_nearest_rank():
    assert derive.percentiles(range(1, 101)) == {"p50": 50, "p90": 90, "p95": 95, "p99": 99}
    with pytest.raises(ValueError, match="outside"):
        derive.percentile([1], 101)


@pytest.mark.parametrize(("tokens", "name"), [(1, "1-16"), (16, "1-16"), (17, "17-32"), (200_000, "131073+")])
def test_prompt_buckets(tokens, name):
    assert derive.prompt_bucket(tokens) == name


def test_choices_are_one_request_and_an_id_that_comes_again_is_two():
    asked = [("a-0", 1), ("a-1", 1), ("b-0", 1), ("mine-0", 1), ("mine-1", 1), ("mine-0", 2), ("mine-1", 2)]
    accounts = [books.example(request_id, start_ns) for request_id, start_ns in asked]
    assert [account.group_id for account in accounts[:3]] == ["a", "a", "b"]
    assert len(set(map(derive.request_of, accounts))) == 1 + 1 + 2


@given(books.step_runs())
def test_device_book_accounts_for_all_wall_time(records):
    book = derive.device_book(records)
    derive.verify_device_book(book, records)
    assert sum(book.share_ns.values()) + book.host_gap_ns + book.idle_ns == book.wall_ns


def test_device_book_refuses_a_hole():
    records = [books.step(1, 100), books.step(3, 200, gap_ns=58)]
    with pytest.raises(ValueError, match="consecutive"):
        derive.verify_device_book(derive.device_book(records), records)


@given(st.integers(0, 10**12), st.dictionaries(st.text(max_size=3), st.integers(0, 10**6), min_size=1))
def test_apportioning_loses_nothing(total, weights):
    parts = derive.apportion(total, weights)
    assert sum(parts.values()) == total
    weight_sum = sum(weights.values())
    if weight_sum:
        assert all(abs(parts[key] - total * weight / weight_sum) <= 1 for key, weight in weights.items())
