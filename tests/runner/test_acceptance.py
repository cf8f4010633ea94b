"""What is believed of drafts before any was verified, and after."""

import pytest

from splittime.kernels.native.suffix import CORPUS, OWN
from splittime.runner.draft_record import UNVERIFIED_CHANCE, Acceptance, DraftKind, Trust, kind_of

SHORT = DraftKind(OWN, 0)


def test_before_anything_is_known_each_draft_is_as_likely_as_the_one_before() -> None:
    assert Acceptance(3).survival(SHORT) == pytest.approx(
        (UNVERIFIED_CHANCE, UNVERIFIED_CHANCE**2, UNVERIFIED_CHANCE**3)
    )


def test_lengths_of_a_match_fall_into_classes_by_source() -> None:
    assert [kind_of(OWN, length).match for length in (2, 3, 4, 7, 8, 15, 16, 31, 32, 64)] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
        4,
        4,
    ]
    assert kind_of(CORPUS, 2) == DraftKind(CORPUS, 0)


@pytest.mark.parametrize(("num_right", "expected"), [(0, 0.0), (1, 0.0), (3, 1.0)])
def test_many_trials_outweigh_what_was_believed(num_right: int, expected: float) -> None:
    acceptance = Acceptance(3)
    for _ in range(500):
        acceptance.learn(SHORT, 3, num_right)
    survival = acceptance.survival(SHORT)
    assert survival[-1] == pytest.approx(expected, abs=0.2)
    assert (survival[0] > 0.9) is (num_right > 0)
    assert list(survival) == sorted(survival, reverse=True)
    assert acceptance.survival(DraftKind(CORPUS, 0))[0] == pytest.approx(UNVERIFIED_CHANCE)


def test_a_place_behind_a_wrong_draft_was_not_tried() -> None:
    acceptance = Acceptance(3)
    for _ in range(500):
        acceptance.learn(SHORT, 3, 1)
    first, second, third = acceptance.survival(SHORT)
    assert (first, third / second) == (pytest.approx(1.0, abs=0.05), pytest.approx(UNVERIFIED_CHANCE))


def test_what_is_new_outweighs_what_is_old() -> None:
    acceptance = Acceptance(1)
    for num_right in [1] * 1000 + [0] * 200:
        acceptance.learn(SHORT, 1, num_right)
    assert acceptance.survival(SHORT)[0] < 0.1


def test_a_request_that_is_never_right_loses_trust_and_regains_it_slowly() -> None:
    trust = Trust()
    for _ in range(60):
        trust.learn(1.2, 0)
    lost = trust.factor
    assert lost < 0.05
    trust.recover()
    assert lost < trust.factor < 0.05
    for _ in range(1000):
        trust.recover()
    assert trust.factor == pytest.approx(1.0)


@pytest.mark.parametrize("period", [2, 7])
def test_a_request_as_right_as_others_keeps_most_of_its_trust(period: int) -> None:
    trust = Trust()
    for number in range(500):
        trust.learn(1 / period, number % period == 0)
        assert trust.factor > 0.7
