"""Recorded drafts in a simulation with other settings: told where they were, and right where the record knows it."""

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_runs import TIGHT, record_run
from msgspec import UNSET

from splittime.core.step import Row
from splittime.ledger.account import ClosedAccount
from splittime.ledger.steps import StepRecord
from splittime.scheduler.admission import QueueLimits
from splittime.simulate.costed import Answers
from splittime.simulate.drafts import DraftsAt, RequestDrafts, drafts_of
from splittime.simulate.recorded import Recorded
from splittime.simulate.run import SimulatedBooks, simulate
from splittime.simulate.shape import StepShape, StepTime
from splittime.simulate.trace import TracedRequest, traced_requests, with_drafts

UNBOUNDED = QueueLimits(10**9, 10**9)
ENDS = ("stop", "length")
CHANGES = (
    {"max_num_batched_tokens": 16},
    {"max_num_batched_tokens": 256},
    {"max_num_seqs": 2},
    {"num_blocks": 40},
    {"num_host_slots": 8, "policy": "priority"},
)


class OtherCosts:
    """Rows are dearer than in the recorded runs, or cheaper."""

    def __init__(self, ns_per_token: int) -> None:
        self._ns_per_token = ns_per_token

    def of(self, shape: StepShape, now_ns: int) -> StepTime:
        return StepTime(device_ns=900 + self._ns_per_token * shape.tokens)


def drafted_requests(recorded: Recorded) -> list[TracedRequest]:
    return with_drafts(traced_requests(recorded.accounts, 256), recorded.steps)


def rows_with_drafts(steps: list[StepRecord]) -> dict[tuple[str, int], tuple[int, int]]:
    """Returns by request and place how many were verified and right; of the rows that verified the most."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for step in steps:
        starts = {name: start for name, start, _ in step.rows}
        for name, drafts, right in step.verified:
            key = name, starts[name] + 1
            found[key] = max(found.get(key, (0, 0)), (drafts, right))
    return found


@given(st.integers(0, 10_000), st.sampled_from(CHANGES), st.sampled_from((1, 31, 300)), st.integers(0, 3))
def test_what_the_record_knows_is_so_in_any_simulation(seed: int, change: dict, ns_per_token: int, drawn: int) -> None:
    recorded = record_run(TIGHT, seed, stops=0.0, have_deadlines=False, guess_ns=0)
    config = msgspec.structs.replace(TIGHT, **change)
    books = simulate(drafted_requests(recorded), config, OtherCosts(ns_per_token), UNBOUNDED, drafts_seed=drawn)
    lengths = {one.request_id: one.output_tokens for one in recorded.accounts if one.finish_reason in ENDS}
    for one in books.accounts:
        if one.finish_reason in ENDS and one.request_id in lengths:
            assert one.output_tokens == lengths[one.request_id]
    known = rows_with_drafts(list(recorded.steps))
    for key, (drafts, right) in rows_with_drafts(books.steps).items():
        num_known, num_right = known.get(key, (0, 0))
        if num_right < num_known:
            assert right == min(drafts, num_right)
        elif num_known:
            assert right >= min(drafts, num_right)


def test_a_seed_is_of_what_nobody_knows() -> None:
    recorded = record_run(TIGHT, 4, count=60, stops=0.0, guess_ns=0)
    requests = drafted_requests(recorded)

    def run(seed: int) -> SimulatedBooks:
        return simulate(requests, TIGHT, OtherCosts(1), UNBOUNDED, drafts_seed=seed)

    assert run(1) == run(1)
    assert run(1).steps != run(2).steps


def test_without_drafts_none_are_verified() -> None:
    requests = drafted_requests(record_run(TIGHT, 4, guess_ns=0))
    assert not any(step.verified for step in simulate(requests, TIGHT, OtherCosts(1), UNBOUNDED).steps)


def test_more_room_verifies_more_and_dear_rows_less() -> None:
    requests = drafted_requests(record_run(TIGHT, 4, count=60, stops=0.0, guess_ns=0))

    def num_verified(ns_per_token: int, budget: int) -> int:
        config = msgspec.structs.replace(TIGHT, max_num_batched_tokens=budget)
        steps = simulate(requests, config, OtherCosts(ns_per_token), UNBOUNDED, drafts_seed=0).steps
        return sum(drafts for step in steps for _, drafts, _ in step.verified)

    assert num_verified(31, 8) < num_verified(31, 64)
    assert num_verified(3000, 64) < 0.9 * num_verified(31, 64)


# ---- a request's drafts


def test_behind_a_place_is_what_was_left_there() -> None:
    told = DraftsAt((900, 600, 300, 0), num_verified=3, num_right=2)
    assert told.behind(1) == DraftsAt((667, 333, 0), 2, 1)
    assert told.behind(2) == DraftsAt((500, 0), 1, 0)
    assert DraftsAt(4, 3, 3).behind(3) == DraftsAt(1, 0, 0)
    assert DraftsAt((0, 0), 1, 1).behind(1) == DraftsAt((0,), 0, 0)
    assert DraftsAt((500, 600), 1, 1).behind(1) == DraftsAt((1000,), 0, 0)


def test_the_latest_place_before_counts_as_far_as_it_was_right() -> None:
    first, second = DraftsAt(5, 3, 2), DraftsAt((400,))
    drafts = RequestDrafts((10, 17), (first, second), 0.5)
    told = {place: drafts.at(place).told for place in (9, 10, 11, 12, 13, 16, 17, 18)}
    assert told == {9: 0, 10: 5, 11: 4, 12: 3, 13: 0, 16: 0, 17: (400,), 18: 0}


@pytest.mark.parametrize(
    ("drafts", "num_drafts", "right"),
    [
        (DraftsAt((900, 800, 700), 3, 2), 3, 2),
        (DraftsAt((900, 800, 700), 3, 2), 1, 1),
        (DraftsAt((1000, 1000, 1000), 2, 1), 3, 1),  # the second is wrong, whatever was told of the third
        (DraftsAt((1000, 1000, 1000), 2, 2), 3, 3),
        (DraftsAt((1000, 1000, 0), 2, 2), 3, 2),
        (DraftsAt((0, 0, 0), 2, 2), 2, 2),
        (DraftsAt(3), 3, 0),
    ],
)
def test_of_those_that_were_verified_as_many_are_right(drafts: DraftsAt, num_drafts: int, right: int) -> None:
    assert drafts.right_of(num_drafts, 0.0, random.Random(0)) == right


@pytest.mark.parametrize(
    ("drafts", "chances"),
    [
        (DraftsAt((800, 400, 400)), (0.8, 0.4, 0.4)),
        (DraftsAt((800, 400, 200), 1, 1), (1.0, 0.5, 0.25)),  # given that the first is right
        (DraftsAt(3), (0.7, 0.49, 0.343)),
    ],
)
def test_beyond_these_each_is_right_by_its_chance(drafts: DraftsAt, chances: tuple[float, ...]) -> None:
    rng, count = random.Random(1), 20_000
    found = Counter(drafts.right_of(3, 0.7, rng) for _ in range(count))
    for number, chance in enumerate(chances, 1):
        assert sum(times for right, times in found.items() if right >= number) / count == pytest.approx(
            chance, abs=0.015
        )


def test_each_place_has_its_own_luck_and_what_has_ended_is_forgotten() -> None:
    answers, places = Answers(seed=3), range(100, 140)
    answers.learn("a", 0, (), RequestDrafts(tuple(places), (DraftsAt((500,)),) * len(places), 0.5))
    rows = [Row("a", place - 1, (7,), (), 2, (0,)) for place in places]
    results = [answers.result(row) for row in rows]
    assert 10 < sum(len(result.token_ids) - 1 for result in results) < 30
    assert all(result.draft_survival == (0.5,) for result in results[:-2])
    answers.forget("a")
    assert not any(answers.result(row).draft_token_ids for row in rows)


def step(step_id: int, rows: dict[str, tuple[int, int]], verified: dict, told: dict) -> StepRecord:
    (recorded,) = record_run(TIGHT, 3, count=4).steps[:1]
    return msgspec.structs.replace(
        recorded,
        step_id=step_id,
        begin_ns=100 * step_id,
        rows=tuple((name, *row) for name, row in rows.items()),
        verified=tuple((name, *counts) for name, counts in verified.items()),
        drafts=tuple(told.items()) or UNSET,
    )


def account(name: str, start_ns: int) -> ClosedAccount:
    (recorded,) = record_run(TIGHT, 4, count=1).accounts
    return msgspec.structs.replace(recorded, request_id=name, start_ns=start_ns)


def test_drafts_lie_where_the_tokens_of_their_step_end() -> None:
    steps = [
        step(1, {"a": (0, 5), "b": (0, 3)}, {}, {"a": (900, 800, 700)}),  # a knows 6 tokens, b 4
        step(2, {"a": (5, 4), "b": (3, 1)}, {"a": (3, 1)}, {"a": 3, "b": 1}),  # a knows 8, of which one was drafted
        step(3, {"a": (7, 4), "b": (4, 1)}, {"a": (3, 3)}, {}),  # b's draft was not verified
    ]
    (a,), (b,), (c,) = (drafts_of([account(name, 0)], steps) for name in "abc")
    assert a.places == (6, 8)
    assert a.drafts == (DraftsAt((900, 800, 700), 3, 1), DraftsAt(3, 3, 3))
    assert (b.places, b.drafts) == ((5,), (DraftsAt(1),))
    assert c is None
    assert a.usual == b.usual == 4 / 5  # nobody knows of a's third whether it would have been right behind a right one


def test_what_was_verified_elsewhere_says_nothing_here() -> None:
    """As in a ledger whose middle is missing."""
    steps = [step(1, {"a": (0, 5)}, {}, {"a": 2}), step(7, {"a": (8, 3)}, {"a": (2, 2)}, {})]
    (found,) = drafts_of([account("a", 0)], steps)
    assert found == RequestDrafts((6,), (DraftsAt(2),), 0.0)


def test_an_id_that_is_used_again_has_other_drafts() -> None:
    steps = [
        step(1, {"a": (0, 5)}, {}, {"a": (900,)}),
        step(3, {"a": (0, 5)}, {}, {"a": 2}),
        step(5, {"a": (0, 5)}, {}, {}),
    ]
    found = drafts_of([account("a", 300), account("a", 0), account("a", 500)], steps)
    assert [one and one.drafts for one in found] == [(DraftsAt(2),), (DraftsAt((900,)),), None]


def test_of_a_place_that_comes_again_the_latest_counts() -> None:
    steps = [
        step(1, {"a": (0, 5)}, {}, {"a": (900,)}),
        step(2, {"a": (0, 5)}, {}, {"a": (200,)}),
        step(3, {"a": (5, 2)}, {"a": (1, 1)}, {}),
    ]
    (found,) = drafts_of([account("a", 0)], steps)
    assert found == RequestDrafts((6,), (DraftsAt((200,), 1, 1),), 1.0)
