"""How another API is served by a chat's `Visit`: its body becomes a chat's as it is read, and the chat's answer becomes
its own as it is sent. The account, the queue and every limit are those of a chat."""

from collections.abc import Awaitable, Callable
from typing import Any

from splittime.server.service import Service
from splittime.server.visit import GivenBody, Visit
from splittime.web import http
from splittime.web.reading import BodySender

ChatOf = Callable[[BodySender, bytes], Awaitable[GivenBody]]


class TranslatedVisit(Visit):
    """chat_of: makes a chat's body of this API's. Raises what the client must be told."""

    def __init__(
        self, service: Service, scope: http.Scope, receive: http.Receive, send: http.Send, chat_of: ChatOf
    ) -> None:
        super().__init__(service, "chat", scope, receive, send)
        self._chat_of = chat_of

    async def _given_by(self, sender: BodySender, body: bytes) -> GivenBody:
        return await self._chat_of(sender, body)


class TranslatedAnswer:
    """Sends a chat's answer as another API's. The head of a whole answer waits for its body, whose length it says.

    whole: makes of a status and a chat's body what is sent. stream: makes what translates the bytes of a stream. names:
    headers of the chat's answer that are sent under another name too."""

    def __init__(
        self,
        send: http.Send,
        whole: Callable[[int, bytes], bytes],
        stream: Callable[[], Callable[[bytes], bytes]],
        names: dict[bytes, bytes] | None = None,
    ) -> None:
        self._send, self._whole, self._stream, self._names = send, whole, stream, names or {}
        self._head: dict[str, Any] | None = None  # held back
        self._translate: Callable[[bytes], bytes] | None = None  # of a stream

    async def send(self, message: http.Message) -> None:
        if message["type"] == "http.response.start":
            await self._begin(dict(message))
        elif self._translate is not None:
            await self._send({**message, "body": self._translate(message.get("body", b""))})
        else:
            await self._send_whole(dict(message))

    async def _begin(self, head: dict[str, Any]) -> None:
        own = [(self._names[name], value) for name, value in head["headers"] if name in self._names]
        head["headers"] = [*head["headers"], *own]
        if not dict(head["headers"]).get(b"content-type", b"").startswith(b"text/event-stream"):
            self._head = head
            return
        self._translate = self._stream()
        await self._send(head)

    async def _send_whole(self, message: dict[str, Any]) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            message["body"] = self._whole(head["status"], message["body"])
            length = (b"content-length", b"%d" % len(message["body"]))
            head["headers"] = [*(each for each in head["headers"] if each[0] != b"content-length"), length]
            await self._send(head)
        await self._send(message)
