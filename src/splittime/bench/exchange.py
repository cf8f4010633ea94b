"""What becomes of one request on the wire, and how it ended.

Every instant is taken where it happens: in `connection`'s callbacks. What ended a request is told apart here and only
here (`Ending`): whole; hung up as planned; refused (a status of 400 or more, its message kept); failed (no connection,
a connection broken off, an answer that is no event stream, an error inside the stream, a stream that stops without
saying that it is done); out of time.
"""

import asyncio
from collections.abc import Callable

from splittime.bench.book.records import Ending
from splittime.present.terminal import clipped
from splittime.wire.sse import MAX_EVENT_BYTES, AnswerReader, EventLines, body_text

MAX_ERROR_BODY_BYTES = 64 * 1024
MAX_CHUNKS = 2**20


class TimedExchange:
    """`ended` is done once the end is known. on_first: told when the first chunk with content was read.
    after_reading: called after each piece of an answer that goes on."""

    def __init__(self, on_first: Callable[[int], None] | None = None) -> None:
        self.reading = AnswerReader()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ending: Ending | None = None
        self.error: str | None = None
        self.sent_ns: int | None = None
        self.headers_ns: int | None = None
        self.end_ns: int | None = None
        self.status: int | None = None
        self.is_over_on_the_wire = False  # the connection told the end itself: whole, or lost
        self._lines = EventLines()
        self._on_first = on_first
        self.after_reading: Callable[[], None] | None = None
        self._is_stream = False
        self._content_type = ""
        self._error_body = bytearray()

    @property
    def has_begun(self) -> bool:
        """Something of an answer was read."""
        return self.headers_ns is not None

    def on_sent(self, at_ns: int) -> None:
        if self.sent_ns is None:
            self.sent_ns = at_ns

    def on_headers(self, status: int, content_type: str, at_ns: int) -> None:
        self.status, self.headers_ns, self._content_type = status, at_ns, content_type
        self._is_stream = status < 300 and content_type.lower().startswith("text/event-stream")

    def on_body(self, piece: bytes, at_ns: int) -> None:
        if not self._is_stream:
            self._error_body += piece[: MAX_ERROR_BODY_BYTES - len(self._error_body)]
            return
        for data in self._lines.feed(piece):
            self.reading.take(data, at_ns)
        if self._lines.is_too_long:
            what = f"an event of the stream is longer than {MAX_EVENT_BYTES:,} bytes"
            self.finish(Ending.FAILED, what, at_ns)
            return
        if len(self.reading.chunk_ns) > MAX_CHUNKS:
            self.finish(Ending.FAILED, f"the stream has more than {MAX_CHUNKS:,} chunks", at_ns)
            return
        if self._on_first is not None and self.reading.chunk_ns:
            self._on_first(at_ns)
            self._on_first = None
        if self.after_reading is not None and self.ending is None:
            self.after_reading()

    def on_end(self, at_ns: int) -> None:
        self.is_over_on_the_wire = True
        self.finish(*self._judge(), at_ns)

    def on_lost(self, error: Exception | None, at_ns: int) -> None:
        self.is_over_on_the_wire = True
        if self.reading.is_done and self.reading.error is None:
            self.finish(Ending.COMPLETE, None, at_ns)
            return
        why = f": {error}" if error is not None else " by the server"
        after = f"after {len(self.reading.chunk_ns)} chunks" if self.has_begun else "before an answer"
        self.finish(Ending.FAILED, f"the connection was closed {after}{why}", at_ns)

    def finish(self, ending: Ending, error: str | None, at_ns: int) -> None:
        """The first end is the end."""
        if self.ending is None:
            self.ending, self.error, self.end_ns = ending, error, at_ns
            self.ended.set_result(None)

    def _judge(self) -> tuple[Ending, str | None]:
        """What an answer is whose HTTP message is whole."""
        reading, status = self.reading, self.status or 0
        if status >= 400:
            return Ending.REFUSED, body_text(bytes(self._error_body)) or f"status {status}"
        if not self._is_stream:
            what = body_text(bytes(self._error_body))
            return Ending.FAILED, clipped(f"no event stream but status {status}, {self._content_type or '-'}: {what}")
        if reading.error is not None:
            return Ending.FAILED, reading.error
        if reading.is_done or reading.finish_reason is not None:  # some servers never say [DONE]
            return Ending.COMPLETE, None
        return Ending.FAILED, f"the stream ended after {len(reading.chunk_ns)} chunks without [DONE]"
