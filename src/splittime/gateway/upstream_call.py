"""One request at one upstream: it is sent, and its answer is read, within the times that there are.

A stream has `first_byte_s` to its first byte and `between_s` between two pieces. An answer that is no stream has
`whole_answer_s` in all, as long as its upstream lives (`upstream_pulse`): that its time is over says nothing against
the upstream, and nobody else is asked to write the same again.
"""

import time
from collections.abc import Mapping

from splittime.gateway.breaks import BROKEN, AttemptBreaks, Deadline
from splittime.gateway.decoded_answer import Answer, begun
from splittime.gateway.forwarded import ForwardedRequest
from splittime.gateway.upstream_answer import UpstreamAnswer
from splittime.gateway.upstream_connections import UpstreamConnections
from splittime.gateway.upstreams import Upstream
from splittime.gateway.usage_asked import REFUSED, UsageAsked
from splittime.gateway.verdict import AttemptAsked, BrokenStream, UpstreamFailure, Whose, bad_answer

now_ns = time.monotonic_ns


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
