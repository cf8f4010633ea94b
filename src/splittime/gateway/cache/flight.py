"""An answer that is under way: what the upstream sends is kept for the cache, and given to others who ask for the same.

The request that asked the upstream leads; each other follows, from the first byte on, at its own pace. When the
leader's client goes away and somebody follows, the upstream goes on, and the leader's request is over when the answer
is; when the last follower goes too, the upstream is cancelled. Bounded: an answer longer than `max_bytes` is not kept,
nobody joins it any more, and who followed it ends with an error.

A leader whose client reads slowly holds its followers back, as it does an upstream, until it is dropped
(`slow_reader_s`).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from splittime.core.errors import UpstreamError
from splittime.web import http

now_ns = time.monotonic_ns
OWN_HEADERS = frozenset({b"x-request-id", b"server-timing", b"x-cache", b"age", b"x-cache-entry"})


class Flight:
    """raw: instants and bytes of the answer so far. is_over: nothing more comes. max_bytes: of the answer."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._changed: asyncio.Future[None] | None = None
        self._cancel: Callable[[], object] | None = None  # of the leader's work, once its client has gone
        self.begun_ns = now_ns()
        self.status = 0
        self.headers: http.Headers = []
        self.raw: list[tuple[int, bytes]] = []
        self.num_followers = 0
        self.is_whole = self.is_over = self.is_too_long = False

    @property
    def may_be_joined(self) -> bool:
        return not self.is_too_long and not (self.is_over and not self.is_whole)

    # ---- the leader's side

    def tee(self, send: http.Send) -> http.Send:
        """Returns a `send` that keeps what it is given, and passes it on while there is a client."""

        async def both(message: http.Message) -> None:
            self._keep(message)
            if self._cancel is None:
                await send(message)

        return both

    def goes_on(self, cancel: Callable[[], object]) -> bool:
        """The leader's client has gone. Returns whether the upstream goes on for followers, until `cancel` is
        called."""
        if self.num_followers:
            self._cancel = cancel
        else:
            self._end()
        return bool(self.num_followers)

    def close(self) -> None:
        """The leader is gone: what is not whole now never will be."""
        self._end()

    def _keep(self, message: http.Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message["headers"])
        elif not self.is_over and not self.is_too_long:
            self._keep_piece(message)
        self._wake()

    def _keep_piece(self, message: http.Message) -> None:
        piece: bytes = message["body"]
        self._size += len(piece)
        if self._size > self._max_bytes:
            self.is_too_long = True
            self.raw = []
        elif piece:
            self.raw.append((now_ns(), piece))
        if not message.get("more_body"):
            self.is_whole = not self.is_too_long
            self._end()

    def _end(self) -> None:
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._changed = None

    # ---- the followers' side

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the answer's pieces from its first, as they come; the first is b"", with the head of the answer.

        Raises `UpstreamError` if it has no end, or is too long to be shared."""
        self.num_followers += 1
        try:
            async for piece in self._followed():
                yield piece
        finally:
            self.num_followers -= 1
            if not self.num_followers and self._cancel is not None and not self.is_over:
                self._cancel()

    async def _followed(self) -> AsyncIterator[bytes]:
        has_head, at = False, 0
        while True:
            if self.is_too_long:
                raise _failure(f"the shared answer has more than {self._max_bytes} bytes", "shared_answer_too_long")
            if self.status and not has_head and (self.raw or self.is_whole):
                has_head = True
                yield b""
            while at < len(self.raw):
                at += 1
                yield self.raw[at - 1][1]
            if self.is_whole and at >= len(self.raw):
                return
            if self.is_over:
                raise _failure("the answer that it shared broke off", "shared_answer_died")
            await self._change()

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    def shared_headers(self) -> http.Headers:
        """Returns the answer's headers without those that are the leader's own."""
        return [(name, value) for name, value in self.headers if name not in OWN_HEADERS]


def _failure(words: str, code: str) -> UpstreamError:
    return UpstreamError(words, code=code, hint="ask again, or with Cache-Control: no-cache")
