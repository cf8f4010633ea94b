"""When a draft model drafts, how much, and when it reads a text: by what steps take under a clock of the test's.

A step of the model takes 9 ms and 1 ms a row, and of a draft of which nothing is known 0.8 is believed. So one draft
that takes 1 ms gives 1.8 tokens in 12 ms, and none gives one in 10.
"""

from itertools import pairwise

import pytest
from draft_world import WRONG, World


def test_no_draft_before_the_second_token() -> None:
    world = World()
    world.admit("a")
    assert world.steps(1) == [0]
    assert world.model.sampled == world.model.read == []
    assert world.steps(1)[0] > 0


@pytest.mark.parametrize(
    ("draft_ms", "number"),
    [
        (1.0, 4),  # 3.36 tokens in 18 ms are more than 2.95 in 16, and than 3.69 in 20
        (3.0, 2),
        (5.0, 1),
        (6.2, 1),  # 4.7 % better than none
        (6.75, 0),  # 1.4 % better
        (20.0, 0),
    ],
)
def test_drafts_are_made_while_one_more_is_worth_its_steps(draft_ms: float, number: int) -> None:
    world = World(draft_ms)
    world.admit("a")
    assert world.steps(2)[-1] == number
    assert world.model.sampled == [1] * number


def test_no_more_drafts_than_a_row_may_have() -> None:
    world = World(0.001, most=3)
    world.admit("a", 2)
    assert world.steps(2)[-1] == 3


@pytest.mark.parametrize(("draft_ms", "number"), [(5.5, 1), (5.9, 0)])
def test_a_batch_is_drafted_in_one_step_of_the_draft_model(draft_ms: float, number: int) -> None:
    """7.2 tokens in 17 ms and the draft model's step, or 4 in 13."""
    world = World(draft_ms)
    for name in "abcd":
        world.admit(name)
    world.steps(1)
    assert set(world.step().values()) == {number}
    assert world.model.sampled == [4] * number


def test_an_answer_that_ends_has_no_drafts_behind_its_end() -> None:
    world = World(0.001)
    world.admit("a", most=5)
    assert world.steps(2)[-1] == 2  # two tokens are there, and the last is not drafted


def test_right_drafts_bring_more_and_wrong_ones_end() -> None:
    right, wrong = World(3.0), World(3.0)
    wrong.is_right = lambda name, number: False
    for world in (right, wrong):
        world.admit("a", most=4000)
    assert right.steps(40)[-1] > 5
    assert wrong.steps(40)[-10:] == [0] * 10


def test_what_the_draft_model_is_unsure_of_is_judged_apart() -> None:
    """Three of four are right, so that some pay."""
    world = World(3.0, probability=0.2)
    world.is_right = lambda name, number: number % 4 != 3
    world.admit("a", most=4000)
    numbers = world.steps(60)
    assert 0 < max(numbers[-10:]) <= 3


def tries_of(most: int) -> list[int]:
    """Returns the steps after which the draft model computes again, whenever drafts have become cheap."""
    found = set()
    for num_dear in range(2, 36):
        world = World(50.0, most=most)
        world.admit("a")
        assert not any(world.steps(num_dear))
        world.price_drafts(0.01)
        waited = next(number for number in range(40) if world.step() and (world.model.read or world.model.sampled))
        found.add(num_dear + 1 + waited)
    return sorted(found)


@pytest.mark.parametrize(("most", "tries"), [(16, [4, 8, 16, 24, 32, 40]), (4, [4, 8, 12, 16, 20, 24, 28, 32, 36])])
def test_where_drafts_do_not_pay_that_is_asked_in_pauses_of_eight_steps_at_most(most: int, tries: list[int]) -> None:
    assert tries_of(most) == tries


def test_while_drafts_pay_it_is_asked_in_each_step() -> None:
    """Also where all of them are right, and lie in spare blocks."""
    world = World()
    world.admit("a")
    numbers = world.steps(40)[1:]
    assert all(numbers)
    assert numbers[-1] == 16
    assert world.model.read == []


def test_a_step_without_drafts_is_followed_by_a_try() -> None:
    world = World()
    world.admit("a")
    assert all(world.steps(5)[1:])
    world.price_drafts(50.0)
    assert world.steps(1) == [0]
    world.price_drafts(0.01)
    assert world.steps(1)[0] > 0


@pytest.mark.parametrize(("num_prompt", "is_read"), [(240, True), (340, False)])
def test_a_text_is_read_if_its_drafts_repay_it_twice(num_prompt: int, is_read: bool) -> None:
    """126 tokens are expected; each takes 4.6 ms less with drafts: 584 ms. A token of the text takes 1 ms."""
    world = World(text_ms=1.0)
    world.admit("a", num_prompt)
    world.steps(12)
    assert bool(world.model.read) is is_read


def test_a_short_rest_of_an_answer_repays_no_text() -> None:
    world = World(text_ms=1.0)
    world.admit("a", 240, most=40)
    world.steps(12)
    assert world.model.read == []


@pytest.mark.parametrize(
    ("text_ms", "batch_tokens", "num_read"),
    [
        (0.2, 512, 50),  # in 10 ms
        (1.0, 512, 16),  # the least
        (0.2, 30, 30),  # as many as the draft model takes at once
    ],
)
def test_a_text_is_read_for_as_long_as_a_step_takes(text_ms: float, batch_tokens: int, num_read: int) -> None:
    world = World(0.0, text_ms, batch_tokens=batch_tokens)
    world.admit("a", 150)
    numbers = world.steps(2)
    assert numbers == [0, 0]
    assert world.model.read[0] == pytest.approx(num_read, abs=2)
    assert world.model.sampled == []
    assert any(world.steps(12))
    assert sum(world.model.read) <= 175


def test_a_text_as_long_as_drafts_leave_behind_is_not_read_first() -> None:
    ready, behind = World(most=4), World(most=4)
    ready.admit("a", 4)  # six tokens with the second output: four drafts, the token before them, and the one behind
    behind.admit("a", 5)
    ready.steps(2)
    behind.steps(2)
    assert (ready.model.read, behind.model.read) == ([], [6])
    assert ready.model.sampled
    assert not behind.model.sampled


def test_a_request_that_is_never_right_is_tried_again_after_long() -> None:
    world = World()
    world.is_right = lambda name, number: False
    world.admit("a", most=4000)
    tried = [step for step, number in enumerate(world.steps(3000)) if number]
    assert len(tried) > 4
    assert all(450 < after - before < 720 for before, after in pairwise(tried[1:]))


def test_drafts_that_are_not_verified_are_made_no_more() -> None:
    world = World()
    world.verified = 0.0
    world.admit("a", most=4000)
    numbers = world.steps(100)
    assert 20 < sum(map(bool, numbers)) < 40
    assert not any(numbers[-25:])


@pytest.mark.parametrize("reads_a_text", [False, True])
def test_a_row_that_fails_in_the_draft_model_ends_the_drafts_of_its_request_alone(reads_a_text: bool) -> None:
    """Whether it fails at its first draft, or while its text is read: the model's own step is none the wiser."""
    world = World(0.001)
    world.admit("a", 200 if reads_a_text else 3)
    world.admit("b")
    world.model.failing.add("a")
    for _ in range(3):
        found = world.step()
    asked_before = len(world.model.sampled)
    assert found["a"] == 0
    assert found["b"] > 0
    world.model.failing.clear()
    assert [world.step()["a"] for _ in range(20)] == [0] * 20, "what the draft model holds of it is not to be trusted"
    assert set(world.model.sampled[asked_before:]) == {1}
    world.release("a")
    world.admit("a")
    assert any(world.step()["a"] for _ in range(10)), "a request of the same name begins anew"


@pytest.mark.parametrize("is_head", [False, True])
def test_a_head_computes_again_what_it_made_of_its_own_drafts(is_head: bool) -> None:
    """A model keeps what it computed of the drafts that were right: its next row is the newest tokens alone. A head
    made them of its own features, and the model's are there now."""
    world = World(0.001, most=4, is_head=is_head)
    world.admit("a")
    world.steps(2)
    world.model.given = []
    assert world.steps(4) == [4] * 4
    firsts = world.model.given[::4]
    if is_head:
        assert set(firsts) == {5}
    else:  # the last draft is computed by nobody before; those in spare blocks are computed again
        assert firsts.count(2) >= 3
    assert {length for number, length in enumerate(world.model.given) if number % 4} == {1}


def test_the_last_token_of_an_answer_is_not_drafted() -> None:
    """Behind its second token there may be two more, of which the draft model may guess the first; then none."""
    world = World(0.001)
    world.is_right = lambda name, number: False
    world.admit("a", most=4)
    assert world.steps(2) == [0, 1]
    world.model.sampled = []
    assert world.steps(1) == [0]
    assert world.model.sampled == []


def test_an_answer_that_has_ended_is_not_drafted() -> None:
    """The scheduler releases it in the next plan."""
    world = World(0.001)
    world.is_right = lambda name, number: number != 1
    for name, stop_ids in (("a", (WRONG,)), ("b", ())):
        world.admit(name, stop_ids=stop_ids)
    world.steps(1)
    found = world.step()
    assert found["a"] == 0 < found["b"]
    assert set(world.model.sampled) == {1}


def test_texts_of_a_step_share_its_time() -> None:
    """What one request's text takes is not there for another's."""
    world = World(0.1, batch_tokens=64)
    for name in "ab":
        world.admit(name, 200)
    world.steps(1)
    for _ in range(4):
        world.model.read = []
        world.step()
        assert 0 < sum(world.model.read) <= 64


def test_what_a_text_takes_is_learnt_from_texts() -> None:
    """A step reads for about as long as a step of the model takes: less, once texts take longer than was measured."""
    world = World(0.1, batch_tokens=2048)
    world.model.slow_down_texts(10)
    world.admit("a", 4000)
    world.steps(6)
    first, *others = world.model.read
    assert first > 600
    assert others[-1] < 0.5 * first


def test_of_drafts_behind_a_wrong_one_nothing_is_learnt() -> None:
    """Nobody knows whether they would have been right."""
    world = World(0.1)
    world.is_right = lambda name, number: number < 2
    world.admit("a")
    assert world.steps(2)[-1] > 2
    confidence = world.drafter.record_of("").confidence
    before = confidence.chance(0.9)
    world.step()
    assert confidence.chance(0.9) == pytest.approx(before * 4 / 5, rel=0.05), "as one more that was wrong beside four"
