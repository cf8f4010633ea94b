"""The error that an upstream's answer or event tells, by its fields alone.

Nothing here reads a message for what it means but its beginning, where servers that tell no code name the model: the
rest of a message may be a piece of the request, and would let a client say what is held against an upstream.
"""

from typing import Any, NamedTuple

import msgspec

from splittime.core.errors import NotFound

NO_SUCH_MODEL = frozenset({"model_not_found", "deploymentnotfound"})
NO_SUCH_MODEL_BEGINS = ("the model ", "model ", "model:")  # the last is Anthropic's
TIME_IS_OVER = frozenset({"deadline_exceeded", "upstream_total_timeout", "upstream_whole_answer_timeout"})  # of ours
RPC_TOO_LATE = "DEADLINE_EXCEEDED"  # of Google's: the upstream's own time, not the request's
NO_SUCH_ROUTE = {"detail": "Not Found"}  # of FastAPI: vLLM, SGLang
STATUS_OF = {  # where a type stands for a status
    "invalid_request_error": 400,
    "badrequesterror": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "notfounderror": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "overloaded_error": 529,
    **dict.fromkeys(TIME_IS_OVER, 504),
}


class ToldError(NamedTuple):
    """codes: its code, type, status and reason, in lower case. status: a number that stands for one, or that its type
    stands for; None for none. is_flagged: it says that the request's text is not allowed."""

    codes: frozenset[str] = frozenset()
    status: int | None = None
    param: str = ""
    message: str = ""
    is_flagged: bool = False

    @property
    def names_a_model(self) -> bool:
        """Returns whether it says that there is no such model."""
        begin = self.message[:16].lower()
        return bool(self.codes & NO_SUCH_MODEL) or self.param == "model" or begin.startswith(NO_SUCH_MODEL_BEGINS)


def told_error(told: object) -> ToldError | None:
    """Returns the error that a decoded answer is; None for one that is none."""
    if not isinstance(told, dict):
        return None
    error = told.get("error")
    if error is None and (told.get("object") == "error" or told.get("type") == "error"):
        error = told
    if error is None or error is False or error == {}:
        return None
    return _of_fields(error) if isinstance(error, dict) else ToldError(message=str(error)[:1000])


def refusal_of(told: object) -> ToldError:
    """Returns what a decoded refusal says, in whatever form."""
    found = told_error(told)
    if found is None and isinstance(told, dict):
        found = _of_fields(told if "message" in told else {"message": told.get("detail")})
    return found or ToldError()


def event_error(data: bytes) -> ToldError | None:
    """Returns the error that an event of a stream is. Few events are decoded for it: a text that has the word has it
    between quotes that are escaped."""
    return told_error(decoded(data)) if b'"error"' in data else None


def says_no_such_path(told: object, *, has_kept: bool = False) -> bool:
    """Returns whether a decoded 404 is about the path, not about what was asked for there: an API's own error is about
    a model, a file or a response, unless it is one of ours that names nothing. Who has no API there answers with a page
    or with words: `{"detail": "Not Found"}` of FastAPI, `{"message": "no Route matched"}` of a proxy. has_kept: an API
    with things that are kept, of which words may be."""
    if not isinstance(told, dict):
        return True
    error, found = told.get("error"), refusal_of(told)
    if isinstance(error, dict):
        return error.get("code") == NotFound.code and not found.param
    if has_kept:
        return told == NO_SUCH_ROUTE
    return not (found.codes or found.param or found.names_a_model or told.get("object") == "error")


def decoded(body: bytes) -> Any:
    """Returns what JSON says; None for what is none."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _of_fields(error: dict[str, Any]) -> ToldError:
    words = [error.get(name) for name in ("reason", "code", "type", "status")]
    codes = [one.lower() for one in words if isinstance(one, str) and one != RPC_TOO_LATE]
    numbers = [one for one in words if type(one) is int]
    numbers += [int(one) for one in codes if len(one) == 3 and one.isascii() and one.isdigit()]
    numbers += [STATUS_OF[one] for one in codes if one in STATUS_OF]
    metadata = error.get("metadata")
    return ToldError(
        codes=frozenset(codes),
        status=next((one for one in numbers if 400 <= one < 600), None),
        param=str(error.get("param") or ""),
        message=str(error.get("message") or "")[:1000],
        is_flagged=isinstance(metadata, dict) and "flagged_input" in metadata,
    )
