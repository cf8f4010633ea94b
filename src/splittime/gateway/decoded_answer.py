"""An answer that an upstream has compressed though it was asked not to, decoded as it is read.

What a few bytes become is bounded: a piece is decoded for at most `MAX_PIECE_BYTES` at a time, and whoever reads them
counts what they come to. An answer whose coding ends early has broken off, whatever its length says.
"""

import asyncio
import zlib

from splittime.gateway.upstream_answer import UpstreamAnswer

CLOSING_S = 1.0  # for an upstream to end an answer after its last event
MAX_PIECE_BYTES = 128 * 1024  # a millisecond's work or less
CODING = b"content-encoding"
AS_IT_IS = (b"", b"identity")
EITHER_HEAD = zlib.MAX_WBITS | 32  # gzip's or zlib's
CODINGS = (b"gzip", b"x-gzip", b"deflate")


class DecodedAnswer:
    """Does as an `UpstreamAnswer`, whose pieces it decodes. first: the piece that has come already."""

    def __init__(self, answer: UpstreamAnswer, coding: bytes, first: bytes) -> None:
        self._answer, self._coding, self._rest = answer, coding, first
        self._decoder = zlib.decompressobj(EITHER_HEAD)
        self._has_more = False  # that came out of what it was given
        self.status, self.headers, self.content_type = answer.status, answer.headers, answer.content_type

    async def piece(self, within_s: float) -> bytes:
        """Returns what has come and is decoded, b"" at the end. Raises what `UpstreamAnswer.piece` does, and
        `ValueError` for what is not coded as it says."""
        if self._coding not in CODINGS:
            raise ValueError(f"the answer's content-encoding is {self._coding[:32]!r}, and identity was asked for")
        while True:
            coded = self._rest or (b"" if self._has_more else await self._answer.piece(within_s))
            if not (coded or self._has_more):
                return self._end()
            if found := self._decoded(coded):
                return found

    def _end(self) -> bytes:
        if not self._decoder.eof:
            raise ConnectionResetError("the coded answer ends early")
        return b""

    def _decoded(self, coded: bytes) -> bytes:
        if self._decoder.eof:
            raise ValueError("more stands behind the coded answer")
        try:
            found = self._decoder.decompress(coded, MAX_PIECE_BYTES)
        except zlib.error as error:
            raise ValueError(f"the answer is not coded as it says: {error}") from error
        self._rest = self._decoder.unconsumed_tail
        self._has_more = len(found) == MAX_PIECE_BYTES and not self._decoder.eof
        if self._decoder.eof and self._decoder.unused_data:
            raise ValueError("more stands behind the coded answer")
        return found

    def close(self) -> None:
        self._answer.close()


Answer = UpstreamAnswer | DecodedAnswer


async def begun(answer: UpstreamAnswer, within_s: float) -> tuple[Answer, bytes]:
    """Returns the answer without a coding, and its first piece, b"" if it has no body. Raises what `piece` does."""
    first = await answer.piece(within_s)
    coding = answer.headers.get(CODING, b"").strip().lower()
    if coding in AS_IT_IS:
        return answer, first
    decoded = DecodedAnswer(answer, coding, first)
    return decoded, await decoded.piece(within_s)


async def drain(answer: Answer) -> None:
    """Read the end behind the last event, so that the connection can be used again; what else comes is dropped."""
    try:
        async with asyncio.timeout(CLOSING_S):
            while await answer.piece(CLOSING_S):
                pass
    except (TimeoutError, OSError, ValueError):
        pass  # the client has its answer; the connection is closed
