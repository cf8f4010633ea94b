"""The index of questions is exact and bounded; what shadows find, and the interval of their rate."""

import asyncio

import numpy as np
import pytest

from splittime.gateway.cache.service import CLOSE, DIFFERENT, SAME, UNJUDGED, QuestionIndex, outcome, wilson


def test_an_index_is_exact_bounded_and_parted():
    drawn = np.random.default_rng(3)
    vectors = drawn.normal(size=(60, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index = QuestionIndex(40)
    for number, vector in enumerate(vectors):
        index.add(f"k{number}", "l", vector)
    index.add("elsewhere", "m", vectors[59])
    for number in range(25, 60, 3):
        index.discard(f"k{number}")
    held = [number for number in range(21, 60) if number not in range(25, 60, 3)]
    assert len(index) == len(held) + 1
    for asked in vectors[:10]:
        cosines = {number: float(vectors[number] @ asked) for number in held}
        near = sorted((number for number in held if cosines[number] >= 0.3), key=lambda number: -cosines[number])
        assert index.near("l", asked, 0.3) == [f"k{number}" for number in near][:16]
    assert index.near("m", vectors[59], 0.9) == ["elsewhere"]
    assert index.near("n", vectors[59], -1.0) == []
    assert index.near("l", np.ones(3, dtype=np.float32), -1.0) == []


@pytest.mark.parametrize(
    ("given", "fresh", "verdict", "found"),
    [
        ("It is 5.", "It  is 5. ", None, SAME),
        ("It is 5.", "Five it is.", True, CLOSE),
        ("It is 5.", "It is 6.", False, DIFFERENT),
        ("It is 5.", "It is 6.", None, UNJUDGED),
        ("It is 5.", "It is 5." + " And so on" * 400, True, UNJUDGED),
    ],
)
def test_answers_are_compared(given, fresh, verdict, found):
    async def says_same(one, other):
        return verdict

    assert asyncio.run(outcome(given, fresh, says_same)) == found


def test_without_a_verifier_other_words_are_another_answer():
    assert asyncio.run(outcome("It is 5.", "Five it is.", None)) == DIFFERENT


def test_wilsons_interval():
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-4)
    assert wilson(1, 10) == pytest.approx((0.017876, 0.40415), abs=1e-4)
    assert wilson(10, 10) == pytest.approx((0.72247, 1.0), abs=1e-4)
