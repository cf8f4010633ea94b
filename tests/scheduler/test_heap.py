"""The heap whose entries may die, against a plain set."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.scheduler import queue
from splittime.scheduler.queue import MortalHeap

STEPS = st.lists(st.tuples(st.sampled_from(["push", "push", "kill", "pop", "sweep"]), st.integers(0, 30)), max_size=80)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_the_least_of_the_living_is_first_and_the_dead_are_swept_out(script: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "SWEEP_FROM", 2)
        alive: set[tuple[int, int]] = set()
        mortals: MortalHeap[tuple[int, int]] = MortalHeap(alive.__contains__)
        for number, (what, key) in enumerate(script):
            if what == "push":
                alive.add((key, number))
                mortals.push((key, number))
            elif what == "kill" and alive:
                alive.discard(sorted(alive)[key % len(alive)])
            elif what == "pop":
                assert mortals.pop() == min(alive, default=None)
                alive.discard(min(alive, default=(0, 0)))
            elif what == "sweep":
                mortals.sweep(len(alive))
                assert mortals.num_kept <= 2 * len(alive) + 2
            assert sorted(mortals) == sorted(alive)
            assert mortals.first() == min(alive, default=None)


def test_it_can_be_filled_anew() -> None:
    mortals: MortalHeap[tuple[int]] = MortalHeap(lambda entry: True)
    mortals.push((9,))
    mortals.fill([(3,), (1,), (2,)])
    assert [mortals.pop() for _ in range(4)] == [(1,), (2,), (3,), None]


def test_the_dead_are_kept_until_they_are_the_most() -> None:
    mortals: MortalHeap[tuple[int]] = MortalHeap(lambda entry: entry[0] < 10)
    mortals.fill([(key,) for key in range(20 + queue.SWEEP_FROM)])
    mortals.sweep(10)
    assert mortals.num_kept == 20 + queue.SWEEP_FROM
    mortals.push((99,))
    mortals.sweep(10)
    assert mortals.num_kept == 10
