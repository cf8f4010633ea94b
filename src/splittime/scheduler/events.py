"""What the scheduler tells of a request: its new tokens, its account's new marks, its end. Values only."""

import msgspec

from splittime.core.errors import ErrorInfo
from splittime.core.request import FinishReason
from splittime.core.step import TokenLogprob
from splittime.ledger.account import Mark


class RequestOutput(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What is new of one request. The one with a `finish_reason` is its terminal event; none follows.

    marks: the account's marks since the previous output of this request (the engine's part begins with `handoff` at
    `Request.submitted_ns`). The terminal event's last mark is `deliver`, at the moment the engine was done with it.
    num_cached_tokens: prompt tokens found in the prefix cache at first admission; None until then. num_host_tokens: of
        these, the ones that were copied back from host memory.
    freed_ns: terminal event only: when its blocks were free again.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    marks: tuple[Mark, ...] = ()
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    freed_ns: int | None = None
    stop_token_id: int | None = None  # the end-of-sequence or stop id that ended it (also the last of token_ids)
    num_host_tokens: int = 0
    pooled: bytes = b""  # with `sampling.pooling`, in the terminal event: as `RowResult` has it
