"""Deadlines: each ends its own request and nobody else's, and those of requests that have ended are forgotten."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import add, make_scheduler, step

from splittime.core.request import FinishReason
from splittime.scheduler import queue


def test_a_deadline_does_not_end_a_later_request_of_the_same_name() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", deadline_ns=100)
    scheduler.abort("a", 10)
    add(scheduler, "a", now_ns=20, deadline_ns=500)
    assert scheduler.expire(100) == []
    (output,) = scheduler.expire(500)
    assert output.finish_reason is FinishReason.DEADLINE


@pytest.mark.parametrize(("runs", "where"), [(True, "while it ran"), (False, "while it waited")])
def test_how_late_a_deadline_was_noticed_is_told(runs: bool, where: str) -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", deadline_ns=1_000_000)
    if runs:
        step(scheduler, 10)
    (output,) = scheduler.expire(3_500_000)
    assert output.error is not None
    assert f"{where} (noticed 2.5 ms later)" in output.error.message


FEW = 2  # dead entries that are not worth a sweep
EVENTS = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 60), st.integers(0, 2_000)),
    st.tuples(st.just("abort"), st.integers(0, 80), st.just(0)),
    st.tuples(st.just("wait"), st.integers(0, 300), st.just(0)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(EVENTS, min_size=5, max_size=40))
def test_whoever_is_due_ends_and_what_is_kept_is_bounded(script: list[tuple[str, int, int]]) -> None:
    """Many come at once, most of them go away, and their names come back with other deadlines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "SWEEP_FROM", FEW)
        crowd(script)


def crowd(script: list[tuple[str, int, int]]) -> None:
    scheduler = make_scheduler()
    due: dict[str, int] = {}
    now_ns = 0
    for what, number, spread in script:
        if what == "ask":
            for i in range(number):
                if f"r{i}" not in due:
                    due[f"r{i}"] = now_ns + 1 + (7919 * (i + spread)) % (spread + 1)
                    add(scheduler, f"r{i}", now_ns=now_ns, deadline_ns=due[f"r{i}"])
                    assert scheduler._deadlines.num_kept <= 2 * len(due) + FEW
        elif what == "abort":
            for name in list(due)[:number]:
                scheduler.abort(name, now_ns)
                del due[name]
        now_ns += number if what == "wait" else 1
        next_ns = scheduler.next_deadline_ns()
        assert not due or (next_ns is not None and next_ns <= min(due.values()))
        over = {name for name, deadline_ns in due.items() if deadline_ns <= now_ns}
        assert {output.request_id for output in scheduler.expire(now_ns)} == over
        for name in over:
            del due[name]


def test_the_earliest_deadline_is_when_somebody_must_look() -> None:
    scheduler = make_scheduler()
    assert scheduler.next_deadline_ns() is None
    for name, deadline_ns in (("a", 300), ("b", 100), ("c", None), ("d", 200)):
        add(scheduler, name, deadline_ns=deadline_ns)
    for now_ns, next_ns in ((99, 100), (100, 200), (200, 300), (300, None)):
        scheduler.expire(now_ns)
        assert scheduler.next_deadline_ns() == next_ns
