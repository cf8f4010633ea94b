"""Giving a client an answer that no upstream is asked for by its own request: one that is kept, or another's.

`KeptGiving` and `SharedGiving` look to the visit like a relay: how far the answer got, and what it said.
"""

import asyncio
import time
from collections.abc import Callable

from splittime.core.errors import DeadlineExceeded
from splittime.gateway.answer_events import AnswerEvents
from splittime.gateway.cache.flight import Flight
from splittime.gateway.cache.kept import DONE, KeptAnswer
from splittime.gateway.decoded_answer import PassedAnswer
from splittime.gateway.request_account import RequestAccount
from splittime.ledger.stages import Cause, Stage
from splittime.web import http

now_ns = time.monotonic_ns


class Giving:
    """What both share. headers: asked for when the answer begins.

    first_byte_ns: None, since no upstream was asked, and no tokens of one are charged.
    """

    first_byte_ns: int | None = None
    blocked_ns = 0

    def __init__(self, send: http.Send, account: RequestAccount, headers: Callable[[], http.Headers]) -> None:
        self._send, self._account, self._headers = send, account, headers
        self.events = AnswerEvents()
        self.status: int | None = None
        self.ended_ns: int | None = None
        self.has_begun = self.is_answered = False

    async def run(self) -> None:
        """Give it, in time. Raises `DeadlineExceeded`, or why there is no whole answer."""
        deadline_ns = self._account.deadline_ns
        left_s = None if deadline_ns is None else max(0.0, (deadline_ns - now_ns()) / 1e9)
        try:
            async with asyncio.timeout(left_s):
                await self._give()
        except TimeoutError:
            raise DeadlineExceeded.before("its answer was complete") from None

    async def _give(self) -> None:
        raise NotImplementedError

    async def give_answer(self, answer: PassedAnswer) -> None:
        """Give a whole answer, as a relay does that has one of an upstream that failed."""
        await self._begin(answer.status, [*answer.headers, (b"content-length", b"%d" % len(answer.body))])
        await self._piece(answer.body)
        await self._end()

    async def _begin(self, status: int, headers: http.Headers) -> None:
        self.has_begun, self.status = True, status
        sent = [*headers, *self._headers()]
        await self._send({"type": "http.response.start", "status": status, "headers": sent})

    async def _piece(self, data: bytes) -> None:
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _end(self) -> None:
        self.is_answered = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        self.ended_ns = now_ns()


class KeptGiving(Giving):
    """A kept answer, given again: a stream as a stream. pace: 1.0 for events as far apart as they came, 0.0 for all at
    once. answer_id: what its `id` is this time.
    """

    def __init__(
        self,
        answer: KeptAnswer,
        answer_id: str,
        pace: float,
        send: http.Send,
        account: RequestAccount,
        headers: Callable[[], http.Headers],
    ) -> None:
        super().__init__(send, account, headers)
        self._answer, self._pace = answer, pace
        self._mark, self._id = answer.mark.encode(), answer_id.encode()

    async def _give(self) -> None:
        if self._answer.is_stream:
            await self._give_stream()
        else:
            self._account.enter(Stage.DELIVER, now_ns())
            body = self._with_id(self._answer.pieces[0].data)
            self.events.take_whole(body)
            await self.give_answer(PassedAnswer(200, [_content_type(self._answer)], body))

    async def _give_stream(self) -> None:
        await self._begin(200, [_content_type(self._answer), (b"cache-control", b"no-store")])
        begin_ns = now_ns()
        self._account.enter(Stage.CACHE, begin_ns, Cause.REPLAY_PACE if self._pace else None)
        for piece in self._answer.pieces:
            wait_ns = begin_ns + int(piece.after_ns * self._pace) - now_ns()
            if self._pace and wait_ns > 0:
                await asyncio.sleep(wait_ns / 1e9)
            if piece.data == DONE:
                self._account.enter(Stage.DELIVER, now_ns())
            event = b"data: " + (piece.data if piece.data == DONE else self._with_id(piece.data)) + b"\n\n"
            self.events.feed(event)
            await self._piece(event)
        await self._end()

    def _with_id(self, data: bytes) -> bytes:
        return data.replace(self._mark, self._id)


class SharedGiving(Giving):
    """Another request's answer, given as it comes."""

    def __init__(
        self, flight: Flight, send: http.Send, account: RequestAccount, headers: Callable[[], http.Headers]
    ) -> None:
        super().__init__(send, account, headers)
        self._flight = flight

    async def _give(self) -> None:
        pieces = self._flight.pieces()
        try:
            async for piece in pieces:
                if not self.has_begun:
                    await self._begin(self._flight.status, self._flight.shared_headers())
                self._read(piece)
                await self._piece(piece)
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]
        if not self._is_stream:
            self.events.take_whole(b"".join(piece for _, piece in self._flight.raw))
        self._account.enter(Stage.DELIVER, now_ns())
        await self._end()

    @property
    def _is_stream(self) -> bool:
        return dict(self._flight.headers).get(b"content-type", b"").startswith(b"text/event-stream")

    def _read(self, piece: bytes) -> None:
        if self._is_stream and piece:
            self.events.feed(piece)


def _content_type(answer: KeptAnswer) -> tuple[bytes, bytes]:
    return b"content-type", answer.content_type.encode("latin-1")
