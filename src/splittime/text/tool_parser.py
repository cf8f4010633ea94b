"""Reads calls of tools out of an answer's text as it comes, by the same table that the grammar is made of.

What may be the beginning of a mark is held back, so that no mark is ever part of the content. A call is told once its
name is whole and is that of a tool; its arguments follow as the model writes them. What looked like a call and is none
(no tool's name, no JSON) is content, without the marks. What an answer's end cuts off stays cut off: nothing is added.
"""

import json
import re
from collections.abc import Collection
from typing import NamedTuple

from splittime.text.tool_families import ToolFamily

MOST_HEAD_CHARS = 1024  # of a call, up to its arguments
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


class CallDelta(NamedTuple):
    """What is new of a call. number: of the call, from 0. name: only where it begins."""

    number: int
    name: str | None
    arguments: str


class Parsed(NamedTuple):
    """content: of the answer, without its calls."""

    content: str
    calls: tuple[CallDelta, ...]


class ToolParser:
    """Give it the answer's text in pieces of any size. names: of the tools that may be called."""

    def __init__(self, family: ToolFamily, names: Collection[str]) -> None:
        self._family, self._names = family, frozenset(names)
        self._begin, self._end = family.begin.strip(), family.end.strip()
        self._text = ""  # what has come and is not decided yet
        self._state = self._in_content
        self._is_first = True  # nothing but white space came before
        self._blank = ""  # white space behind a call, which is content only before more of it
        self._nesting = _Nesting()
        self.num_calls = 0

    def push(self, text: str, *, is_end: bool = False) -> Parsed:
        """Returns what this piece makes sure. is_end: no other piece follows."""
        self._text += text
        self._content: list[str] = []
        self._calls: list[CallDelta] = []
        while self._state(is_end):
            pass
        return Parsed("".join(self._content), _joined(self._calls))

    # ---- each returns whether there is more to do with what has come

    def _in_content(self, is_end: bool) -> bool:
        if not self._begin:
            return self._before_bare_call(is_end)
        at = self._text.find(self._begin)
        if at >= 0:
            self._say(self._text[:at])
            self._text = self._text[at + len(self._begin) :]
            self._state = self._in_head
            return True
        self._say_up_to_mark(self._begin, is_end)
        return False

    def _before_bare_call(self, is_end: bool) -> bool:
        """A family without marks: an answer that begins with an object is a call, and so is each object behind one."""
        bare = self._text.lstrip("; \n" if self.num_calls else " \n")
        if bare.startswith("{") and self._is_first:
            self._text, self._state = bare, self._in_head
            return True
        if bare:
            self._is_first = False
        if bare or (is_end and not self.num_calls):
            self._say(self._text)
            self._text = ""
        return False

    def _in_head(self, is_end: bool) -> bool:
        """Between a call's begin and its arguments."""
        head = _read_head(self._text[:MOST_HEAD_CHARS], self._family.arguments)
        if head is not None and head.size and head.name in self._names:
            self._calls.append(CallDelta(self.num_calls, head.name, ""))
            self.num_calls, self._blank = self.num_calls + 1, ""
            self._text, self._nesting, self._state = self._text[head.size :], _Nesting(), self._in_arguments
            return True
        is_none = head is None or head.size > 0 or len(self._text) >= MOST_HEAD_CHARS
        return self._no_call() if is_none else False

    def _no_call(self) -> bool:
        """What came is content after all."""
        self._is_first, self._state = False, self._in_other
        return True

    def _in_other(self, is_end: bool) -> bool:
        """In something that is marked as a call and is none."""
        if not self._end:
            self._state = self._in_content
            return True
        return self._skip_to_end(is_end, is_content=True)

    def _in_arguments(self, is_end: bool) -> bool:
        size = self._nesting.feed(self._text)
        if size:
            self._calls.append(CallDelta(self.num_calls - 1, None, self._text[:size]))
        self._text = self._text[size:]
        if self._nesting.is_closed:
            self._state = self._after_arguments
            return True
        return False

    def _after_arguments(self, is_end: bool) -> bool:
        """The call's own brace, and its end."""
        if self._end:
            return self._skip_to_end(is_end, is_content=False)
        bare = self._text.lstrip()
        if not bare:
            return False
        self._text, self._state = bare.removeprefix("}"), self._in_content
        return True

    def _skip_to_end(self, is_end: bool, *, is_content: bool) -> bool:
        """Go to behind the end mark; what is before it is content, or nothing."""
        at = self._text.find(self._end)
        if at >= 0:
            if is_content:
                self._say(self._text[:at])
            self._text = self._text[at + len(self._end) :]
            self._state = self._in_content
            return True
        if is_content:
            self._say_up_to_mark(self._end, is_end)
        else:
            self._text = self._text[len(self._text) - _overlap(self._text, self._end) :]
        return False

    def _say_up_to_mark(self, mark: str, is_end: bool) -> None:
        """Give out all but an end that may be the beginning of the mark."""
        sure = len(self._text) - (0 if is_end else _overlap(self._text, mark))
        self._say(self._text[:sure])
        self._text = self._text[sure:]

    def _say(self, text: str) -> None:
        text = self._blank + text
        sure = len(text.rstrip()) if self.num_calls else len(text)
        self._content.append(text[:sure])
        self._blank = text[sure:]


class _Nesting:
    """How deep in objects, lists and texts of JSON."""

    def __init__(self) -> None:
        self._depth, self._in_text, self._is_escaped = 0, False, False
        self.is_closed = False

    def feed(self, text: str) -> int:
        """Returns how many of these characters belong to the value that it began in."""
        for position, character in enumerate(text):
            self._take(character)
            if self.is_closed:
                return position + 1
        return len(text)

    def _take(self, character: str) -> None:
        if self._in_text:
            ends = character == '"' and not self._is_escaped
            self._is_escaped = character == "\\" and not self._is_escaped
            self._in_text = not ends
        elif character == '"':
            self._in_text = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.is_closed = self._depth == 0


class _Head(NamedTuple):
    """size: its characters; 0 while it is not whole."""

    size: int
    name: str


def _read_head(text: str, arguments: str) -> _Head | None:
    """Reads `{"name": "f", "arguments": ` before an object. Returns None where the text begins no such head."""
    at, name = 0, ""
    for part in ("{", '"name"', ":", None, ",", f'"{arguments}"', ":"):
        at += len(text[at:]) - len(text[at:].lstrip())
        size = len(part) if part is not None and text.startswith(part, at) else 0
        if part is None and (written := _STRING.match(text, at)):
            size, name = len(written[0]), _decoded(written[0])
        if not size:
            rest = text[at:]
            is_begin = part.startswith(rest) if part is not None else not rest or rest[0] == '"'
            return _Head(0, "") if is_begin else None
        at += size
    at += len(text[at:]) - len(text[at:].lstrip())
    if at == len(text):
        return _Head(0, "")
    return _Head(at, name) if text[at] == "{" else None


def _decoded(written: str) -> str:
    """Returns the text of a string in JSON; "", which is no tool's name, where it is none."""
    try:
        return str(json.loads(written))
    except ValueError:
        return ""


def _overlap(text: str, mark: str) -> int:
    """Returns the length of the longest end of the text that begins the mark."""
    most = min(len(text), len(mark) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(mark[:size])), 0)


def _joined(deltas: list[CallDelta]) -> tuple[CallDelta, ...]:
    """Puts together what is new of the same call."""
    found: dict[int, CallDelta] = {}
    for delta in deltas:
        before = found.get(delta.number)
        arguments = delta.arguments if before is None else before.arguments + delta.arguments
        found[delta.number] = CallDelta(delta.number, delta.name if before is None else before.name, arguments)
    return tuple(found.values())
