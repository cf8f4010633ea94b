"""Shares and their intervals: wide where one event lost it all, narrow where all lost alike, right as often as said."""

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.diagnose.rules.evidence import CONFIDENCE, MIN_LOSERS, MIN_SHARE, counted, ratio, widened

amounts = st.lists(st.tuples(st.floats(0, 1e12), st.floats(1, 1e12)), min_size=1, max_size=60)


@given(amounts)
def test_the_share_lies_in_its_interval_and_between_0_and_1(pairs):
    lost, felt = zip(*pairs, strict=True)
    share = ratio(lost, felt)
    assert 0 <= share.value <= 1
    if share.interval is not None:
        low, high = share.interval
        assert 0 <= low <= share.value <= high <= 1
        assert share.num_losers >= MIN_LOSERS
    assert not (share.is_worth_it and share.unsure() is None and share.value < share.least)


def test_all_that_lose_alike_are_sure():
    share = ratio([3.0] * 40, [10.0] * 40)
    assert share.interval == pytest.approx((0.3, 0.3))
    assert share.is_worth_it


def test_one_event_is_not_enough_however_large():
    """Five neighbours held up by one step, for a quarter of everybody's time."""
    lost = [0.0] * 20 + [20.0] * 5 + [0.0] * 15
    share = ratio(lost, [10.0 + ns for ns in lost])
    assert share.value > 2 * MIN_SHARE * 0.9
    assert not share.is_worth_it
    assert "another may show" in share.unsure().why


def test_few_losers_are_not_enough():
    share = ratio([100.0] * (MIN_LOSERS - 1) + [0.0] * 20, [100.0] * (MIN_LOSERS + 19))
    assert not share.is_worth_it
    assert f"seen {MIN_LOSERS - 1} times only" in share.unsure().why


def test_a_small_share_says_nothing():
    share = ratio([1.0] * 40, [100.0] * 40)
    assert share.unsure() is None
    assert not share.is_worth_it


def test_what_was_counted_is_its_own_interval():
    assert counted(0.3, 6).interval == (0.3, 0.3)
    assert counted(0.0, 0).interval is None


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """Half of the requests, at random, lose half of their time: the truth is a quarter."""
    rng = numpy.random.default_rng(7)
    held = 0
    for _ in range(150):
        lost = rng.integers(0, 2, 60) * 50.0
        low, high = ratio(lost, [100.0] * 60).interval
        held += low <= 0.25 <= high
    assert held / 150 >= CONFIDENCE - 0.1


def test_what_a_share_was_worked_out_from_widens_it():
    """Errors that have nothing to do with each other add by their squares."""
    share = ratio([3.0] * 40, [10.0] * 40)
    assert widened(share, 0.05).interval == pytest.approx((0.25, 0.35))
    assert widened(widened(share, 0.03), 0.04).interval == pytest.approx((0.25, 0.35))
    assert widened(share, 2.0).interval == (0.0, 1.0)
    assert not widened(share, 0.25).is_worth_it
    assert widened(ratio([0.0] * 40, [10.0] * 40), 0.05).interval is None
