"""Arguments and outputs of `splittime.LLM`."""

import operator
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import msgspec

from splittime.api.given_prompts import check_token_ids
from splittime.api.params import check_lists
from splittime.core.errors import ErrorInfo, RequestError
from splittime.core.sampling import SamplingParams
from splittime.core.step import TokenLogprob
from splittime.ledger.account import ClosedAccount

Prompt = str | Sequence[int]


def checked_pairs(prompts: Any, sampling: Any, vocab_size: int) -> list[tuple[Prompt, SamplingParams]]:
    """Returns each prompt with its parameters; one value of `sampling` is for all of them. Raises RequestError for the
    first mistake in any, before anything is submitted."""
    listed = _as_list(prompts)
    given = sampling if isinstance(sampling, list | tuple) else [sampling] * len(listed)
    if len(given) != len(listed):
        raise RequestError(f"{len(listed)} prompts and {len(given)} sampling parameters", param="sampling")
    params = [_typed(one) for one in given]
    for index, (prompt, one) in enumerate(zip(listed, params, strict=True)):
        if not prompt:
            raise RequestError(f"prompt {index} is empty", param="prompts", value=index)
        _check(prompt, one, vocab_size)
    return list(zip(listed, params, strict=True))


def _check(prompt: Prompt, sampling: SamplingParams, vocab_size: int) -> None:
    """A token id that the model does not have would break the step for everyone in it."""
    sampling.validate()
    if isinstance(prompt, str):
        _check_text(prompt)
    else:
        check_token_ids(prompt, vocab_size, "prompts")
    check_lists(sampling, vocab_size)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Texts and tuples of ids. Arrays of integers count as lists of ids."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        listed: list[Any] = list(prompts)
        if listed and all(isinstance(entry, Integral) for entry in listed):
            return [_ids(prompts)]
        return [entry if isinstance(entry, str) else _ids(entry) for entry in listed]
    except (TypeError, ValueError) as error:
        message = f"prompts must be a text, a list of token ids, or a list of such: {error}"
        raise RequestError(message, param="prompts") from None


def _ids(entries: Sequence[Any]) -> tuple[int, ...]:
    if isinstance(entries, bytes):
        raise TypeError("bytes are no text, decode them first")
    return tuple(operator.index(entry) for entry in entries)


def _check_text(prompt: str) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"prompts holds a text that is not Unicode: {error}", param="prompts") from None


def _typed(sampling: Any) -> SamplingParams:
    """With its fields' types checked: msgspec does not check what the constructor is called with."""
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling is a {type(sampling).__name__}, must be SamplingParams", param="sampling")
    try:
        return msgspec.convert(msgspec.structs.asdict(sampling), SamplingParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"sampling: {error}", param="sampling") from None


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one prompt. `error` says why, where `finish_reason` is `error`; the other outputs are unharmed.

    pooled: with `SamplingParams.pooling`, the embedding as the engine has it; `LLM.embed` gives it as numbers.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: str
    account: ClosedAccount
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: ErrorInfo | None = None
    pooled: bytes = b""


class Piece(msgspec.Struct, frozen=True):
    """What is new of one prompt while streaming; its last piece has the whole `output`."""

    index: int
    text: str
    output: Output | None = None
