"""What a student is worth and how like its teacher it is: the figures, on distributions that are known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.lab.distill.fidelity import difference, measure, overlap, scores
from splittime.lab.quality.documents import TextWindow
from splittime.lab.quality.model import Dense, log_softmax

VOCAB = 5


class Known:
    """Predicts by the seed and the position; the same for the same seed."""

    def __init__(self, seed):
        self.seed = seed

    def predictions(self, token_ids, begin, decode_tokens):
        random = np.random.default_rng((self.seed, *token_ids))
        logprobs = log_softmax(3 * random.standard_normal((len(token_ids) - 1 - begin, VOCAB)))
        for at in range(0, len(logprobs), 2):
            yield Dense(begin + at, logprobs[at : at + 2])


WINDOWS = [TextWindow(document, tuple((document + i * i) % VOCAB for i in range(9)), 1) for document in (0, 1, 1, 3)]


def run(teacher, student, tell=lambda done, of: None):
    found = measure(WINDOWS, Known(teacher), {"student": Known(student)}, lambda ids: 3 * len(ids), tell)
    assert list(found) == ["teacher", "student"]
    return found["student"]


@given(st.integers(0, 2**32))
def test_acceptance_is_what_total_variation_leaves(seed):
    ours, theirs = log_softmax(np.random.default_rng(seed).standard_normal((2, 4, VOCAB)).reshape(8, VOCAB)).reshape(
        2, 4, VOCAB
    )
    variation = np.abs(np.exp(ours) - np.exp(theirs)).sum(axis=1) / 2
    np.testing.assert_allclose(overlap(ours, theirs), 1 - variation)


def test_the_teacher_itself_is_the_perfect_student():
    found = scores("teacher", run(1, 1))
    assert (found.documents, found.tokens) == (3, 32)
    assert found.kl.value == 0
    assert found.top1.value == 1
    assert found.acceptance.value == pytest.approx(1)


def test_each_student_has_its_own_figures_and_the_teacher_is_perfect():
    found = measure(WINDOWS, Known(1), {"a": Known(2), "b": Known(3)}, len, lambda done, of: None)
    assert [found[name].of("kl").tolist() for name in ("a", "b")] == [run(1, k).of("kl").tolist() for k in (2, 3)]
    np.testing.assert_array_equal(found["teacher"].totals, run(1, 1).totals)


def test_sums_are_by_document_and_both_units_agree():
    sums = run(1, 2)
    assert sums.tokens.tolist() == [8, 16, 8]
    assert sums.bytes.tolist() == [24, 48, 24]
    found = scores("student", sums)
    assert found.bits_per_byte.value == pytest.approx(found.task.value / np.log(2) / 3)
    assert found.kl.value > 0
    assert found.task.low <= found.task.value <= found.task.high


def test_task_is_the_students_own_cost():
    window = WINDOWS[0]
    logprobs = np.concatenate([piece.logprobs for piece in Known(2).predictions(window.token_ids, 0, 0)])
    expected = -logprobs[np.arange(8), list(window.token_ids[1:])].sum()
    assert run(1, 2).of("task")[0] == pytest.approx(expected)


def test_a_student_does_not_differ_from_itself():
    same = difference(("a", run(1, 2)), ("b", run(1, 2)))
    assert (same.acceptance.value, same.acceptance.low, same.acceptance.high) == (0, 0, 0)
    other = difference(("a", run(1, 2)), ("teacher", run(1, 1)))
    assert other.acceptance.high < 0 < other.kl.low


def test_progress_is_told_to_the_end():
    told = []
    run(1, 2, lambda done, of: told.append((done, of)))
    assert told == [(done, 4) for done in range(5)]
