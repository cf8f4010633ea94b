"""Streams are asked to tell their tokens (`stream_options.include_usage`), whether their client asks for that or not.

A client that did not ask gets the stream without that event, and the rest as it came, byte for byte. A splittime server
tells its tokens beside the `timing` that the gateway asks it for, and is not asked. A server that refuses the field is
asked again without it; once it has answered that, it is not asked for the field any more. So is one that refuses to
count each chunk (`each`), which is asked for where a stream may have to go on elsewhere, after so many tokens. A
refusal alone says nothing: it may quote what its client wrote.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import msgspec

from splittime.gateway.forwarded import WITH_CHOICES, ForwardedRequest
from splittime.gateway.verdict import ANSWERED
from splittime.wire.sse import EventLines

OPTIONS, INCLUDE, EACH = "stream_options", "include_usage", "continuous_usage_stats"
REFUSED = (400, 422)
MAX_REFUSAL_BYTES = 1024  # its beginning: behind that it quotes the request
EACH_CHUNK, AT_THE_END, NOTHING = 2, 1, 0
NULL, TRUE, ESCAPED = b"null", b"true", b"\\u"
END = re.compile(rb"(?<![^\n])\r?\n")  # of an event, as `EventLines` reads one: a line with nothing in it
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Telling(Protocol):
    """An upstream, and how much of its streams' tokens it can be asked for."""

    tells_usage: int

    @property
    def keeps_accounts(self) -> bool: ...


class UsageEvent(msgspec.Struct, gc=False):
    """What tells an event that has nothing but the usage."""

    choices: msgspec.Raw = msgspec.Raw(b"[]")
    usage: msgspec.Raw = msgspec.Raw(NULL)

    @property
    def is_told(self) -> bool:
        return bytes(self.usage) != NULL

    @property
    def is_all(self) -> bool:
        return bytes(self.choices).translate(None, b" \t\r\n") == b"[]"


class UsageAsked:
    """One attempt's part. request: what the upstream is sent. each: where each chunk is to tell its tokens."""

    def __init__(self, request: ForwardedRequest, upstream: Telling, *, each: bool = False) -> None:
        self._asked, self._upstream = request, upstream
        self._level, self._added, self._was_refused = NOTHING, frozenset[str](), False
        self.request = request
        if request.is_stream and request.path in WITH_CHOICES and not upstream.keeps_accounts:
            self._ask(min(upstream.tells_usage, EACH_CHUNK if each else AT_THE_END))

    def _ask(self, level: int) -> None:
        self._level = level
        names = {NOTHING: (), AT_THE_END: (INCLUDE,), EACH_CHUNK: (INCLUDE, EACH)}[self._level]
        body, self._added = _with_options(self._asked.body, names)
        self.request = msgspec.structs.replace(self._asked, body=body) if self._added else self._asked

    def is_refused(self, status: int, body: bytes) -> bool:
        """Returns whether the upstream refused what was added alone; `request` then asks for less."""
        is_about_it = any(name.encode() in body[:MAX_REFUSAL_BYTES] for name in (OPTIONS, INCLUDE, EACH))
        if not (self._added and status in REFUSED and is_about_it):
            return False
        self._ask(self._level - 1)
        self._was_refused = True
        return True

    def note_answered(self, status: int) -> None:
        """Take note that the upstream answered what it was asked last."""
        if self._was_refused and status in ANSWERED:
            self._upstream.tells_usage = min(self._upstream.tells_usage, self._level)

    @property
    def may_be_refused(self) -> bool:
        return bool(self._added)

    def shown(self, events: bytes) -> bytes:
        """Returns whole events as the client asked for them."""
        if not self._added or b'"usage"' not in events:
            return events
        return b"".join(self._shown(one) for one in _split(events))

    def _shown(self, event: bytes) -> bytes:
        data = b"\n".join(EventLines().feed(event))
        try:
            told = msgspec.json.decode(data, type=UsageEvent)
        except UNREADABLE:
            return event
        if told.is_told and told.is_all:
            return b"" if INCLUDE in self._added else event
        if told.is_told and EACH in self._added:
            fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
            del fields["usage"]
            return _with_data(event, msgspec.json.encode(fields))
        return event


def _with_options(body: bytes, names: Sequence[str]) -> tuple[bytes, frozenset[str]]:
    """Returns the body with these options of its stream, and those of them that it did not have."""
    if not names:
        return body, frozenset()
    if OPTIONS.encode() not in body and ESCAPED not in body:
        begin, written = body.index(b"{") + 1, msgspec.json.encode(dict.fromkeys(names, True))
        return b'%b"%b":%b,%b' % (body[:begin], OPTIONS.encode(), written, body[begin:]), frozenset(names)
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        options = msgspec.json.decode(fields.get(OPTIONS, msgspec.Raw(NULL)), type=dict[str, msgspec.Raw] | None) or {}
    except UNREADABLE:
        return body, frozenset()  # the upstream's to refuse
    added = frozenset(name for name in names if bytes(options.get(name, b"")) != TRUE)
    if not added:
        return body, added
    written = msgspec.json.encode({**options, **dict.fromkeys(added, True)})
    return msgspec.json.encode({**fields, OPTIONS: msgspec.Raw(written)}), added


def _split(events: bytes) -> list[bytes]:
    """Returns the events, each with its own end."""
    ends = (0, *(found.end() for found in END.finditer(events)), len(events))
    return [events[begin:end] for begin, end in pairwise(ends) if begin < end]


def _with_data(event: bytes, data: bytes) -> bytes:
    """Returns the event with other data, in the first line that has some; its other lines and its ends stay."""
    found = list[bytes]()
    for line in event.split(b"\n"):
        if line.partition(b":")[0] != b"data":
            found.append(line)
        elif data:
            found.append(b"data: %b%b" % (data, b"\r" if line.endswith(b"\r") else b""))
            data = b""
    return b"\n".join(found)
