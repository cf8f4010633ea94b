"""Intervals: do they hold the truth as often as they say, where values depend on the ones before?"""

import sys
from math import sqrt
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from client_runs import ar1

from splittime.ledger import derive
from splittime.ledger.client_intervals import (
    Bootstrap,
    Dependence,
    Pooled,
    bootstrap,
    bounded,
    circular_weights,
    dependence,
    interval,
    mean_replicates,
    nearest_rank,
    one_each,
    percentile_replicates,
    spread,
    t_quantile,
)

TRIALS = 120
NONE = Dependence(1, 1.0, 1.0)


def covers(pooled: Pooled, drawn: Bootstrap, percent: float | None, truth: float) -> bool:
    if percent is None:
        replicates = mean_replicates(pooled, drawn)
    else:
        replicates = percentile_replicates(pooled, drawn, [percent])[:, 0]
    found = spread(replicates, drawn)
    return found.low <= truth <= found.high


def independent(size: int, seed: int) -> Bootstrap:
    """What a bootstrap is that takes requests for independent."""
    return Bootstrap(circular_weights(size, 1, 400, np.random.default_rng(seed)), size, size, NONE)


def coverage(size: int, dependence: float, percent: float | None, draw) -> float:
    truth = 0.0 if percent is None else NormalDist().inv_cdf(percent / 100)
    hits = 0
    for seed in range(TRIALS):
        pooled = one_each(ar1(np.random.default_rng(1000 + seed), size, dependence))
        hits += covers(pooled, draw(pooled, seed), percent, truth)
    return hits / TRIALS


@pytest.mark.parametrize(
    ("size", "dependence", "percent", "least"),
    [(300, 0.0, None, 0.90), (100, 0.5, None, 0.84), (400, 0.6, 90, 0.87), (800, 0.8, None, 0.88)],
)
def test_coverage_of_95_percent_intervals(size, dependence, percent, least):
    found = coverage(size, dependence, percent, lambda pooled, seed: bootstrap(pooled, seed=seed, replicates=400))
    assert least <= found <= 0.995


def test_a_bootstrap_that_takes_requests_for_independent_is_too_sure():
    assert coverage(400, 0.6, None, lambda pooled, seed: independent(400, seed)) < 0.75


def test_dependence_of_a_known_process():
    """The variance of a mean of AR(1) is (1 + r) / (1 - r) times that of independent values; here 1, 4 and 9 times."""
    blocks = {}
    for ratio, times in ((0.0, 1.0), (0.6, 4.0), (0.8, 9.0)):
        found = [dependence(ar1(np.random.default_rng(seed), 2000, ratio)) for seed in range(20)]
        assert np.median([its.times for its in found]) == pytest.approx(times, rel=0.35)
        assert all(1 <= its.widen <= 2 for its in found)
        blocks[ratio] = np.median([its.block for its in found])
    assert 13 <= blocks[0.0] <= 15 < blocks[0.6] < blocks[0.8]  # 2000^(1/3) is 12.6


@pytest.mark.parametrize("values", [np.ones(100), np.zeros(9), np.arange(3.0), np.array([1.0])])
def test_what_has_no_spread_or_is_short_has_no_dependence(values):
    assert dependence(values) == NONE


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 1000))
def test_weights_draw_whole_blocks_and_as_many_as_there_are(cells, block, seed):
    block = min(cells, block)
    weights = circular_weights(cells, block, 7, np.random.default_rng(seed))
    assert weights.shape == (7, cells)
    assert (weights.sum(axis=1) == cells).all()
    assert (weights >= 0).all()
    begins = (np.diff(np.concatenate([weights[:, -1:], weights], axis=1), axis=1) > 0).sum(axis=1)
    assert (begins <= -(-cells // block)).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-50, 50), min_size=8, max_size=80), st.integers(1, 99), st.integers(0, 9))
def test_replicates_are_the_statistics_of_what_was_drawn(values, percent, seed):
    """Against repeating each value as often as its weight says."""
    pooled = one_each([float(value) for value in values])
    drawn = bootstrap(pooled, seed=seed, replicates=20)
    means, percentiles = mean_replicates(pooled, drawn), percentile_replicates(pooled, drawn, [percent])[:, 0]
    for row, mean, at_percent in zip(drawn.weights.astype(int), means, percentiles, strict=True):
        sample = np.repeat(pooled.values, row)
        assert mean == pytest.approx(sample.mean(), abs=1e-6)
        assert at_percent == derive.percentile(sample.tolist(), percent)


def test_many_requests_are_drawn_in_cells_and_give_the_same_interval():
    """20,000 requests in 1,000 cells against 20 times as many weights."""
    values = ar1(np.random.default_rng(5), 20_000, 0.9) + 10
    drawn = bootstrap(one_each(values), replicates=1000)
    assert drawn.weights.shape == (1000, 1000)
    spread = mean_replicates(one_each(values), drawn).std()
    assert spread == pytest.approx(sqrt(19 / 20_000), rel=0.2)
    p99 = percentile_replicates(one_each(values), drawn, [99])[:, 0]
    assert p99.min() <= np.sort(values)[19_799] <= p99.max()
    assert 0.02 < p99.std() < 0.4


def test_a_request_is_drawn_with_all_its_values():
    """Gaps of a request come together: with them all alike within a request, the interval is as if of one each."""
    each = np.random.default_rng(3).normal(size=300)
    one, many = one_each(each), Pooled(np.repeat(each, 50), np.repeat(np.arange(300), 50), 300)
    spreads = [mean_replicates(pooled, bootstrap(pooled, replicates=2000)).std() for pooled in (one, many)]
    assert spreads[0] == pytest.approx(spreads[1], rel=0.01)


def test_requests_without_values_are_no_trouble():
    pooled = Pooled(np.array([1.0, 2.0, 3.0]), np.array([0, 5, 9]), 10)
    drawn = bootstrap(pooled, replicates=50)
    assert drawn.num_requests == 10
    assert np.isfinite(mean_replicates(pooled, drawn)).all()
    assert percentile_replicates(pooled, drawn, [50, 99]).shape == (50, 2)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(-1000, 1000), min_size=1, max_size=60), st.lists(st.integers(0, 100), min_size=1, max_size=4)
)
def test_nearest_rank_is_the_definition(values, percents):
    assert nearest_rank(np.array(values, dtype=float), percents) == [derive.percentile(values, p) for p in percents]


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [
        (0.975, 1, 12.706),
        (0.975, 4, 2.776),
        (0.975, 3, 3.182),
        (0.995, 10, 3.169),
        (0.975, 1e9, 1.960),
        (0.025, 4, -2.776),
    ],
)
def test_t_quantiles_as_in_the_tables(probability, freedom, value):
    assert t_quantile(probability, freedom) == pytest.approx(value, rel=1e-3)


def test_a_percentile_is_bounded_above_only_if_enough_lie_beyond():
    """0.99^n is the chance that all of n lie below the 99th percentile: at most 2.5 % from n = 368 on."""
    found = interval(np.linspace(0, 1, 100), 100)
    for requests, is_bounded in ((367, False), (368, True)):
        drawn = Bootstrap(np.zeros((1, 1), np.float32), requests, requests, NONE)
        assert (bounded(found, 99, drawn).high is not None) is is_bounded
        assert bounded(found, 99, drawn).low is not None
        assert bounded(found, 50, drawn) == found
    dependent = Bootstrap(np.zeros((1, 1), np.float32), 368, 100, Dependence(1, 2.0, 1.0))
    assert bounded(found, 99, dependent).high is None
