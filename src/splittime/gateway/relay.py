"""One attempt: a request goes to one upstream, and its answer comes back to the client, piece by piece as it is read.

    connect and first byte in `first_byte_s` -> pieces, at most `between_s` apart -> the end, all before the deadline

Until the first byte has gone to the client a failure is an `UpstreamFailure`, and another attempt may be made. After it
the stream goes on at another upstream where that is configured and possible (`Interrupted`), or ends with an error
event and without `[DONE]` (`BrokenStream`): the tokens before it stay true, and nobody takes half an answer for a whole
one. A stream that ends without `[DONE]` has broken off, however politely.
An answer that is no stream is given to the client when all of it is there, so one that breaks off is an error, not half
a body.

Nothing is buffered beyond the event that is not yet whole: while the client does not take a piece the next is not read,
and TCP tells the upstream.
"""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from splittime.core.errors import DeadlineExceeded, SplittimeError, UpstreamError
from splittime.gateway.answer_events import WholeEvents, ignored
from splittime.gateway.degrade.lesser import MarkedAnswer
from splittime.gateway.endpoints import error_event
from splittime.gateway.failures import BrokenStream, Interrupted, PassedAnswer, UpstreamFailure, failure_of
from splittime.gateway.judged import is_for_client, judged
from splittime.gateway.resume.resumption import BREAKS, Resumption
from splittime.gateway.sent_request import NoConnection
from splittime.gateway.typed_events import events_of
from splittime.gateway.upstream_connections import UpstreamAnswer, UpstreamConnections
from splittime.gateway.upstreams import Upstream
from splittime.web import http
from splittime.wire.sse import body_text

now_ns = time.monotonic_ns
CLIENT_WAIT_NS = 1_000_000  # a send that blocks longer than this is the client's doing, as in `api.choice`
CLOSING_S = 1.0  # for an upstream to end an answer after its last event
EVENT_STREAM = "text/event-stream"
PASSED_ON = (b"content-type", b"content-encoding", b"retry-after", b"x-splittime-notice")
BROKEN = (OSError, ValueError)


class Deadline(NamedTuple):
    """The instant at which a request is given up. is_clients: its client said so, else the config."""

    at_ns: int
    is_clients: bool

    def within(self, seconds: float) -> tuple[float, bool]:
        """Returns how long something may take that may take so long at most, and whether the deadline says so. An event
        loop's timers are a millisecond coarse: what has run out is not asked of a clock afterwards."""
        left_s = max(0.0, (self.at_ns - now_ns()) / 1e9)
        return (left_s, True) if left_s <= seconds else (seconds, False)


class Relay:
    """headers: those of the request to the upstream. answer_headers: asked for when an answer begins, with ours.

    on_read: called when the end of the answer has been read, and not yet given to the client; on_first_byte: its first.
    blocked_ns: how long the client did not take what was there. ended_ns: when the system had taken the end.
    has_begun: the client has the head of an answer; has_given: and something of it; is_answered: and all of it.
    resumed_by, resumed_after: how it goes on with another's stream, and after how many tokens; "" and 0 for a first.
    mark: what the answer says of itself if it is a lesser one.
    is_refused: an answer has begun that says "try another" or is a fault, which the client is not given.
    """

    def __init__(
        self,
        connections: UpstreamConnections,
        upstream: Upstream,
        headers: dict[str, str],
        deadline: Deadline,
        resumption: Resumption,
        *,
        max_answer_bytes: int,
        send: http.Send,
        answer_headers: Callable[[], http.Headers],
        on_read: Callable[["Relay"], None],
        mark: MarkedAnswer,
        has_begun: bool = False,
    ) -> None:
        self._connections, self._upstream, self._headers = connections, upstream, headers
        self._resumption = resumption
        self.resumed_by, self.resumed_after = resumption.resumed_by, resumption.resumed_after
        self._request, recorder = resumption.attempt(upstream)
        self._editor, self._mark = recorder or WholeEvents(), mark
        self._deadline, self._max_answer_bytes = deadline, max_answer_bytes
        self._send, self._answer_headers, self._on_read = send, answer_headers, on_read
        self.events = events_of(self.path)
        self.status: int | None = None
        self.first_byte_ns: int | None = None
        self.on_first_byte: Callable[[], None] = ignored
        self.blocked_ns, self.is_answered = 0, False
        self.ended_ns: int | None = None
        self.has_begun, self.has_given = has_begun or resumption.is_continuing, resumption.is_continuing
        self._opened: tuple[UpstreamAnswer, bytes] | None = None

    async def open(self) -> None:
        """Returns when the first byte of an answer is there: for who waits to see whether it comes. Raises
        `UpstreamFailure`."""
        self._opened = await self._open()

    @property
    def path(self) -> str:
        return self._request.path

    @property
    def model(self) -> str:
        return self._request.model

    @property
    def is_refused(self) -> bool:
        return self.status is not None and not is_for_client(self.status)

    def tell_nobody(self) -> None:
        """Let go of those whom it told, as it is over: no circle is left for the garbage collector."""
        self.on_first_byte, self.events.on_id = ignored, ignored

    def close(self) -> None:
        """Nobody wants the answer that has begun."""
        if self._opened is not None:
            self._opened[0].close()

    async def run(self) -> None:
        """Returns when the client has the whole answer. Raises `UpstreamFailure` or `BrokenStream`."""
        response, first = self._opened or await self._open()
        try:
            if response.status == 200 and response.content_type == EVENT_STREAM:
                await self._stream(response, first)
            else:
                await self._whole(response, first)
        finally:
            response.close()

    # ---- the upstream

    async def _open(self) -> tuple[UpstreamAnswer, bytes]:
        """Returns the answer, whose head is there, and its first piece, b"" if it has no body."""
        config, request, begin_ns = self._upstream.config, self._request, now_ns()
        limit_s, is_deadline = self._deadline.within(config.first_byte_s)
        response: UpstreamAnswer | None = None
        try:
            response = await self._connections.ask(
                "POST",
                self._upstream.address,
                self.path,
                self._headers,
                request.body,
                connect_s=min(config.connect_s, limit_s),
            )
            first = await response.piece(max(0.0, limit_s - (now_ns() - begin_ns) / 1e9))
            self.status = response.status
        except BaseException as error:
            if response is not None:
                response.close()
            raise self._not_begun(error, limit_s, is_deadline) from error
        self.first_byte_ns = now_ns()
        self.on_first_byte()
        return response, first

    def _not_begun(self, error: BaseException, limit_s: float, is_deadline: bool) -> BaseException:
        name, config = self._upstream.name, self._upstream.config
        if isinstance(error, NoConnection):
            if not error.is_too_late:
                return failure_of(f"no connection to upstream {name!r}", "upstream_unreachable", 502)
            if config.connect_s < limit_s:
                words = f"no connection to upstream {name!r} within {config.connect_s:g} s"
                return failure_of(words, "upstream_connect_timeout", 504)
        if isinstance(error, NoConnection | TimeoutError):
            if is_deadline:
                return UpstreamFailure(self._too_late(), is_fault=False)
            words = f"no byte of an answer from upstream {name!r} within {config.first_byte_s:g} s"
            return failure_of(words, "upstream_first_byte_timeout", 504)
        if isinstance(error, BROKEN):
            return failure_of(f"upstream {name!r} broke off before its answer", "upstream_broke_off", 502)
        return error

    def _too_late(self) -> SplittimeError:
        if self._deadline.is_clients:
            return DeadlineExceeded.before("its answer was complete")
        total_s = self._upstream.config.total_s
        message = f"the answer took longer than {total_s:g} s (total_s of upstream {self._upstream.name!r})"
        return UpstreamError(message, code="upstream_total_timeout", status=504, limit=total_s)

    async def _next(self, response: UpstreamAnswer) -> bytes:
        """Returns the next piece, b"" at the end. Raises `BrokenStream`, told to nobody yet."""
        name, between_s = self._upstream.name, self._upstream.config.between_s
        limit_s, is_deadline = self._deadline.within(between_s)
        try:
            return await response.piece(limit_s)
        except TimeoutError:
            if is_deadline:
                raise BrokenStream(self._too_late(), is_fault=False) from None
            words = f"upstream {name!r} sent nothing for {between_s:g} s"
            raise BrokenStream(UpstreamError(words, code="upstream_stalled", status=504)) from None
        except BROKEN as error:
            raise self._died() from error

    def _died(self) -> BrokenStream:
        words = f"upstream {self._upstream.name!r} broke off in the middle of its answer"
        return BrokenStream(UpstreamError(words, code="upstream_died"))

    # ---- a stream

    async def _stream(self, response: UpstreamAnswer, piece: bytes) -> None:
        self._upstream.breaker.note_begun()
        try:
            while piece:
                if await self._pass_on(response, piece):
                    return
                piece = await self._next(response)
            raise self._died()
        except BrokenStream as broken:
            await self._break_off(broken)

    async def _break_off(self, broken: BrokenStream) -> None:
        """Raises what it comes to; a stream that nobody goes on with is told its end first."""
        error, code = broken.error, broken.error.info.code
        if not self.has_given:
            is_retryable = code in BREAKS
            raise UpstreamFailure(error, is_retryable=is_retryable, is_fault=broken.is_fault) from broken
        if self._resumption.may_go_on(code):
            raise Interrupted(error, is_retryable=True, is_fault=broken.is_fault) from broken
        if code in BREAKS and self._resumption.reason:
            words = f"{error.info.message}; it does not go on at another: {self._resumption.reason}"
            broken = BrokenStream(UpstreamError(words, code=code, status=error.info.status), is_fault=broken.is_fault)
        self._on_read(self)
        await self._give(error_event(self.path, broken.error.info))
        await self._end()
        raise broken

    async def _pass_on(self, response: UpstreamAnswer, piece: bytes) -> bool:
        """Give a piece of a stream to the client. Returns whether it was the last."""
        piece = self._mark.in_events(self._editor.edit(piece))
        self.events.feed(piece)
        if self._editor.is_too_long:
            words = f"upstream {self._upstream.name!r} sent an event without an end"
            raise BrokenStream(UpstreamError(words, code="upstream_bad_answer"))
        if self.events.is_done:
            self._on_read(self)
        if piece:
            await self._begin(response)
            await self._give(piece)
        if self.events.is_done:
            await self._end()
            await self._drain(response)
        return self.events.is_done

    async def _begin(self, response: UpstreamAnswer) -> None:
        self.has_given = True
        if not self.has_begun:
            self.has_begun = True
            headers = [*_passed_on(response), *self._answer_headers(), (b"cache-control", b"no-store")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _give(self, piece: bytes) -> None:
        begin_ns = now_ns()
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        lasted_ns = now_ns() - begin_ns
        self.blocked_ns += lasted_ns if lasted_ns > CLIENT_WAIT_NS else 0

    async def _end(self) -> None:
        self.is_answered = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        self.ended_ns = now_ns()

    async def _drain(self, response: UpstreamAnswer) -> None:
        """Read the end behind the last event, so that the connection can be used again; what else comes is dropped."""
        try:
            async with asyncio.timeout(CLOSING_S):
                while await response.piece(CLOSING_S):
                    pass
        except (TimeoutError, *BROKEN):
            pass  # the client has its answer; the connection is closed

    # ---- an answer that is no stream

    async def _whole(self, response: UpstreamAnswer, first: bytes) -> None:
        body = await self._read(response, first)
        answer = PassedAnswer(response.status, _passed_on(response), body)
        failure = judged(self._upstream.name, self._request, answer)
        self.events.take_whole(body)
        edited = answer if failure is not None else answer._replace(body=self._editor.edit_whole(body))
        if failure is None and self.has_begun:
            words = f"upstream {self._upstream.name!r} answered {answer.status} and no stream: {body_text(answer.body)}"
            failure = UpstreamFailure(UpstreamError(words, code=f"upstream_{answer.status}"), is_fault=False)
        if failure is not None:
            raise failure
        self._on_read(self)
        await self.give_answer(edited)

    async def give_answer(self, answer: PassedAnswer) -> None:
        """Give a whole answer to the client; returns when the system has taken it."""
        self.has_begun = True
        is_plain = 200 <= answer.status < 300 and b"content-encoding" not in dict(answer.headers)
        body = self._mark.in_body(answer.body) if is_plain else answer.body
        headers = [*answer.headers, *self._answer_headers(), (b"content-length", b"%d" % len(body))]
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})
        if body:
            await self._give(body)
        await self._end()

    async def _read(self, response: UpstreamAnswer, piece: bytes) -> bytes:
        pieces, size = [], 0
        try:
            while piece:
                pieces.append(piece)
                size += len(piece)
                if size > self._max_answer_bytes:
                    words = f"upstream {self._upstream.name!r} answered more than {self._max_answer_bytes} bytes"
                    raise BrokenStream(UpstreamError(words, code="upstream_bad_answer", limit=self._max_answer_bytes))
                piece = await self._next(response)
        except BrokenStream as broken:
            raise UpstreamFailure(broken.error, is_fault=broken.is_fault) from broken
        return b"".join(pieces)


def _passed_on(response: UpstreamAnswer) -> http.Headers:
    return [(name, response.headers[name]) for name in PASSED_ON if name in response.headers]
