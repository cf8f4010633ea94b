"""A start that measured another moment than the steps that followed: told only where it sizes the steps."""

import msgspec
import pytest
from test_rules_queue import poisson
from ward import Case, Ward, ids

from splittime.diagnose.attribution import Computed, attribution
from splittime.diagnose.doctor import diagnose
from splittime.diagnose.finding import Abstention, Finding
from splittime.diagnose.rules.start import start_measurement_is_off
from splittime.ledger.stages import Stage

TOKEN_MS = 0.5


@pytest.fixture(scope="module")
def books():
    """Some prompts come alone and some while others decode: 64 tokens a step, at about 0.56 ms a token."""
    load = poisson(3, 60, prompt=200, output=25)
    return Ward(step_ms=4.0, token_ms=TOKEN_MS, settings={"max_prefill_tokens": 64}).run(*load)


def measured(books, ns_per_token, **settings):
    told = {"prefill_ns_per_token": ns_per_token, "prefill_reason": "measured, so", "max_num_batched_tokens": 512}
    facts = msgspec.structs.replace(books.facts, settings=books.facts.settings | told | settings)
    return msgspec.structs.replace(books, facts=facts)


def test_a_moment_that_was_better_is_told_with_both_figures(books):
    found = start_measurement_is_off(measured(books, 100_000))
    assert isinstance(found, Finding)
    assert f"which costs {found.share_of_time:.0%} of all requests' time" in found.claim
    assert found.share_of_time < attribution(books).share(Computed.OTHERS_PROMPTS)
    assert found.cure.flags == ("--remeasure",)
    assert "0.10 were measured at start" in found.claim
    assert any(fact.value == "measured, so" for fact in found.evidence)
    assert "start_measurement_is_off" in [one.name for one in diagnose(measured(books, 100_000)).findings]


def test_a_moment_that_was_worse_is_told_where_what_each_step_takes_is_much_of_it(books):
    small = Ward(step_ms=4.0, token_ms=0.1, settings={"max_prefill_tokens": 16}).run(
        *poisson(2, 60, prompt=300, output=10)
    )
    found = start_measurement_is_off(measured(small, 5_000_000))
    assert isinstance(found, Finding)
    assert found.share_of_time < 4 / 5.6 * attribution(small).share(Stage.PREFILL)
    assert start_measurement_is_off(measured(books, 5_000_000)) is None, "a ninth of each step: nothing to gain"


def test_long_steps_that_hold_up_nobody_are_no_loss():
    """Prompts that come alone."""
    alone = Ward(step_ms=4.0, token_ms=TOKEN_MS, settings={"max_prefill_tokens": 64}).run(*poisson(1, 40, output=3))
    assert start_measurement_is_off(measured(alone, 100_000)) is None


@pytest.mark.parametrize("ns_per_token", [600_000, 450_000, 800_000, 0])
def test_what_is_alike_or_not_measured_is_not(books, ns_per_token):
    assert start_measurement_is_off(measured(books, ns_per_token)) is None


def test_where_it_sizes_no_step_it_does_not_matter(books):
    assert start_measurement_is_off(measured(books, 100_000, max_prefill_tokens=512)) is None


def test_few_prompts_say_nothing(books):
    few = msgspec.structs.replace(measured(books, 100_000), steps=books.steps[:5])
    assert isinstance(start_measurement_is_off(few), Abstention)


@pytest.mark.parametrize(("prompt", "found"), [(40, None), (400, None), (1100, None)])
def test_a_short_prompt_is_no_measure_of_a_long_one(prompt, found):
    """What a step takes whatever is in it weighs more in a step of few tokens: here it was measured over 1,100."""
    each_ns = int((20 + 0.2 * 1100) / 1100 * 1e6)
    cases = [Case(max(30, prompt // 3) * i, ids(prompt, i), 2) for i in range(60)]
    short = Ward(step_ms=20, token_ms=0.2, settings={"max_num_batched_tokens": 2048, "max_prefill_tokens": 1100})
    answer = start_measurement_is_off(measured(short.run(*cases), each_ns, max_num_batched_tokens=2048))
    assert answer is found
