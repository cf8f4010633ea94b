"""Arrivals against theory: gaps by a Kolmogorov-Smirnov test, counts by their dispersion, ramps by their integral."""

import math
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.bench.distributions import stream
from splittime.bench.starts import RateProfile, arrivals_ns, trace_arrivals_ns, unit_gaps
from splittime.core.errors import ConfigError

RATE = 20.0
WINDOW_S = 50.0


def arrivals_s(kind: str, count: int, seed: int = 0, profile: RateProfile | None = None, cv: float = 1.0) -> np.ndarray:
    drawn = arrivals_ns(kind, profile or RateProfile(rate=RATE), stream(seed, "arrivals"), cv)
    return np.array(list(islice(drawn, count))) / 1e9


def ks_p_value(gaps: np.ndarray, mean: float) -> float:
    """That these are draws of an exponential distribution of known mean: Kolmogorov's limit law, with Stephens'
    correction for finite n."""
    cumulative = 1 - np.exp(-np.sort(gaps) / mean)
    n = len(gaps)
    distance = max(np.max(np.arange(1, n + 1) / n - cumulative), np.max(cumulative - np.arange(n) / n))
    scaled = distance * (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n))
    return min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101)))


def dispersion(counts: np.ndarray) -> float:
    """Variance over mean; 1 for Poisson."""
    return float(np.var(counts, ddof=1) / np.mean(counts))


def window_counts(make, seeds: int) -> np.ndarray:
    """How many arrivals each seed's process has in the same window."""
    return np.array([np.sum(make(seed) < WINDOW_S) for seed in range(seeds)])


def rescaled(seed: int) -> np.ndarray:
    """What some tools call Poisson: exponential gaps, stretched so that the last of n arrivals comes at n / rate."""
    count = int(RATE * WINDOW_S * 1.2)
    at_s = arrivals_s("poisson", count, seed)
    return at_s * (count / RATE / at_s[-1])


def test_poisson_gaps_are_exponential():
    gaps = np.diff(arrivals_s("poisson", 20_000, seed=1), prepend=0.0)
    assert ks_p_value(gaps, 1 / RATE) > 0.01


@pytest.mark.parametrize(("kind", "cv"), [("constant", 1.0), ("gamma", 1.5), ("gamma", 0.8)])
def test_the_gap_test_tells_others_from_poisson(kind, cv):
    gaps = np.diff(arrivals_s(kind, 20_000, seed=1, cv=cv), prepend=0.0)
    assert ks_p_value(gaps, 1 / RATE) < 1e-6


def test_gap_test_accepts_as_often_as_it_should():
    """p-values of true draws are uniform: about a tenth of the seeds fall below 0.1."""
    p_values = [ks_p_value(np.diff(arrivals_s("poisson", 500, seed), prepend=0.0), 1 / RATE) for seed in range(300)]
    assert 0.05 < np.mean(np.array(p_values) < 0.1) < 0.16


def test_poisson_counts_of_windows_vary_as_poisson_does():
    """Within one run, over 2,000 windows of 1 s: the standard error of the dispersion is sqrt(2 / 2000) = 0.03."""
    at_s = arrivals_s("poisson", 50_000, seed=3)
    counts = np.histogram(at_s, bins=2000, range=(0, 2000))[0]
    assert dispersion(counts) == pytest.approx(1.0, abs=0.13)
    assert np.mean(counts) == pytest.approx(RATE, rel=0.02)


def test_the_number_of_a_whole_run_varies_too_and_a_rescaled_process_is_caught():
    """Over 400 seeds: Poisson's dispersion is 1 (standard error 0.07), a rescaled one's about 1/6 = 1 - 1/1.2."""
    true = dispersion(window_counts(lambda seed: arrivals_s("poisson", int(RATE * WINDOW_S * 1.5), seed), 400))
    caught = dispersion(window_counts(rescaled, 400))
    assert true == pytest.approx(1.0, abs=0.28)
    assert caught < 0.3


def test_the_last_arrival_is_by_chance():
    last_s = {arrivals_s("poisson", 100, seed)[-1] for seed in range(10)}
    assert len(last_s) == 10
    assert np.std(list(last_s)) > 0.1


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_gamma_gaps_have_the_asked_variation(cv):
    gaps = unit_gaps("gamma", stream(1, "x"), 200_000, cv)
    assert np.mean(gaps) == pytest.approx(1.0, rel=0.03)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(cv, rel=0.03)


def test_constant_arrivals_are_even_and_begin_at_once():
    at_ns = list(islice(arrivals_ns("constant", RateProfile(rate=8.0), stream(0, "x")), 3000))
    assert at_ns[0] == 0
    assert {after - before for before, after in pairwise(at_ns)} == {125_000_000}


def test_other_kinds_are_refused():
    with pytest.raises(ConfigError, match="bursty"):
        unit_gaps("bursty", stream(0, "x"), 1)


profiles = st.builds(
    RateProfile,
    rate=st.floats(0.1, 1000),
    rate_end=st.none() | st.floats(0.1, 1000),
    ramp_from_s=st.floats(0, 100),
    ramp_s=st.floats(0.01, 1000),
)


@given(profiles, st.lists(st.floats(0, 2000), min_size=1, max_size=20))
def test_a_profile_and_its_inverse_agree(profile, instants_s):
    at_s = np.array(instants_s)
    assert profile.when(profile.expected(at_s)) == pytest.approx(at_s, rel=1e-9, abs=1e-9)


@given(profiles)
def test_expected_counts_are_the_integral_of_the_rate(profile):
    at_s = np.linspace(0, 300, 4001)
    end = profile.rate if profile.rate_end is None else profile.rate_end
    share = np.clip((at_s - profile.ramp_from_s) / profile.ramp_s, 0, 1)
    rates = np.where(at_s < profile.ramp_from_s, profile.rate, profile.rate + (end - profile.rate) * share)
    summed = np.concatenate(([0], np.cumsum((rates[1:] + rates[:-1]) / 2 * np.diff(at_s))))
    most_off = abs(end - profile.rate) * (at_s[1] - at_s[0])  # within the two steps where the slope changes
    assert np.max(np.abs(profile.expected(at_s) - summed)) <= most_off + 1e-6 * summed[-1]


@pytest.mark.parametrize("kind", ["constant", "poisson", "gamma"])
def test_a_ramp_has_its_rates(kind):
    """10/s for 100 s, then growing to 50/s over 200 s, then 50/s: counts against the integral."""
    profile = RateProfile(rate=10, rate_end=50, ramp_from_s=100, ramp_s=200)
    at_s = arrivals_s(kind, 20_000, 5, profile, cv=0.5)
    for begin, end, want in ((0, 100, 1000), (100, 200, 2000), (200, 300, 4000), (300, 400, 5000)):
        found = np.sum((at_s >= begin) & (at_s < end))
        assert found == pytest.approx(want, abs=4 * math.sqrt(want))


def test_ramped_poisson_is_poisson_in_its_own_time():
    profile = RateProfile(rate=5, rate_end=100, ramp_from_s=10, ramp_s=300)
    counts = profile.expected(arrivals_s("poisson", 10_000, 7, profile))
    assert ks_p_value(np.diff(counts, prepend=0.0), 1.0) > 0.01


def test_the_same_ranks_at_another_rate():
    slow, fast = (arrivals_s("poisson", 50, 3, RateProfile(rate=rate)) for rate in (2.0, 8.0))
    assert slow == pytest.approx(4 * fast, abs=1e-5)


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=50).map(sorted), st.floats(0.01, 1000))
def test_a_trace_keeps_its_times(at_s, speed_up):
    replayed = trace_arrivals_ns(np.array(at_s), speed_up)
    assert replayed == sorted(replayed)
    assert [at_ns / 1e9 for at_ns in replayed] == pytest.approx([one / speed_up for one in at_s], rel=1e-9, abs=1e-6)
