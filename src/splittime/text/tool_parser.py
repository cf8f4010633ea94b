"""Reads calls of tools out of an answer's text as it comes, by the same table that the grammar is made of.

What may be the beginning of a mark is held back, so that no mark is ever part of the content. A call is told once its
name is whole; its arguments follow as the model writes them (`text.call_readers`). What looked like a call and is none
(no name, no JSON) is content, without the marks. What an answer's end cuts off stays cut off: nothing is added. Where
no mark told a call from a text, and no tool's name was read, the text is the answer.
"""

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
        self._firsts = [trigger(mark) for mark in (family.opens, family.begin) if mark.strip()] or [""]
        self._end, self._last = last_word(family.end), last_word(family.closes or family.end)
        self._text, self._undecided = "", Undecided()  # what has come and is not decided yet
        self._kept = ""  # what has been read, and is content if no call follows
        self._state: Callable[[bool], bool] = self._in_content
        self._reader = self._new_reader()
        self._is_first = True  # nothing but white space came before
        self._blank: list[str] = []  # white space behind a call, which is content only before more of it
        self.num_calls = 0

    def _new_reader(self) -> CallReader:
        return READERS[self._family.style](self._family, self._tools)

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
        """A family without marks: an answer that begins as calls do is calls, and so is what begins so behind one."""
        opens = self._family.opens
        bare = self._text.lstrip(_BETWEEN if self.num_calls and not opens else " \n")
        if bare.startswith(opens or "{") and self._is_first:
            self._kept, self._text = opens, bare[len(opens) :]
            self._state = self._in_calls if opens else self._begin_call
            return True
        if bare:
            self._is_first = False
        if bare or (is_end and not self.num_calls):
            self._say(self._text)
            self._text = ""
        return False

    def _at_mark(self, is_end: bool) -> bool:
        """Behind a text, where a mark begins whose rest may be missing."""
        rest = behind(self._text, self._family.opens or self._family.begin)
        if rest is None:
            return False
        if rest == self._text and len(self._firsts) > 1 and rest.startswith(self._firsts[1]):
            self._state = self._in_calls  # the mark around all calls is missing
            return True
        if rest == self._text:
            self._text = self._text[len(self._firsts[0]) :]
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
        self._is_first = False
        return True

    def _begin_call(self, is_end: bool) -> bool:
        self._reader, self._state = self._new_reader(), self._in_call
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
        self._text, self._kept = self._kept + self._text, ""
        self._is_first, self._state = False, self._in_other
        return True

    def _in_other(self, is_end: bool) -> bool:
        """In something that is marked as a call and is none."""
        if self._family.is_bare or not self._last:
            self._state = self._in_content
            return True
        return self._skip_to(self._last, is_end, is_content=True)

    def _after_call(self, is_end: bool) -> bool:
        if self._end:
            return self._skip_to(self._end, is_end, is_content=False)
        self._state = self._in_calls if self._family.opens else self._in_content
        return True

    def _skip_to(self, mark: str, is_end: bool, *, is_content: bool) -> bool:
        """Go to behind the mark; what is before it is content, or nothing."""
        at = self._text.find(mark)
        if at >= 0:
            if is_content:
                self._say(self._text[:at])
            self._text = self._text[at + len(mark) :]
            self._state = self._in_calls if self._family.opens and not is_content else self._in_content
            return True
        if is_content:
            self._say_up_to_mark([mark], is_end)
        else:
            self._text = self._text[len(self._text) - overlap(self._text, mark) :]
        return False

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
