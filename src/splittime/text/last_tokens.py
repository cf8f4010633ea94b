"""Prompts cut to their last tokens, as Hugging Face's tokenizers cut on the left: the special tokens that stand around
a text stay, and of a pair the longer text loses first."""

from collections.abc import Sequence

from splittime.text.foreign_code import require_at_most
from splittime.text.tokenizer import Tokenizer

SAMPLE = "a"  # what stands around it stands around any text
Ids = Sequence[int]


def encoded(
    tokenizer: Tokenizer,
    text: str,
    first: str | None,
    add_special_tokens: bool,
    most_tokens: int | None,
    keep_last: int | None,
) -> tuple[int, ...]:
    """Returns the token ids of a text, or of a pair where one stands before it as the first; `keep_last` of them, if
    that says how many. Raises `RequestError` where there are more than `most_tokens`."""
    if keep_last is None:
        return _whole(tokenizer, text, first, add_special_tokens, most_tokens)
    ids: Ids = _whole(tokenizer, text, first, add_special_tokens)
    if len(ids) > keep_last:
        ids = _cut(tokenizer, text, first, add_special_tokens, keep_last) or ids[-keep_last:]
    if most_tokens is not None:
        require_at_most(len(ids), most_tokens)
    return tuple(ids)


def _whole(
    tokenizer: Tokenizer, text: str, first: str | None, add_special_tokens: bool, most: int | None = None
) -> tuple[int, ...]:
    if first is not None:
        return tokenizer.encode_pair(first, text, most)
    return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens, most_tokens=most))


def _cut(tokenizer: Tokenizer, text: str, first: str | None, add_special_tokens: bool, kept: int) -> Ids:
    """Returns () where what stands around the texts leaves them no room."""
    sample, rest = tokenizer.encode(SAMPLE, add_special_tokens=False), []
    around: Ids = _whole(tokenizer, SAMPLE, None if first is None else SAMPLE, add_special_tokens)
    texts = [tokenizer.encode(each, add_special_tokens=False) for each in (first, text) if each is not None]
    for _ in texts:
        at = next(at for at in range(len(around)) if list(around[at : at + len(sample)]) == sample)
        rest.append(around[:at])
        around = around[at + len(sample) :]
    room = kept - len(around) - sum(map(len, rest))
    if room < 1:
        return ()
    sizes = [room] if first is None else _sizes(len(texts[0]), len(texts[1]), room)
    parts = [[*before, *ids[len(ids) - size :]] for before, ids, size in zip(rest, texts, sizes, strict=True)]
    return [token for part in parts for token in part] + list(around)


def _sizes(one: int, other: int, room: int) -> tuple[int, int]:
    """Returns how many tokens two texts keep that have more than the room: the longer one loses until both are as long,
    and an odd token more is that of the longer."""
    least = min(one, other, room // 2)
    return (least, room - least) if one <= other else (room - least, least)
