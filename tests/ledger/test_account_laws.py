"""The ledger's first law, for any order of marks: the sum is exact, and what is out of order is refused."""

import books
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.ledger.account import Account
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
    account.close(100 if account.marks[-1].begin_ns <= 100 else account.marks[-1].begin_ns)
    account.verify()


def test_a_closed_account_takes_no_marks():
    account = Account("r", 0, Stage.RECEIVE)
    account.close(5)
    with pytest.raises(ValueError, match="closed"):
        account.enter(Stage.ADMIT, 6)
    with pytest.raises(ValueError, match="already closed"):
        account.close(7)


def test_every_stage_and_cause_has_its_sentence():
    assert set(STAGE_MEANING) == set(Stage)
    assert set(CAUSE_MEANING) == set(Cause)
