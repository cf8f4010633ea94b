"""A prompt's parts: contiguous, the same in every process, and the same wherever a text stands."""

import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.ledger.prompt_parts import (
    MAX_TOKENS,
    MIN_TOKENS,
    PREFIX_TOKENS,
    SHORT_TOKENS,
    WINDOW,
    answer_hashes,
    prefix_list,
    prompt_hashes,
)


def some_tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(150_000) for _ in range(count))


@given(st.lists(st.integers(0, 200_000), max_size=400) | st.integers(0, 700).map(lambda count: [7] * count))
def test_parts_are_contiguous_and_cover_the_prompt(token_ids):
    parts = prompt_hashes(token_ids).parts
    if len(token_ids) < SHORT_TOKENS:
        assert parts == ()
        return
    expected = 0
    for hashed, start, num_tokens in parts:
        assert start == expected
        assert num_tokens > 0
        assert 0 <= hashed < 2**53  # exact in JavaScript
        expected += num_tokens
    assert expected == len(token_ids)
    assert parts == prompt_hashes(tuple(token_ids)).parts


@given(st.integers(0, 10_000), st.integers(0, 300), st.integers(0, 300))
def test_a_text_keeps_its_parts_wherever_it_stands(seed, num_before, num_other):
    """Cuts are a local matter: beyond the reach of what stands before, they and the hashes between are the same."""
    blob = some_tokens(1_000, seed)
    one = prompt_hashes(some_tokens(num_before, seed + 1) + blob).parts
    other = set(prompt_hashes(some_tokens(num_other, seed + 2) + blob + some_tokens(50, seed + 3)).parts)
    inner = [part for part in one[:-1] if part[1] >= num_before + MIN_TOKENS + WINDOW]
    assert {(hashed, start - num_before + num_other, count) for hashed, start, count in inner} <= other


def test_most_of_a_blob_is_found_again():
    blob = some_tokens(2_000, 5)
    alone = prompt_hashes(blob).parts
    moved = {hashed for hashed, _, _ in prompt_hashes(some_tokens(137, 6) + blob).parts}
    assert sum(hashed in moved for hashed, _, _ in alone) >= len(alone) - 2


def test_different_texts_share_no_part():
    seen = [hashed for seed in range(200) for hashed, _, _ in prompt_hashes(some_tokens(1_000, seed)).parts]
    assert len(seen) == len(set(seen))


def test_the_order_of_tokens_counts():
    blob = some_tokens(64, 1)
    assert prompt_hashes(blob).parts != prompt_hashes((*blob[:20], blob[21], blob[20], *blob[22:])).parts


def test_parts_are_of_64_tokens_on_average():
    parts = prompt_hashes(some_tokens(MAX_TOKENS)).parts
    assert 55 <= MAX_TOKENS / len(parts) <= 75


def test_a_run_of_one_token_is_not_cut_at_each():
    assert all(len(prompt_hashes([token] * 3_000).parts) <= 3 for token in range(300))


def test_what_lies_beyond_the_bound_has_no_part():
    parts = prompt_hashes(some_tokens(MAX_TOKENS + 5_000)).parts
    assert parts[-1][1] + parts[-1][2] == MAX_TOKENS


@pytest.mark.parametrize("seed", ["0", "77"])
def test_parts_are_the_same_in_every_process(seed):
    code = "from splittime.ledger.prompt_parts import prompt_hashes; print(prompt_hashes(list(range(500))).parts)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(prompt_hashes(list(range(500))).parts)
    assert prompt_hashes(list(range(500))).parts[0][0] == FIRST


@given(st.integers(0, 10_000), st.integers(0, 100), st.integers(0, 90))
def test_an_answers_hashes_go_on_from_the_prompts_which_is_not_read_again(seed, num_prompt, num_answer):
    prompt, answer = some_tokens(num_prompt, seed), some_tokens(num_answer, seed + 1)
    known, whole = prompt_hashes(prompt), prompt_hashes(prompt + answer).prefixes
    assert known.prefixes + answer_hashes(prompt, answer) == whole
    other = (0,) * (num_prompt - PREFIX_TOKENS - WINDOW) + prompt[-PREFIX_TOKENS - WINDOW :]
    assert known.prefixes + answer_hashes(other, answer, known) == whole


@pytest.mark.parametrize("num_prompt", [MAX_TOKENS - 20, MAX_TOKENS - 1, MAX_TOKENS, MAX_TOKENS + 40])
def test_an_answers_hashes_end_where_a_prompts_do(num_prompt):
    prompt, answer = some_tokens(num_prompt), some_tokens(50, 1)
    known = prompt_hashes(prompt)
    assert known.prefixes + answer_hashes(prompt, answer, known) == prompt_hashes(prompt + answer).prefixes


FIRST = 92294657484788  # written down once: a change of the hash makes old ledgers incomparable with new ones


@given(st.integers(0, 10_000), st.integers(0, 200), st.integers(0, 90), st.integers(0, 90))
def test_beginnings_have_one_hash_where_they_are_the_same_and_another_where_not(seed, num_common, num_one, num_other):
    common = some_tokens(num_common, seed)
    one, other = (*common, *some_tokens(num_one, seed + 1)), (*common, *some_tokens(num_other, seed + 2))
    hashes = [prefix_list(prompt_hashes(tokens).prefixes) for tokens in (one, other)]
    assert [len(each) for each in hashes] == [len(one) // PREFIX_TOKENS, len(other) // PREFIX_TOKENS]
    num_same = next((at for at, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), num_common)
    for number, (mark, another) in enumerate(zip(*hashes, strict=False), 1):
        assert (mark == another) == (number * PREFIX_TOKENS <= num_same)
