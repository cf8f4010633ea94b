"""The prompts of a body, which may be texts or token ids: of ids the last ones may be all that is kept."""

from collections.abc import Sequence
from typing import Any

from splittime.api.limits import ModelInfo
from splittime.core.errors import RequestError
from splittime.text.foreign_code import require_at_most
from splittime.text.process import KeptTokens, last_of

GivenPrompts = str | Sequence[str | int | list[int]]
Prompt = str | KeptTokens


def listed(given: GivenPrompts, param: str) -> Sequence[Any]:
    """Returns a list that is all texts, or all lists of token ids: what is given alone is the only one. Raises
    `RequestError` for a list that is neither."""
    if isinstance(given, str):
        return (given,)
    kinds = {type(entry) for entry in given}
    if len(kinds) != 1:
        raise RequestError(f"{param} {'mixes texts and token ids' if kinds else 'is an empty list'}", param=param)
    return [given] if kinds == {int} else given


def kept_of(
    lists: Sequence[Sequence[int]], keep_last: int | None, most_tokens: int, model: ModelInfo, param: str
) -> tuple[KeptTokens, ...]:
    """Returns what is kept of lists of token ids. Raises `RequestError`, which names one of several by its index, where
    that is more than `most_tokens`, or no token of the model."""
    params = [numbered(param, index, len(lists)) for index in range(len(lists))]
    each = [last_of(ids, keep_last) for ids in lists]
    for kept, name in zip(each, params, strict=True):
        require_at_most(len(kept.ids), most_tokens, name)
    for kept, name in zip(each, params, strict=True):
        check_token_ids(kept.ids, model.vocab_size, name)
    return tuple(each)


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> tuple[int, ...]:
    """Returns the ids. Raises `RequestError` unless all are of the vocabulary."""
    if ids:
        least, most = min(ids), max(ids)
        worst = least if least < 0 else most
        if not 0 <= worst < vocab_size:
            words, limit = f"{param} has a token id outside the vocabulary", [0, vocab_size - 1]
            raise RequestError(words, param=param, value=str(worst), limit=limit)
    return tuple(ids)


def numbered(name: str, index: int, count: int) -> str:
    """Returns how an error calls the entry of a field, which may be the only one."""
    return f"{name}[{index}]" if count > 1 else name
