"""One attempt: a request goes to one upstream, and its answer comes back to the client, piece by piece as it is read.

    connect and first byte in `first_byte_s` -> pieces, at most `between_s` apart -> the end, all before the deadline

Until a piece has gone to the client (not who speaks: that is held back) a failure is an `UpstreamFailure`, and another
attempt may be made. After it the stream goes on elsewhere where that is configured and possible (`Interrupted`), or
ends with an error event and without `[DONE]` (`BrokenStream`): what was told stays true, and nobody takes half an
answer for a whole one. One that ends cleanly after a finish reason is whole; its client gets a `[DONE]` left out.
What an answer is worth, `verdict` says: here its bytes are read and passed on.
An answer that is no stream is given to the client when all of it is there, so one that breaks off is an error, not half
a body.

Nothing is buffered beyond the event that is not yet whole: while the client does not take a piece the next is not read,
and TCP tells the upstream.

A stream has `first_byte_s` to its first byte and `between_s` between two pieces. An answer that is no stream has
`whole_answer_s` in all, as long as its upstream lives (`UpstreamPulse`): that its time is over says nothing against
the upstream, and nobody else is asked to write the same again.
"""

import re
import time
from collections.abc import Callable, Mapping

from splittime.gateway import verdict as verdicts
from splittime.gateway.answer_events import DONE, WholeEvents, events_of, ignored, readable
from splittime.gateway.breaks import BROKEN, AttemptBreaks, Deadline
from splittime.gateway.decoded_answer import EVENT_STREAM, Answer, KeyMask, PassedAnswer, begun, drain, is_stream
from splittime.gateway.degrade import MarkedAnswer
from splittime.gateway.forwarded import ForwardedRequest, error_event
from splittime.gateway.resume import BREAKS, Asked, Resumption
from splittime.gateway.upstream_connections import UpstreamAnswer, UpstreamConnections
from splittime.gateway.upstreams import SLO_HEADER, Upstream
from splittime.gateway.usage_asked import REFUSED, UsageAsked
from splittime.gateway.verdict import AttemptAsked, BrokenStream, UpstreamFailure, Whose, bad_answer
from splittime.web import http

now_ns = time.monotonic_ns
CLIENT_WAIT_NS = 1_000_000  # a send that blocks longer than this is the client's doing, as in `api.choice`
DONE_EVENT = b"data: %b\n\n" % DONE
BEGIN, EVENT_BEGINS = b"data:", re.compile(rb"^(?:data|error):", re.MULTILINE)


class UpstreamCall:
    """usage: what is asked of a stream's tokens beside the request, and taken out of the answer again."""

    def __init__(
        self,
        connections: UpstreamConnections,
        upstream: Upstream,
        request: ForwardedRequest,
        headers: Mapping[str, str],
        deadline: Deadline,
        asked: AttemptAsked,
        *,
        counts_each: bool,
        max_answer_bytes: int,
    ) -> None:
        self._connections, self._upstream, self._headers = connections, upstream, headers
        self._deadline, self._asked, self._max_answer_bytes = deadline, asked, max_answer_bytes
        self.usage = UsageAsked(request, upstream, each=counts_each)
        self._breaks = AttemptBreaks(upstream.config, deadline)
        self._is_stream, self._begin_ns, self._most_bytes = request.is_stream, now_ns(), request.most_bytes
        self._watched: UpstreamAnswer | None = None

    async def open(self) -> tuple[Answer, bytes]:
        """Returns the answer, whose head is there, and its first piece, b"" if it has no body. Raises
        `UpstreamFailure`."""
        answer, first = await self._open()
        self.usage.note_answered(answer.status)
        if not (self.usage.may_be_refused and answer.status in REFUSED):
            return answer, first
        try:
            first = await self.read(answer, first)
        except UpstreamFailure:
            answer.close()
            raise
        if not self.usage.is_refused(answer.status, first):
            return answer, first
        answer.close()
        return await self.open()

    async def _open(self) -> tuple[Answer, bytes]:
        config, begin_ns = self._upstream.config, now_ns()
        limit_s, is_deadline = self._within(config.first_byte_s)
        response: Answer | None = None
        try:
            response = answer = await self._connections.ask(
                "POST",
                self._upstream.address,
                self._asked.path,
                self._headers,
                self.usage.request.body,
                connect_s=min(config.connect_s, limit_s),
            )
            if not self._is_stream:
                self._watched = answer
                self._upstream.pulse.watch(answer, self._connections)
            response, first = await begun(answer, max(0.0, limit_s - (now_ns() - begin_ns) / 1e9))
        except BaseException as error:
            if response is not None:
                response.close()
            if not self._is_stream and type(error) is TimeoutError and not is_deadline:
                raise UpstreamFailure(self._breaks.whole_too_late()) from error
            verdict = self._breaks.before(error, limit_s, is_deadline=is_deadline)
            if verdict is None:
                raise
            raise UpstreamFailure(verdict) from error
        return response, first

    async def next(self, response: Answer) -> bytes:
        """Returns the next piece, b"" at the end. Raises `BrokenStream`, told to nobody yet."""
        limit_s, is_deadline = self._within(self._upstream.config.between_s)
        try:
            return await response.piece(limit_s)
        except BROKEN as error:
            if not self._is_stream and type(error) is TimeoutError and not is_deadline:
                raise BrokenStream(self._breaks.whole_too_late()) from error
            raise BrokenStream(self._breaks.within(error, is_deadline=is_deadline)) from error

    async def read(self, response: Answer, piece: bytes) -> bytes:
        """Returns the whole body, of which this piece is there; then nobody waits for it. Raises `UpstreamFailure`."""
        pieces, size, most = [], 0, self._max_answer_bytes
        try:
            while piece:
                pieces.append(piece)
                size += len(piece)
                if size > most:
                    verdict = bad_answer(self._asked, f"answered more than {most} bytes", limit=most)
                    if self._most_bytes > most:  # as it was asked to
                        verdict = verdict._replace(whose=Whose.REQUEST, is_retryable=False)
                    raise BrokenStream(verdict)
                piece = await self.next(response)
        except BrokenStream as broken:
            raise UpstreamFailure(broken.verdict) from broken
        finally:
            self.leave()
        return b"".join(pieces)

    def leave(self) -> None:
        """Nobody waits for the answer any more."""
        if self._watched is not None:
            self._upstream.pulse.leave(self._watched)
            self._watched = None

    def _within(self, of_stream_s: float) -> tuple[float, bool]:
        """Returns how long the next wait may last, and whether the deadline says so."""
        if self._is_stream:
            return self._deadline.within(of_stream_s)
        passed_s = (now_ns() - self._begin_ns) / 1e9
        return self._deadline.within(max(0.0, self._upstream.config.whole_s - passed_s))


class Relay:
    """headers: those of the request to the upstream. answer_headers: asked for when an answer begins, with ours.

    on_read: called when the end of the answer has been read, and not yet given to the client; on_first_byte: its first.
    blocked_ns: how long the client did not take what was there. ended_ns: when the system had taken the end.
    has_begun: the client has the head of an answer; has_given: it gets some of this one; is_answered: has it all.
    resumed_by, resumed_after: how it goes on with another's stream, and after how many tokens; "" and 0 for a first.
    mark: what the answer says of itself if it is a lesser one.
    verdict: on the answer that the client has had. failed_by: whose doing it was that it failed.
    """

    def __init__(
        self,
        connections: UpstreamConnections,
        upstream: Upstream,
        headers: dict[str, str],
        deadline: Deadline,
        resumption: Resumption,
        asked: Asked,
        *,
        max_answer_bytes: int,
        send: http.Send,
        answer_headers: Callable[[], http.Headers],
        on_read: Callable[["Relay"], None],
        mark: MarkedAnswer,
        has_begun: bool = False,
    ) -> None:
        self._upstream, self._resumption = upstream, resumption
        self.resumed_by, self.resumed_after = resumption.resumed_by, resumption.resumed_after
        self._request, recorder = asked
        self.path, self.model = self._request.path, self._request.model
        self._editor, self._mark = recorder or WholeEvents(), mark
        self._send, self._answer_headers, self._on_read = send, answer_headers, on_read
        self.events = events_of(self.path)
        self.status: int | None = None
        self.first_byte_ns: int | None = None
        self.on_first_byte: Callable[[], None] = ignored
        self.blocked_ns, self.is_answered = 0, False
        self.ended_ns: int | None = None
        self.has_begun, self.has_given = has_begun or resumption.is_continuing, resumption.is_continuing
        self.verdict: verdicts.AnswerVerdict = verdicts.GOOD
        self.failed_by: verdicts.Whose | None = None
        is_timed = deadline.is_clients or SLO_HEADER in headers
        self._asked = verdicts.AttemptAsked(upstream.name, self.path, self.model, is_timed=is_timed)
        self._mask, self._breaks = KeyMask(upstream.key), AttemptBreaks(upstream.config, deadline)
        self._call = UpstreamCall(
            connections,
            upstream,
            self._request,
            headers,
            deadline,
            self._asked,
            counts_each=resumption.counts_each,
            max_answer_bytes=max_answer_bytes,
        )
        self._is_judged = False  # a stream has begun well
        self._held = b""  # events of a stream that has not begun: another upstream may still have the client

    def tell_nobody(self) -> None:
        """Let go of those whom it told, as it is over: no circle is left for the garbage collector."""
        self.on_first_byte, self.events.on_id = ignored, ignored
        self._call.leave()

    async def run(self) -> None:
        """Returns when the client has the whole answer. Raises `UpstreamFailure` or `BrokenStream`."""
        response, first = await self._open()
        try:
            if is_stream(response, first, self._request.is_stream):
                await self._stream(response, first)
            else:
                await self._whole(await self._judged(response, first))
        finally:
            response.close()

    # ---- the upstream

    async def _open(self) -> tuple[Answer, bytes]:
        """Returns the answer, whose head is there, and its first piece, b"" if it has no body."""
        response, first = await self._call.open()
        self.status = response.status
        self._note_begun(first if is_stream(response, first, self._request.is_stream) else BEGIN)
        return response, first

    def _note_begun(self, piece: bytes) -> None:
        """Comments, which tell that a request waits, are no byte of an answer."""
        if self.first_byte_ns is None and EVENT_BEGINS.search(piece):
            self.first_byte_ns = now_ns()
            self.on_first_byte()

    # ---- a stream

    async def _stream(self, response: Answer, piece: bytes) -> None:
        try:
            if not self._request.is_stream:
                raise verdicts.BrokenStream(
                    verdicts.bad_answer(self._asked, "answered with a stream, and none was asked for")
                )
            while piece:
                self._note_begun(piece)
                if await self._pass_on(response, self._editor.edit(piece)):
                    return
                piece = await self._call.next(response)
            await self._end_without_done(response)
        except verdicts.BrokenStream as broken:
            await self._break_off(broken)

    async def _break_off(self, broken: verdicts.BrokenStream) -> None:
        """Raises what it comes to; a stream that nobody goes on with is told its end first."""
        verdict, code = broken.verdict, broken.verdict.code
        if not self.has_given:
            await self._tell_refusal(verdict)
            return
        if self.events.error is not None and self._is_judged:  # the client has been told
            self._on_read(self)
            await self._end()
            return
        if self._resumption.may_go_on(code):
            raise verdicts.Interrupted(verdict) from broken
        if code in BREAKS and self._resumption.reason:
            broken = verdicts.BrokenStream(self._breaks.not_resumed(verdict, self._resumption.reason))
        self._on_read(self)
        await self._give(error_event(self.path, broken.error.info))
        await self._end()
        raise broken

    async def _tell_refusal(self, verdict: verdicts.AnswerVerdict) -> None:
        """The first event is an error: give it where it is about the request, as the answer that it should have been.
        Raises `UpstreamFailure` otherwise."""
        if not verdict.is_given:
            raise verdicts.UpstreamFailure(verdict)
        await self._whole(verdict)

    async def _pass_on(self, response: Answer, events: bytes) -> bool:
        """Give whole events of a stream to the client. Returns whether they were the last."""
        events, before = self._mask.masked(events), self.events.num_events
        self.events.feed(events)
        if self.events.num_events > before:
            self._upstream.in_flight.note_heard(now_ns())
        if self._editor.is_too_long:
            raise verdicts.BrokenStream(verdicts.bad_answer(self._asked, "sent an event without an end"))
        self._require_good_begin()
        if self.events.is_done:
            self._on_read(self)
            self.verdict = self._of_empty or self.verdict
        events = self._call.usage.shown(events)
        if self._is_judged:
            events, self._held = self._held + events, b""
        elif EVENT_BEGINS.search(events):
            events, self._held = b"", self._held + events
        if events:
            await self._begin(response)
            await self._give(self._mark.in_events(events))
        if self.events.is_done:
            await self._end()
            await drain(response)
        return self.events.is_done

    @property
    def _of_empty(self) -> verdicts.AnswerVerdict | None:
        """Returns the verdict on a stream that has ended and said nothing; None for any other."""
        is_empty = self._asked.has_choices and self.events.is_empty and not self.resumed_after
        return verdicts.bad_answer(self._asked, "ended a stream in which it had said nothing") if is_empty else None

    def _require_good_begin(self) -> None:
        """Raises `BrokenStream` where an error, the end or what is no event comes before the answer."""
        events, begin = self.events, self.events.begin
        if self._is_judged or begin is None:
            return
        if events.error is not None and events.is_error_first:
            raise verdicts.BrokenStream(verdicts.of_event(self._asked, events.error, events.error_data))
        if (verdict := self._of_empty or verdicts.of_begin(self._asked, begin)) is not None:
            raise verdicts.BrokenStream(verdict)
        if events.has_begun:
            self._is_judged = self.has_given = True
            self._upstream.breaker.note_begun()

    async def _end_without_done(self, response: Answer) -> None:
        """The upstream ended it cleanly, and the last event may lack the line that ends one. Raises `BrokenStream`
        where it is not whole."""
        tail = readable(self._editor.edit(b"\n\n"))
        if tail and await self._pass_on(response, tail):
            return
        if not self._asked.has_choices or self.events.read().finish_reason is None:
            raise verdicts.BrokenStream(self._breaks.died())
        await self._pass_on(response, DONE_EVENT)

    async def _begin(self, response: Answer) -> None:
        if not self.has_begun:
            self.has_begun = True
            kind = (b"content-type", EVENT_STREAM.encode())
            headers = [kind, *self._mask.headers(response.headers), *self._answer_headers()]
            headers.append((b"cache-control", b"no-store"))
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _give(self, piece: bytes) -> None:
        begin_ns = now_ns()
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        lasted_ns = now_ns() - begin_ns
        self.blocked_ns += lasted_ns if lasted_ns > CLIENT_WAIT_NS else 0

    async def _end(self) -> None:
        if self.events.error is not None and self.verdict.whose is verdicts.GOOD.whose:
            self.verdict = verdicts.of_event(self._asked, self.events.error, self.events.error_data)
        self.is_answered = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        self.ended_ns = now_ns()

    # ---- an answer that is no stream

    async def _judged(self, response: Answer, first: bytes) -> verdicts.AnswerVerdict:
        """Returns the verdict on an answer that the client shall have. Raises `UpstreamFailure`."""
        body = await self._call.read(response, first)
        passed = self._mask.passed(response, body)
        verdict = verdicts.of_answer(self._asked, passed)
        self.events.take_whole(passed.body)
        if not verdict.is_given:
            raise verdicts.UpstreamFailure(verdict)
        return verdict

    async def _whole(self, verdict: verdicts.AnswerVerdict) -> None:
        assert verdict.answer is not None, "it is given"
        self.status, self.verdict = verdict.answer.status, verdict
        edited = verdict.answer._replace(body=self._editor.edit_whole(verdict.answer.body))
        if self.has_begun:
            raise verdicts.UpstreamFailure(verdicts.of_late_head(self._asked, verdict))
        self.has_given = True
        self._on_read(self)
        await self.give_answer(edited)

    async def give_answer(self, answer: PassedAnswer) -> None:
        """Give a whole answer to the client; returns when the system has taken it."""
        self.has_begun = True
        body = self._mark.in_body(answer.body) if answer.status in verdicts.ANSWERED else answer.body
        headers = [*answer.headers, *self._answer_headers(), (b"content-length", b"%d" % len(body))]
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})
        if body:
            await self._give(body)
        await self._end()
