"""Errors by kind of step, on a machine whose steps are known."""

import random

import pytest
from test_step_times import a_record

from splittime.plan.kept import errors_by_kind


def records(bend: float, spread: float) -> list:
    rng, made, begin_ns = random.Random(2), [], 0
    for number in range(1_600):
        record = a_record(rng, number, begin_ns, rng.uniform(1 - spread, 1 + spread), bend)
        made.append(record)
        begin_ns = record.end_ns + 50_000
    return made


def test_a_machine_that_is_as_the_model_says_has_no_error() -> None:
    errors = errors_by_kind(records(bend=1.0, spread=0.0))
    assert [error.kind for error in errors[:2]] == ["decode, up to 1", "decode, up to 2"]
    assert errors[-1].kind == "all"
    assert errors[-1].num_steps == sum(error.num_steps for error in errors[:-1]) == 800
    assert all(error.median_relative < 0.02 for error in errors)
    firsts = [error.kind.startswith("prompts") for error in errors[:-1]]
    assert firsts == sorted(firsts)


def test_what_varies_by_chance_is_told_as_the_error_that_it_is() -> None:
    whole = errors_by_kind(records(bend=1.0, spread=0.2))[-1]
    assert whole.median_relative == pytest.approx(0.1, abs=0.02)  # the median of |x|, x even between -0.2 and 0.2
    assert abs(whole.mean_relative) < 0.02
    assert whole.machine_relative == pytest.approx(whole.median_relative, abs=0.02)
