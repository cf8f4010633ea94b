"""The ledger's first law, for any order of marks: the sum is exact, and what is out of order is refused."""

import books
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.ledger.account import Account, StageInterval, verify_intervals
from splittime.ledger.stages import CAUSE_MEANING, STAGE_MEANING, Cause, Stage


@given(books.accounts())
def test_stages_sum_to_wall_time_exactly(account):
    account.verify()
    assert sum(interval.duration_ns for interval in account.intervals) == account.end_ns - account.start_ns


@given(st.lists(st.tuples(st.sampled_from(Stage), st.integers(0, 100)), max_size=20))
def test_marks_in_any_order_are_taken_in_order_or_refused(entries):
    account = Account("r", 50, Stage.RECEIVE)
    for stage, now_ns in entries:
        before = list(account.marks)
        if stage is account.stage:
            account.enter(stage, now_ns)
            assert account.marks == before
        elif now_ns < account.marks[-1].begin_ns:
            with pytest.raises(ValueError, match="before"):
                account.enter(stage, now_ns)
            assert account.marks == before
        else:
            account.enter(stage, now_ns)
        assert (account.stage, account.cause) == (account.marks[-1].stage, account.marks[-1].cause)
    account.close(100 if account.marks[-1].begin_ns <= 100 else account.marks[-1].begin_ns)
    account.verify()


def test_a_closed_account_takes_no_marks():
    account = Account("r", 0, Stage.RECEIVE)
    account.close(5)
    with pytest.raises(ValueError, match="closed"):
        account.enter(Stage.ADMIT, 6)
    with pytest.raises(ValueError, match="already closed"):
        account.close(7)


@pytest.mark.parametrize(
    ("spans", "end_ns", "words"),
    [
        ([(0, 4), (4, 9)], 9, None),
        ([(1, 4), (4, 9)], 9, "expected from 0"),
        ([(0, 4), (5, 9)], 9, "expected from 4"),
        ([(0, 4), (3, 9), (10, 10), (9, 10)], 10, "expected from 4"),  # whose sum is exact
        ([(0, 9), (9, 4), (4, 9)], 9, "runs 9..4"),
        ([(0, 4), (4, 9)], 10, "intervals end at 9, account at 10"),
        ([(0, 4), (4, 9)], None, "account at None"),
        ([], 0, None),
    ],
)
def test_what_is_not_contiguous_from_start_to_end_is_refused(spans, end_ns, words):
    intervals = [StageInterval(Stage.DECODE, None, *span) for span in spans]
    if words is None:
        verify_intervals(intervals, 0, end_ns)
        return
    with pytest.raises(ValueError, match=words):
        verify_intervals(intervals, 0, end_ns)


def test_an_account_ends_where_its_last_mark_begins_at_the_earliest():
    account = Account("r", 5, Stage.RECEIVE)
    with pytest.raises(ValueError, match="is open: say until when"):
        account.intervals()
    with pytest.raises(ValueError, match="before its last mark"):
        account.close(4)
    account.close(5)
    account.verify()
    assert [interval.duration_ns for interval in account.intervals()] == [0]
    assert [interval.end_ns for interval in account.intervals(until_ns=9)] == [9]


def test_the_same_stage_for_another_cause_is_another_mark():
    account = Account("r", 0, Stage.RECEIVE)
    for at_ns, cause in ((1, Cause.POLICY), (2, Cause.KV_BLOCKS), (3, Cause.KV_BLOCKS)):
        account.enter(Stage.QUEUE, at_ns, cause)
    assert [(mark.cause, mark.begin_ns) for mark in account.marks[1:]] == [(Cause.POLICY, 1), (Cause.KV_BLOCKS, 2)]


def test_every_stage_and_cause_has_its_sentence():
    assert set(STAGE_MEANING) == set(Stage)
    assert set(CAUSE_MEANING) == set(Cause)
