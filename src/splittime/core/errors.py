"""Errors, grouped by whose fault they are. This tree is the whole list.

    SplittimeError
      RequestError        4xx  the request cannot be served as asked; what, value, limit and hint say why
        NotFound          404  no such model, request or page
        Conflict          409  the request id is already in flight
        DeadlineExceeded  504  the request's own deadline passed before it was done
      Overloaded          429/503  the server is full (429: try again) or not serving (503); carries Retry-After
        Refused           the same, by this server's admission, with the numbers that led to it
      UpstreamError       502/504  a server behind the gateway failed, or took too long; which one, and how
      EngineError         500  our fault; the engine stops admitting, drains and restarts
        NobodyThere         -    of a command: nothing answers where it asked
      ConfigError         -    a setting is unknown or out of range; raised before anything starts

`to_body()` is the OpenAI-compatible JSON body of each; `ErrorInfo` is the same as plain data, to cross a process.
"""

import re
from typing import Any

import msgspec

MAX_QUOTED_CHARS = 1000


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as data: what an engine sends to its client, and what a ledger keeps."""

    kind: str
    message: str
    code: str
    status: int
    param: str | None = None
    value: Any = None
    limit: Any = None
    hint: str | None = None
    retry_after_s: float | None = None


OWN_WORDS = frozenset({"overloaded_error", "deadline_exceeded_error", "engine_error", "upstream_error", "slow_reader"})
QUOTING = re.compile(r"tokenizer_failed|text_worker_failed|upstream_(?:error_event|bad_answer|\d+)")
NAMED_BY_CLIENTS = frozenset({"unknown_field", "duplicate_field"})  # codes of errors whose `param` is the client's own
_FIELD = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


def for_books(info: ErrorInfo) -> ErrorInfo:
    """Returns what a ledger keeps of an error: no word of a request, nor of an upstream's answer to it."""
    if info.kind in OWN_WORDS and not QUOTING.fullmatch(info.code):
        return info
    field = _FIELD.match(info.param or "") if info.code not in NAMED_BY_CLIENTS else None
    param = field[0] if field else None
    limit = info.limit if isinstance(info.limit, int | float) else None
    message = info.code if param is None else f"{param}: {info.code}"
    return ErrorInfo(info.kind, message, info.code, info.status, param, limit=limit, retry_after_s=info.retry_after_s)


def _clipped(text: str) -> str:
    """An error quotes what was sent, and the ledger keeps thousands of errors: not megabytes of each."""
    if len(text) <= MAX_QUOTED_CHARS:
        return text
    return f"{text[: MAX_QUOTED_CHARS // 2]} ... {text[-MAX_QUOTED_CHARS // 2 :]}"


def _quoted(value: Any) -> Any:
    """A value as an error holds it: a long text clipped, a whole number that no JSON reader would take as text."""
    if isinstance(value, str):
        return _clipped(value)
    return _clipped(str(value)) if isinstance(value, int) and not -(2**63) <= value < 2**63 else value


class SplittimeError(Exception):
    status = 500
    kind = "server_error"
    code = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int | None = None,
        param: str | None = None,
        value: Any = None,
        limit: Any = None,
        hint: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.info = ErrorInfo(
            kind=self.kind,
            message=_clipped(message),
            code=code or self.code,
            status=status or self.status,
            param=None if param is None else _clipped(param),
            value=_quoted(value),
            limit=limit,
            hint=hint,
            retry_after_s=retry_after_s,
        )

    def to_body(self) -> dict[str, Any]:
        return error_body(self.info)


class RequestError(SplittimeError):
    status = 400
    kind = "invalid_request_error"
    code = "invalid_value"


class NotFound(RequestError):
    status = 404
    kind = "not_found_error"
    code = "not_found"


class Conflict(RequestError):
    status = 409
    kind = "conflict_error"
    code = "request_id_in_flight"


class DeadlineExceeded(RequestError):
    status = 504
    kind = "deadline_exceeded_error"
    code = "deadline_exceeded"

    @classmethod
    def before(cls, what: str) -> "DeadlineExceeded":
        """Returns the error of a request whose deadline passed before this happened."""
        return cls(f"the request's deadline passed before {what}")


class Overloaded(SplittimeError):
    status = 429
    kind = "overloaded_error"
    code = "overloaded"


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


class Refused(Overloaded):
    """A refusal with the numbers that led to it."""

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        status: int = 429,
        queued: int = 0,
        limit: int | None = None,
        predicted_wait_s: float | None = None,
        predicted_ttft_s: float | None = None,
        wait_estimate: str | None = None,
        retry_after_s: float | None = 1.0,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, code=reason, status=status, retry_after_s=retry_after_s, limit=limit, hint=hint)
        self.reason = reason
        self.facts = {
            "reason": reason,
            "queued": queued,
            "limit": limit,
            "predicted_wait_ms": _in_ms(predicted_wait_s),
            "wait_estimate": wait_estimate,
        }
        if predicted_ttft_s is not None:
            self.facts["predicted_ttft_ms"] = _in_ms(predicted_ttft_s)

    def to_body(self) -> dict[str, Any]:
        body = super().to_body()
        return {"error": {**body["error"], **self.facts}}


class EngineError(SplittimeError):
    status = 500
    kind = "engine_error"
    code = "engine_error"


class NobodyThere(EngineError):
    code = "nobody_there"


class UpstreamError(SplittimeError):
    status = 502
    kind = "upstream_error"
    code = "upstream_failed"


class ConfigError(SplittimeError):
    kind = "config_error"
    code = "invalid_config"


ERROR_CLASSES = (
    RequestError,
    NotFound,
    Conflict,
    DeadlineExceeded,
    Overloaded,
    EngineError,
    UpstreamError,
    ConfigError,
)


def error_body(info: ErrorInfo) -> dict[str, Any]:
    """Returns the JSON body of an error. Its message ends with the hint: clients of every API show no other field."""
    hint = info.hint or ""
    message = f"{info.message}{'. ' if hint[:1].isupper() else '; ' * bool(hint)}{hint}"
    told = {"message": message, "type": info.kind, "param": info.param, "code": info.code}
    more = {"value": info.value, "limit": info.limit, "hint": info.hint, "retry_after_s": info.retry_after_s}
    return {"error": told | {name: value for name, value in more.items() if value is not None}}


def error_from_info(info: ErrorInfo) -> SplittimeError:
    """The error that `info` describes, to be raised in this process."""
    by_kind = {cls.kind: cls for cls in ERROR_CLASSES}
    error = by_kind.get(info.kind, EngineError)(info.message)
    error.info = info
    return error
