"""Server-sent events, from bytes to what they say of an answer.

`EventLines` cuts bytes into the data of events, whatever the pieces they came in; `AnswerReader` understands them:
OpenAI's two forms of chunk, and each known server's way of telling how many tokens a chunk holds. A chunk is never
taken for a token: `chunk_tokens` is None unless the server told it for every chunk, by one of

    token_ids in the choice (splittime), usage in each chunk (vllm, sglang), timings.predicted_n (llama.cpp)
"""

from typing import Any

import msgspec

from splittime.present.terminal import clipped

MAX_EVENT_BYTES = 16 * 2**20
MAX_TOKENS = 2**31


class EventLines:
    """`feed` returns the data of each event that is now whole. Lines end with LF or CRLF. `is_too_long`: an event is
    longer than `MAX_EVENT_BYTES`, and no more is to be fed."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._is_error = False  # by its name
        self._num_data_bytes = self._num_open_bytes = 0  # of whole lines, and with the last that is not yet whole

    @property
    def is_too_long(self) -> bool:
        return self._num_open_bytes > MAX_EVENT_BYTES

    @property
    def _is_between(self) -> bool:
        """Returns whether what was fed ended with an event."""
        return not (self._rest or self._data)

    def feed(self, piece: bytes) -> list[bytes]:
        if b"\n" not in piece:
            self._rest += piece
            self._num_open_bytes += len(piece)
            return []
        if piece.endswith(b"\n\n") and piece.startswith(b"data: ") and self._is_between and piece.count(b"\n") == 2:
            self._num_data_bytes = self._num_open_bytes = 0
            return [piece[6:-2].removesuffix(b"\r")]  # one event: the same as below, in a fifth of the time
        *lines, rest = b"".join((self._rest, piece)).split(b"\n")
        self._rest = bytearray(rest)
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    data = b"\n".join(self._data)
                    events.append(_as_error(data) if self._is_error else data)
                    self._data.clear()
                self._num_data_bytes, self._is_error = 0, False
                continue
            self._num_data_bytes += len(line)
            field, _, value = line.partition(b":")
            if field == b"data":
                self._data.append(value.removeprefix(b" "))
            elif field == b"error":  # as older llama.cpp servers have it
                self._data.append(b'{"error":' + value + b"}")
            elif field == b"event":
                self._is_error = value.strip() == b"error"
        self._num_open_bytes = len(self._rest) + self._num_data_bytes
        return events


def _as_error(data: bytes) -> bytes:
    """Returns the data of an event that is named an error, so that it says so by itself."""
    if b'"error"' in data:
        return data
    try:
        return msgspec.json.encode({"error": msgspec.json.decode(data, type=msgspec.Raw)})
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.encode({"error": data.decode("utf-8", "replace")})


class ChunkDelta(msgspec.Struct, gc=False):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None


class ChunkChoice(msgspec.Struct, gc=False):
    text: Any = None
    delta: ChunkDelta | None = None
    message: Any = None
    finish_reason: Any = None
    token_ids: list[int] | None = None


TEXTS = ("content", "reasoning_content", "reasoning")


class Chunk(msgspec.Struct, gc=False):
    """usage, timings (llama.cpp's): read by `part`, as nothing else of a chunk is lost where they are odd."""

    choices: list[ChunkChoice] = []
    usage: Any = None
    timings: Any = None
    error: Any = None
    object: Any = None
    message: Any = None


_decode = msgspec.json.Decoder(Chunk).decode


class AnswerReader:
    """What the events of one answer said so far.

    error: why it cannot be taken for an answer: an event that says so, or one that cannot be read.
    """

    def __init__(self) -> None:
        self.chunk_ns: list[int] = []
        self._chunk_tokens: list[int] = []
        self._tokens_before = 0
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.is_done = False

    @property
    def chunk_tokens(self) -> tuple[int, ...] | None:
        is_told = len(self._chunk_tokens) == len(self.chunk_ns)
        return tuple(self._chunk_tokens) if is_told and self.chunk_ns else None

    def take(self, data: bytes, at_ns: int) -> None:
        """One event's data, read at this instant."""
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            chunk = _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self.error = self.error or clipped(f"an event of the stream cannot be read: {error}: {data[:200]!r}")
            return
        if chunk.error is not None or chunk.object == "error":
            self.error = self.error or clipped(f"an error inside the stream: {error_text(chunk)}")
            return
        self._take_usage(chunk)
        if chunk.choices:
            self._take_choice(chunk, chunk.choices[0], at_ns)

    def _take_choice(self, chunk: Chunk, choice: ChunkChoice, at_ns: int) -> None:
        if choice.finish_reason is not None:
            self.finish_reason = clipped(str(choice.finish_reason))
        if not has_content(choice):
            return
        self.chunk_ns.append(at_ns)
        if choice.token_ids is not None:
            self._chunk_tokens.append(len(choice.token_ids))
            return
        so_far = tokens_so_far(chunk)
        if so_far is not None and so_far >= self._tokens_before:
            self._chunk_tokens.append(so_far - self._tokens_before)
            self._tokens_before = so_far

    def _take_usage(self, chunk: Chunk) -> None:
        usage, cached = chunk.usage, part(chunk.timings, "cache_n")
        if usage is not None:
            prompt, output = possible(part(usage, "prompt_tokens")), possible(part(usage, "completion_tokens"))
            self.prompt_tokens = prompt if prompt is not None else self.prompt_tokens
            self.output_tokens = output if output is not None else self.output_tokens
            if cached is None:
                cached = part(part(usage, "prompt_tokens_details"), "cached_tokens")
        self.cached_tokens = self.cached_tokens if cached is None else possible(cached)


def part(told: object, name: str) -> Any:
    """A field of what should be an object; None where it is none."""
    return told.get(name) if isinstance(told, dict) else None


def possible(tokens: object) -> int | None:
    """A number of tokens that can be one, 7.0 too; what a server says beyond that counts as not told."""
    if not isinstance(tokens, int | float) or isinstance(tokens, bool) or not 0 <= tokens <= MAX_TOKENS:
        return None
    return int(tokens) if tokens == int(tokens) else None


def has_content(choice: ChunkChoice) -> bool:
    if choice.text or choice.token_ids:
        return True
    delta = choice.delta
    return delta is not None and bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


def text_bytes_of(data: bytes) -> int:
    """Returns how many bytes of text an event, or a whole answer, tells; 0 for one that cannot be read."""
    try:
        chunk = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0
    told = 0
    for choice in chunk.choices or ():
        delta, whole = choice.delta or ChunkDelta(), choice.message if isinstance(choice.message, dict) else {}
        texts = (choice.text, *(getattr(delta, name) or whole.get(name) for name in TEXTS))
        told += sum(len(text.encode("utf-8", "replace")) for text in texts if isinstance(text, str))
    return told


def tokens_so_far(chunk: Chunk) -> int | None:
    """The output tokens up to and with this chunk, if it says so."""
    told = part(chunk.usage, "completion_tokens")
    return possible(part(chunk.timings, "predicted_n") if told is None else told)


def error_text(chunk: Chunk) -> str:
    error = chunk.error if chunk.error is not None else chunk.message
    if isinstance(error, dict) and "message" in error:
        return str(error["message"])
    return str(error)


def body_text(body: bytes) -> str:
    """The message of an error's body, or its beginning."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return clipped(body.decode("utf-8", "replace").strip())
    if isinstance(found, dict):
        inner = found.get("error", found)
        for name in ("message", "detail", "error"):
            if isinstance(inner, dict) and inner.get(name):
                return clipped(str(inner[name]))
        return clipped(str(inner))
    return clipped(str(found))
