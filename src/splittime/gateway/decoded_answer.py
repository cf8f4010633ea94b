"""Answers of upstreams: decoded as they are read, where one was compressed though it was asked not to; read whole; and
as their clients may have them, with known headers alone, and nowhere the key of the upstream.

What a few bytes become is bounded: a piece is decoded for at most `MAX_PIECE_BYTES` at a time, and whoever reads them
counts what they come to. An answer whose coding ends early has broken off, whatever its length says.
"""

import asyncio
import math
import zlib
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from time import time
from types import MappingProxyType
from typing import NamedTuple

from splittime import __version__
from splittime.gateway.upstream_connections import UpstreamAnswer, UpstreamConnections
from splittime.web import http
from splittime.wire.target import Address

CLOSING_S = 1.0  # for an upstream to end an answer after its last event
MAX_PIECE_BYTES = 128 * 1024  # a millisecond's work or less
CODING = b"content-encoding"
AS_IT_IS = (b"", b"identity")
EITHER_HEAD = zlib.MAX_WBITS | 32  # gzip's or zlib's
CODINGS = (b"gzip", b"x-gzip", b"deflate")
EVENT_STREAM = "text/event-stream"
STREAM_BEGINS = (b"data:", b"event:", b":")
JSON = b"application/json"
NOTICE, RETRY_AFTER, RETRY_AFTER_MS = b"x-splittime-notice", b"retry-after", b"retry-after-ms"
MAX_NOTICE_BYTES = 4096
MAX_PAUSE_S = 10**7
LEAST_KEY_BYTES = 8  # a shorter key is a word that answers may have
HIDDEN = b"***"
USER_AGENT = f"splittime-gateway/{__version__}"


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


class PassedAnswer(NamedTuple):
    """A whole answer as it is given to the client."""

    status: int
    headers: http.Headers
    body: bytes


class KeyMask:
    """Takes the key of an upstream out of what it says: a refusal may quote it."""

    def __init__(self, key: str | None) -> None:
        raw = (key or "").encode("latin-1", "replace")
        self._key = raw if len(raw) >= LEAST_KEY_BYTES else b""

    def masked(self, piece: bytes) -> bytes:
        """Returns it without the key."""
        return piece.replace(self._key, HIDDEN) if self._key and self._key in piece else piece

    def passed(self, answer: Answer, body: bytes) -> PassedAnswer:
        """Returns a whole answer as it may be given."""
        kind = (b"content-type", JSON if body else b"text/plain")
        return PassedAnswer(answer.status, [kind, *self.headers(answer.headers)], self.masked(body))

    def headers(self, told: Mapping[bytes, bytes]) -> http.Headers:
        """Returns those that mean something to a client, if they are what they should be."""
        found: http.Headers = []
        pause_s, notice = pause_of(told), told.get(NOTICE, b"")
        if pause_s is not None:
            found.append((RETRY_AFTER, b"%d" % math.ceil(pause_s)))
        if notice and len(notice) <= MAX_NOTICE_BYTES and notice.isascii() and notice.decode().isprintable():
            found.append((NOTICE, self.masked(notice)))
        return found


def is_stream(answer: Answer, first: bytes, was_asked_for: bool) -> bool:
    """Returns whether an answer that begins so is a stream, whatever was asked for. Some servers name none, or another
    type for one: Flask's is HTML where nothing was said."""
    looks_so = answer.content_type == EVENT_STREAM or (was_asked_for and first.lstrip().startswith(STREAM_BEGINS))
    return looks_so and 200 <= answer.status < 300


def pause_of(told: Mapping[bytes, bytes]) -> float | None:
    """Returns the seconds of `Retry-After`, told as a number or a date, or of OpenAI's milliseconds; None for none."""
    value = told.get(RETRY_AFTER, b"").decode("latin-1").strip()
    try:
        if value[:1].isdigit():
            return min(float(value), MAX_PAUSE_S)
        if value:
            return min(max(0.0, parsedate_to_datetime(value).timestamp() - time()), MAX_PAUSE_S)
        told_ms = told.get(RETRY_AFTER_MS, b"")
        return min(int(told_ms) / 1e3, MAX_PAUSE_S) if told_ms.isdigit() and len(told_ms) < 16 else None
    except (ValueError, TypeError, OverflowError):
        return None


async def read_whole(answer: UpstreamAnswer, within_s: float, max_bytes: int) -> bytes | None:
    """Returns the body; None for one of more than `max_bytes`. within_s: between two pieces. Raises `OSError` or
    `ValueError` where it does not end as it should."""
    body = bytearray()
    try:
        decoded, piece = await begun(answer, within_s)
        while piece:
            body += piece
            if len(body) > max_bytes:
                return None
            piece = await decoded.piece(within_s)
    finally:
        answer.close()
    return bytes(body)


async def ask_whole(
    connections: UpstreamConnections,
    address: Address,
    path: str,
    key: str | None,
    body: bytes | None = None,
    *,
    within_s: float,
    max_bytes: int,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, bytes | None]:
    """Returns the status and what `read_whole` does. body: JSON, to be posted. headers: beside the usual ones.
    Raises `OSError` or `ValueError` where no whole answer came, a `TimeoutError` after `within_s`."""
    async with asyncio.timeout(within_s):
        answer = await _asked(connections, address, path, key, body, within_s, headers)
        read = await read_whole(answer, within_s, max_bytes)
        return answer.status, read


async def _asked(
    connections: UpstreamConnections,
    address: Address,
    path: str,
    key: str | None,
    body: bytes | None,
    within_s: float,
    more: Mapping[str, str],
) -> UpstreamAnswer:
    headers = {**more, "accept-encoding": "identity", "user-agent": USER_AGENT}
    headers |= {} if body is None else {"content-type": "application/json"}
    headers |= {} if key is None else {"authorization": f"Bearer {key}"}
    method = "GET" if body is None else "POST"
    return await connections.ask(method, address, path, headers, body, connect_s=within_s)
