"""What a tenant's answers teach of a draft model's drafts, and whose they stay."""

import pytest

from splittime.runner.draft_record import PRIOR_CHANCE, Confidence, TenantRecord


def test_what_was_right_is_believed_by_how_sure_the_draft_model_was() -> None:
    confidence = Confidence()
    assert confidence.chance(0.99) == confidence.mean == pytest.approx(PRIOR_CHANCE)
    for _ in range(300):
        confidence.learn(0.97, True)
        confidence.learn(0.2, False)
    assert confidence.chance(0.99) > 0.95
    assert confidence.chance(0.1) < 0.1
    assert confidence.mean == pytest.approx(0.5, abs=0.03)
    assert confidence.chance(0.6) == pytest.approx(PRIOR_CHANCE)


def test_what_was_never_right_is_tried_again() -> None:
    confidence = Confidence()
    for _ in range(300):
        confidence.learn(0.9, False)
    assert confidence.mean < 0.1
    for _ in range(1200):
        confidence.fade()
    assert confidence.mean > 0.6


def test_answers_are_expected_to_be_as_long_as_others_were() -> None:
    record = TenantRecord()
    for _ in range(200):
        record.learn_answer(40)
    assert record.num_left(10, 1000) == pytest.approx(30, rel=0.01)
    assert record.num_left(100, 1000) == 100
    assert record.num_left(10, 7) == 7
