"""An answer of an upstream as its client may have it: known headers alone, and nowhere the key of the upstream."""

import math
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from time import time
from typing import NamedTuple

from splittime.gateway.decoded_answer import Answer
from splittime.web import http

EVENT_STREAM = "text/event-stream"
STREAM_BEGINS = (b"data:", b"event:", b":")
JSON = b"application/json"
NOTICE, RETRY_AFTER, RETRY_AFTER_MS = b"x-splittime-notice", b"retry-after", b"retry-after-ms"
MAX_NOTICE_BYTES = 4096
MAX_PAUSE_S = 10**7
LEAST_KEY_BYTES = 8  # a shorter key is a word that answers may have
HIDDEN = b"***"


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
    """Returns whether an answer that begins so is a stream, whatever was asked for. Some servers name no type for
    one."""
    if not 200 <= answer.status < 300:
        return False
    is_unnamed = was_asked_for and answer.content_type in ("", "text/plain")
    return answer.content_type == EVENT_STREAM or (is_unnamed and first.lstrip().startswith(STREAM_BEGINS))


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
