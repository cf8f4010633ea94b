"""What the cache reads of a request: whether an answer may be kept or given, and by which key.

The key is the whole body in one form (names in order, no spaces between its parts, 1.0 as 1, no nulls, no defaults
written out), with the tenant, the path, the model and the pool: two bodies of one key are one JSON value, and nobody
has another tenant's answers. Texts are compared code point by code point. Nothing in them is folded, no case, no
space, no composed form of Unicode: an indentation, a `!`, a Kelvin sign may be what the question is about.
`likeness` is the same without the latest user's text, which is the `question`: what two requests must share exactly to
share an answer by the likeness of their questions.

What belongs to the request that was answered first is taken out: the upstream's `timing`, and the answer's id. For
that stands a mark that no answer has, so that each giving has an id of its own.

The request that asked the upstream leads; each other follows, from the first byte on, at its own pace. When the
leader's client goes away and somebody follows, the upstream goes on, and the leader's request is over when the answer
is; when the last follower goes too, the upstream is cancelled. Bounded: an answer longer than `max_bytes` is not kept,
nobody joins it any more, and who followed it ends with an error.

A leader whose client reads slowly holds its followers back, as it does an upstream, until it is dropped
(`slow_reader_s`).
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from hashlib import sha256
from typing import Any

import msgspec
import orjson

from splittime.core.errors import UpstreamError
from splittime.gateway.forwarded import CHAT, ForwardedRequest
from splittime.web import http
from splittime.wire.sse import EventLines

MAX_REQUEST_BYTES = 256 * 1024  # a longer one is passed on and not looked at
MAX_QUESTION_CHARS = 4000
MAX_AGE_S = 10**9
DEFAULTS: dict[str, Any] = {"stream": False, "n": 1, "best_of": 1, "echo": False, "store": False}
DONE = b"[DONE]"
EQUAL, LIKE = "equal", "like"  # the kinds of a hit
KINDS = (EQUAL, LIKE)
now_ns = time.monotonic_ns
OWN_HEADERS = frozenset({b"x-request-id", b"server-timing", b"x-cache", b"age", b"x-cache-entry"})


class Wishes(msgspec.Struct, frozen=True):
    """`Cache-Control` of a request, as far as it is heeded. max_age_s: of an answer that it takes."""

    no_store: bool = False
    no_cache: bool = False
    max_age_s: int | None = None


class AskedKey(msgspec.Struct, frozen=True):
    """key: of equal requests. likeness, question: of like ones; empty where only equal ones share an answer.
    why_not: why no answer of this request is kept or given; "" if one may be."""

    key: str = ""
    likeness: str = ""
    question: str = ""
    why_not: str = ""


def wishes(scope: http.Scope) -> Wishes:
    """Returns what `Cache-Control` and `Pragma` ask for; other directives mean nothing to a request here."""
    told: dict[str, str] = {}
    for value in [*http.headers(scope, b"cache-control"), *http.headers(scope, b"pragma")]:
        for part in value.lower().split(","):
            name, _, number = part.strip().partition("=")
            told[name.strip()] = number.strip(' "')
    age = told.get("max-age", "")
    max_age_s = min(int(age[:12]), MAX_AGE_S) if age.isascii() and age.isdigit() else None
    return Wishes("no-store" in told, "no-cache" in told, max_age_s)


def asked_key(request: ForwardedRequest, tenant: str, *, takes_sampled: bool) -> AskedKey:
    """Returns the keys of a request, or why it has none. Takes as long as its body is to be read: at most a few
    milliseconds, outside the event loop."""
    if len(request.body) > MAX_REQUEST_BYTES:
        return AskedKey(why_not="long")
    try:
        told = json.loads(request.body, parse_float=_number, parse_constant=_refuse)
        if not isinstance(told, dict):
            raise ValueError("no object")
        body = {name: value for name, value in told.items() if value is not None and not _is_default(name, value)}
        why_not = _why_not(body, takes_sampled)
        return AskedKey(why_not=why_not) if why_not else _keys(body, request, tenant)
    except (ValueError, RecursionError):
        return AskedKey(why_not="unreadable")


def _is_default(name: str, value: Any) -> bool:
    """Returns whether leaving it out says the same. `true` is no 1, though Python takes it for one."""
    return name in DEFAULTS and type(value) is type(DEFAULTS[name]) and value == DEFAULTS[name]


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _why_not(body: dict[str, Any], takes_sampled: bool) -> str:
    if any(name in body for name in ("n", "best_of", "store")):
        return "several_answers" if "store" not in body else "stored_elsewhere"
    temperature = body.get("temperature")  # left out, it is the upstream's, which draws
    if not takes_sampled and (temperature != 0 or isinstance(temperature, bool)):
        return "sampled"
    return ""


def _keys(body: dict[str, Any], request: ForwardedRequest, tenant: str) -> AskedKey:
    held = (tenant, request.path, request.model, request.pool)  # a rule's upstreams answer for themselves alone
    key = _digest([*held, body])
    question = _question(body) if request.path == CHAT else ""
    if not question:
        return AskedKey(key)
    messages = body["messages"]
    without = {**body, "messages": [*messages[:-1], {**messages[-1], "content": None}]}
    return AskedKey(key, _digest([*held, without]), question)


def _question(body: dict[str, Any]) -> str:
    """Returns the text of the latest message if a user wrote it, and it is a text of a length that can be compared."""
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get("role") != "user" or not isinstance(last.get("content"), str):
        return ""
    text: str = last["content"]
    return text if text.strip() and len(text) <= MAX_QUESTION_CHARS and _is_whole(text) else ""


def _is_whole(text: str) -> bool:
    """Returns whether it can be sent on: a body may have halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _digest(value: list[Any]) -> str:
    return sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


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


class Flight:
    """raw: instants and bytes of the answer so far. is_over: nothing more comes. max_bytes: of the answer."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._changed: asyncio.Future[None] | None = None
        self._cancel: Callable[[], object] | None = None  # of the leader's work, once its client has gone
        self.begun_ns = now_ns()
        self.status = 0
        self.headers: http.Headers = []
        self.raw: list[tuple[int, bytes]] = []
        self.num_followers = 0
        self.is_whole = self.is_over = self.is_too_long = False

    @property
    def may_be_joined(self) -> bool:
        return not self.is_too_long and not (self.is_over and not self.is_whole)

    # ---- the leader's side

    def tee(self, send: http.Send) -> http.Send:
        """Returns a `send` that keeps what it is given, and passes it on while there is a client."""

        async def both(message: http.Message) -> None:
            self._keep(message)
            if self._cancel is None:
                await send(message)

        return both

    def goes_on(self, cancel: Callable[[], object]) -> bool:
        """The leader's client has gone. Returns whether the upstream goes on for followers, until `cancel` is
        called."""
        if self.num_followers:
            self._cancel = cancel
        else:
            self._end()
        return bool(self.num_followers)

    def close(self) -> None:
        """The leader is gone: what is not whole now never will be."""
        self._end()

    def _keep(self, message: http.Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message["headers"])
        elif not self.is_over and not self.is_too_long:
            self._keep_piece(message)
        self._wake()

    def _keep_piece(self, message: http.Message) -> None:
        piece: bytes = message["body"]
        self._size += len(piece)
        if self._size > self._max_bytes:
            self.is_too_long = True
            self.raw = []
        elif piece:
            self.raw.append((now_ns(), piece))
        if not message.get("more_body"):
            self.is_whole = not self.is_too_long
            self._end()

    def _end(self) -> None:
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._changed = None

    # ---- the followers' side

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the answer's pieces from its first, as they come; the first is b"", with the head of the answer.

        Raises `UpstreamError` if it has no end, or is too long to be shared."""
        self.num_followers += 1
        try:
            async for piece in self._followed():
                yield piece
        finally:
            self.num_followers -= 1
            if not self.num_followers and self._cancel is not None and not self.is_over:
                self._cancel()

    async def _followed(self) -> AsyncIterator[bytes]:
        has_head, at = False, 0
        while True:
            if self.is_too_long:
                raise _failure(f"the shared answer has more than {self._max_bytes} bytes", "shared_answer_too_long")
            if self.status and not has_head and (self.raw or self.is_whole):
                has_head = True
                yield b""
            while at < len(self.raw):
                at += 1
                yield self.raw[at - 1][1]
            if self.is_whole and at >= len(self.raw):
                return
            if self.is_over:
                raise _failure("the answer that it shared broke off", "shared_answer_died")
            await self._change()

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    def shared_headers(self) -> http.Headers:
        """Returns the answer's headers without those that are the leader's own."""
        return [(name, value) for name, value in self.headers if name not in OWN_HEADERS]


def _failure(words: str, code: str) -> UpstreamError:
    return UpstreamError(words, code=code, hint="ask again, or with Cache-Control: no-cache")
