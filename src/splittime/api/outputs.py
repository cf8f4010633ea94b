"""What `splittime.LLM` gives its caller: a prompt's output, whole or in pieces."""

import msgspec

from splittime.core.errors import ErrorInfo
from splittime.core.step import TokenLogprob
from splittime.ledger.account import ClosedAccount


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
