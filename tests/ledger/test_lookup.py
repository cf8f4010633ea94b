"""What a lookup would have guessed of an answer, against one that looks token by token."""

import msgspec
import pytest
from books import example
from hypothesis import given
from hypothesis import strategies as st

from splittime.ledger.account import ClosedAccount
from splittime.ledger.account_json import account_from_json, account_json
from splittime.ledger.prompt_parts import ENDS, MOST_TOKENS, SAMPLED, Lookup, is_sampled, lookup, sampled_lookup


def looked_up(prompt: list[int], answer: list[int]) -> Lookup:
    """Token by token."""
    text, guesses, right = [*prompt, *answer], 0, 0
    for place in range(len(prompt) + 1, len(text)):
        guess = guess_at(text[:place])
        guesses += guess is not None
        right += guess == text[place]
    return Lookup(guesses, right)


def guess_at(known: list[int]) -> int | None:
    for length in ENDS:
        for begin in range(len(known) - length - 1, -1, -1):
            if known[begin : begin + length] == known[-length:]:
                return known[begin + length]
    return None


TOKENS = st.lists(st.integers(0, 3), max_size=40)


@given(TOKENS, TOKENS)
def test_each_token_is_guessed_by_the_longest_end_that_stood_before(prompt: list[int], answer: list[int]) -> None:
    assert lookup(prompt, answer) == looked_up(prompt, answer)


def test_what_is_quoted_is_guessed_and_what_is_new_is_not() -> None:
    quoted = list(range(100, 150))
    assert lookup(quoted, quoted) == Lookup(48, 48)
    assert lookup(quoted, list(range(500, 550))) == Lookup(0, 0)
    assert lookup([1, 2, 3, 4], [9, 1, 2, 3, 5]) == Lookup(2, 1)


def test_the_last_time_counts() -> None:
    assert lookup([1, 2, 3, 1, 2, 4], [9, 1, 2, 4]) == Lookup(1, 1)
    assert lookup([1, 2, 3, 1, 2, 4], [9, 1, 2, 3]) == Lookup(1, 0)


def test_tokens_that_are_large_are_told_apart() -> None:
    assert lookup([2**40, 2**41, 7], [2**40, 2**41, 7]) == Lookup(1, 1)
    assert lookup([2**40, 2**41, 7], [2**41, 2**40, 7]) == Lookup(0, 0)


def test_one_request_in_eight_is_counted_by_its_name() -> None:
    names = [f"req-{number}" for number in range(4000)]
    counted = [name for name in names if is_sampled(name)]
    assert 0.8 * len(names) < SAMPLED * len(counted) < 1.2 * len(names)
    assert sampled_lookup(counted[0], [1, 2, 3], [1, 2, 3]) == Lookup(1, 1)
    assert sampled_lookup(counted[0], [], []) == Lookup(None, None)
    assert sampled_lookup(counted[0], [1] * MOST_TOKENS, [1]) == Lookup(None, None)
    other = next(name for name in names if not is_sampled(name))
    assert sampled_lookup(other, [1, 2, 3], [1, 2, 3]) == Lookup(None, None)


def test_an_account_keeps_it_and_an_earlier_one_has_none() -> None:
    account = msgspec.structs.replace(example(), lookup_guesses=5, lookup_right=3)
    assert account_from_json(account_json(account)) == account
    told = account_json(account)
    del told["lookup_guesses"], told["lookup_right"]
    assert account_from_json(told).lookup_guesses is None
    body = msgspec.json.decode(msgspec.json.encode(account))
    del body["lookup_guesses"], body["lookup_right"]
    assert msgspec.convert(body, ClosedAccount, strict=False).lookup_right is None


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_text_of_few_tokens_has_no_guesses(count: int) -> None:
    assert lookup([], [5] * count) == Lookup(0, 0)
