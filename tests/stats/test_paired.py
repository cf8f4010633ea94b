"""Intervals hold the truth as often as they say, however documents differ; McNemar's test is scipy's binomial."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazily import scipy_stats as stats
from splittime.stats import paired
from splittime.stats.paired import BootstrapEstimate

EXPERIMENTS = 300


def coverage(documents: int, draw) -> float:
    """The share of experiments whose interval holds 0; draw(source) gives sums and counts of each document."""
    source = np.random.default_rng(7)
    found = [paired.ratio_of_sums(*draw(source, documents), seed=n) for n in range(EXPERIMENTS)]
    return sum(one.low <= 0 <= one.high for one in found) / EXPERIMENTS


def correlated(source, documents):
    """Tokens share their document's own shift: intervals over tokens would be far too narrow."""
    counts = source.integers(20, 400, documents).astype(float)
    shifts = source.normal(0, 0.1, documents)
    noise = source.normal(0, 1, documents) / np.sqrt(counts)
    return (shifts + noise) * counts, counts


def skewed(source, documents):
    return source.exponential(1, documents) - 1, np.ones(documents)


@pytest.mark.parametrize(("documents", "least", "most"), [(10, 0.91, 0.99), (40, 0.92, 0.985)])
def test_intervals_over_documents_hold_the_truth(documents, least, most):
    assert least <= coverage(documents, correlated) <= most


def test_skewed_documents_are_covered_nearly_as_often():
    assert 0.86 <= coverage(12, skewed) <= 0.985


def test_intervals_over_tokens_would_not():
    """What the module is there to avoid: the same data, each token taken for a document."""
    source, held = np.random.default_rng(3), 0
    for _ in range(100):
        counts = np.full(10, 200)
        tokens = np.repeat(source.normal(0, 0.3, 10), counts) + source.normal(0, 1, counts.sum())
        reach = 1.96 * tokens.std(ddof=1) / math.sqrt(len(tokens))
        held += abs(tokens.mean()) <= reach
    assert held < 60


def test_quantiles_over_documents_hold_the_truth():
    truth, source, held = float(stats.expon.ppf(0.9)), np.random.default_rng(5), 0
    for seed in range(150):
        owners = np.repeat(np.arange(20), 50)
        values = source.exponential(1, len(owners))
        found = paired.quantile_of_tokens(values, owners, 0.9, seed=seed)
        held += found.low <= truth <= found.high
    assert held >= 130


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=40), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_an_interval_holds_its_own_value_or_nearly(values, seed):
    """And is a point where all documents are alike."""
    found = paired.mean(np.array(values), seed)
    assert found.low <= found.high
    assert min(values) - 1e-9 <= found.low
    assert found.high <= max(values) + 1e-9
    assert found.value == pytest.approx(np.mean(values), abs=1e-12)
    alike = paired.mean(np.full(len(values), values[0]), seed)
    assert alike.low == pytest.approx(values[0], abs=1e-9)
    assert alike.standard_error == pytest.approx(0, abs=1e-9)


@given(st.lists(st.floats(0, 10), min_size=3, max_size=60), st.floats(0.05, 1.0))
@settings(max_examples=40, deadline=None)
def test_a_quantile_is_the_least_value_that_the_share_does_not_exceed(values, share):
    array = np.array(values)
    found = paired.quantile_of_tokens(array, np.arange(len(array)) % 2, share).value
    assert (array <= found).mean() >= share - 1e-9
    assert (array < found).mean() < share + 1e-9


def test_one_document_says_nothing_of_others():
    found = paired.ratio_of_sums(np.array([3.0]), np.array([2.0]))
    assert (found.value, found.low, found.high) == (1.5, -math.inf, math.inf)


@given(st.integers(0, 60), st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_mcnemar_is_the_sign_test_of_the_questions_that_differ(first, second):
    p = paired.mcnemar(first, second)
    assert p == paired.mcnemar(second, first)
    count = first + second
    if count == 0:
        assert p == 1.0
        return
    tail = stats.binom.cdf(min(first, second), count, 0.5)
    assert p == pytest.approx(min(1.0, 2 * tail))
    assert p == pytest.approx(stats.binomtest(first, count).pvalue)


def test_paired_differences_hold_the_truth():
    source, held = np.random.default_rng(11), 0
    for _ in range(500):
        losses, gains, _ = source.multinomial(300, [0.06, 0.02, 0.92])
        found = paired.paired_difference(int(losses), int(gains), 300)
        held += found.low <= -0.04 <= found.high
    assert 0.93 <= held / 500 <= 0.98


@given(st.integers(0, 50), st.integers(0, 50), st.integers(100, 1000))
@settings(max_examples=40, deadline=None)
def test_a_paired_difference_turns_round_with_its_sides(first, second, count):
    one, other = (paired.paired_difference(*pair, count) for pair in ((first, second), (second, first)))
    assert one.value == -other.value
    assert one.low == pytest.approx(-other.high)
    assert one.low < one.value < one.high


def test_no_differences_in_few_questions_still_leave_doubt():
    """An interval from the observed shares alone would be a point."""
    found = paired.paired_difference(0, 0, 60)
    assert found.low < -0.02
    assert found.high > 0.02


def test_a_logarithm_s_estimate_becomes_its_own():
    found = BootstrapEstimate(math.log(2), 0.1, math.log(1.5), math.log(3)).mapped_by_exp()
    assert (found.value, found.standard_error) == (pytest.approx(2), pytest.approx(0.2))
    assert (found.low, found.high) == (pytest.approx(1.5), pytest.approx(3))
