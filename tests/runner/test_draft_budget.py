"""How much time the search for drafts may take: a share of the model's, and a share of what right drafts saved."""

from collections import Counter
from collections.abc import Mapping

import msgspec
import pytest

from splittime.core.step import Admitted, Row, RowResult, StepPlan, StepResult
from splittime.runner.drafting import FREE_SHARE, LONGEST_NS, MOST_KEPT_NS, Draft, DraftingRunner, Look

STEP_NS = 300_000


class Steps:
    """A runner whose steps take as long; of a row's drafts so many are right."""

    verifies_drafts = True

    def __init__(self, num_right: int = 0) -> None:
        self._num_right = num_right

    def run(self, plan: StepPlan) -> StepResult:
        right = [min(self._num_right, len(row.draft_token_ids)) for row in plan.rows]
        rows = [RowResult(row.request_id, (7,) * (1 + number)) for row, number in zip(plan.rows, right, strict=True)]
        return StepResult(plan.step_id, tuple(rows), device_ns=STEP_NS)


class Searching:
    """A drafter whose search takes `search_ns`, wherever it is."""

    def __init__(self, search_ns: int) -> None:
        self.now_ns, self._search_ns = 0, search_ns
        self.looks: Counter[Look] = Counter()
        self.learnt: list[tuple[int, int]] = []

    def admit(self, admitted: Admitted) -> None: ...

    def release(self, request_id: str, is_preempted: bool = False) -> None: ...

    def forget(self) -> None: ...

    def learn(self, request_id: str, num_drafts: int, num_right: int) -> None:
        self.learnt.append((num_drafts, num_right))

    def draft(self, plan: StepPlan, result: StepResult, look: Look) -> Mapping[str, Draft] | None:
        self.looks[look] += 1
        if look is Look.NOWHERE:
            return None
        self.now_ns += self._search_ns
        return {}


def run(drafter: Searching, steps: int, num_drafts: int = 0, num_right: int = 0) -> None:
    runner = DraftingRunner(Steps(num_right), drafter, now_ns=lambda: drafter.now_ns)
    for number in range(steps):
        runner.run(StepPlan(number, (Row("a", number, (7,), (), 1 + num_drafts, (7,) * num_drafts),)))


class Telling(Steps):
    """Tells a draft itself in its first step."""

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        drafts = (7,) if plan.step_id == 0 else ()
        return msgspec.structs.replace(result, rows=(msgspec.structs.replace(result.rows[0], draft_token_ids=drafts),))


def test_a_drafter_learns_nothing_of_what_the_runner_told() -> None:
    drafter = Searching(0)
    runner = DraftingRunner(Telling(1), drafter, now_ns=lambda: drafter.now_ns)
    runner.run(StepPlan(0, (Row("a", 0, (7,), (), 1),)))
    runner.run(StepPlan(1, (Row("a", 1, (7,), (), 2, (7,)),)))
    assert drafter.learnt == []
    runner.run(StepPlan(2, (Row("a", 3, (7,), (), 2, (7,)),)))
    assert drafter.learnt == [(1, 1)]


@pytest.mark.parametrize("search_ns", [10_000, 300_000, 3_000_000])
def test_searches_that_find_nothing_take_no_more_than_their_share(search_ns: int) -> None:
    drafter = Searching(search_ns)
    run(drafter, 20_000)
    share = (drafter.now_ns - MOST_KEPT_NS - search_ns) / (20_000 * STEP_NS)
    assert 0.5 * FREE_SHARE < share <= FREE_SHARE


def test_where_searches_are_cheap_every_row_is_searched() -> None:
    drafter = Searching(round(0.9 * FREE_SHARE * STEP_NS))
    run(drafter, 2000)
    assert set(drafter.looks) == {Look.EVERYWHERE}


def test_between_plenty_and_nothing_only_rows_with_a_reason_are_searched() -> None:
    drafter = Searching(10_000)
    run(drafter, 90)
    assert list(drafter.looks) == [Look.EVERYWHERE, Look.WHERE_DUE]


def test_right_drafts_earn_their_searches() -> None:
    drafter = Searching(60_000)
    run(drafter, 2000, num_drafts=2, num_right=1)
    assert set(drafter.looks) == {Look.EVERYWHERE}
    assert drafter.learnt == [(2, 1)] * 2000


def test_wrong_drafts_earn_nothing() -> None:
    drafter = Searching(60_000)
    run(drafter, 2000, num_drafts=2)
    assert drafter.looks[Look.NOWHERE] > 1900


def test_a_stop_of_the_machine_is_not_owed_for_long() -> None:
    drafter = Searching(10**10)
    run(drafter, 1 + round(LONGEST_NS / (FREE_SHARE * STEP_NS)))
    assert drafter.looks[Look.EVERYWHERE] == 1
    assert drafter.looks[Look.WHERE_DUE] >= 1
