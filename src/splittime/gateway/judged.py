"""What the status of an upstream's answer means: the client has it, another may do better, or the path is not there."""

from typing import Any

import msgspec

from splittime.core.errors import NotFound, UpstreamError
from splittime.gateway.failures import LacksEndpoint, PassedAnswer, UpstreamFailure
from splittime.gateway.forwarded import ForwardedRequest

TRY_ANOTHER = (502, 503, 504)
BUSY = 429
NO_SUCH_PATH = (405, 501)
KEY_REFUSED = (401, 403)  # no client can mend that: the key is the gateway's
NO_SUCH_ROUTE = {"detail": "Not Found"}  # of FastAPI: vLLM, SGLang


def judged(upstream: str, request: ForwardedRequest, answer: PassedAnswer) -> UpstreamFailure | None:
    """Returns the failure that an upstream's answer is; None for one that the client shall have."""
    status, code = answer.status, f"upstream_{answer.status}"
    if not request.has_choices and _says_no_such_path(answer):
        error = UpstreamError(f"upstream {upstream!r} has no {request.path}", code=code, status=status)
        return LacksEndpoint(error, answer=answer, is_retryable=True, is_fault=False)
    if is_for_client(status):
        return None
    if not 400 <= status < 600:
        return UpstreamFailure(UpstreamError(f"upstream {upstream!r} answered {status}", code="upstream_bad_answer"))
    error = UpstreamError(f"upstream {upstream!r} answered {status}", code=code, status=status)
    is_retryable = status in TRY_ANOTHER or status == BUSY
    return UpstreamFailure(error, answer=answer, is_retryable=is_retryable, is_fault=status != BUSY)


def is_for_client(status: int) -> bool:
    """Whether an answer is the client's whatever others would say: 2xx, and 4xx but 429."""
    return 200 <= status < 300 or (400 <= status < 500 and status != BUSY)


def _says_no_such_path(answer: PassedAnswer) -> bool:
    """Whether a refusal is one of the path, not of what was asked for there: a 404 that is an API's own error is about
    a model, a file or a response, unless it is one of ours that names nothing."""
    if answer.status != 404:
        return answer.status in NO_SUCH_PATH
    try:
        told = msgspec.json.decode(answer.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # a page in HTML, a word, nothing
        return True
    error: Any = told.get("error") if isinstance(told, dict) else None
    is_ours = isinstance(error, dict) and error.get("code") == NotFound.code and not error.get("param")
    return is_ours or told == NO_SUCH_ROUTE
