"""Do intervals hold the truth as often as they say? On queues whose truth is known, with fixed seeds.

The short form of `benchmarks.scenarios.interval_coverage`. Bounds leave three standard errors of so few runs.
"""

import numpy as np
import pytest

from benchmarks import queues
from benchmarks.scenarios.interval_coverage import cell
from splittime.bench.book.figures import figure
from splittime.stats.intervals import MIN_FOR_LOW, one_each

RUNS = 60
SURE = 0.87  # of 60 runs at 95 % fewer than 52 hold the truth once in 200 times
MOSTLY_FALSE = 0.10


@pytest.mark.parametrize(
    ("queue", "rho", "size"),
    [("mm1", 0.5, 400), ("mm1", 0.7, 1500), ("gm1", 0.5, 1500), ("md4", 0.7, 1500), ("mmpp", 0.5, 1500)],
)
@pytest.mark.sample(2)
def test_intervals_cover_where_there_are_enough_requests(queue, rho, size):
    found = cell(queue, rho, size, RUNS, seed=1)["figures"]
    for name in ("mean", "p50", "p90"):
        assert found[name]["given"] + found[name]["low_given"] >= 0.8, name
        assert found[name]["false"] <= 1 - SURE, name


@pytest.mark.parametrize(
    ("queue", "rho", "size"), [("mm1", 0.8, 1500), ("gm1", 0.7, 1500), ("md4", 0.8, 400), ("mh2", 0.6, 1500)]
)
def test_runs_that_were_spared_the_long_queues_do_not_say_that_there_are_none(queue, rho, size):
    """Where a third of the runs or so look calm enough for an upper end: before, one in four of those lay below."""
    found = cell(queue, rho, size, 3 * RUNS, seed=5)["figures"]
    for name in ("mean", "p50", "p90"):
        assert 0.05 <= found[name]["given"] <= 0.8, name
        assert found[name]["covered"] >= SURE, name


@pytest.mark.parametrize(
    ("queue", "rho", "size"), [("mm1", 0.9, 400), ("mm1", 0.95, 1500), ("gm1", 0.9, 400), ("mmpp", 0.9, 1500)]
)
def test_near_capacity_it_says_that_it_cannot_tell(queue, rho, size):
    found = cell(queue, rho, size, RUNS, seed=2)
    for name in ("mean", "p50", "p90", "p99"):
        assert found["figures"][name]["given"] <= 0.2, name
        assert found["figures"][name]["false"] <= MOSTLY_FALSE, name
    assert found["false_differences"] <= MOSTLY_FALSE


def test_a_p99_has_an_upper_end_only_with_hundreds_of_independent_requests():
    values = np.random.default_rng(0).lognormal(size=4000)
    assert figure(one_each(values[:400])).percentiles["p99"].interval.high is None
    p99 = figure(one_each(values)).percentiles["p99"].interval
    assert p99.low < np.exp(2.326) < p99.high


def test_too_few_independent_requests_have_no_interval():
    busy = queues.draw("mm1", 0.95, 400, 1, seed=3)[0]
    found = figure(one_each(busy))
    assert found.independent < MIN_FOR_LOW
    assert found.mean.interval is None
    assert all(one.interval is None for one in found.percentiles.values())


@pytest.mark.parametrize("queue", list(queues.QUEUES))
def test_the_oracle_agrees_with_itself(queue):
    """Long runs against the stated truth, and a queue of three against the walk by hand."""
    drawn = queues.draw(queue, 0.5, 40_000, 5, seed=4).ravel()
    true = queues.truth("gm1" if queue == "gm1" else queue, 0.5)
    assert drawn.mean() == pytest.approx(true["mean"], rel=0.05)
    assert np.percentile(drawn, 90) == pytest.approx(true["p90"], rel=0.05)


def test_a_walk_by_hand():
    """Service 3, 1, 1 and gaps 1, 2: the second waits 2, the third 1."""
    assert queues.waits(np.array([3.0 - 1, 1.0 - 2, 0.0])).tolist() == [0.0, 2.0, 1.0]
