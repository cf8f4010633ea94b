"""Which captured sizes are kept."""

from hypothesis import given
from hypothesis import strategies as st

from splittime.runner.device.execution import candidates, worth_keeping


def test_candidates_hold_as_many_as_may_run():
    assert candidates(1) == (1,)
    assert candidates(9) == (1, 2, 4, 8, 12)
    assert candidates(256)[-1] == 256
    assert candidates(300)[-1] == 256, "larger steps are not captured"


def test_sizes_that_cost_the_same_are_one():
    assert worth_keeping({1: 100, 2: 100, 4: 100, 8: 101, 16: 120, 32: 200}) == (8, 16, 32)
    assert worth_keeping({1: 50, 2: 100}) == (1, 2)
    assert worth_keeping({1: 300, 2: 100}) == (2,), "a small one that was slow by chance is no loss"
    assert worth_keeping({}) == ()


@given(st.dictionaries(st.integers(1, 300), st.floats(1, 1e9)), st.floats(0.0, 0.5))
def test_no_padding_costs_more_than_the_least_saving(times_ns, least_saving):
    kept = worth_keeping(times_ns, least_saving)
    for size, ns in times_ns.items():
        served_by = min(one for one in kept if one >= size)
        assert times_ns[served_by] * (1 - least_saving) <= ns or served_by == size
    assert list(kept) == sorted(set(kept))
