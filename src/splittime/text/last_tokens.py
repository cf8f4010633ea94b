"""Prompts cut to their last tokens, as Hugging Face's tokenizers cut on the left: the special tokens that stand around
a text stay, and of a pair the longer text loses first."""

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

from splittime.text.foreign_code import require_at_most
from splittime.text.tokenizer import Tokenizer

SAMPLE = "a"  # what stands around it stands around any text
Ids = Sequence[int]


class KeptTokens(NamedTuple):
    """What is kept of a prompt. whole_len: how many tokens it was, before it was cut."""

    ids: tuple[int, ...]
    whole_len: int


def last_of(ids: Sequence[int], keep_last: int | None) -> KeptTokens:
    """Returns so many last ones of token ids; None for all."""
    return KeptTokens(tuple(ids if keep_last is None else ids[-keep_last:]), len(ids))


def encoded(
    tokenizer: Tokenizer,
    text: str,
    first: str | None,
    add_special_tokens: bool,
    most_tokens: int | None,
    keep_last: int | None,
) -> KeptTokens:
    """Returns the token ids of a text, or of a pair where one stands before it as the first; `keep_last` of them, if
    that says how many. Raises `RequestError` where there are more than `most_tokens`."""
    whole = partial(_whole, tokenizer, text, first, add_special_tokens)
    if keep_last is None:
        return last_of(whole(most_tokens), None)
    texts = [tokenizer.encode(each, add_special_tokens=False) for each in (first, text) if each is not None]
    around, whole_len = _around(tokenizer, len(texts), add_special_tokens), sum(map(len, texts))
    if around is None or whole_len + sum(map(len, around)) <= keep_last:  # as good as never of a long text
        found = last_of(whole(), keep_last)
    else:
        found = KeptTokens(_cut(texts, around, keep_last), whole_len + sum(map(len, around)))
    if most_tokens is not None:
        require_at_most(len(found.ids), most_tokens)
    return found


def _whole(
    tokenizer: Tokenizer, text: str, first: str | None, add_special_tokens: bool, most: int | None = None
) -> tuple[int, ...]:
    if first is not None:
        return tokenizer.encode_pair(first, text, most)
    return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens, most_tokens=most))


def _around(tokenizer: Tokenizer, num_texts: int, add_special_tokens: bool) -> list[Ids] | None:
    """Returns the special tokens before each text, and those behind the last; None where nothing tells them apart from
    the text."""
    sample, runs = tokenizer.encode(SAMPLE, add_special_tokens=False), list[Ids]()
    rest: Ids = _whole(tokenizer, SAMPLE, None if num_texts == 1 else SAMPLE, add_special_tokens)
    for _ in range(num_texts):
        at = next((at for at in range(len(rest)) if list(rest[at : at + len(sample)]) == sample), None)
        if at is None or not sample:
            return None
        runs.append(rest[:at])
        rest = rest[at + len(sample) :]
    return [*runs, rest]


def _cut(texts: Sequence[Ids], around: Sequence[Ids], kept: int) -> tuple[int, ...]:
    """Returns so many tokens of texts that are more. Where what stands around them leaves them no room, it is cut."""
    room = kept - sum(map(len, around))
    if room > 0:
        sizes = [room] if len(texts) == 1 else _sizes(len(texts[0]), len(texts[1]), room)
        texts = [ids[len(ids) - size :] for ids, size in zip(texts, sizes, strict=True)]
    runs = [run for pair in zip_longest(around, texts, fillvalue=()) for run in pair]
    return tuple(token for run in runs for token in run)[-kept:]


def _sizes(one: int, other: int, room: int) -> tuple[int, int]:
    """Returns how many tokens two texts keep that have more than the room: the longer one loses until both are as long,
    and an odd token more is that of the longer."""
    least = min(one, other, room // 2)
    return (least, room - least) if one <= other else (room - least, least)
