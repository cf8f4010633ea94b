"""What an attempt's end says: whose doing it is, what its client is told, whether another may be asked, who is paused.

This is the only place that decides it. `of_answer` looks at an answer that is all there, `of_event` at an error inside
a stream, and `breaks` at what broke off or came too late; all make one `AnswerVerdict`, and nobody asks a status again.

    whose     the upstream's breaker                  another is asked      the client is told
    nobody    a success                               no                    the answer
    request   nothing                                 where it was a 429    the answer: it is about what was asked
    busy      a pause, by Retry-After                 yes                   the 429
    health    a failure                               yes                   a 5xx of its own, or 502; of a refusal of
              who asked (`OF_THE_GATEWAY`)                                  the gateway nothing that the upstream said
    key       a failure                               yes                   502, and nothing that the upstream said
    model     a failure; of one with several models   yes                   502, likewise
              that model alone is kept from it
    path      nothing; the path is kept from it       yes                   the 404
    client    nothing: it left, or another won
    own       nothing: this process stood still       as health

A request can bring a refusal about by itself: by a deadline, a size, a form, a text that is not allowed. Such a refusal
says nothing of what others would get. Our own servers say the reason; of others, a 429 to a request with a deadline of
its client's own is taken to be about that deadline.

Nothing here reads a message for what it means but its beginning, where servers that tell no code name the model: the
rest of a message may be a piece of the request, and would let a client say what is held against an upstream.
"""

from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from splittime.core.errors import NotFound, RequestError, SplittimeError, UpstreamError
from splittime.gateway.decoded_answer import JSON, PassedAnswer, pause_of
from splittime.gateway.forwarded import ENDPOINTS, RESPONSES, WITH_CHOICES
from splittime.wire.sse import body_text

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
ANSWERED = (200, 201)
BAD_REQUEST, BAD_GATEWAY, BUSY_STATUS, TOO_LATE = 400, 502, 429, 504
KEY_REFUSED = (401, 402, 403, 407)  # no client can mend that: the key, and who pays for it, is the gateway's
OF_A_PROXY_TOO = (402, 403, 407, 451)  # a firewall and a proxy answer so too, with a page or with words
OF_THE_GATEWAY = (402, 403, 407, 421, 426, 451, 511)  # about who asks the upstream, from where and how: no client
KEY_CODES = {"invalid_api_key", "api_key_invalid", "authentication_error", "account_deactivated", "insufficient_quota"}


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


KEY_CODES |= {"billing_not_active", "billing_hard_limit_reached"}
FLAGGED = frozenset({"content_policy_violation", "content_filter", "moderation_blocked"})
NO_SUCH_PATH = (405, 501)
PASSING = (408, 425, 502, 503, 504, 529)
UPSTREAM_MAY_TRY = (408, 421, 425, 426)  # 4xx that are about the exchange
# Reasons of a 429 that another request need not meet.
OF_THE_REQUEST = {"deadline", "slo_ttft", "deadline_exceeded", "grammars_queue_full", "queued_prompt_tokens"}
OF_THE_REQUEST |= {"queued_texts", "queued_bodies", "open_prefills"}
OF_THE_REQUEST |= {"request_too_large", "context_length_exceeded", "string_above_max_length"}
# Reasons that any request of this key meets, and that of a server which is told whose each is, of his part of a queue.
OF_THE_UPSTREAM = frozenset({"queue_full", "shed", "upstreams_busy", "tokens_per_day", "tokens_per_month"})
OF_THE_TENANT = "queued_requests"
OF_THE_KEY = OF_THE_UPSTREAM | {  # and these, but for what is left: one that is larger than that meets them alone
    *(OF_THE_TENANT, "max_open_requests", "requests_per_minute", "tokens_per_minute")
}
MAX_TOLD_BYTES = 64 * 1024  # of a refusal that is read
MAX_CHECKED_BYTES = 2**20  # of an answer that is read through; of a longer one the ends are looked at


class Whose(StrEnum):
    """Whose doing an attempt's end is."""

    NOBODY = "nobody"
    REQUEST = "request"
    BUSY = "busy"
    HEALTH = "health"
    KEY = "key"
    MODEL = "model"
    PATH = "path"
    CLIENT = "client"
    OWN = "own"


OWN_LIMITS = frozenset({"upstream_total_timeout", "upstream_whole_answer_timeout"})  # the gateway's
UNTOLD = {Whose.REQUEST: BAD_REQUEST, Whose.KEY: KEY_REFUSED[0]}  # the status of an error that tells none
AGAINST = frozenset({Whose.HEALTH, Whose.KEY, Whose.MODEL})  # the upstream


class AttemptAsked(NamedTuple):
    """What an upstream was asked. is_timed: for a client with a deadline or a bound of its own for the first token."""

    upstream: str
    path: str
    model: str
    is_timed: bool = False

    @property
    def has_choices(self) -> bool:
        return self.path in WITH_CHOICES


class AnswerVerdict(NamedTuple):
    """code: of a failure, in metrics and accounts; "" for an answer that is given. error: what the client is told if
    nobody does better; answer: what it has in its place, as the upstream said it. is_retryable: another upstream may be
    asked; is_passing: the same one too, where there is no other. pause_s: that the upstream asked for; is_for_all: it
    said that any request would meet it, not this tenant's alone; is_for_one: that others need not, however many tenants
    meet it. is_reached: the upstream had the request, which may have brought it about."""

    whose: Whose
    code: str = ""
    error: SplittimeError | None = None
    answer: PassedAnswer | None = None
    is_retryable: bool = False
    is_passing: bool = False
    pause_s: float | None = None
    is_for_all: bool = False
    is_for_one: bool = False
    is_reached: bool = False

    @property
    def is_given(self) -> bool:
        """Whether the client has the answer whatever others would say."""
        return self.answer is not None and not self.is_retryable

    @property
    def is_upstreams(self) -> bool:
        """Whether it is the upstream's state, and not the request's doing."""
        return self.whose in AGAINST or self.whose in (Whose.BUSY, Whose.OWN)

    @property
    def is_against(self) -> bool:
        """Whether it speaks against the upstream."""
        return self.whose in AGAINST


GOOD = AnswerVerdict(Whose.NOBODY)
LEFT = AnswerVerdict(Whose.CLIENT)


def or_own(verdict: AnswerVerdict, *, is_own: bool) -> AnswerVerdict:
    """Returns the verdict on a failure that may be this process's own."""
    return verdict._replace(whose=Whose.OWN) if is_own and verdict.whose is Whose.HEALTH else verdict


def failed(
    words: str, code: str, status: int = BAD_GATEWAY, *, is_passing: bool = True, is_reached: bool = True, **more: Any
) -> AnswerVerdict:
    """Returns the verdict on an upstream that did not do what it should."""
    error = UpstreamError(words, code=code, status=status, **more)
    return AnswerVerdict(Whose.HEALTH, code, error, is_retryable=True, is_passing=is_passing, is_reached=is_reached)


def bad_answer(asked: AttemptAsked, words: str, **more: Any) -> AnswerVerdict:
    """Returns the verdict on an answer that is none."""
    return failed(f"upstream {asked.upstream!r} {words}", "upstream_bad_answer", is_passing=False, **more)


# ---- an answer that is all there


def of_answer(asked: AttemptAsked, answer: PassedAnswer) -> AnswerVerdict:
    """Returns the verdict on an answer that is no stream."""
    status, size = answer.status, len(answer.body)
    if status in ANSWERED:
        return _of_whole(asked, answer)
    if not 400 <= status < 600:
        return bad_answer(asked, f"answered {status}")
    told = decoded(answer.body) if size <= MAX_TOLD_BYTES else None
    if status == 404 and says_no_such_path(told, has_kept=asked.path == RESPONSES):
        whose = Whose.HEALTH if asked.has_choices else Whose.PATH
        return _refused(asked, answer, whose, is_told=isinstance(told, dict))
    refusal = refusal_of(told)
    is_proxys = status == BAD_REQUEST and answer.body.lstrip().startswith(b"<")  # a page: no API has read the request
    is_proxys |= status in OF_A_PROXY_TOO and told_error(told) is None
    whose = Whose.HEALTH if is_proxys else _whose(asked, status, refusal)
    verdict = _refused(asked, answer, whose, is_told=isinstance(told, dict))
    is_for_all, is_for_one = bool(refusal.codes & OF_THE_UPSTREAM), OF_THE_TENANT in refusal.codes
    return verdict._replace(is_for_all=is_for_all, is_for_one=is_for_one)


def _of_whole(asked: AttemptAsked, answer: PassedAnswer) -> AnswerVerdict:
    body = answer.body
    if len(body) > MAX_CHECKED_BYTES:
        is_whole = body[:64].lstrip()[:1] + body[-64:].rstrip()[-1:] in (b"{}", b"[]")
        return GOOD._replace(answer=answer) if is_whole else bad_answer(asked, "answered what is no JSON")
    told = _shape_of(body)
    if told is None:
        return bad_answer(asked, "answered what is no JSON" if body.strip() else "answered nothing")
    found = told_error(decoded(body)) if told.is_error else None
    if found is not None:  # under the status of a success: its client would take it for an answer
        status, whose = _whose_within(asked, found)
        return _refused(asked, answer._replace(status=status), whose, is_told=True)
    if (field := told.missing(asked.path)) is not None:
        return bad_answer(asked, f"answered without {field}")
    return GOOD._replace(answer=answer)


class WholeShape(msgspec.Struct, gc=False):
    """What tells an answer from something else."""

    error: msgspec.Raw = msgspec.Raw(b"")
    object: Any = None
    type: Any = None
    choices: msgspec.Raw = msgspec.Raw(b"")
    content: msgspec.Raw = msgspec.Raw(b"")
    output: msgspec.Raw = msgspec.Raw(b"")
    data: msgspec.Raw = msgspec.Raw(b"")

    def missing(self, path: str) -> str | None:
        """Returns the name of the list that an answer of this path has and this has not; choices are one at least."""
        name = ENDPOINTS[path].list_field if path in ENDPOINTS else ""
        found = bytes(getattr(self, name)) if name else b"["
        is_list = found.startswith(b"[") and (path not in WITH_CHOICES or found[1:].lstrip() != b"]")
        return None if is_list else name

    @property
    def is_error(self) -> bool:
        return bytes(self.error) not in (b"", b"null") or "error" in (self.object, self.type)


def _shape_of(body: bytes) -> WholeShape | None:
    """Returns what tells an answer; None for what is no object, nor a list, as some rankings are."""
    try:
        return msgspec.json.decode(body, type=WholeShape)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return WholeShape() if isinstance(decoded(body), list) else None


def _refused(asked: AttemptAsked, answer: PassedAnswer, whose: Whose, *, is_told: bool) -> AnswerVerdict:
    """is_told: the body is an object, which a client may read."""
    status, code = answer.status, f"upstream_{answer.status}"
    if whose in (Whose.KEY, Whose.MODEL) or (whose is Whose.HEALTH and status in OF_THE_GATEWAY):
        return AnswerVerdict(whose, *_not_for_clients(asked, whose, code), is_retryable=True, is_reached=True)
    words = f"upstream {asked.upstream!r} answered {status}"
    if whose is Whose.PATH:
        words = f"upstream {asked.upstream!r} has no {asked.path}"
    kind = RequestError if whose is Whose.REQUEST and status != BUSY_STATUS else UpstreamError
    pause_s = pause_of(dict(answer.headers)) if whose is Whose.BUSY else None
    return AnswerVerdict(
        whose,
        code,
        kind(words, code=code, status=status, retry_after_s=pause_s),
        answer if is_told else None,
        is_retryable=whose is not Whose.REQUEST or status == BUSY_STATUS,
        is_passing=whose is Whose.HEALTH and status in PASSING,
        pause_s=pause_s,
        is_reached=True,
    )


def _not_for_clients(asked: AttemptAsked, whose: Whose, code: str) -> tuple[str, UpstreamError]:
    if whose is Whose.MODEL:
        words, hint = f"does not have {asked.model!r}", "its operator can mend that: `models` of the upstream"
        code = "upstream_lacks_model"
    else:
        words, hint = "refuses the gateway", "its operator can mend that: its key or account there, or a proxy between"
    return code, UpstreamError(f"upstream {asked.upstream!r} {words}", code=code, status=BAD_GATEWAY, hint=hint)


def _whose(asked: AttemptAsked, status: int, told: ToldError) -> Whose:
    if told.is_flagged or told.codes & FLAGGED:
        return Whose.REQUEST
    if status in KEY_REFUSED or told.codes & KEY_CODES:
        return Whose.KEY
    if status == 404:
        return Whose.MODEL if told.names_a_model else Whose.REQUEST
    if status in NO_SUCH_PATH:
        return Whose.HEALTH if asked.has_choices else Whose.PATH
    if status == BUSY_STATUS:
        return _whose_refusal(asked, told)
    if status == TOO_LATE and told.codes & TIME_IS_OVER:
        return Whose.REQUEST
    return Whose.HEALTH if status >= 500 or status in UPSTREAM_MAY_TRY else Whose.REQUEST


def _whose_within(asked: AttemptAsked, told: ToldError) -> tuple[int, Whose]:
    """Returns the status and whose an error is that comes as an answer. A server that has too much to do says so by its
    status: who does not is asked by others as if it were well."""
    whose = _whose(asked, told.status or BAD_GATEWAY, told)
    status = told.status or UNTOLD.get(whose, BAD_GATEWAY)
    return status, Whose.HEALTH if whose is Whose.BUSY else whose


def _whose_refusal(asked: AttemptAsked, told: ToldError) -> Whose:
    """Returns whose a 429 is."""
    if told.codes & OF_THE_REQUEST or told.message.startswith("Request too large"):
        return Whose.REQUEST
    return Whose.BUSY if told.codes & OF_THE_KEY or not asked.is_timed else Whose.REQUEST


# ---- an error inside a stream


def of_event(asked: AttemptAsked, told: ToldError, data: bytes) -> AnswerVerdict:
    """Returns the verdict on a stream with an event that is an error; its answer is for who has nothing of it yet."""
    (status, whose), code = _whose_within(asked, told), "upstream_error_event"
    found = _refused(asked, PassedAnswer(status, [(b"content-type", JSON)], data), whose, is_told=True)
    if found.answer is None or found.whose is Whose.REQUEST:
        return found
    words = f"an error inside the stream of upstream {asked.upstream!r}: {told.message}"
    error = UpstreamError(words, code=code, status=status)
    return found._replace(code=code, error=error, answer=None)


def of_begin(asked: AttemptAsked, data: bytes) -> AnswerVerdict | None:
    """Returns the verdict on a stream that begins with an error or no event of its path's; None for a good beginning.
    Who answers at once with anything would get most requests."""
    told = decoded(data)
    if (error := told_error(told)) is not None:
        return of_event(asked, error, data)
    is_event = isinstance(told, dict) and ("choices" if asked.has_choices else "type") in told
    return None if is_event else bad_answer(asked, "began a stream with what is no event of one")


def of_late_head(asked: AttemptAsked, verdict: AnswerVerdict) -> AnswerVerdict:
    """Returns the verdict on a whole answer to a client that has the head of a stream: an event tells it."""
    assert verdict.answer is not None, "it would be given"
    status, text = verdict.answer.status, body_text(verdict.answer.body)
    words = f"upstream {asked.upstream!r} answered {status} and no stream: {text}"
    return verdict._replace(error=UpstreamError(words, code=f"upstream_{status}"), answer=None)


class AttemptFailure(Exception):
    """verdict: what it says, and what the client is told."""

    def __init__(self, verdict: AnswerVerdict) -> None:
        self.verdict = verdict
        super().__init__(self.error.info.message)

    @property
    def error(self) -> SplittimeError:
        return self.verdict.error or UpstreamError("no answer", code=self.verdict.code or None)


class UpstreamFailure(AttemptFailure):
    """The attempt failed, and the client has seen nothing of it; another may be made. is_outright: nobody has had an
    answer of the upstream since it was sent."""

    is_outright = False


class Interrupted(UpstreamFailure):
    """The stream broke off, and the client has seen its beginning alone; another upstream may go on with it."""


class BrokenStream(AttemptFailure):
    """The answer ended before its end, after the client had the beginning; it has been told."""
