"""`POST /v1/messages` and `/v1/messages/count_tokens`, Anthropic's API: a chat's `Visit` between two translations, of
the body as it is read (`api.messages`) and of the answer as it is sent (`api.message_answers`). What the account says
of a chat, it says of a message."""

from typing import Any

from splittime.api import message_answers, messages
from splittime.api.decode import decode_body
from splittime.api.params import check_model, template_options
from splittime.api.tools import as_template_reads, tool_use_of
from splittime.core.errors import RequestError, SplittimeError
from splittime.server.routes_info import worked_on
from splittime.server.service import Service
from splittime.server.visit import Visit
from splittime.text.process import Render
from splittime.web import http


async def create(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers with a message, whole or streamed."""
    translated = AsMessage(send)
    await Visit(service, "chat", scope, AsChat(service, scope, receive), translated.send).serve()


async def count_tokens(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers with the tokens of the prompt that `create` would make of this body."""
    send = AsMessage(send).send
    try:
        model = service.require_model()
        _check_version(scope)
        body = await http.read_body_in_time(
            scope, receive, service.config.max_body_bytes, service.config.body_timeout_s
        )
        given = decode_body(body, messages.CountTokensBody, is_strict=service.config.strict)
        check_model(given.model, model)
        chat = messages.chat_of(given)
        tool_use = tool_use_of(chat, service.marks)
        options = template_options(chat) | ({} if tool_use is None else {"tools": tool_use.told})
        done = await worked_on(service, Render(as_template_reads(chat, service.marks), options), receive)
    except SplittimeError as error:
        await http.respond_error(send, error)
    else:
        await http.respond_json(send, {"input_tokens": len(done.ids[0])})


def _check_version(scope: http.Scope) -> None:
    """Clients send one; who sends none is taken to mean it."""
    given = http.header(scope, b"anthropic-version")
    if given is not None and given not in messages.VERSIONS:
        hint = f"send anthropic-version: {' or '.join(messages.VERSIONS)}"
        raise RequestError(
            f"anthropic-version {given[:64]} is not served", param="anthropic-version", value=given[:64], hint=hint
        )


class AsChat:
    """What a chat's visit receives: the message's body as a chat's, then what comes after it."""

    def __init__(self, service: Service, scope: http.Scope, receive: http.Receive) -> None:
        self._config, self._scope, self._receive = service.config, scope, receive
        self._is_read = False

    async def __call__(self) -> http.Message:
        if self._is_read:
            return await self._receive()
        self._is_read = True
        _check_version(self._scope)
        body = await http.read_body(self._scope, self._receive, self._config.max_body_bytes)
        given = decode_body(body, messages.MessagesBody, is_strict=self._config.strict)
        return {"type": "http.request", "body": messages.chat_body(given), "more_body": False}


class AsMessage:
    """Sends a chat's answer as a message's. The head of a whole answer waits for its body, whose length it says."""

    def __init__(self, send: http.Send) -> None:
        self._send = send
        self._head: dict[str, Any] | None = None  # held back
        self._events: message_answers.MessageEvents | None = None

    async def send(self, message: http.Message) -> None:
        if message["type"] == "http.response.start":
            await self._begin(dict(message))
        elif self._events is not None:
            await self._send({**message, "body": self._events.feed(message.get("body", b""))})
        else:
            await self._whole(dict(message))

    async def _begin(self, head: dict[str, Any]) -> None:
        names = dict(head["headers"])
        if (request_id := names.get(b"x-request-id")) is not None:
            head["headers"] = [*head["headers"], (b"request-id", request_id)]
        if not names.get(b"content-type", b"").startswith(b"text/event-stream"):
            self._head = head
            return
        self._events = message_answers.MessageEvents()
        await self._send(head)

    async def _whole(self, message: dict[str, Any]) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            message["body"] = self._translated(head["status"], message["body"])
            length = (b"content-length", b"%d" % len(message["body"]))
            others = [each for each in head["headers"] if each[0] != b"content-length"]
            head["headers"] = [*others, length]
            await self._send(head)
        await self._send(message)

    def _translated(self, status: int, body: bytes) -> bytes:
        if status != 200:
            return message_answers.error(status, body)
        return message_answers.message(body) if b'"choices":' in body else body
