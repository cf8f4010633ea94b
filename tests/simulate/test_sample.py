"""Percentiles of times: those of the definition, exactly or within half a percent."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.ledger import derive
from splittime.simulate.figures import TimeSample

TIMES = st.lists(st.one_of(st.just(0), st.integers(1, 10), st.integers(1, 10**13)), max_size=60)
PERCENTS = (0, 1, 50, 90, 99, 100)


def sample(parts: list[list[int]], exact: int) -> TimeSample:
    made = TimeSample(exact)
    for part in parts:
        made.extend(part)
    return made


@given(st.lists(TIMES, max_size=4))
def test_as_many_as_are_kept_are_exact(parts: list[list[int]]) -> None:
    assert sample(parts, 1_000).percentiles(PERCENTS) == derive.percentiles(list(chain(*parts)), PERCENTS)


@given(st.lists(TIMES, max_size=4))
def test_more_are_within_half_a_percent(parts: list[list[int]]) -> None:
    found, true = sample(parts, 3).percentiles(PERCENTS), derive.percentiles(list(chain(*parts)), PERCENTS)
    assert found == {name: pytest.approx(value, rel=0.005, abs=0) for name, value in true.items()}
