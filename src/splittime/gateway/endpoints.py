"""The paths that are passed on, and what differs among them: the fields that bound an answer, its id, and its errors.

Chats and completions answer with choices. What is built on those (the cache, streams that go on elsewhere, first
tokens that are looked at, template answers) is for these two alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from splittime.api import message_answers
from splittime.core.errors import ErrorInfo, SplittimeError, error_body
from splittime.web import http

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, COUNT_TOKENS = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
WITH_CHOICES = (CHAT, COMPLETIONS)
OF_ANTHROPIC = (MESSAGES, COUNT_TOKENS)


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
        told = message_answers.error(info.status, plain.removeprefix(b"data: ").rstrip())
    elif path == RESPONSES:
        named = {"type": "error", "code": info.code, "message": info.message, "param": info.param}
        told = msgspec.json.encode({**named, **error_body(info)})
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
    body = message_answers.error(told.status, told.body)
    sized = [(b"content-length", b"%d" % len(body)), *(one for one in told.headers if one[0] != b"content-length")]
    return told._replace(headers=sized, body=body)


async def respond_error(send: http.Send, path: str, error: SplittimeError, headers: http.Headers) -> None:
    """Answer with an error."""
    told = error_at_once(path, error, headers)
    await send({"type": "http.response.start", "status": told.status, "headers": told.headers})
    await send({"type": "http.response.body", "body": told.body, "more_body": False})
