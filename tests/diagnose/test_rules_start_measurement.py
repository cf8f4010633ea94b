"""A start that measured another moment than the steps that followed: told only where it sizes the steps."""

import msgspec
import pytest
from test_rules_queue import poisson
from ward import Ward

from splittime.diagnose.doctor import diagnose
from splittime.diagnose.finding import Abstention, Finding
from splittime.diagnose.rules.start import start_measurement_is_off

TOKEN_MS = 0.5


@pytest.fixture(scope="module")
def books():
    """Prompts come alone: each is computed by itself, 64 tokens a step, at about 0.56 ms a token."""
    return Ward(step_ms=4.0, token_ms=TOKEN_MS, settings={"max_prefill_tokens": 64}).run(*poisson(1, 40, output=3))


def measured(books, ns_per_token, **settings):
    told = {"prefill_ns_per_token": ns_per_token, "prefill_reason": "measured, so", "max_num_batched_tokens": 512}
    facts = msgspec.structs.replace(books.facts, settings=books.facts.settings | told | settings)
    return msgspec.structs.replace(books, facts=facts)


def test_a_moment_that_was_better_is_told_with_both_figures(books):
    found = start_measurement_is_off(measured(books, 100_000))
    assert isinstance(found, Finding)
    assert found.cure.flags == ("--remeasure",)
    assert "0.10 were measured at start" in found.claim
    assert any(fact.value == "measured, so" for fact in found.evidence)
    assert "start_measurement_is_off" in [one.name for one in diagnose(measured(books, 100_000)).findings]


def test_a_moment_that_was_worse_is_told_too(books):
    assert isinstance(start_measurement_is_off(measured(books, 5_000_000)), Finding)


@pytest.mark.parametrize("ns_per_token", [600_000, 450_000, 800_000, 0])
def test_what_is_alike_or_not_measured_is_not(books, ns_per_token):
    assert start_measurement_is_off(measured(books, ns_per_token)) is None


def test_where_it_sizes_no_step_it_does_not_matter(books):
    assert start_measurement_is_off(measured(books, 100_000, max_prefill_tokens=512)) is None


def test_few_prompts_say_nothing(books):
    few = msgspec.structs.replace(measured(books, 100_000), steps=books.steps[:5])
    assert isinstance(start_measurement_is_off(few), Abstention)
