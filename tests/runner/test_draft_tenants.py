"""Nothing that is learnt of one tenant's texts shows in what another one gets.

A step of the model takes 9 ms and 1 ms a row, which is what is believed of rows before steps differed: so what steps
cost, which belongs to the machine and not to a tenant, is the same whatever is drafted.
"""

from collections.abc import Callable

import pytest
from draft_world import World

from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted
from splittime.runner import draft_record
from splittime.runner.draft_record import ByTenant, TenantRecord
from splittime.runner.draft_sources import forgive
from splittime.runner.draft_steps import DraftedAnswer

ALWAYS: Callable[[str, int], bool] = lambda name, number: True  # noqa: E731
NEVER: Callable[[str, int], bool] = lambda name, number: False  # noqa: E731


def after(world: World, salt: str, is_right: Callable[[str, int], bool], num_outputs: int) -> World:
    """The world when requests of this tenant have come and gone."""
    world.is_right = is_right
    for number in range(30):
        world.admit(f"{salt}{number}", salt=salt, most=4000)
        while world.outputs(f"{salt}{number}") < num_outputs:
            world.step()
        world.release(f"{salt}{number}")
    return world


@pytest.mark.parametrize("num_prompt", [3, 240])
def test_a_model_drafts_for_one_tenant_the_same_whatever_it_drafted_for_others(num_prompt: int) -> None:
    gets = []
    for is_right, num_outputs in ((ALWAYS, 40), (NEVER, 40), (NEVER, 3), (lambda name, number: number % 2 == 0, 100)):
        world = after(World(text_ms=1.0), "ours", is_right, num_outputs)
        world.is_right = lambda name, number: number % 3 > 0
        world.idle()
        world.admit("a", num_prompt, salt="theirs")
        gets.append(world.steps(60))
    assert any(gets[0])
    assert gets == gets[:1] * len(gets)


def test_a_tenant_s_own_answers_count() -> None:
    right, wrong = after(World(3.0), "ours", ALWAYS, 40), after(World(3.0), "ours", NEVER, 40)
    for world in (right, wrong):
        world.admit("a", salt="ours")
    assert right.steps(4)[-1] > 2
    assert not any(wrong.steps(4))


@pytest.mark.parametrize(
    ("is_preempted", "num_steps", "is_read"),
    [
        (True, 3, True),
        (False, 3, False),
        (False, 0, True),  # gone before its first token
    ],
)
def test_answers_that_end_tell_how_long_answers_are(is_preempted: bool, num_steps: int, is_read: bool) -> None:
    world = World(text_ms=1.0)
    for number in range(60):
        world.admit(f"a{number}")
        world.steps(num_steps, f"a{number}")
        world.release(f"a{number}", is_preempted)
    world.idle()
    world.model.read.clear()
    world.admit("b", 240)
    world.steps(12, "b")
    assert bool(world.model.read) is is_read


def test_one_that_was_preempted_goes_on_where_it_was() -> None:
    world = World()
    world.admit("a", 3)
    world.steps(5)
    num_outputs = world.outputs("a")
    world.release("a", is_preempted=True)
    world.admit("a", 3, num_outputs=num_outputs)
    assert any(world.steps(3))


def test_a_tenant_whose_drafts_were_wrong_is_forgiven_while_another_has_drafts() -> None:
    world = World(1.0)
    world.is_right = lambda name, number: name == "good"
    world.admit("bad", 240, salt="bad", most=4000)
    record = world.drafter.record_of("bad")
    record.verified = 0.0
    world.admit("good", salt="good", most=4000)
    numbers = world.steps(200, "good")
    assert all(numbers[1:])
    assert 0.04 < record.verified < 0.08
    assert world.drafter.record_of("good").verified == pytest.approx(1.0)


def test_forgiving_one_tenant_is_nothing_to_another() -> None:
    sampling = SamplingParams(temperature=0.0, seed=0)
    ours, theirs = (DraftedAnswer(Admitted("a", (1, 2), 0, sampling, ()), 100, TenantRecord()) for _ in range(2))
    for answer in (ours, theirs):
        answer.trust.learn(3.0, 0)
        answer.record.verified = 0.5
    before = theirs.trust.factor
    forgive(ours.record, [ours, theirs])
    assert ours.trust.factor > before
    assert ours.record.verified > 0.5
    assert (theirs.trust.factor, theirs.record.verified) == (before, 0.5)


def test_the_tenants_who_asked_last_are_remembered() -> None:
    records = ByTenant(TenantRecord, most=2)
    one = records.of("one")
    two = records.of("two")
    assert records.of("one") is one
    records.of("three")
    assert records.of("one") is one
    assert records.of("two") is not two


def test_as_many_are_remembered_as_answers_are_kept_of() -> None:
    records = ByTenant(TenantRecord)
    first = records.of("0")
    for number in range(1, draft_record.MOST_TENANTS):
        records.of(str(number))
    assert records.of("0") is first
    records.of("one more")
    records.of("another")
    assert records.of("0") is first
