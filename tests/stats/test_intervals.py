"""Intervals by hand: what makes them wide, what ends they have, and where there is none."""

import numpy as np
import pytest
from client_runs import ar1
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.ledger import derive
from splittime.stats.intervals import (
    MIN_FOR_LOW,
    MIN_INDEPENDENT,
    Pooled,
    Precision,
    Spread,
    nearest_rank,
    one_each,
    ranks,
    spread_of,
    t_quantile,
    times,
    together,
    upward,
    without_trend,
)


def test_dependence_of_a_known_process():
    """The variance of a mean of AR(1) is (1 + r) / (1 - r) times that of independent values; here 1, 4 and 9 times."""
    for ratio, known in ((0.0, 1.0), (0.6, 4.0), (0.8, 9.0)):
        found = [times(ar1(np.random.default_rng(seed), 2000, ratio)) for seed in range(20)]
        assert np.median(found) == pytest.approx(known, rel=0.35)


@pytest.mark.parametrize("values", [np.ones(100), np.zeros(9), np.arange(3.0), np.array([1.0]), np.array([])])
def test_what_has_no_spread_or_is_short_has_no_dependence(values):
    assert times(values) == 1.0


def test_what_goes_up_and_down_by_turns_is_not_surer_than_chance():
    assert times(np.tile([1.0, -1.0], 50)) == 1.0


def test_a_trend_is_dependence_unless_it_is_taken_away():
    rising = np.arange(400.0) + np.random.default_rng(0).normal(size=400)
    assert times(rising) > 50
    assert times(without_trend(rising)) < 2


def test_equal_values_share_their_rank():
    assert ranks(np.array([5.0, 1.0, 5.0, 9.0])).tolist() == [2.5, 1.0, 2.5, 4.0]


def test_an_interval_of_independent_requests_is_students():
    """As by the textbook, but for what the estimated dependence and the doubt about the upper end add."""
    values = np.random.default_rng(1).normal(100, 10, 2000)
    found = Precision(one_each(values)).mean()
    textbook = 1.96 * 10 / 2000**0.5
    assert textbook * 0.9 < values.mean() - found.low < textbook * 1.4
    assert textbook * 0.9 < found.high - values.mean() < textbook * 1.5


def test_a_request_counts_once_with_all_its_values():
    """Gaps of a request come together: with them all alike within a request, the interval is as if of one each."""
    each = 10 + np.random.default_rng(3).normal(size=300)
    one, many = one_each(each), Pooled(np.repeat(each, 50), np.repeat(np.arange(300), 50), 300)
    first, second = (Precision(pooled) for pooled in (one, many))
    assert (first.mean().low, first.mean().high) == pytest.approx((second.mean().low, second.mean().high))
    assert first.percentiles([50]) == second.percentiles([50])
    assert first.effective == pytest.approx(second.effective)


def test_requests_without_values_are_no_trouble():
    pooled = Pooled(np.array([1.0, 2.0, 3.0] * 20), np.arange(0, 180, 3), 180)
    assert Precision(pooled).mean().low < 2.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-50, 50), min_size=1, max_size=200), st.integers(1, 99))
def test_an_interval_holds_its_estimate(values, percent):
    pooled = one_each([float(value) for value in values])
    precision, middle = Precision(pooled), float(np.mean(values))
    for value, found in (
        (middle, precision.mean()),
        (nearest_rank(pooled.values, [percent])[0], precision.percentiles([percent])[0]),
    ):
        assert found is None or found.low is None or found.low <= value + 1e-9
        assert found is None or found.high is None or found.high >= value - 1e-9


@pytest.mark.parametrize(("size", "has_interval", "has_end"), [(8, False, False), (20, True, False), (100, True, True)])
def test_few_requests_have_no_upper_end_and_fewer_none(size, has_interval, has_end):
    assert 8 < MIN_FOR_LOW < 20 <= MIN_INDEPENDENT < 100
    found = Precision(one_each(np.linspace(1, 2, size)[np.random.default_rng(2).permutation(size)])).mean()
    assert (found is not None) is has_interval
    assert (found is not None and found.high is not None) is has_end


def test_a_percentile_has_an_upper_end_only_if_enough_lies_beyond():
    values = np.random.default_rng(5).normal(size=1000)
    p50, p99 = Precision(one_each(values[:200])).percentiles([50, 99])
    assert None not in (p50.low, p50.high, p99.low)
    assert p99.high is None
    assert Precision(one_each(values)).percentiles([99])[0].high is not None


def test_the_greatest_of_few_is_no_p99_that_is_known_exactly():
    """All values lie below it, so their share has no spread of its own."""
    for seed in range(20):
        found = Precision(one_each(np.random.default_rng(seed).normal(10, 1, 40))).percentiles([99])[0]
        assert found is None or found.high is None


def test_only_requests_that_share_a_queue_reach_further_upward():
    assert upward(400.0, 400) == 1.0
    assert [upward(effective, 1500) for effective in (20.0, 100.0, 300.0)] == pytest.approx([15.8, 3.8, 1.8])


def test_a_jump_that_the_sample_shows_is_an_upper_end():
    """Gaps of tokens that come in chunks: seven in eight take no time."""
    gaps = np.where(np.random.default_rng(6).random(4000) < 0.125, 20.0, 0.1)
    found = Precision(one_each(gaps)).percentiles([87])[0]
    assert (found.low, found.high >= 20.0) == (0.1, True)


def test_a_mean_that_one_request_made_has_no_upper_end():
    values = np.ones(400)
    values[250] = 1e4
    assert Precision(one_each(values)).mean().high is None


def test_what_both_sides_share_cancels():
    shared = np.exp(ar1(np.random.default_rng(0), 400, 0.9))
    noise = np.random.default_rng(1).normal(1, 0.01, 400)
    a, b = (Precision(one_each(values)).log_mean() for values in (shared, 1.1 * shared * noise))
    assert spread_of(b - a).reach(0.95) < 0.05 * together(spread_of(a), spread_of(b)).reach(0.95)


def test_fewer_independent_requests_reach_further():
    reaches = [
        Spread(1.0, effective).reach(0.95) * Spread(1.0, effective).widening() for effective in (5, 20, 100, 1e6)
    ]
    assert reaches == sorted(reaches, reverse=True)
    assert reaches[-1] == pytest.approx(1.96, rel=0.01)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(-1000, 1000), min_size=1, max_size=60), st.lists(st.integers(0, 100), min_size=1, max_size=4)
)
def test_nearest_rank_is_the_definition(values, percents):
    assert nearest_rank(np.array(values, dtype=float), percents) == [derive.percentile(values, p) for p in percents]


@pytest.mark.parametrize(
    ("probability", "freedom", "value"), [(0.975, 4, 2.776), (0.995, 10, 3.169), (0.025, 4, -2.776)]
)
def test_t_quantiles_as_in_the_tables(probability, freedom, value):
    assert t_quantile(probability, freedom) == pytest.approx(value, rel=1e-3)
