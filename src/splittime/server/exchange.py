"""One request and its answer, with a bound on what a client sends that nobody asked for.

Many answers are given before the request's body is there: routes that read none, refusals. To close such a connection
at once would reset it, and the reset would overtake the answer; to let it be would hold it for as long as the client
likes to send. So the answer goes out whole, and when the application has returned the rest of the body is read and
dropped, for `LINGER_S` and `LINGER_BYTES` at most. A client that is done by then keeps its connection; any other
loses it.
"""

import asyncio
import contextlib

from splittime.server.http import LINGER_BYTES, LINGER_S, TRANSPORT, Message, Receive, Scope, Send, header

LAST: Message = {"type": "http.response.body", "body": b"", "more_body": False}


class Exchange:
    """`receive` and `send` are for the application; `end` is called when it has returned."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        has_body = header(scope, b"transfer-encoding") is not None or header(scope, b"content-length") not in (
            None,
            "0",
        )
        self._is_read = not has_body
        self._is_open = False  # the answer is all there, and its end is kept back
        self.has_begun = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._is_read = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        self.has_begun = True
        if not self._is_read and message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_open = True
            message = {**message, "more_body": True}
        await self._send(message)

    async def end(self) -> None:
        if not self._is_open:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await self._drop_rest()
        await self._send(LAST)
        transport = self._scope.get("extensions", {}).get(TRANSPORT)
        if not self._is_read and transport is not None:
            transport.close()

    async def _drop_rest(self) -> None:
        num_bytes = 0
        while not self._is_read and num_bytes <= LINGER_BYTES:
            num_bytes += len((await self.receive()).get("body", b""))
