"""Reads calls of tools out of an answer's text as it comes, by the same table that the grammar is made of.

What may be the beginning of a mark is held back, so that no mark is ever part of the content. A call is told once its
name is whole; its arguments follow as the model writes them (`text.call_readers`). What looked like a call and is none
(no name, no JSON) is content, without the marks. What an answer's end cuts off stays cut off: nothing is added. Where
no mark told a call from a text, and no tool's name was read, the text is the answer.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from splittime.text.call_readers import CallReader, MemberReader, ObjectReader, PythonReader, QuotedReader, TaggedReader
from splittime.text.marks import Undecided, behind, last_word, overlap, trigger
from splittime.text.tool_families import Style, ToolFamily

READERS: Mapping[Style, type[CallReader]] = {
    Style.MEMBER: MemberReader,
    Style.NAMED: ObjectReader,
    Style.TAGGED: TaggedReader,
    Style.PYTHON: PythonReader,
    Style.QUOTED: QuotedReader,
}
_BETWEEN = "; ,\n"  # two calls: more than any family writes
_TAG_BEGIN = "<function="
_BARE_BEGIN = {"": re.compile(rf"\{{|{_TAG_BEGIN}"), "[": re.compile(r"\[")}  # of a call without a mark, by `opens`
_BARE_BETWEEN = re.compile(r"[\s;,\[\]]*(?:`{1,3}(?:j(?:s(?:on?)?)?)?)?[\s\[]*")  # before such a call, and behind it
_WORD = re.compile(r"\w")
PIECE_CHARS = 1024  # of a long text, read at once: what is left of it is copied for each part that is read


class CallDelta(NamedTuple):
    """What is new of a call. number: of the call, from 0. name: only where it begins, as is own_number: what the model
    itself numbered the call with."""

    number: int
    name: str | None
    arguments: str
    own_number: str = ""


class ParsedText(NamedTuple):
    """content: of the answer, without its calls."""

    content: str
    calls: tuple[CallDelta, ...]


class ToolParser:
    """Give it the answer's text in pieces of any size. tools: that may be called, with the schema of the arguments."""

    def __init__(self, family: ToolFamily, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._family, self._tools = family, tools
        self._named = trigger(family.before_name) if family.before_name.startswith("<") else ""
        self._firsts = [trigger(mark) for mark in (family.opens, family.begin, self._named) if mark.strip()] or [""]
        self._end, self._last = last_word(family.end), last_word(family.closes or family.end)
        self._text, self._undecided = "", Undecided()  # what has come and is not decided yet
        self._kept = ""  # what has been read, and is content if no call follows
        self._state: Callable[[bool], bool] = self._in_content
        self._reader = READERS[family.style](family, tools)
        self._is_fresh = True  # nothing but what stands between calls has come, since the last or at all
        self._is_text = False  # all that comes
        self._num_refused = 0  # of the undecided characters, in which no call begins
        self._is_strict = False  # the next call stands where prose or code may
        self._blank: list[str] = []  # white space behind a call, which is content only before more of it
        self.num_calls = 0

    def push(self, text: str, *, is_end: bool = False) -> ParsedText:
        """Returns what this piece makes sure. is_end: no other piece follows."""
        self._content: list[str] = []
        self._calls: list[CallDelta] = []
        for begin in range(0, len(text) or 1, PIECE_CHARS):
            is_last = is_end and begin + PIECE_CHARS >= len(text)
            grown = self._undecided.grown(self._text, text[begin : begin + PIECE_CHARS], is_end=is_last)
            if grown is not None:
                self._text = grown
                while self._state(is_last):
                    pass
        return ParsedText("".join(self._content), _joined(self._calls))

    # ---- each returns whether there is more to do with what has come

    def _in_content(self, is_end: bool) -> bool:
        if self._family.is_bare:
            return self._before_bare_calls(is_end)
        at = min((place for place in map(self._text.find, self._firsts) if place >= 0), default=-1)
        if at >= 0:
            self._say(self._text[:at])
            self._text, self._state = self._text[at:], self._at_mark
            return True
        self._say_up_to_mark(self._firsts, is_end)
        return False

    def _before_bare_calls(self, is_end: bool) -> bool:
        """A family without marks: what begins as calls do may be calls, wherever it stands. An answer that begins as an
        object and is no call is a text to its end."""
        name, bracket, _ = self._text.lstrip().partition("(")
        if self._family.opens and self._is_fresh and not self.num_calls and name:  # the list's bracket is missing
            if bracket and name in self._tools and not self._num_refused:
                self._state, self._is_strict = self._begin_call, True
                return True
            if not bracket and not is_end and any(tool.startswith(name) for tool in self._tools):
                return False
        begin = None if self._is_text else _BARE_BEGIN[self._family.opens].search(self._text, self._num_refused)
        if begin is None:
            return self._before_none(is_end)
        before = self._text[: begin.start()]
        is_between = self._is_between(before)
        if not is_between:
            self._say(before)
            self._is_fresh = False
            if begin[0] == _TAG_BEGIN:  # prose speaks of it
                self._text, self._num_refused = self._text[len(before) :], len(begin[0])
                return True
        self._kept, self._text = before if is_between else "", self._text[len(before) :]
        self._num_refused, self._state, self._is_strict = 0, self._begin_call, not is_between
        if self._family.opens:
            self._kept, self._text, self._state = self._kept + self._text[:1], self._text[1:], self._in_calls
        return True

    def _is_between(self, before: str) -> bool:
        return self._is_fresh and not self._num_refused and _BARE_BETWEEN.fullmatch(before) is not None

    def _before_none(self, is_end: bool) -> bool:
        """Nothing that has come begins a call."""
        held = 0 if is_end or self._is_text or self._family.opens else overlap(self._text, _TAG_BEGIN)
        before = self._text[: len(self._text) - held]
        if self._is_between(before) and (self.num_calls or not is_end):
            return False
        self._say(before)
        self._text, self._num_refused, self._is_fresh = self._text[len(before) :], 0, False
        return False

    def _at_mark(self, is_end: bool) -> bool:
        """Behind a text, where a mark begins whose rest may be missing."""
        rest = behind(self._text, self._family.opens or self._family.begin)
        if rest is None:
            return False
        if rest == self._text and self._named and rest.startswith(self._named):
            self._state = self._begin_bare_call  # all marks before the name are missing
            return True
        if rest == self._text and len(self._firsts) > 1 and rest.startswith(self._firsts[1]):
            self._state = self._in_calls  # the mark around all calls is missing
            return True
        if rest == self._text:
            self._text = self._text[len(self._firsts[0]) :]
            if not self._family.before_name and self._text.lstrip().startswith("{"):  # the list's bracket is missing
                self._state = self._in_calls
                return True
            return self._no_call()
        self._text, self._state = rest, self._in_calls if self._family.opens else self._begin_call
        return True

    def _in_calls(self, is_end: bool) -> bool:
        """Before a call, or before the mark that closes all of them."""
        family, text = self._family, self._text.lstrip(_BETWEEN)
        closed = behind(text, family.closes)
        if closed is not None and closed != text:
            return self._close(closed)
        begun = behind(text, family.begin) if family.begin else text
        if closed is None or begun is None:
            return self._no_call() if is_end and self._kept else False
        is_call = begun != text or not family.begin
        if self._kept:  # white space in front is content too, if no call follows
            self._kept += self._text[: len(self._text) - len(text)]
        self._text, self._state = (begun, self._begin_call) if is_call else (text, self._in_content)
        return True

    def _close(self, rest: str) -> bool:
        if self._kept:
            return self._no_call()
        self._text, self._state = rest, self._in_content
        return True

    def _begin_call(self, is_end: bool) -> bool:
        """Where arguments stand between marks, some models write an object all the same."""
        family, bare = self._family, self._text.lstrip()
        if family.style is Style.TAGGED and not bare and not is_end:
            return False
        style = Style.MEMBER if family.style is Style.TAGGED and bare.startswith("{") else family.style
        self._reader, self._state = READERS[style](family, self._tools), self._in_call
        if isinstance(self._reader, PythonReader):
            self._reader.is_strict = self._is_strict
        self._is_strict = False
        return True

    def _begin_bare_call(self, is_end: bool) -> bool:
        """Only of a tool that there is: the text may speak of calls."""
        family = self._family._replace(is_bare=True)
        self._reader, self._state = READERS[family.style](family, self._tools), self._in_call
        return True

    def _in_call(self, is_end: bool) -> bool:
        reader = self._reader
        was_known = reader.name is not None
        self._text = reader.feed(self._text, is_end=is_end)
        if reader.is_none or (is_end and self._is_text_so_far()):
            return self._no_call()
        if reader.name is not None and not was_known:
            self._calls.append(CallDelta(self.num_calls, reader.name, "", reader.number))
            self.num_calls, self._blank, self._kept = self.num_calls + 1, [], ""
        if reader.arguments:
            self._calls.append(CallDelta(self.num_calls - 1, None, reader.arguments))
            reader.arguments = ""
        if reader.is_over:
            self._state = self._after_call
        return reader.is_over

    def _is_text_so_far(self) -> bool:
        """Returns whether all of the answer is a text that only begins as calls do, in a family without marks."""
        return self._family.is_bare and not self.num_calls and self._reader.name is None

    def _no_call(self) -> bool:
        """Returns what came, which is content after all."""
        is_at_begin = bool(self._named) and self._text.startswith(self._named)
        self._num_refused = len(self._kept) + (not self._family.opens) if self._family.is_bare else int(is_at_begin)
        self._is_text = self._is_fresh and not self.num_calls and not self._family.opens
        self._text, self._kept = self._kept + self._text, ""
        self._is_fresh, self._state = False, self._in_other
        return True

    def _in_other(self, is_end: bool) -> bool:
        """In something that is marked as a call and is none: up to its end mark, or to where another call begins."""
        marks = [mark for mark in (*self._firsts, self._last) if mark]
        if self._family.is_bare:
            self._state = self._in_content
            return True
        places = [at for mark in marks if (at := self._text.find(mark, self._num_refused)) >= 0]
        self._num_refused = 0
        if not places:
            self._say_up_to_mark(marks, is_end)
            return False
        at = min(places)
        self._say(self._text[:at])
        self._text, self._state = self._text[at:].removeprefix(self._last), self._in_content
        return True

    def _after_call(self, is_end: bool) -> bool:
        """Behind a call: what stands before its end mark is nothing. Where another call begins first, or no mark comes,
        the model has left it out."""
        self._is_fresh = True
        marks = [self._end, *filter(None, self._firsts)] if self._end else [""]
        places = [at for mark in marks if (at := self._text.find(mark)) >= 0]
        if not places and not is_end:
            return False
        word = _WORD.search(self._text)  # a bracket or white space is still of the call
        at = min(places) if places else word.start() if word else len(self._text)
        ending = 0 if places else max(overlap(self._text, mark) for mark in marks)
        self._text = self._text[at : max(at, len(self._text) - ending)].removeprefix(self._end)
        self._state = self._in_calls if self._family.opens else self._in_content
        return True

    def _say_up_to_mark(self, marks: Sequence[str], is_end: bool) -> None:
        """Give out all but an end that may be the beginning of a mark."""
        sure = len(self._text) - (0 if is_end else max(overlap(self._text, mark) for mark in marks))
        self._say(self._text[:sure])
        self._text = self._text[sure:]

    def _say(self, text: str) -> None:
        sure = len(text.rstrip()) if self.num_calls else len(text)
        if sure:
            self._content += [*self._blank, text[:sure]]
            self._blank = []
        if sure < len(text):
            self._blank.append(text[sure:])


def _joined(deltas: list[CallDelta]) -> tuple[CallDelta, ...]:
    """Puts together what is new of the same call."""
    found: dict[int, list[CallDelta]] = {}
    for delta in deltas:
        found.setdefault(delta.number, []).append(delta)
    return tuple(of[0]._replace(arguments="".join(each.arguments for each in of)) for of in found.values())
