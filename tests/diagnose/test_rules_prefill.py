"""Prompts in others' way."""

import re

import msgspec
import pytest
from test_rules_client import directly, with_client
from test_rules_queue import names, poisson
from ward import MS, Case, Ward, ids

from splittime.diagnose.doctor import diagnose
from splittime.diagnose.rules import step_cost
from splittime.diagnose.rules.prefill import prefill_interference

CHATS = [Case(150 * i, ids(16, i), 120) for i in range(30)]
LONG = [Case(300 + 400 * i, ids(1500, 1000 + i), 4) for i in range(10)]
WHOLE = {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096}


def test_whole_prompts_make_decoding_stand_still():
    first = diagnose(Ward(token_ms=0.4, settings=WHOLE).run(*CHATS, *LONG)).findings[0]
    assert first.name == "prefill_interference"
    assert set(first.step_ids) <= set(range(1, 10_000))
    enable, flag, tokens = first.cure.flags
    assert (enable, flag) == ("--enable-chunked-prefill", "--max-prefill-tokens")
    assert 0.2 <= 0.4e-3 * int(tokens) <= 0.25, "a step of the size that a start would make"


def test_what_a_cure_of_gaps_costs_first_tokens_is_told_beside_them():
    """A prompt of 1,500 tokens takes a step of 604 ms; of 608, 247: what each takes is paid three times."""
    first = diagnose(Ward(token_ms=0.4, settings=WHOLE).run(*CHATS, *LONG)).findings[0]
    assert re.search(r"a step falls from \d+ to 24\d ms", first.cost)
    before, after = (int(found) for found in re.findall(r"take (\d+) ms instead of (\d+)", first.cost)[0][::-1])
    assert before == pytest.approx(604, rel=0.05)
    assert before + 2 * 4 <= after <= before + 2 * (4 + 0.4 * 40)


def test_steps_of_the_size_that_the_product_makes_are_no_illness():
    """Prompts have most of the time in steps of 0.25 s, as a start makes them; that is no wait that wants a cure."""
    chunked = {"max_num_batched_tokens": 1024, "max_prefill_tokens": 600}
    diagnosis = diagnose(Ward(token_ms=0.4, settings=chunked).run(*CHATS, *LONG))
    assert "prefill_interference" not in [finding.name for finding in diagnosis.findings]
    assert "no_cure_known" not in [finding.name for finding in diagnosis.findings]
    (why,) = (one.why for one in diagnosis.abstentions if one.name == "prefill_interference")
    assert why.startswith("51% of the requests' time is others' prompts, in steps of 249 ms (median) by the default")


@pytest.mark.parametrize(
    ("term", "limit_ms", "is_ill"), [("itl_p99", 40, True), ("tpot", 300, False), ("ttft", 40, False)]
)
def test_an_slo_that_was_set_says_what_is_too_long(term, limit_ms, is_ill):
    chunked = {"max_num_batched_tokens": 1024, "max_prefill_tokens": 600}
    books = with_client(Ward(token_ms=0.4, settings=chunked).run(*CHATS, *LONG), directly)
    asked = msgspec.structs.replace(books, run=msgspec.structs.replace(books.run, slo={term: limit_ms * 1e6}))
    found = [one for one in diagnose(asked).findings if one.name == "prefill_interference"]
    assert bool(found) is is_ill
    assert all(int(one.cure.flags[-1]) * 0.4 <= limit_ms for one in found)


def test_small_chunks_are_not_felt():
    chunked = {"max_num_batched_tokens": 512, "max_prefill_tokens": 64}
    assert "prefill_interference" not in names(Ward(token_ms=0.2, settings=chunked).run(*CHATS, *LONG))


def test_short_prompts_behind_long_ones():
    shorts = [Case(35 * i, ids(16, i), 3) for i in range(120)]
    long = [Case(200 + 600 * i, ids(2000, 1000 + i), 1) for i in range(6)]
    settings = {"max_num_batched_tokens": 256, "max_prefill_tokens": 128}
    first = diagnose(Ward(token_ms=0.1, settings=settings).run(*shorts, *long)).findings[0]
    assert first.name == "head_of_line"
    assert first.cure.flags == ("--policy", "shortest_prefill")


def test_prompts_of_one_length_are_in_no_line():
    cases = [Case(60 * i, ids(200, i), 5) for i in range(60)]
    assert "head_of_line" not in names(Ward(token_ms=0.05).run(*cases))


def test_a_token_budget_too_small():
    settings = {"max_prefill_tokens": 16}
    first = diagnose(Ward(step_ms=4, token_ms=0.02, settings=settings).run(*poisson(10, 80, prompt=200))).findings[0]
    assert first.name == "token_budget_bound"


def test_a_large_token_budget_is_no_illness():
    assert names(Ward(step_ms=4, token_ms=0.02).run(*poisson(10, 80, prompt=200))) == []


def prompts_beside_one_that_decodes():
    """Each step with a prompt takes 30 ms, of which TPOT shows 5."""
    settings = {"max_num_batched_tokens": 512, "max_prefill_tokens": 256}
    return Ward(step_ms=4, token_ms=0.1, settings=settings).run(*[Case(120 * i, ids(256, i), 40) for i in range(60)])


@pytest.mark.parametrize(
    ("slo", "by"),
    [
        ({}, ""),
        ({"tpot_p99": 25 * MS}, ""),  # a mean over tokens bounds no step
        ({"max_stall": 40 * MS}, ""),  # kept
        ({"max_stall": 25 * MS, "goodput": 0.01}, ""),  # kept, as few as that are to keep it
        ({"max_stall": 25 * MS}, "a step of 25 ms, by the SLO."),
        ({"token_gap_p99": 1 * MS}, "a step of 17 ms, 4 times one without prompts."),
    ],
)
def test_a_step_is_bound_by_what_the_slo_says_of_gaps_where_that_is_missed(slo, by):
    books = with_client(prompts_beside_one_that_decodes(), directly)
    answer = prefill_interference(msgspec.structs.replace(books, run=msgspec.structs.replace(books.run, slo=slo)))
    assert (by in answer.claim and answer.cure.flags) if by else answer is None


def test_no_size_is_prescribed_where_none_could_be_worked_out(monkeypatch):
    books = with_client(prompts_beside_one_that_decodes(), directly)
    books = msgspec.structs.replace(books, run=msgspec.structs.replace(books.run, slo={"max_stall": 25 * MS}))
    monkeypatch.setattr(step_cost, "fit", lambda steps: None)
    assert prefill_interference(books).cure.flags == ()


def test_few_steps_with_prompts_are_not_what_fits_worst():
    """A prompt in one step of forty, and a fit without the twentieth that fits worst."""
    cost = step_cost.fit(prompts_beside_one_that_decodes().steps)
    assert cost.prefill_ns == pytest.approx(0.1 * MS, rel=0.05)


def test_a_wait_for_a_processor_is_no_property_of_a_step():
    """Every third step waits for one, twice as long as it takes itself."""
    steps = prompts_beside_one_that_decodes().steps
    late = [
        step
        if number % 3
        else msgspec.structs.replace(
            step, end_ns=3 * step.end_ns - 2 * step.begin_ns, cpu_wait_ns=2 * (step.end_ns - step.begin_ns)
        )
        for number, step in enumerate(steps)
    ]
    assert step_cost.fit(late) == step_cost.fit(steps)
