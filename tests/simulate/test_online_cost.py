"""A step's time, learnt while it runs: a known truth is found and forgotten when it changes, and the error is right."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.ledger.steps import StepRecord
from splittime.simulate.shape import StepShape, features_of, shape_of_record
from splittime.simulate.wait import ERROR_WINDOW_NS, MEMORY_STEPS, OnlineCost, non_negative_solution

TRUTH = (200_000.0, 300_000.0, 90_000.0, 60_000.0, 40.0, 70.0)
LARGE = StepShape(rows=33, tokens=288, decode_rows=32, kv_tokens=30_000, prompt_pairs=256 * 257 // 2)


def truth_ns(shape: StepShape) -> float:
    return sum(coefficient * value for coefficient, value in zip(TRUTH, features_of(shape), strict=True))


def a_record(
    rng: random.Random, begin_ns: int, takes: Callable[[StepShape], float], prompts: float = 0.3
) -> StepRecord:
    rows = [(f"r{i}", rng.randrange(50, 1_000), 1) for i in range(rng.randrange(1, 17))]
    if rng.random() < prompts:
        rows.append(("p", rng.choice((0, 128)), rng.randrange(8, 200)))
    num_prompt = sum(count for _, _, count in rows if count > 1)
    times = {"plan_ns": 0, "launch_ns": 0, "device_ns": 0, "sample_ns": 0, "commit_ns": 0}
    record = StepRecord(
        step_id=1,
        begin_ns=begin_ns,
        end_ns=begin_ns,
        **times,
        host_gap_ns=50_000,
        idle_ns=0,
        rows=tuple(rows),
        prefill_tokens=num_prompt,
        decode_tokens=sum(count == 1 for _, _, count in rows),
        kv_tokens_read=sum(start + count for _, start, count in rows),
        blocks_used=0,
        num_running=len(rows),
        num_waiting=0,
    )
    taken_ns = round(takes(shape_of_record(record)))
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    return StepRecord(**{**fields, "end_ns": begin_ns + taken_ns - record.host_gap_ns, "device_ns": taken_ns - 50_000})


def learn(cost: OnlineCost, rng: random.Random, count: int, takes: Callable[[StepShape], float], **more: float) -> None:
    for number in range(count):
        cost.learn(a_record(rng, number * 1_000_000, takes, **more))


def test_it_finds_the_truth() -> None:
    cost = OnlineCost()
    learn(cost, random.Random(1), 2_000, truth_ns)
    assert cost.coefficients == pytest.approx(TRUTH, rel=0.01)
    assert max(cost.errors.values()) < 0.001
    assert cost.is_trusted


def test_it_knows_nothing_before_it_has_seen_enough_of_both_kinds() -> None:
    cost, rng = OnlineCost(), random.Random(2)
    learn(cost, rng, 400, truth_ns, prompts=0.0)
    assert cost.errors["decode"] < 0.01
    assert cost.errors["prompts"] is None
    assert not cost.is_trusted
    learn(cost, rng, 150, truth_ns)
    assert cost.is_trusted


def test_noise_and_pauses_leave_it_near_the_truth() -> None:
    cost, rng = OnlineCost(), random.Random(3)

    def takes(shape: StepShape) -> float:
        pause = 50 if rng.random() < 0.01 else 1
        return truth_ns(shape) * rng.lognormvariate(0, 0.1) * pause

    learn(cost, rng, 3_000, takes)
    assert cost.total_ns(features_of(LARGE)) == pytest.approx(truth_ns(LARGE), rel=0.15)
    assert 0.04 < cost.errors["decode"] < 0.12  # two thirds of the noise's standard deviation, and a little


def test_it_forgets_a_machine_that_was_slower() -> None:
    cost, rng = OnlineCost(), random.Random(4)
    learn(cost, rng, 2_000, lambda shape: 3 * truth_ns(shape))
    learn(cost, rng, 24 * MEMORY_STEPS, truth_ns)
    assert cost.total_ns(features_of(LARGE)) == pytest.approx(truth_ns(LARGE), rel=0.02)


def test_it_follows_a_machine_that_is_ten_times_slower_from_now_on() -> None:
    cost, rng = OnlineCost(), random.Random(5)
    learn(cost, rng, 2_000, truth_ns)
    learn(cost, rng, 24 * MEMORY_STEPS, lambda shape: 10 * truth_ns(shape))
    assert cost.total_ns(features_of(LARGE)) == pytest.approx(10 * truth_ns(LARGE), rel=0.05)


def test_an_hour_of_decoding_leaves_what_is_known_of_prompts() -> None:
    cost, rng = OnlineCost(), random.Random(6)
    learn(cost, rng, 1_000, truth_ns)
    learn(cost, rng, 20 * MEMORY_STEPS, truth_ns, prompts=0.0)
    assert cost.total_ns(features_of(LARGE)) == pytest.approx(truth_ns(LARGE), rel=0.02)


def test_the_error_is_that_of_the_predictions_made_before() -> None:
    """A machine twice as slow at once: for some steps each prediction is half of what was taken."""
    cost, rng = OnlineCost(), random.Random(7)
    learn(cost, rng, 2_048, truth_ns)
    assert cost.errors["decode"] < 0.001
    begin_ns = 2 * ERROR_WINDOW_NS  # what was before is out of the window
    for number in range(128):
        cost.learn(a_record(rng, begin_ns + number, lambda shape: 2 * truth_ns(shape)))
    assert cost.errors == pytest.approx({"decode": 0.5, "prompts": 0.5}, abs=0.01)


@settings(max_examples=60)
@given(st.integers(0, 10_000))
def test_no_coefficient_is_negative_and_what_is_unseen_stays(seed: int) -> None:
    rng = random.Random(seed)
    columns = [[rng.gauss(0, 1) for _ in range(6)] for _ in range(rng.randrange(1, 12))]
    unseen = rng.randrange(6)
    for column in columns:
        column[unseen] = 0.0
    products = [[sum(c[i] * c[j] for c in columns) for j in range(i + 1)] for i in range(6)]
    moments = [sum(c[i] * rng.gauss(0, 5) for c in columns) for i in range(6)]
    solution = non_negative_solution(products, moments, [7.0] * 6)
    assert min(solution) >= 0
    assert solution[unseen] == 7.0


def test_a_burst_of_prompts_before_anything_is_known_is_learnt_from() -> None:
    cost, rng = OnlineCost(), random.Random(8)
    learn(cost, rng, 31, truth_ns, prompts=1.0)
    learn(cost, rng, 600, truth_ns)
    assert cost.total_ns(features_of(LARGE)) == pytest.approx(truth_ns(LARGE), rel=0.02)
    assert max(cost.errors.values()) < 0.01


def test_where_hardly_a_step_only_decodes_prompts_are_enough() -> None:
    cost, rng = OnlineCost(), random.Random(9)
    learn(cost, rng, 200, truth_ns, prompts=0.9)
    assert cost.errors["decode"] is None
    assert cost.is_trusted
