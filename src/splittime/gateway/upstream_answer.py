"""One answer of an upstream, as it is read: what has come of it, and the waits for what comes next.

What the client has not taken is read up to `MAX_UNREAD_BYTES` and the end of that read, which may bring 256 KiB; then
TCP tells the upstream.
"""

import asyncio
from copy import copy
from typing import Protocol

MAX_UNREAD_BYTES = 64 * 1024


class AnswerSource(Protocol):
    """The connection that an answer comes from."""

    def pause(self) -> None:
        """Read no more for now."""

    def resume(self, answer: "UpstreamAnswer | None") -> None:
        """Read on, if this is the answer that is being read."""

    def cut(self) -> None:
        """End the connection: nobody reads the rest."""


class UpstreamAnswer:
    """One answer, as it is read. status, headers: known once `piece` has returned; names in lower case, the first of
    each name counts. is_given_up: nobody wants it any more."""

    def __init__(self, connection: AnswerSource) -> None:
        self.status, self.headers = 0, dict[bytes, bytes]()
        self._connection = connection
        self.is_given_up = False
        self._pieces: list[bytes] = []
        self._num_unread = 0
        self._is_whole = False
        self._error: OSError | ValueError | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._until_s = 0.0  # of the loop's clock: when the wait has lasted too long

    @property
    def content_type(self) -> str:
        return self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")

    async def piece(self, within_s: float) -> bytes:
        """Returns all that has been read and not returned yet, as soon as there is any; b"" at the end. Raises
        `TimeoutError`, `OSError` for a connection that broke off, `ValueError` for what is not HTTP."""
        if not (self._pieces or self._is_whole or self._error):
            await self._wait(within_s)
        if self._pieces:
            return self._taken()
        if self._error is not None:
            raise copy(self._error)  # whose frames have this answer
        return b""

    def close(self) -> None:
        """Nobody reads on: a connection in the middle of an answer is cut."""
        self.is_given_up = True
        self._stop()
        if not self._is_whole:
            self._connection.cut()

    def _taken(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        if self._num_unread > MAX_UNREAD_BYTES:
            self._connection.resume(self)
        self._num_unread = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _wait(self, within_s: float) -> None:
        self._until_s = self._loop.time() + within_s
        if self._watch is None or self._watch.when() > self._until_s:
            self._stop()
            self._watch = self._loop.call_later(within_s, self._look)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _look(self) -> None:
        """The timer of an earlier wait, which later ones leave as it is."""
        self._watch = None
        if self._waiter is None or self._waiter.done():
            return
        left_s = self._until_s - self._loop.time()
        if left_s > 0:
            self._watch = self._loop.call_later(left_s, self._look)
        else:
            self._waiter.set_exception(TimeoutError())

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    # ---- what its connection tells

    def come_from(self, connection: AnswerSource) -> None:
        """Take note that it is asked for again, over another connection; nothing of it was there."""
        self._connection = connection

    def begin(self, status: int) -> None:
        """Takes note that the head is there, for which `piece` does not wait."""
        self.status = status

    def feed(self, piece: bytes) -> None:
        self._pieces.append(piece)
        before, self._num_unread = self._num_unread, self._num_unread + len(piece)
        if before <= MAX_UNREAD_BYTES < self._num_unread:
            self._connection.pause()
        self._wake()

    def end(self, error: OSError | ValueError | None = None) -> None:
        """Takes note that it is whole, or, with an error, that nothing more of it comes. The connection of one that is
        whole may be another's by now."""
        if self._is_whole:
            return
        self._is_whole, self._error = error is None, error
        self._stop()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
