"""How much of an answer was said before, where a lookup would have found it: a count over its tokens.

A *lookup* guesses a token by what followed the last tokens where they stood before in the same text (prompt lookup;
`runner.suffix_drafter` without past answers). Here it is asked of each token of an answer but the first, which the
prompt's own step gives, with all before it known: the longest end of 8, 4 or 2 tokens that stood before, and there the
token that followed the last time. So it is known of a server that guesses nothing how often guesses from the text would
have been right; what that would gain is an estimate, and none of the ledger's.

    a b c d   x   a b c e        behind "a b" c is guessed, and right; behind "b c" d is guessed, and wrong

It takes some sorting of the text's tokens once the answer has ended, so it is counted for one request in `SAMPLED`,
chosen by its id, and of texts of `MOST_TOKENS` at most; what was not counted is None.
"""

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np

SAMPLED = 8
MOST_TOKENS = 8192  # of prompt and answer: two or three milliseconds
ENDS = (8, 4, 2)  # tokens that must have stood before, the longest first

_ODD = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(32)


class Lookup(NamedTuple):
    """guesses: tokens of the answer of which there was a guess; right: those of which it was what came."""

    guesses: int | None = None
    right: int | None = None


def is_sampled(request_id: str) -> bool:
    """Returns whether this request is counted: by its name alone, whatever it says and however long it took."""
    return crc32(request_id.encode()) % SAMPLED == 0


def sampled_lookup(request_id: str, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Lookup:
    """Returns what a lookup would have guessed of the answer; nothing where that is not counted."""
    if not is_sampled(request_id) or not answer_ids or len(prompt_ids) + len(answer_ids) > MOST_TOKENS:
        return Lookup()
    return lookup(prompt_ids, answer_ids)


def lookup(prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Lookup:
    """Returns what a lookup would have guessed of each token of the answer but the first, all before it known."""
    tokens = np.array([*prompt_ids, *answer_ids], np.int64)
    guesses = np.full(len(tokens), -1, np.int64)  # by place: the place of the token that is guessed for it
    for length in ENDS:
        found = _followers(tokens, length)
        guesses = np.where(guesses < 0, found, guesses)
    asked = np.arange(len(tokens)) > len(prompt_ids)
    guessed = asked & (guesses >= 0)
    return Lookup(int(guessed.sum()), int((tokens[guesses] == tokens)[guessed].sum()))


def _followers(tokens: np.ndarray, length: int) -> np.ndarray:
    """Returns for each place the one that followed the last time that the `length` tokens before it stood, or -1."""
    found = np.full(len(tokens), -1, np.int64)
    if len(tokens) <= length:
        return found
    keys = _hashes(tokens, length)  # of the end at place + length
    order = np.argsort(keys, kind="stable")
    same = keys[order[1:]] == keys[order[:-1]]
    found[order[1:][same] + length] = order[:-1][same] + length
    return found


def _hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """uint64 [count - length], of the tokens from each place on; the last end has no token behind it."""
    values, count = tokens.view(np.uint64), len(tokens) - length
    mixed = np.zeros(count, np.uint64)
    for place in range(length):
        mixed = (mixed ^ values[place : place + count]) * _ODD
        mixed ^= mixed >> _SHIFT
    return mixed
