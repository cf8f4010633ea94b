"""When a draft model's drafts are worth their time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.core.step import Row, RowResult, StepPlan, StepResult
from splittime.runner.draft_record import MARGIN, DraftingCosts, StepWorth

MS = 1_000_000


def costs_of(model_ms: float, row_ms: float, draft_ms: float) -> DraftingCosts:
    costs = DraftingCosts()
    for _ in range(200):
        for num_rows in (1, 9):
            costs.model.learn(num_rows, round((model_ms + row_ms * (num_rows - 1)) * MS))
        costs.model.learn(1, round((model_ms + row_ms * 8) * MS), 8, 1)
        costs.draft.learn(1, round(draft_ms * MS))
    return costs


@pytest.mark.parametrize(
    ("draft_ms", "chance", "least", "most"),
    [(1.0, 0.8, 2.0, 3.0), (1.0, 0.99, 5.5, 5.8), (5.0, 0.8, 1.0, 1.25), (9.0, 0.8, 1.0, 1.0), (1.0, 0.05, 1.0, 1.0)],
)
def test_the_gain_follows_from_steps_and_chances(draft_ms: float, chance: float, least: float, most: float) -> None:
    assert least <= costs_of(10.0, 0.1, draft_ms).gain(1, chance, 16) <= most


@given(
    st.floats(0.5, 50),
    st.floats(0.0, 1.0),
    st.floats(0.01, 20),
    st.floats(0.01, 0.999),
    st.integers(1, 9),
    st.integers(1, 16),
)
def test_as_many_drafts_as_pay_are_the_best_number(
    model_ms: float, row_share: float, draft_ms: float, chance: float, num_rows: int, most: int
) -> None:
    costs = costs_of(model_ms, row_share * model_ms, draft_ms)
    step_ns, row_ns, draft_ns = (
        costs.model.expected_ns(num_rows),
        costs.model.ns_per_draft,
        costs.draft.expected_ns(num_rows),
    )
    rates = [
        num_rows
        * sum(chance**place for place in range(number + 1))
        / (step_ns + number * (draft_ns + num_rows * row_ns))
        for number in range(most + 1)
    ]
    best = max(rates) / rates[0]
    found = costs.gain(num_rows, chance, most)
    assert found == pytest.approx(best) if rates[1] > (1 + MARGIN) * rates[0] * (1 + 1e-9) else found <= 1 + 1e-9


def test_saved_time_is_what_a_token_takes_less() -> None:
    costs = costs_of(10.0, 0.0, 1.0)
    gain = costs.gain(1, 0.8, 16)
    assert costs.saved_ns(1, 0.8, 16) == pytest.approx(costs.model.expected_ns(1) * (1 - 1 / gain))
    assert costs.saved_ns(1, 0.01, 16) == 0


def test_one_more_draft_must_be_worth_the_step_of_the_draft_model() -> None:
    step = StepWorth(costs_of(10.0, 0.1, 1.0), 1)
    assert step.gains(0.5, 1, MARGIN)
    assert not step.gains(0.1, 1, MARGIN)
    step.add(0.9, 1)
    assert step.tokens == pytest.approx(1.9)
    assert step.ns == pytest.approx(11.1 * MS, rel=0.02)


def test_steps_of_decode_rows_alone_are_learnt_from() -> None:
    costs = DraftingCosts()
    decode, prompt = Row("a", 5, (1,), (), 1), Row("b", 0, (1, 2), (0,), 1)
    result = StepResult(0, (RowResult("a", (2,)),), device_ns=3 * MS, sample_ns=MS)
    costs.learn_model(StepPlan(0, (decode, prompt)), result)
    costs.learn_model(StepPlan(0, ()), result)
    assert not costs.model.is_known
    costs.learn_model(StepPlan(0, (decode,)), result)
    assert costs.model.expected_ns(1) == pytest.approx(4 * MS)


def test_what_a_token_of_a_text_costs_is_learnt_of_long_ones() -> None:
    costs = costs_of(10.0, 0.1, 1.0)
    for _ in range(20):
        costs.learn_text(100, 20 * MS)
    costs.learn_text(3, 20 * MS)  # too few to tell
    assert costs.text_ns == pytest.approx(0.2 * MS, rel=0.01)
