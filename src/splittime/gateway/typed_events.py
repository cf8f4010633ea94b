"""What answers say of themselves that have no choices: those of the Responses and Messages APIs, and counted ones.

A response's usage and end stand in its last event, which has the whole response; `[DONE]` may follow, or not. A
message tells its prompt's tokens in its first event, those of the answer shortly before the last. An event's type
stands in its data too, so that `event:` lines are passed on unread.
"""

from typing import Any, TypeVar

import msgspec

from splittime.core.request import FinishReason
from splittime.gateway import endpoints
from splittime.gateway.answer_events import AnswerEvents
from splittime.gateway.told_error import decoded, event_error, refusal_of, told_error
from splittime.wire.sse import AnswerReader, possible

ENDS = ("response.completed", "response.incomplete", "response.failed")
FILTERED = "content_filter"
STOPS = {
    "end_turn": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "max_tokens": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
    "tool_use": "tool_calls",
    "refusal": FILTERED,
}
Told = TypeVar("Told", bound=msgspec.Struct)


class TypedDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None
    reason: Any = None


class TypedUsage(msgspec.Struct, gc=False):
    """Tokens as both APIs tell them. Those that Anthropic's cache had, or was given, are not in `input_tokens`."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    input_tokens_details: TypedDetails | None = None

    @property
    def cached(self) -> int | None:
        details = self.input_tokens_details
        return self.cache_read_input_tokens if details is None else details.cached_tokens

    @property
    def prompt(self) -> int | None:
        parts = (self.input_tokens, self.cache_read_input_tokens, self.cache_creation_input_tokens)
        own, *others = (possible(part) for part in parts)
        return None if own is None else own + sum(part or 0 for part in others)


class TypedAnswer(msgspec.Struct, gc=False):
    """A response or a message, as far as it counts."""

    status: Any = None
    stop_reason: Any = None
    incomplete_details: TypedDetails | None = None
    usage: TypedUsage | None = None
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
    usage: TypedUsage | None = None


class EventType(msgspec.Struct, gc=False):
    type: str = ""


class CountedUsage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    total_tokens: int | None = None


class CountedAnswer(msgspec.Struct, gc=False):
    usage: CountedUsage | None = None


def events_of(path: str) -> AnswerEvents:
    """Returns who reads an answer of this path."""
    kinds = {endpoints.RESPONSES: PassedResponse, endpoints.MESSAGES: PassedMessage, endpoints.COUNT_TOKENS: PassedFree}
    return kinds.get(path, AnswerEvents if path in endpoints.WITH_CHOICES else PassedCounted)()


class _TypedEvents(AnswerEvents):
    def __init__(self) -> None:
        super().__init__()
        self._usage = AnswerReader()

    def read(self) -> AnswerReader:
        return self._usage

    def _is_head(self, data: bytes) -> bool:
        return _type_of(data) == "message_start"  # a response's first has an id, which its client may use at once

    def _note_usage(self, usage: TypedUsage | None, *, has_output: bool = True) -> None:
        if usage is None:
            return
        read = self._usage
        read.prompt_tokens = _more(read.prompt_tokens, usage.prompt)
        read.cached_tokens = _more(read.cached_tokens, usage.cached)
        if has_output and (output := possible(usage.output_tokens)) is not None:
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
        details = answer.incomplete_details
        if answer.status == "failed":
            told = {"error": answer.error or {"type": "failed"}}
            self._note_error(told_error(told), msgspec.json.encode(told))
        elif answer.status == "incomplete":
            is_filtered = details is not None and details.reason == FILTERED
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
        usage, read = (_read(body, CountedAnswer) or CountedAnswer()).usage or CountedUsage(), self._usage
        told = usage.total_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        read.prompt_tokens, read.output_tokens, read.finish_reason = possible(told), 0, FinishReason.STOP


class PassedFree(_TypedEvents):
    """An answer for which no model was asked."""

    def take_whole(self, body: bytes) -> None:
        super().take_whole(body)
        read = self._usage
        read.prompt_tokens, read.output_tokens, read.finish_reason = 0, 0, FinishReason.STOP


def _more(before: int | None, told: int | None) -> int | None:
    """Returns the larger number: a later event may tell 0 of what an earlier one counted."""
    tokens = possible(told)
    return before if tokens is None else max(tokens, before or 0)


def _read(data: bytes, kind: type[Told]) -> Told | None:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _type_of(data: bytes) -> str:
    """Returns an event's type, where some other field of it cannot be read."""
    return (_read(data, EventType) or EventType()).type
