"""What the gateway reads of a request's body. The body itself goes to the upstream as it came, byte for byte.

Who reads it first and who reads it second must read the same, so that a name that stands twice in one object is refused
(`api.decode.decode_once`); what the fields mean beyond these is the upstream's to say.

The gateway knows no tokenizer. It takes four bytes of the body for a token of the prompt, and the most that the answer
may have for the answer: an estimate, used for order and bounds, and corrected by what the upstream tells.
"""

from math import ceil

import msgspec

from splittime.api.decode import decode_once
from splittime.core.errors import RequestError

BYTES_PER_TOKEN = 4
MAX_ANSWERS = 1024  # of one request, for the estimate


class ForwardedBody(msgspec.Struct):
    """The fields that the gateway needs; all others are passed on unread."""

    model: str
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None


class ForwardedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to be passed on. prompt_tokens, output_tokens: estimates, the second of the most there may be."""

    path: str
    model: str
    is_stream: bool
    body: bytes
    prompt_tokens: int
    output_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


def forwarded(path: str, body: bytes, assumed_max_tokens: int) -> ForwardedRequest:
    """Returns what is passed on to an upstream. Raises `RequestError` for a body that is none."""
    try:
        told = decode_once(body, ForwardedBody)
    except msgspec.ValidationError as error:
        raise RequestError(f"the body: {error}", code="invalid_type") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    most = told.max_completion_tokens if told.max_completion_tokens is not None else told.max_tokens
    answers = min(max(told.n or 1, 1), MAX_ANSWERS)
    return ForwardedRequest(
        path=path,
        model=told.model,
        is_stream=bool(told.stream),
        body=body,
        prompt_tokens=ceil(len(body) / BYTES_PER_TOKEN),
        output_tokens=answers * max(assumed_max_tokens if most is None else most, 0),
    )
