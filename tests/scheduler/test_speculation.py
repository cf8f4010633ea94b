"""How many drafts a step gets: as many as pay, by what steps cost and how likely the drafts are."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_draft_rows import committed, planned
from test_scheduler import add, make_scheduler

from splittime.core.row_costs import RowCosts
from splittime.core.step import RowResult
from splittime.scheduler.scheduler import Scheduler
from splittime.scheduler.speculation import MARGIN

MS = 1_000_000


def known_costs(ms_without: float, ms_a_row: float) -> RowCosts:
    """A draft costs what a row does."""
    costs = RowCosts()
    for number in range(400):
        rows = 1 + number % 8
        costs.learn(rows, round((ms_without + ms_a_row * rows) * MS))
        costs.learn(1, round((ms_without + ms_a_row * (1 + rows)) * MS), rows, 1)
    return costs


def drafts_given(chances: Sequence[Sequence[float]], costs: RowCosts | None, **changes: int) -> list[int]:
    """Returns how many drafts each request's row gets, where these are the chances of its drafts."""
    fields = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": 200} | changes
    scheduler = make_scheduler(**fields)
    for number, _ in enumerate(chances):
        add(scheduler, f"r{number}", 3)
    plan = planned(scheduler, 10)
    if costs is not None:
        scheduler.speculation.costs = costs
    rows = [
        RowResult(row.request_id, (7,), draft_token_ids=(8,) * len(some), draft_survival=tuple(some))
        for row, some in zip(plan.rows, chances, strict=True)
    ]
    scheduler.speculation.learn = lambda now_ns: None  # type: ignore[method-assign]
    committed(scheduler, plan, 20, *rows)
    return [len(row.draft_token_ids) for row in planned(scheduler, 30).rows]


def test_what_a_row_costs_is_learnt_from_steps_of_several_sizes() -> None:
    costs = known_costs(10.0, 0.5)
    assert costs.ns_per_row == pytest.approx(0.5 * MS, rel=0.1)
    assert costs.expected_ns(16) == pytest.approx(18 * MS, rel=0.1)


def test_what_a_row_costs_is_a_guess_while_all_steps_are_alike() -> None:
    costs = RowCosts()
    for _ in range(50):
        costs.learn(1, 10 * MS)
    assert costs.ns_per_row == pytest.approx(1 * MS)
    assert costs.expected_ns(1) == pytest.approx(10 * MS)


def test_a_stop_of_the_machine_is_no_cost_of_rows() -> None:
    costs = known_costs(10.0, 0.5)
    costs.learn(2, 5000 * MS)
    assert costs.expected_ns(1) < 15 * MS


def test_what_a_row_costs_is_remembered_while_the_batch_stays_the_same() -> None:
    costs = known_costs(10.0, 0.1)
    for _ in range(2000):
        costs.learn(4, round(10.4 * MS))
    assert costs.ns_per_row == pytest.approx(0.1 * MS, rel=0.3)


def test_a_line_drawn_too_far_does_not_make_steps_of_no_time() -> None:
    costs = known_costs(10.0, 0.5)
    for _ in range(300):
        for rows in (60, 64):
            costs.learn(rows, round((rows - 50) * MS))
    assert costs.expected_ns(1) > 0.1 * MS
    for _ in range(100):
        costs.learn(1, round(0.3 * MS))
    assert costs.expected_ns(1) == pytest.approx(0.3 * MS, rel=0.5)


def test_of_a_small_budget_the_likeliest_get_the_most() -> None:
    chances = [(0.5, 0.49, 0.48, 0.47), (0.99, 0.98, 0.97, 0.96), (0.6, 0.59, 0.58, 0.57), ()]
    assert drafts_given(chances, known_costs(10.0, 0.01), max_num_batched_tokens=12) == [0, 4, 4, 0]


def test_noise_makes_no_row_cheaper_than_nothing() -> None:
    rng, costs = random.Random(0), RowCosts()
    for _ in range(500):
        costs.learn(rng.randint(1, 4), round(rng.uniform(1, 20) * MS))
        assert costs.ns_per_row >= 0
        assert costs.expected_ns(64) >= 1


@pytest.mark.parametrize(
    ("ms_a_row", "number"),
    [
        (0.01, 4),  # nearly free
        (3.0, 2),  # of a step of 10 ms: 2.5 tokens in 16 ms are more than 2.9 in 19
        (7.5, 1),
        (9.9, 0),
    ],
)
def test_a_row_gets_as_many_drafts_as_pay(ms_a_row: float, number: int) -> None:
    assert drafts_given([(0.9, 0.6, 0.4, 0.05)], known_costs(10 - ms_a_row, ms_a_row)) == [number]


def test_the_likeliest_drafts_of_the_batch_come_first() -> None:
    chances = [(0.95, 0.9, 0.85), (0.3, 0.2), (0.9, 0.1), ()]
    assert drafts_given(chances, known_costs(4.0, 1.0)) == [3, 0, 1, 0]


class Exact(RowCosts):
    """A step of one row takes 100 ns, each more so many, and a draft as many."""

    is_known = True  # type: ignore[assignment]

    ns_per_draft = ns_per_drafted = 0.0  # type: ignore[assignment]

    def __init__(self, ns_per_row: float, ns_per_drafted: float = 0.0) -> None:
        self.ns_per_row = self.ns_per_draft = ns_per_row  # type: ignore[misc]
        self.ns_per_drafted = ns_per_drafted  # type: ignore[misc]

    def expected_ns(self, num_rows: int, num_drafts: int = 0, num_drafted: int = 0) -> float:
        return 100.0 + self.ns_per_row * (num_rows + num_drafts - 1) + self.ns_per_drafted * num_drafted


@pytest.mark.parametrize(("share", "number"), [(1.01, 0), (0.99, 1)])
def test_a_gain_within_the_margin_is_none(share: float, number: int) -> None:
    """A draft that is sure to be right makes two tokens of one."""
    just_worth_ns = 100 * (2 / (1 + MARGIN) - 1)
    assert drafts_given([(1.0,)], Exact(share * just_worth_ns)) == [number]


@given(st.lists(st.lists(st.floats(0.01, 1), max_size=4), min_size=1, max_size=4), st.floats(0, 150))
def test_no_other_number_of_drafts_would_give_more(chances: list[list[float]], row_ns: float) -> None:
    chances = [sorted(some, reverse=True) for some in chances]
    costs = Exact(row_ns)

    def rate(numbers: Sequence[int]) -> float:
        expected = len(chances) + sum(sum(some[:number]) for some, number in zip(chances, numbers, strict=True))
        return expected / costs.expected_ns(len(chances) + sum(numbers))

    given_drafts = drafts_given(chances, costs)
    best = max(map(rate, itertools.product(*(range(len(some) + 1) for some in chances))))
    none = rate([0] * len(chances))
    if best < 0.999999 * (1 + MARGIN) * none:
        assert given_drafts == [0] * len(chances)
    assert rate(given_drafts) >= best / (1 + MARGIN) * 0.999999


def test_what_a_row_with_drafts_costs_beyond_its_drafts_is_learnt() -> None:
    costs = known_costs(10.0, 0.5)
    for number in range(3000):
        drafted, drafts = number % 3, (number % 3) * (1 + number % 5)
        costs.learn(4, (12.0 + 0.3 * drafts + 0.8 * drafted) * MS, drafts, drafted)
    assert costs.ns_per_row == pytest.approx(0.5 * MS, rel=0.15)
    assert costs.ns_per_drafted > costs.ns_per_draft > 0.25 * MS
    for drafts, drafted in ((1, 1), (6, 2), (10, 2)):
        took = (12.0 + 0.3 * drafts + 0.8 * drafted) * MS
        assert costs.expected_ns(4, drafts, drafted) == pytest.approx(took, rel=0.03)


def test_before_a_step_with_drafts_one_costs_what_a_row_does() -> None:
    costs = RowCosts()
    for _ in range(50):
        costs.learn(1, 10 * MS)
    assert (costs.ns_per_draft, costs.ns_per_drafted) == (pytest.approx(1 * MS), 0)


def test_steps_with_drafts_say_nothing_of_steps_without() -> None:
    costs = known_costs(10.0, 0.5)
    before = costs.expected_ns(4), costs.ns_per_row
    for _ in range(100):
        costs.learn(4, 30 * MS, 8, 4)
    assert (costs.expected_ns(4), costs.ns_per_row) == before


def test_what_drafts_cost_once_is_forgotten_in_thousands_of_steps_without() -> None:
    costs = known_costs(9.0, 1.0)
    for _ in range(40):
        costs.learn(1, 100 * MS, 8, 1)
    dear = 8 * costs.ns_per_draft + costs.ns_per_drafted
    assert dear > 15 * MS
    for number in range(20_000):
        costs.learn(1, 10 * MS)
        assert number > 100 or 8 * costs.ns_per_draft + costs.ns_per_drafted > 0.9 * dear
    assert costs.ns_per_draft < 1.3 * MS


def test_noise_makes_no_draft_cheaper_than_nothing() -> None:
    rng, costs = random.Random(0), RowCosts()
    for _ in range(2000):
        drafted = rng.randint(0, 4)
        costs.learn(4, round(rng.uniform(1, 20) * MS), rng.randint(drafted, 8 * drafted), drafted)
        assert costs.ns_per_draft >= 0
        assert costs.ns_per_drafted >= 0


@pytest.mark.parametrize(("ns_per_drafted", "numbers"), [(0.0, [2, 1]), (60.0, [2, 0]), (300.0, [0, 0])])
def test_a_row_gets_drafts_if_they_pay_for_what_it_costs_to_have_some(
    ns_per_drafted: float, numbers: list[int]
) -> None:
    assert drafts_given([(0.9, 0.8), (0.5,)], Exact(5.0, ns_per_drafted)) == numbers


def test_a_first_draft_that_does_not_pay_alone_comes_with_those_behind_it() -> None:
    assert drafts_given([(0.5,) * 6], Exact(1.0, 60.0)) == [6]


def test_before_a_step_was_seen_nothing_is_verified() -> None:
    assert drafts_given([(0.99, 0.99)], RowCosts()) == [0]


def test_drafts_of_which_nobody_knows_the_chance_are_all_taken() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    add(scheduler, "a", 3)
    committed(scheduler, planned(scheduler, 10), 20, RowResult("a", (7,), draft_token_ids=(8, 9)))
    assert [len(row.draft_token_ids) for row in planned(scheduler, 30).rows] == [2]


@pytest.mark.parametrize(("num_requests", "number"), [(4, 16), (6, 10), (80, 1)])
def test_drafts_that_are_sure_share_a_bound(num_requests: int, number: int) -> None:
    scheduler = make_scheduler(max_num_seqs=100, max_num_batched_tokens=1000, num_blocks=1000)
    for place in range(num_requests):
        add(scheduler, f"r{place}", 3, max_tokens=40)
    plan = planned(scheduler, 10)
    committed(scheduler, plan, 20, *(RowResult(row.request_id, (7,), draft_token_ids=(8,) * 16) for row in plan.rows))
    assert {len(row.draft_token_ids) for row in planned(scheduler, 30).rows} == {number}


def test_costs_are_learnt_from_steps_that_only_decode() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    add(scheduler, "a", 3)
    told = {"draft_token_ids": (8,), "draft_survival": (0.5,)}
    committed(scheduler, planned(scheduler, 10), 20, RowResult("a", (7,), **told))  # a prompt: it tells nothing
    costs = scheduler.speculation.costs
    assert costs is not None
    assert not costs.is_known
    committed(scheduler, planned(scheduler, 30), 1030, RowResult("a", (7,), **told))
    assert costs.expected_ns(1) == pytest.approx(1000)
    add(scheduler, "b", 3, now_ns=1030)
    plan = planned(scheduler, 1040)
    rows = [RowResult(row.request_id, (7,) * row.num_samples) for row in plan.rows]
    committed(scheduler, plan, 9_000_000, *rows)
    assert costs.expected_ns(1) == pytest.approx(1000)


def test_a_draft_that_is_not_taken_leaves_the_row_as_it_was() -> None:
    scheduler: Scheduler = make_scheduler(max_num_batched_tokens=64)
    add(scheduler, "a", 3)
    committed(scheduler, planned(scheduler, 10), 20, RowResult("a", (7,), draft_token_ids=(8,), draft_survival=(0.0,)))
    plan = planned(scheduler, 30)
    (row,) = plan.rows
    assert (row.token_ids, row.draft_token_ids, row.num_samples) == ((7,), (), 1)
    (output,) = committed(scheduler, plan, 40, RowResult("a", (9,)))
    assert output.token_ids == (9,)
    assert scheduler.counts.draft_tokens == 0


def test_drafts_that_are_sure_in_every_step_take_nothing_from_the_drafts_of_others() -> None:
    """`a` is told what must follow, without a chance, and `b` by a drafter; a step without drafts comes."""
    scheduler = make_scheduler(max_num_batched_tokens=64, max_model_len=512, num_blocks=400)
    add(scheduler, "a", 3, max_tokens=400)
    add(scheduler, "b", 3, max_tokens=400)
    told = {"a": {"draft_token_ids": (8,)}, "b": {"draft_token_ids": (8,), "draft_survival": (0.99,)}}
    seen, now_ns = [], 0
    for _ in range(100):
        plan = planned(scheduler, now_ns)
        drafts = {row.request_id: len(row.draft_token_ids) for row in plan.rows}
        seen.append((drafts["a"], drafts["b"]))
        now_ns += 10 * MS + MS // 100 * sum(drafts.values())
        committed(
            scheduler, plan, now_ns, *(RowResult(row.request_id, (7,), **told[row.request_id]) for row in plan.rows)
        )
    assert seen.count((1, 1)) > 80
    assert 2 <= seen[1:].count((0, 0)) <= 5
