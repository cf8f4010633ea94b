"""An answer as it is kept: its pieces with the moments at which they came, and what it takes to give it again.

What belongs to the request that was answered first is taken out: the upstream's `timing`, and the answer's id. For
that stands a mark that no answer has, so that each giving has an id of its own.
"""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from splittime.wire.sse import EventLines

DONE = b"[DONE]"
EQUAL, LIKE = "equal", "like"  # the kinds of a hit
KINDS = (EQUAL, LIKE)


class KeptPiece(msgspec.Struct, frozen=True, gc=False):
    """data: of one event, or a whole body. after_ns: since the first byte of the answer."""

    after_ns: int
    data: bytes


class KeptAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """created_unix_s: when it was complete. mark: what stands for its id. vector: of the question, as float32 bytes."""

    key: str
    tenant: str
    model: str
    created_unix_s: float
    is_stream: bool
    content_type: str
    pieces: tuple[KeptPiece, ...]
    mark: str
    likeness: str = ""
    question: str = ""
    vector: bytes = b""

    @property
    def size(self) -> int:
        """Its bytes, roughly: those of its pieces, its question and its vector, and a little for each."""
        return sum(len(piece.data) + 16 for piece in self.pieces) + 4 * len(self.question) + len(self.vector) + 512

    def age_s(self, now_unix_s: float) -> int:
        """Returns whole seconds since it was complete; 0 if clocks were set back."""
        return max(0, int(now_unix_s - self.created_unix_s))


_encode, _decoder = msgspec.msgpack.encode, msgspec.msgpack.Decoder(KeptAnswer)


def to_bytes(answer: KeptAnswer) -> bytes:
    return _encode(answer)


def from_bytes(data: bytes) -> KeptAnswer:
    """Raises `ValueError` for bytes that are no answer of this version."""
    return _decoder.decode(data)  # msgspec's errors are ValueErrors


def pieces_of(raw: Sequence[tuple[int, bytes]], is_stream: bool, mark: str) -> tuple[KeptPiece, ...] | None:
    """Returns what is kept of an answer, given as instants and bytes; None for one that cannot be given again."""
    first_ns = raw[0][0] if raw else 0
    try:
        if not is_stream:
            return (KeptPiece(raw[-1][0] - first_ns, _cleaned(b"".join(piece for _, piece in raw), mark)),)
        lines, kept = EventLines(), []
        for at_ns, piece in raw:
            kept += [KeptPiece(at_ns - first_ns, _cleaned(data, mark)) for data in lines.feed(piece)]
    except (ValueError, TypeError, IndexError):
        return None
    return tuple(kept) if kept and kept[-1].data == DONE else None


def new_mark() -> str:
    return f"kept-{secrets.token_hex(16)}"


def text_of(pieces: Sequence[KeptPiece]) -> str:
    """Returns the text of an answer's first choice."""
    return "".join(_text(orjson.loads(piece.data)) for piece in pieces if piece.data != DONE)


def _text(event: Any) -> str:
    choices = event.get("choices") if isinstance(event, dict) else None
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    holder = first.get("message") or first.get("delta") or first
    found = holder.get("content", holder.get("text")) if isinstance(holder, dict) else None
    return found if isinstance(found, str) else ""


def _cleaned(data: bytes, mark: str) -> bytes:
    if data == DONE:
        return data
    event = orjson.loads(data)
    if not isinstance(event, dict) or event.get("error") is not None:
        raise ValueError("no part of an answer")
    event.pop("timing", None)
    if "id" in event:
        event["id"] = mark
    return orjson.dumps(event)
