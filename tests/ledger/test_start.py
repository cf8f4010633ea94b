"""A start's book: its parts touch and sum to the time from the beginning to readiness, whatever was told."""

from hypothesis import given
from hypothesis import strategies as st

from splittime.ledger.facts import UNATTRIBUTED, start_book

instants = st.integers(-50, 1050)
phases = st.lists(st.tuples(st.sampled_from("abc"), instants, instants), max_size=12)


@given(phases, st.integers(0, 1000))
def test_the_parts_touch_and_sum_to_the_start(told, ready_ns) -> None:
    parts = start_book(0, ready_ns, told)
    assert sum(end_ns - begin_ns for _, begin_ns, end_ns in parts) == ready_ns
    at_ns = 0
    for _, begin_ns, end_ns in parts:
        assert begin_ns == at_ns
        assert end_ns > begin_ns
        at_ns = end_ns


def test_what_nobody_tells_of_is_unattributed_and_the_earlier_of_two_has_what_they_share() -> None:
    told = [("load", 40, 70), ("import", -5, 30), ("warm-up", 60, 90)]
    expected = [("import", 0, 30), (UNATTRIBUTED, 30, 40), ("load", 40, 70), ("warm-up", 70, 90)]
    assert list(start_book(0, 100, told)) == [*expected, (UNATTRIBUTED, 90, 100)]
