"""What the gateway reads of a request's body. The body itself goes to the upstream as it came, byte for byte.

Who reads it first and who reads it second must read the same, so that a name that stands twice in one object is refused
(`api.decode.decode_once`); what the fields mean beyond these is the upstream's to say.

Where a rule or an alias gives a request another model, the name's bytes in the body are replaced and no other. The body
is not decoded again for that: `model` is taken as the piece of the body that it is, so that where it lies is known.

The gateway knows no tokenizer. It takes four bytes of the body for a token of the prompt, and for the answer what such
answers had of late (`LearntUse`): an estimate, used for order, and corrected by what the upstream tells.

The paths that are passed on, and what differs among them: the fields that bound an answer, its id, and its errors.

Chats and completions answer with choices. What is built on those (the cache, streams that go on elsewhere, first
tokens that are looked at, template answers) is for these two alone.
"""

import re
from collections.abc import Callable
from math import ceil
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from splittime.api import messages
from splittime.api.decode import MAX_PARTS, decode_once
from splittime.core.errors import ErrorInfo, RequestError, SplittimeError, error_body
from splittime.ledger.attempts import RouteDecision
from splittime.web import http

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, COUNT_TOKENS = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
WITH_CHOICES = (CHAT, COMPLETIONS)
OF_ANTHROPIC = (MESSAGES, COUNT_TOKENS)
BYTES_PER_TOKEN = 4
MOST_TOKEN_BYTES, MOST_VECTOR_BYTES = 4096, 2**18  # in an answer, as JSON
NULL = b"null"
ITEM_REFERENCE = "item_reference"
NOT_PASSED_ON = {  # fields of responses
    "background": "nobody would wait for it: it would have no place in the queue, and no end in an account",
    "conversation": "an upstream keeps it, and the gateway does not know which one, nor whose it is",
    "request_id": "it would name the response, and another key's response may have that name",
}
MAX_ANSWERS = 2**20  # of one request: a client may write any number
MOST_TOKENS = 2**31  # of an estimate: likewise, and sums of these are kept as floats
WITH_TEXTS = {  # fields with several texts, of which each is answered
    COMPLETIONS: ("prompt",),
    EMBEDDINGS: ("input",),
    RERANK: ("documents",),
    SCORE: ("text_1", "text_2"),
}


class PassedEndpoint(NamedTuple):
    """name: in rules and accounts. prefix: of its answers' ids, as the ledger finds them. most: fields that bound the
    tokens of an answer, of which the first that is there counts; () where it writes none. list_field: of every whole
    answer, which tells it from another server's page; "" where servers differ."""

    name: str
    prefix: str
    most: tuple[str, ...] = ()
    list_field: str = ""


ENDPOINTS = {
    CHAT: PassedEndpoint("chat", "chatcmpl", ("max_completion_tokens", "max_tokens"), "choices"),
    COMPLETIONS: PassedEndpoint("completions", "cmpl", ("max_completion_tokens", "max_tokens"), "choices"),
    RESPONSES: PassedEndpoint("responses", "chatcmpl", ("max_output_tokens",), "output"),
    MESSAGES: PassedEndpoint("messages", "chatcmpl", ("max_tokens",), "content"),
    COUNT_TOKENS: PassedEndpoint("count_tokens", "chatcmpl"),
    EMBEDDINGS: PassedEndpoint("embeddings", "embd", list_field="data"),
    RERANK: PassedEndpoint("rerank", "rerank"),
    SCORE: PassedEndpoint("score", "score"),
}


# ---- errors of the gateway's own, as the clients of each path read them


def error_event(path: str, info: ErrorInfo) -> bytes:
    """Returns an error inside a stream. Its client raises it, so that nobody takes half an answer for a whole one."""
    plain = http.error_event(info)
    if path in OF_ANTHROPIC:
        told = messages.error(info.status, plain.removeprefix(b"data: ").rstrip())
    elif path == RESPONSES:
        body = error_body(info)
        named = {name: body["error"][name] for name in ("code", "message", "param")}
        told = msgspec.json.encode({"type": "error", **named, **body})
    else:
        return plain
    return b"event: error\ndata: %b\n\n" % told


def error_at_once(
    path: str, error: SplittimeError, headers: http.Headers, on_written: Callable[[], None] = lambda: None
) -> http.AtOnce:
    """Returns the answer that is an error."""
    told = http.error_at_once(error, headers, on_written)
    if path not in OF_ANTHROPIC:
        return told
    body = messages.error(told.status, told.body)
    sized = [(b"content-length", b"%d" % len(body)), *(one for one in told.headers if one[0] != b"content-length")]
    return told._replace(headers=sized, body=body)


async def respond_error(send: http.Send, path: str, error: SplittimeError, headers: http.Headers) -> None:
    """Answer with an error."""
    told = error_at_once(path, error, headers)
    await send({"type": "http.response.start", "status": told.status, "headers": told.headers})
    await send({"type": "http.response.body", "body": told.body, "more_body": False})


class ForwardedBody(msgspec.Struct):
    """The fields that the gateway needs; all others are passed on unread."""

    model: msgspec.Raw
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    prompt: msgspec.Raw = msgspec.Raw(NULL)
    previous_response_id: str | None = None
    background: bool | None = None
    conversation: msgspec.Raw = msgspec.Raw(NULL)
    request_id: msgspec.Raw = msgspec.Raw(NULL)
    input: msgspec.Raw = msgspec.Raw(NULL)
    documents: msgspec.Raw = msgspec.Raw(NULL)
    text_1: msgspec.Raw = msgspec.Raw(NULL)
    text_2: msgspec.Raw = msgspec.Raw(NULL)


class InputItem(msgspec.Struct):
    """What tells which kind of item it is; whatever else it has is the upstream's to judge."""

    type: Any = None
    role: Any = None


_ITEMS = msgspec.json.Decoder(
    Annotated[list[InputItem | str | int | float | bool | list[Any] | None], msgspec.Meta(max_length=MAX_PARTS)]
)

_PIECES = msgspec.json.Decoder(list[msgspec.Raw])
_NUMBERS = re.compile(rb"\[\s*[-0-9]")  # begins a list of token ids


class ForwardedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to be passed on. prompt_tokens: an estimate. output_tokens: the most that its answers may have, all
    of them, as it says (is_bounded) or as they are taken to have. expected_tokens: those that they will have.
    model_at, model_bytes: where the model's name lies in the body, and how long it is there.
    decision, pool: what the rules said, and whose line it waits in (`routing.policy`). previous_id: of the response
    that it goes on from; "" for none. reference: the first item of its input that only names one which an upstream
    keeps, as `input[0]`; "" for none. answers: how many it asks for, texts that are embedded or ranked too."""

    path: str
    model: str
    model_at: int
    model_bytes: int
    is_stream: bool
    body: bytes
    prompt_tokens: int
    output_tokens: int
    expected_tokens: int
    answers: int = 1
    is_bounded: bool = False
    decision: RouteDecision | None = None
    pool: str = ""
    previous_id: str = ""
    reference: str = ""

    @property
    def endpoint(self) -> str:
        return ENDPOINTS[self.path].name

    @property
    def has_choices(self) -> bool:
        """Returns whether it is a chat or a completion."""
        return self.path in WITH_CHOICES

    @property
    def is_written(self) -> bool:
        """Returns whether its answer is written by a model, token by token."""
        return bool(ENDPOINTS[self.path].most)

    @property
    def places(self) -> int:
        """Returns how many it takes at an upstream: one for each answer that is written. Texts that are embedded or
        ranked are computed together, and take one."""
        return self.answers if self.is_written else 1

    @property
    def most_bytes(self) -> int:
        """Returns about how long a whole answer to it may be: a token has up to twenty log-probabilities."""
        return self.output_tokens * MOST_TOKEN_BYTES if self.is_written else self.answers * MOST_VECTOR_BYTES

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.expected_tokens


def forwarded(path: str, body: bytes, assumed_max_tokens: int) -> ForwardedRequest:
    """Returns what is passed on to an upstream. Raises `RequestError` for a body that is none."""
    try:
        told = decode_once(body, ForwardedBody)
        model = _name_of(told.model)
        reference = _reference(told.input) if path == RESPONSES else ""
    except msgspec.ValidationError as error:
        raise RequestError(f"the body: {error}", code="invalid_type") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if path == RESPONSES:
        _refuse_not_passed_on(told)
    answers, bound = _answers(path, told), _bound(path, told)
    assumed = assumed_max_tokens if ENDPOINTS[path].most else 0
    output_tokens = min(MOST_TOKENS, answers * (assumed if bound is None else bound))
    return ForwardedRequest(
        path=path,
        model=model,
        model_at=_address(told.model) - _address(body),
        model_bytes=len(memoryview(told.model)),
        is_stream=bool(told.stream and ENDPOINTS[path].most),
        body=body,
        prompt_tokens=ceil(len(body) / BYTES_PER_TOKEN),
        output_tokens=output_tokens,
        expected_tokens=min(output_tokens, answers * assumed),
        answers=answers,
        is_bounded=bound is not None,
        previous_id=(told.previous_response_id or "") if path == RESPONSES else "",
        reference=reference,
    )


def _reference(told: msgspec.Raw) -> str:
    """Returns where the input names an item instead of having it. One without type and role is a reference too. Raises
    `ValidationError` where that cannot be told: of more items than can be looked at, and of numbers out of range."""
    if memoryview(told)[:1] != b"[" or b"{" not in bytes(told):
        return ""
    try:
        items = _ITEMS.decode(told)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"input: {error}") from None
    named = (at for at, one in enumerate(items) if isinstance(one, InputItem) and _is_reference(one))
    return next((f"input[{at}]" for at in named), "")


def _is_reference(item: InputItem) -> bool:
    return item.type == ITEM_REFERENCE or (item.type is None and item.role is None)


def _bound(path: str, told: ForwardedBody) -> int | None:
    """Returns the most tokens that one answer may have; None where that is not said (-1: all that there is room for).
    Where several fields say it the largest counts: an older server knows only one of them."""
    said = [one for name in ENDPOINTS[path].most if (one := getattr(told, name)) is not None]
    return max(said) if said and min(said) >= 0 else None


def _answers(path: str, told: ForwardedBody) -> int:
    """Returns how many answers it asks for, as a server counts them: so many of each prompt, whether all are given or
    only the best; one of each text that is embedded or ranked."""
    texts = max((_texts(getattr(told, name)) for name in WITH_TEXTS.get(path, ())), default=1)
    of_each = max(told.n or 1, told.best_of or 1, 1) if path in WITH_CHOICES else 1
    return min(of_each * texts, MAX_ANSWERS)


def _texts(told: msgspec.Raw) -> int:
    """Returns how many texts stand there: one, unless it is a list of texts or of lists of token ids."""
    if memoryview(told)[:1] != b"[" or _NUMBERS.match(told):
        return 1
    return max(1, len(_PIECES.decode(told)))


def _refuse_not_passed_on(told: ForwardedBody) -> None:
    """Raises `RequestError` for a field of a response that could not be kept to."""
    named = {name: bytes(getattr(told, name)) != NULL for name in ("conversation", "request_id")}
    given = {"background": bool(told.background), **named}
    for name in (name for name, is_given in given.items() if is_given):
        message, hint = f"{name}: not passed on: {NOT_PASSED_ON[name]}", "leave it out; previous_response_id goes on"
        raise RequestError(message, code="unsupported_field", param=name, hint=hint)


def with_model(request: ForwardedRequest, model: str) -> ForwardedRequest:
    """Returns the request with another model's name in its body, which is otherwise the same byte for byte."""
    end = request.model_at + request.model_bytes
    name = msgspec.json.encode(model)
    body = request.body[: request.model_at] + name + request.body[end:]
    return msgspec.structs.replace(request, model=model, model_bytes=len(name), body=body)


def _name_of(piece: msgspec.Raw) -> str:
    try:
        return msgspec.json.decode(piece, type=str)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"{error} - at `$.model`") from None


def _address(piece: msgspec.Raw | bytes) -> int:
    """Returns where these bytes lie in memory: a piece of a body is a view of it, no copy."""
    return int(np.frombuffer(piece, np.uint8).__array_interface__["data"][0])
