"""What an upstream's answer said of itself: its end, its tokens, an error inside it, and its own account.

A stream is passed on as its bytes come; here the same bytes are cut into events, of which the latest few are kept: the
usage, the timing and the end stand there. Nothing else is decoded.

What answers say of themselves that have no choices: those of the Responses and Messages APIs, and counted ones.

A response's usage and end stand in its last event, which has the whole response; `[DONE]` may follow, or not. A
message tells its prompt's tokens in its first event, those of the answer shortly before the last. An event's type
stands in its data too, so that `event:` lines are passed on unread.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from splittime.core.request import FinishReason
from splittime.gateway import forwarded
from splittime.gateway.verdict import ToldError, decoded, event_error, refusal_of, told_error
from splittime.ledger.attempts import NestedStage
from splittime.ledger.stages import Cause, Stage
from splittime.wire.sse import MAX_EVENT_BYTES, AnswerReader, EventLines, part, possible, text_bytes_of

KEPT_EVENTS = 4  # the last chunk, the usage, the end, and one to spare
MOST_HEADS, MOST_HEAD_BYTES = 256, 64 << 10  # of events in which nothing has begun: one for each of several answers
DONE = b"[DONE]"
LONG_BYTES, END_BYTES = 2**18, 4096  # of an answer that is no stream
SAID = ("finish_reason", "token_ids", "text", "message")  # of a choice
ENDS = ("response.completed", "response.incomplete", "response.failed")
FILTERED = "content_filter"
USED = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens")
HEADS = ("message_start", "ping")  # a response's first has an id, for use at once
STOPS = {
    "end_turn": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "max_tokens": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
    "tool_use": "tool_calls",
    "refusal": FILTERED,
}
Told = TypeVar("Told", bound=msgspec.Struct)


class ToldStage(msgspec.Struct):
    stage: str
    cause: str | None
    begin_ns: int
    end_ns: int


class ToldTiming(msgspec.Struct):
    """`timing` as a splittime server tells it (`api.answer.timing`): stages from its own start, up to `sealed_ns`."""

    start_ns: int
    sealed_ns: int
    stages: list[ToldStage]


class TimedAnswer(msgspec.Struct):
    """response: of the Responses API, in an event that has it."""

    timing: ToldTiming | None = None
    response: "TimedAnswer | None" = None


class NestedAccount(msgspec.Struct, frozen=True):
    """An upstream's account: its length and its stages, or why it cannot be taken."""

    duration_ns: int = 0
    stages: tuple[NestedStage, ...] = ()
    fault: str = ""


class AnswerEditor(Protocol):
    """What stands between an upstream's answer and its client."""

    @property
    def is_too_long(self) -> bool:
        """Whether an event is longer than any may be."""

    def edit(self, piece: bytes) -> bytes:
        """Returns the events of a stream that the client may have now."""

    def edit_whole(self, body: bytes) -> bytes:
        """Returns an answer that is no stream, as the client may have it."""


class WholeEvents:
    """Bytes of a stream up to the end of its latest whole event: if it breaks off, what the client is told then does
    not stand in the middle of an event."""

    def __init__(self) -> None:
        self._rest = bytearray()

    @property
    def is_too_long(self) -> bool:
        return len(self._rest) > MAX_EVENT_BYTES

    def edit(self, piece: bytes) -> bytes:
        """Returns what may be given to the client now."""
        if not self._rest and piece.endswith(b"\n\n"):
            return piece
        begin = max(0, len(self._rest) - 2)
        self._rest += piece
        end = max(self._rest.rfind(b"\n\n", begin) + 2, self._rest.rfind(b"\n\r\n", begin) + 3)
        if end < 3:  # neither was found
            return b""
        whole = bytes(self._rest[:end])
        del self._rest[:end]
        return whole

    def edit_whole(self, body: bytes) -> bytes:
        return body


def ignored(*told: object) -> None:
    """Nobody wants to know."""


class AnswerEvents:
    """One answer, as it is read. begin: its latest event up to the one with which it has begun, which has a piece of an
    answer. num_pieces: of its events, those that may have a token of the answer; num_bytes: of those, with all that
    stands around their texts. on_id: told by which id the upstream keeps it, as soon as it says so. error: that it told
    of itself, in which event, and whether before it began."""

    def __init__(self) -> None:
        self._lines = EventLines()
        self._latest: deque[bytes] = deque(maxlen=KEPT_EVENTS)
        self._reader: AnswerReader | None = None
        self.num_events = self.num_pieces = self.num_bytes = 0
        self.on_id: Callable[[str], None] = ignored
        self.is_done = self.has_begun = False
        self.begin: bytes | None = None
        self.error: ToldError | None = None
        self.error_data, self.is_error_first = b"", False
        self._heads: set[tuple[object, ...]] = set()

    def feed(self, piece: bytes) -> None:
        for data in self._lines.feed(piece):
            self.begin = self.begin if self.has_begun else data
            self._take(data)
            self.has_begun = self.has_begun or self.num_events > MOST_HEADS or not self._is_head(data)

    def _is_head(self, data: bytes) -> bool:
        """Returns whether an event comes before an answer, with nothing of it. What comes again is a sign of life."""
        choices = (decoded(data) or {}).get("choices") if data.startswith(b"{") else None
        if not isinstance(choices, list) or not all(map(_says_nothing, choices)) or self.num_bytes > MOST_HEAD_BYTES:
            return False
        num_heads = len(self._heads)
        self._heads.add(tuple((str(choice.get("index")), *(choice.get("delta") or ())) for choice in choices))
        return len(self._heads) > num_heads

    def _take(self, data: bytes) -> None:
        if data == DONE:
            self.is_done = True
            return
        self.num_events += 1
        self.num_pieces += 1
        self.num_bytes += len(data)
        self._latest.append(data)
        self._note_error(event_error(data), data)

    def _note_error(self, error: ToldError | None, data: bytes) -> None:
        if error is not None and self.error is None:
            self.error, self.error_data, self.is_error_first = error, data, not self.has_begun

    def take_whole(self, body: bytes) -> None:
        """An answer that is no stream."""
        self._latest.append(body)
        self.is_done = True

    def read(self) -> AnswerReader:
        """Returns what the latest events say of tokens and the end; of an answer that is all there, the same again."""
        if self._reader is not None:
            return self._reader
        reader = AnswerReader()
        for data in self._latest:
            reader.take(data, 0)
        self._reader = reader if self.is_done else None
        return reader

    @property
    def text_bytes(self) -> int:
        """Returns about how many bytes of text its pieces had, by what stands around the text of one of the latest; of
        an answer that is all there, how many it has."""
        if not self.num_pieces:
            return sum(text_bytes_of(data) for data in self._latest)
        around = next((len(data) - text for data in self._latest if (text := text_bytes_of(data))), None)
        return 0 if around is None else max(0, self.num_bytes - around * self.num_pieces)

    @property
    def is_empty(self) -> bool:
        """Returns whether a stream with choices has ended, and told no piece of an answer, no error and no reason."""
        is_short = self.is_done and self.error is None and 0 < self.num_pieces <= KEPT_EVENTS
        return is_short and self.read().finish_reason is None and not self.read().chunk_ns

    def nested(self) -> NestedAccount:
        """Returns the upstream's own account, as the last event that has one tells it."""
        for data in reversed(self._latest):
            if b'"timing"' in data:
                return _nested(data)
        return NestedAccount(fault="the answer told no timing")


def _says_nothing(choice: Any) -> bool:
    """Returns whether a chunk's choice has no piece of an answer: it tells the role, or is empty."""
    if not isinstance(choice, dict) or any(choice.get(name) for name in SAID):
        return False
    delta = choice.get("delta", {})
    return isinstance(delta, dict) and not any(value for name, value in delta.items() if name != "role")


def readable(piece: bytes) -> bytes:
    """Returns the events of this end of a stream that can be read: the last may have been cut."""
    whole = [one for one in EventLines().feed(piece) if one == DONE or isinstance(decoded(one), dict)]
    return b"".join(b"data: %b\n\n" % one for one in whole)


def _nested(data: bytes) -> NestedAccount:
    try:
        told = msgspec.json.decode(data, type=TimedAnswer)
        timing = (told.response or told).timing
        if timing is None:
            return NestedAccount(fault="the answer told no timing")
        stages = tuple(_stage(told) for told in timing.stages)
    except (msgspec.MsgspecError, ValueError, UnicodeDecodeError) as error:
        return NestedAccount(fault=f"the answer's timing cannot be read: {error}"[:200])
    return _checked(stages, timing.sealed_ns - timing.start_ns)


def _stage(told: ToldStage) -> NestedStage:
    cause: Any = None if told.cause is None else Cause(told.cause)
    return NestedStage(Stage(told.stage), cause, told.begin_ns, told.end_ns)


def _checked(stages: tuple[NestedStage, ...], duration_ns: int) -> NestedAccount:
    """The ledger's first law holds for what is nested, or it is not."""
    expected_ns = 0
    for stage in stages:
        if stage.begin_ns != expected_ns or stage.end_ns < stage.begin_ns:
            return NestedAccount(fault=f"the upstream's account has a gap at {expected_ns} ns")
        expected_ns = stage.end_ns
    if not stages or expected_ns != duration_ns:
        return NestedAccount(fault=f"the upstream's stages sum to {expected_ns} ns of {duration_ns} ns")
    return NestedAccount(duration_ns, stages)


class TypedAnswer(msgspec.Struct, gc=False):
    """A response or a message, as far as it counts."""

    status: Any = None
    stop_reason: Any = None
    incomplete_details: Any = None
    usage: Any = None
    error: Any = None


class ResponseEvent(msgspec.Struct, gc=False):
    type: str = ""
    response: TypedAnswer | None = None


class NamedResponse(msgspec.Struct, gc=False):
    """By which id a response is kept, read for itself: no other field can hide it. store: not, where it is false."""

    id: Any = None
    store: Any = None


class NamedEvent(msgspec.Struct, gc=False):
    response: NamedResponse | None = None


class MessageEvent(msgspec.Struct, gc=False):
    type: str = ""
    message: TypedAnswer | None = None
    delta: TypedAnswer | None = None
    usage: Any = None


class EventType(msgspec.Struct, gc=False):
    type: str = ""


def events_of(path: str) -> AnswerEvents:
    """Returns who reads an answer of this path."""
    kinds = {forwarded.RESPONSES: PassedResponse, forwarded.MESSAGES: PassedMessage, forwarded.COUNT_TOKENS: PassedFree}
    return kinds.get(path, AnswerEvents if path in forwarded.WITH_CHOICES else PassedCounted)()


class _TypedEvents(AnswerEvents):
    def __init__(self) -> None:
        super().__init__()
        self._usage = AnswerReader()

    def read(self) -> AnswerReader:
        return self._usage

    def _is_head(self, data: bytes) -> bool:
        kind = _type_of(data)
        is_head = kind in HEADS and (kind,) not in self._heads  # a second ping is a sign of life
        self._heads.add((kind,))
        return is_head

    def _note_usage(self, usage: object, *, has_output: bool = True) -> None:
        """Tokens as both APIs tell them. Those that Anthropic's cache had, or was given, are not in `input_tokens`."""
        read, (own, cached, made, output) = self._usage, (possible(part(usage, name)) for name in USED)
        details = part(usage, "input_tokens_details")
        prompt = None if own is None else own + (cached or 0) + (made or 0)
        read.prompt_tokens = _more(read.prompt_tokens, prompt)
        read.cached_tokens = _more(read.cached_tokens, cached if details is None else part(details, "cached_tokens"))
        if has_output and output is not None:
            read.output_tokens = output

    def _note_type(self, kind: str, data: bytes) -> None:
        self.num_events += 1
        self.num_pieces += kind.endswith("delta")
        if kind == "error":
            self._note_error(refusal_of(decoded(data)), data)
            self.is_done = True
        elif not kind:  # as servers tell an error whose other events have types
            self._note_error(event_error(data), data)


class PassedResponse(_TypedEvents):
    """A response, whose id is told once."""

    def __init__(self) -> None:
        super().__init__()
        self._has_id = False

    def take_whole(self, body: bytes) -> None:
        super().take_whole(body)
        self._note_id(_read(body, NamedResponse))
        self._note_answer(_read(body, TypedAnswer) or TypedAnswer())

    def _take(self, data: bytes) -> None:
        if not self._has_id:
            self._note_id((_read(data, NamedEvent) or NamedEvent()).response)
        event = _read(data, ResponseEvent) or ResponseEvent(_type_of(data))
        self._note_type(event.type, data)
        if event.type in ENDS:
            self._latest.append(data)
            self.is_done = True
            self._note_answer(event.response or TypedAnswer(status=event.type.removeprefix("response.")))

    def _note_id(self, told: NamedResponse | None) -> None:
        if told is not None and isinstance(told.id, str):
            self._has_id = True
            if told.store is not False:
                self.on_id(told.id)

    def _note_answer(self, answer: TypedAnswer) -> None:
        self._note_usage(answer.usage)
        if answer.status == "failed":
            told = {"error": answer.error or {"type": "failed"}}
            self._note_error(told_error(told), msgspec.json.encode(told))
        elif answer.status == "incomplete":
            is_filtered = part(answer.incomplete_details, "reason") == FILTERED
            self._usage.finish_reason = FILTERED if is_filtered else FinishReason.LENGTH
        elif answer.status == "completed":
            self._usage.finish_reason = FinishReason.STOP


class PassedMessage(_TypedEvents):
    """The first event's `output_tokens` are those of that moment, and count for nothing if no other comes."""

    def take_whole(self, body: bytes) -> None:
        super().take_whole(body)
        answer = _read(body, TypedAnswer) or TypedAnswer()
        self._note_usage(answer.usage)
        self._note_stop(answer.stop_reason)

    def _take(self, data: bytes) -> None:
        event = _read(data, MessageEvent) or MessageEvent(_type_of(data))
        self._note_type(event.type, data)
        if event.type == "message_start" and event.message is not None:
            self._note_usage(event.message.usage, has_output=False)
        elif event.type == "message_delta":
            self._note_usage(event.usage)
            self._note_stop(None if event.delta is None else event.delta.stop_reason)
        elif event.type == "message_stop":
            self.is_done = True

    def _note_stop(self, reason: object) -> None:
        if isinstance(reason, str):
            self._usage.finish_reason = STOPS.get(reason, reason[:64])


class PassedCounted(_TypedEvents):
    """An answer without tokens of its own. Those of the prompt are the sum of all where a server tells no more."""

    def take_whole(self, body: bytes) -> None:
        super().take_whole(body)
        answer = _read(_from(b"usage", body), TypedAnswer) or _read(body, TypedAnswer) or TypedAnswer()
        usage, read = answer.usage, self._usage
        told, total = part(usage, "prompt_tokens"), part(usage, "total_tokens")
        told = total if told is None else told
        read.prompt_tokens, read.output_tokens, read.finish_reason = possible(told), 0, FinishReason.STOP


class PassedFree(_TypedEvents):
    """An answer for which no model was asked."""

    def take_whole(self, body: bytes) -> None:
        super().take_whole(body)
        read = self._usage
        read.prompt_tokens, read.output_tokens, read.finish_reason = 0, 0, FinishReason.STOP


def _more(before: int | None, told: object) -> int | None:
    """Returns the larger number: a later event may tell 0 of what an earlier one counted."""
    tokens = possible(told)
    return before if tokens is None else max(tokens, before or 0)


def _from(name: bytes, body: bytes) -> bytes:
    """Returns a long answer's end from this field on, as an object: 17 MB of vectors before it take 20 ms to skip."""
    begin = body.rfind(b'"%b":' % name, len(body) - END_BYTES) if len(body) > LONG_BYTES else -1
    return body if begin < 0 else b"{" + body[begin:]


def _read(data: bytes, kind: type[Told]) -> Told | None:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _type_of(data: bytes) -> str:
    """Returns an event's type, where some other field of it cannot be read."""
    return (_read(data, EventType) or EventType()).type
