"""Prompts in others' way."""

from test_rules_queue import names, poisson
from ward import Case, Ward, ids

from splittime.diagnose.doctor import diagnose

CHATS = [Case(150 * i, ids(16, i), 120) for i in range(30)]
LONG = [Case(300 + 400 * i, ids(1500, 1000 + i), 4) for i in range(10)]
WHOLE = {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096}


def test_whole_prompts_make_decoding_stand_still():
    first = diagnose(Ward(token_ms=0.2, settings=WHOLE).run(*CHATS, *LONG)).findings[0]
    assert first.name == "prefill_interference"
    assert "--enable-chunked-prefill" in first.cure.flags
    assert set(first.step_ids) <= set(range(1, 10_000))


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
