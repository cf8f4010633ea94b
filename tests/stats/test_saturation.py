"""The test of over-saturation against queues that are made here: one server, Poisson arrivals, exponential service."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from splittime.stats.saturation import BLOCKS, FIRST_LOOK_S, LEVEL, Judge, drift_test

NS = 1_000_000_000
SERVED_PER_S = 20.0


def stopped_at(seed, load, length_s, steps_s=0.5):
    """When the judge stops a queue with this load, looking on as a run would; None if never."""
    rng = np.random.default_rng(seed)
    count = int(load * SERVED_PER_S * length_s * 1.3) + 50
    arrived = np.cumsum(rng.exponential(1 / (load * SERVED_PER_S), count))
    service = rng.exponential(1 / SERVED_PER_S, count)
    ended = np.maximum.accumulate(arrived - np.cumsum(service) + service) + np.cumsum(service)  # Lindley
    begun = ended - service
    judge, seen = Judge(), 0
    for now_s in np.arange(steps_s, length_s, steps_s):
        in_flight = np.searchsorted(arrived, now_s, "right") - np.searchsorted(ended, now_s, "right")
        judge.add_in_flight(int(now_s * NS), int(in_flight))
        until = int(np.searchsorted(begun, now_s))
        times = zip(begun[seen:until], (begun - arrived)[seen:until], strict=True)
        judge.add_ttft([(int(at * NS), int(wait * NS)) for at, wait in times])
        seen = until
        if judge.look(int(now_s * NS)) is not None:
            return now_s
    return None


def test_a_server_that_keeps_up_is_never_stopped():
    assert [seed for seed in range(100) if stopped_at(seed, 0.7, 120) is not None] == []


def test_a_server_near_its_edge_is_seldom_stopped():
    assert sum(stopped_at(seed, 0.95, 120) is not None for seed in range(100)) <= LEVEL * 100


def test_overload_is_found():
    found = [stopped_at(seed, 1.3, 160) for seed in range(50)]
    assert None not in found
    assert min(found) >= FIRST_LOOK_S
    assert np.median(found) <= 100


def test_the_filling_of_an_empty_server_is_no_overload():
    """40 in flight on average, 2 s each: it fills within seconds and then stays."""
    judge = Judge()
    rng = np.random.default_rng(1)
    for step in range(1, 400):
        now_s = step * 0.25
        judge.add_in_flight(int(now_s * NS), int(rng.poisson(40 * (1 - np.exp(-now_s / 2)))))
        judge.add_ttft([(int(now_s * NS), int(rng.normal(0.2, 0.02) * NS))])
        assert judge.look(int(now_s * NS)) is None


def test_both_must_grow():
    """Requests in flight grow because answers get longer; the first token comes as ever."""
    judge = Judge()
    for step in range(1, 400):
        now_s = step * 0.25
        judge.add_in_flight(int(now_s * NS), step)
        judge.add_ttft([(int(now_s * NS), 1000)])
        assert judge.look(int(now_s * NS)) is None


def test_it_says_why():
    judge = Judge()
    verdict = None
    for step in range(1, 400):
        now_s = step * 0.25
        judge.add_in_flight(int(now_s * NS), step)
        judge.add_ttft([(int(now_s * NS), step * 1_000_000)])
        verdict = verdict or judge.look(int(now_s * NS))
    assert verdict is not None
    assert "requests in flight grew by" in verdict
    assert "4 ms each second" in verdict


@pytest.mark.parametrize("level", [0.01, 0.05, 0.2])
def test_a_walk_without_drift_is_taken_for_one_with_it_as_often_as_stated(level):
    """The stated distribution of the statistic, on what it was made for: means of a random walk."""
    rng = np.random.default_rng(7)
    walks = rng.normal(size=(4000, BLOCKS * 20)).cumsum(axis=1).reshape(4000, BLOCKS, 20).mean(axis=2)
    share = np.mean([drift_test(walk)[1] < level for walk in walks])
    assert share <= level * 1.3 + 0.003


@given(arrays.arrays(float, BLOCKS, elements=st.floats(-1e6, 1e6)))
def test_any_series_has_an_answer(means):
    growth, p = drift_test(means)
    assert 0.0 <= p <= 1.0
    assert growth == means[-1] - means[0]
