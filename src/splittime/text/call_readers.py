"""How one call is read as it comes, by its style (`tool_families.Style`): its name once that is whole and is a tool's,
and its arguments as the JSON that an API answers with.

A reader is fed what has come and gives back what it does not use, which may be all of it: then it waits for more, or
`is_none` says that this is no call.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from splittime.text.call_arguments import MAX_LITERAL_CHARS, JsonPieces, is_text, python_value_of, types_of, value_of
from splittime.text.marks import behind, last_word, overlap, trigger
from splittime.text.tool_families import Style, ToolFamily

MOST_BARE_CHARS = 2**14  # of an object without a mark whose arguments come first
MOST_HEAD_CHARS = 1024  # of a call, up to its arguments; of an argument, up to its value (python)
_POSITIONAL = re.compile(r"""[\s,]*(?:["'\[{(]|[^\s=(),]+(?:\s+[^\s=]|[(),]))""")  # a value without a name
_TEXT, _ANY_BUT_TEXT = frozenset({"string"}), frozenset({"array", "boolean", "integer", "null", "number", "object"})
_KEYWORD = re.compile(r"""[\s,]*([^\s=(),"'\[{]+)\s*=""")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_TYPE = re.compile(r'"type"\s*:\s*"function"\s*,\s*')  # which some write first
_NAMED: tuple[str, ...] = ('"name"',)
_MEMBERS = (("{",), _NAMED, (":",), (), (",",), ('"arguments"', '"parameters"'), (":",))  # (): the name
_NAME = re.compile(r"[\w.-]+")
_QUOTED_NAME = re.compile(r"""(["']?)([\w.-]+)""")
_WORD = re.compile(r'[^,:{}\[\]<"]+')
_TAG = re.compile(r"<function=([\w.-]*)(>\s*(\{)?)?")  # before the arguments alone, as some Llamas write it
_TAG_END = "</function>"
_FIRST_MEMBERS = ('{"id":', '{"name":', '{"function":', '{"type":"function"', '{"arguments":', '{"parameters":')
_CALL_MEMBERS = {"name", "function", "type", "id", "arguments", "parameters"}
_FIRST_NAME = re.compile(r"""\{\s*["'](?:name|function)["']\s*:\s*(?:(["'])([^"']*)(["']?)|$)""")
_IN_STRING = re.compile(r'(?:[^"\\]|\\.)*')
_CLOSES = {"{": "}", "[": "]"}
_NUMBER = re.compile(r":\d*")
_ID = re.compile(r"[a-zA-Z0-9]*")


class CallHead(NamedTuple):
    """size: its characters; 0 while it is not whole. number: that the model gave the call; "" for none."""

    size: int
    name: str
    number: str = ""


def read_members(text: str) -> CallHead | None:
    """Reads `{"name": "f", "arguments": ` before an object. Returns None where the text begins no such head."""
    at, name = 0, ""
    for parts in _MEMBERS:
        at += len(text[at:]) - len(text[at:].lstrip())
        if parts is _NAMED and (typed := _TYPE.match(text, at)):
            at = typed.end()
        size = next((len(part) for part in parts if text.startswith(part, at)), 0)
        if not parts and (written := _STRING.match(text, at)):
            size, name = len(written[0]), _decoded(written[0])
        if not size:
            rest = text[at:]
            begins = (*parts, '"type":"function",') if parts is _NAMED else parts or ('"' + rest[1:],)
            is_begin = any(each.startswith(rest if not parts else "".join(rest.split())) for each in begins)
            return CallHead(0, "") if is_begin else None
        at += size
    at += len(text[at:]) - len(text[at:].lstrip())
    if at == len(text):
        return CallHead(0, "")
    return CallHead(at, name) if text[at] == "{" else None


def _decoded(written: str) -> str:
    """Returns the text of a string in JSON; "", which is no tool's name, where it is none."""
    try:
        return str(json.loads(written))
    except ValueError:
        return ""


def read_name(text: str, family: ToolFamily) -> CallHead | None:
    """Reads a name and the family's marks around it. Returns None where the text begins no such head."""
    rest = behind(text, family.before_name)
    if rest is None or not rest.strip():
        return CallHead(0, "")
    if rest == text and family.before_name and not family.is_numbered:
        return None
    named = _QUOTED_NAME.match(rest.lstrip())
    if named is None:
        return CallHead(0, "") if rest.strip() in ("'", '"') else None
    rest = rest.lstrip()[named.end() :].removeprefix(named[1])
    numbered = _NUMBER.match(rest) if family.is_numbered else None
    if numbered is not None:
        rest = rest[numbered.end() :]
    if family.id_mark and rest.startswith(family.id_mark):
        rest = rest[len(family.id_mark) :]
        rest = rest[len(_ID.match(rest)[0]) :]  # type: ignore[index]
    if not rest or (family.id_mark and family.id_mark.startswith(rest)):
        return CallHead(0, "")
    after = behind(rest, family.after_name)
    if after is None:
        return CallHead(0, "")
    begins = family.style is Style.NAMED and rest.lstrip().startswith("{")
    is_whole = after != rest or not family.after_name.strip() or begins
    number = "" if numbered is None else numbered[0][1:]
    return CallHead(len(text) - len(after), named[2], number) if is_whole else None


def call_of(written: str, *, has_mark: bool) -> tuple[str, str] | None:
    """Returns the name, and the arguments as JSON, of a call that is one object, its members in any order, as JSON or
    Python has it; None where it is no call. It may lack arguments, and they may stand in a text. has_mark: a mark says
    that it is a call, whatever other members it has."""
    value = value_of(JsonPieces().push(written, is_end=True)[0], None)
    if isinstance(value, str):
        value = python_value_of(written)
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not (has_mark or value.keys() <= _CALL_MEMBERS):
        return None
    name = next((value[key] for key in ("name", "function") if isinstance(value.get(key), str)), None)
    given = next((value[key] for key in ("arguments", "parameters") if key in value), None)
    if isinstance(given, str):
        given = python_value_of(given) if given.strip() else None
    return None if name is None or not isinstance(given or {}, dict) else (name, _json(given or {}))


class CallReader:
    """tools: the schema of the arguments, by the tool's name. arguments: what is new of them; whoever takes it empties
    it. number: that the model gave the call, where the family numbers them. is_over: all but the family's end mark has
    been read."""

    def __init__(self, family: ToolFamily, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._family, self._tools = family, tools
        self.name: str | None = None
        self.number = ""
        self.arguments = ""
        self.is_over = self.is_none = self._is_end = False
        self._state: Callable[[str], str | None] = self._head

    def feed(self, text: str, *, is_end: bool) -> str:
        """Returns what it has not used. is_end: nothing else follows."""
        self._is_end = is_end
        while not self.is_over and not self.is_none:
            rest = self._state(text)
            if rest is None:
                break
            text = rest
        return text

    # ---- each returns what follows, or None where more must come

    def _head(self, text: str) -> str | None:
        head = self._read_head(text[:MOST_HEAD_CHARS])
        if head is not None and head.size and (head.name in self._tools or self._may_be_unknown(head.name)):
            self.name, self.number, self._state = head.name, head.number, self._arguments
            return text[head.size :]
        self.is_none = head is None or head.size > 0 or len(text) >= MOST_HEAD_CHARS
        return None

    def _may_be_unknown(self, name: str) -> bool:
        """Returns whether a name that is no tool's is told as a call all the same: the client says what is wrong with
        it, and the model goes on. Without a mark it is a text."""
        return not self._family.is_bare and _NAME.fullmatch(name) is not None

    def _read_head(self, text: str) -> CallHead | None:
        return read_name(text, self._family)

    def _arguments(self, text: str) -> str | None:
        raise NotImplementedError


class ObjectReader(CallReader):
    """For arguments that are an object of JSON: they are given as they were written, but for what is no JSON at all."""

    def __init__(self, family: ToolFamily, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(family, tools)
        self._pieces = JsonPieces()

    def _read_head(self, text: str) -> CallHead | None:
        head = super()._read_head(text)
        if head is None or not head.size:
            return head
        size = len(text) - len(text[head.size :].lstrip())
        if size == len(text):
            return CallHead(0, "")
        return head._replace(size=size) if text[size] == "{" else None

    def _arguments(self, text: str) -> str | None:
        sure, rest = self._pieces.push(text, is_end=self._is_end)
        self.arguments += sure
        if self._pieces.is_closed:
            self._state = self._close
        return rest if text else None

    def _close(self, text: str) -> str | None:
        self.is_over = True
        return None


class MemberReader(ObjectReader):
    """For a call that is an object with the name and then the arguments, which are given as they come. One whose
    members are others, or stand in another order, is read when it is whole."""

    def __init__(self, family: ToolFamily, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(family, tools)
        self._around = JsonPieces(depth=1)
        self._nesting, self._num_scanned = PythonNesting(), 0
        self._end = family.end

    def _head(self, text: str) -> str | None:
        rest = super()._head(text)
        may_be_call = self._may_be_call(text) if self.is_none else None
        if may_be_call is not None:
            self.is_none, self._state = not may_be_call, self._whole
            return text
        self.is_none = self.is_none and len(text) >= MOST_HEAD_CHARS
        return rest

    def _read_head(self, text: str) -> CallHead | None:
        tag = _TAG.match(text) if self._family.is_bare else None
        if tag is None:
            return read_members(text)
        if tag[3] is None:
            return CallHead(0, "") if tag.end() == len(text) else None
        self._end = _TAG_END
        return CallHead(tag.start(3), tag[1])

    def _may_be_call(self, text: str) -> bool | None:
        """Returns whether an object may be a call, by its first member; None while that is not known."""
        head = text[:MOST_HEAD_CHARS].lstrip()
        named = _FIRST_NAME.match(head)
        if named is not None and not named[3]:  # it is not whole
            return None
        if named is not None and named[2] not in self._tools and not self._may_be_unknown(named[2]):
            return False
        begun = "".join(head.split()).replace("'", '"')
        if any(begun.startswith(first) for first in _FIRST_MEMBERS):
            return True
        return None if any(first.startswith(begun) for first in _FIRST_MEMBERS) else False

    def _whole(self, text: str) -> str | None:
        for at in range(self._num_scanned, len(text)):
            self._nesting.take(text[at])
            if self._nesting.is_outside and text[at] == "}":
                return self._call(text, at + 1)
        self._num_scanned = len(text)
        self.is_none = self._is_end or (self._family.is_bare and len(text) > MOST_BARE_CHARS)
        return None

    def _call(self, text: str, size: int) -> str:
        found = call_of(text[:size], has_mark=not self._family.is_bare)
        if found is None or not (found[0] in self._tools or self._may_be_unknown(found[0])):
            self.is_none = True
            return text
        (self.name, self.arguments), self.is_over = found, True
        return text[size:]

    def _close(self, text: str) -> str | None:
        """Reads to the brace of the call itself; where a mark ends it, that is enough."""
        if self._end == _TAG_END:
            rest = behind(text, _TAG_END)
            self.is_over = rest is not None
            return rest
        if self._end:
            self.is_over = True
            return None
        _, rest = self._around.push(text, is_end=self._is_end)
        self.is_over = self._around.is_closed
        return rest if text else None


class TaggedReader(CallReader):
    """For arguments that stand between marks, a text as it is."""

    def __init__(self, family: ToolFamily, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(family, tools)
        self._value_end = trigger(family.after_value)
        self._has_breaks = family.after_value.startswith("\n")  # around a value
        self._is_first = True  # of the arguments
        self._types: frozenset[str] | None = None  # of the value that is read

    def _read_head(self, text: str) -> CallHead | None:
        """Where no mark stands beside the name, one that is no tool's is followed by an argument's mark, or the end.
        So is any name that no mark stands before."""
        head = super()._read_head(text)
        is_sure = self._family.after_name.strip() or (head is not None and head.name in self._tools)
        if not head or not head.size or (is_sure and not self._family.is_bare):
            return head
        rest = text[head.size :]
        found = [behind(rest, mark) for mark in (self._family.before_key, trigger(self._family.end))]
        is_open = None in found or not rest
        return CallHead(0, "") if is_open else head if found != [rest, rest] else None

    def _arguments(self, text: str) -> str | None:
        """Between two arguments, or behind the last."""
        end = trigger(self._family.end)
        after = behind(text, end)
        if after is not None and after != text:
            self.arguments += "{}" if self._is_first else "}"
            self.is_over = True
            return None if end == last_word(self._family.end) else after  # its last word is looked for behind this one
        if self._is_end and not self._is_first and not text.strip():  # the model has left out the end
            self.arguments, self.is_over = self.arguments + "}", True
            return None
        rest = behind(text, self._family.before_key)
        begun = behind(text, self._family.begin) if self._family.begin.strip() else text
        if rest is None or after is None or begun is None or not text.strip():
            return None
        if begun != text:  # another call: the model has left out the end
            self.arguments, self.is_over = self.arguments + ("{}" if self._is_first else "}"), True
            return None
        if rest == text:  # neither: it says something else, which is skipped
            at = text.find("<", len(text) - len(text.lstrip()) + 1)
            return text[at:] if at > 0 else None
        self._state = self._key
        return rest

    def _key(self, text: str) -> str | None:
        at = text.find(trigger(self._family.after_key))
        found = self._behind_key(text[at:]) if at >= 0 else None
        if found is None:
            return None
        key, (rest, own_types) = text[:at].strip().strip("\"'"), found
        schema = self._tools.get(self.name or "", {})
        properties = schema.get("properties")
        of_key = properties.get(key, {}) if isinstance(properties, Mapping) else {}
        self._types = own_types or types_of(of_key, schema)
        self.arguments += ("{" if self._is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        self._is_first, self._state = False, self._value_begin
        if is_text(self._types):
            self.arguments += '"'
        return rest

    def _behind_key(self, text: str) -> tuple[str, frozenset[str] | None] | None:
        """Returns what follows the marks behind a name, and the types of its value where they say those; None where
        they may go on."""
        family = self._family
        after_text = behind(text, family.after_key)
        if not family.after_json_key:
            return None if after_text is None else (after_text, None)
        after_json = behind(text, family.after_json_key)
        if after_text is None or after_json is None:
            return None
        return (after_text, _TEXT) if after_text != text else (after_json, _ANY_BUT_TEXT)

    def _value_begin(self, text: str) -> str | None:
        if not text:
            return None
        self._state = self._value
        return text.removeprefix("\n") if self._has_breaks else text

    def _value(self, text: str) -> str | None:
        at = min((place for mark in self._ends() if (place := text.find(mark)) >= 0), default=-1)
        if at < 0:
            return self._some_text(text)
        written = text[:at].removesuffix("\n") if self._has_breaks else text[:at]
        self.arguments += inner(written) + '"' if is_text(self._types) else _json(value_of(written, self._types))
        self._state = self._arguments
        return text[at:].removeprefix(self._value_end)

    def _ends(self) -> tuple[str, ...]:
        """Returns what ends a value. Where it is no text, its own mark may be missing."""
        others = (trigger(self._family.before_key), trigger(self._family.end))
        return (self._value_end,) if is_text(self._types) else (self._value_end, *others)

    def _some_text(self, text: str) -> str | None:
        """A text is given as it comes, but for what may be its end mark; any other value when it is whole."""
        if not is_text(self._types):
            return None
        mark = ("\n" if self._has_breaks else "") + self._value_end
        held = 0 if self._is_end else max(overlap(text, mark), overlap(text, self._value_end))
        sure = text[: len(text) - held]
        self.arguments += inner(sure)
        return text[len(sure) :] if sure else None


class PythonNesting:
    """How deep in brackets and texts of a literal of Python."""

    def __init__(self) -> None:
        self._depth, self._quote, self._is_escaped = 0, "", False
        self._last, self._num_quotes = "", 0  # of the same kind, one behind the other

    @property
    def is_outside(self) -> bool:
        return not self._quote and self._depth == 0

    def take(self, character: str) -> None:
        is_quote = not self._is_escaped and character in (self._quote[:1] or "\"'")
        self._is_escaped = self._quote != "" and character == "\\" and not self._is_escaped
        self._num_quotes = 1 + (self._num_quotes if character == self._last else 0) if is_quote else 0
        self._last = character
        if not is_quote:
            self._depth += 0 if self._quote else (character in "{[(") - (character in "}])")
        elif not self._quote:  # a third one behind an empty text
            self._quote, self._num_quotes = (character * 3, 0) if self._num_quotes == 3 else (character, 1)
        elif len(self._quote) == 1 or self._num_quotes == 3:
            self._quote, self._num_quotes = "", self._num_quotes % 3


class PythonReader(CallReader):
    """For `f(a="x", b=[1])`; each argument is given when it is whole. is_strict: it is no call unless it begins with an
    argument's name, as prose and code seldom do."""

    is_strict = False

    def __init__(self, family: ToolFamily, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(family._replace(after_name="("), tools)
        self._is_first = True
        self._is_skipped, self._written = False, list[str]()  # the value that is read, and what came of it
        self._nesting = PythonNesting()

    def _read_head(self, text: str) -> CallHead | None:
        head = super()._read_head(text)
        if not self.is_strict or head is None or not head.size or _KEYWORD.match(text, head.size):
            return head
        is_none = _POSITIONAL.match(text, head.size) or ")" in text[head.size :]
        return None if is_none else CallHead(0, "")

    def _arguments(self, text: str) -> str | None:
        bare = text.lstrip(" \n\t,")
        if bare.startswith(")"):
            self.arguments += "{}" if self._is_first else "}"
            self.is_over = True
            return bare[1:]
        if bare != text:
            return bare
        head = text[:MOST_HEAD_CHARS]
        found = _KEYWORD.match(head)
        self._is_skipped = found is None  # as is what is too long for a name
        if found is None and len(text) < MOST_HEAD_CHARS and not _POSITIONAL.match(head):
            return None
        self._written, self._state = [], self._value
        if found is None:
            return bare
        self.arguments += ("{" if self._is_first else ", ") + json.dumps(found[1], ensure_ascii=False) + ": "
        self._is_first = False
        return text[found.end() :]

    def _value(self, text: str) -> str | None:
        for at, character in enumerate(text):
            if self._nesting.is_outside and character in ",)":
                if not self._is_skipped:
                    self.arguments += _json(python_value_of("".join(self._written) + text[:at]))
                self._state = self._arguments
                return text[at:]
            self._nesting.take(character)
        self._written.append(text)
        return "" if text else None


class QuotedReader(CallReader):
    """For an object of a family's own kind, `f{a:<escape>x<escape>}`: names stand bare, texts between quotes that are
    marks, and anything else as in JSON. What is none of this ends the call. Texts are given as they come."""

    def __init__(self, family: ToolFamily, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(family._replace(after_name="{"), tools)
        self._open: list[str] = []  # what closes the objects and lists that it is in
        self._is_first = True  # in the innermost of them
        self._is_value = True  # comes next; else a name
        self._num_scanned = 1  # of a text as JSON has it, from its quote on

    def _arguments(self, text: str) -> str | None:
        """Between two parts."""
        if not self._open:
            self._begin("{")
        bare = text.lstrip(" \n\t,:")
        quote = self._family.quote
        if bare.startswith(quote):
            self._part('"')
            self._state = self._quoted
            return bare[len(quote) :]
        if not bare or (not self._is_end and quote.startswith(bare)):
            return bare if bare != text else None
        if bare[0] in "{[":
            return self._opened(bare)
        if bare[0] in "}]":
            return self._closed(bare)
        if bare[0] == "<":
            self.is_over = True  # the call's end, or none of its parts
            return None
        return self._string(bare) if bare[0] == '"' else self._word(bare)

    def _quoted(self, text: str) -> str | None:
        at = text.find(self._family.quote)
        if at >= 0:
            self.arguments += inner(text[:at]) + '"'
            self._state = self._arguments
            self._end_part()
            return text[at + len(self._family.quote) :]
        sure = text[: len(text) - (0 if self._is_end else overlap(text, self._family.quote))]
        self.arguments += inner(sure)
        return text[len(sure) :] if sure else None

    def _string(self, text: str) -> str | None:
        """A text as JSON has it."""
        found = _IN_STRING.match(text, self._num_scanned)
        assert found is not None
        end = found.end()
        if not text.startswith('"', end):
            self._num_scanned, self.is_over = end, len(text) > MAX_LITERAL_CHARS
            return None
        self._num_scanned = 1
        self._part(json.dumps(value_of(text[: end + 1], None), ensure_ascii=False))
        self._end_part()
        return text[end + 1 :]

    def _word(self, text: str) -> str | None:
        found = _WORD.match(text)
        assert found is not None
        if found.end() == len(text):
            self.is_over = len(text) > MAX_LITERAL_CHARS
            return None
        word = found[0].strip()
        value = value_of(word, None) if self._is_value else word
        self._part(json.dumps(value, ensure_ascii=False))
        self._end_part()
        return text[found.end() :]

    # ---- where it is

    def _part(self, written: str) -> None:
        """A name, or a value, is written."""
        is_listed = self._open[-1] == "]" or not self._is_value
        self.arguments += (", " if is_listed and not self._is_first else "") + written
        self._is_first = False

    def _end_part(self) -> None:
        """Behind a name comes its value, and behind that the next name."""
        if self._open[-1] == "]":
            return
        self.arguments += "" if self._is_value else ": "
        self._is_value = not self._is_value

    def _begin(self, opening: str) -> None:
        self.arguments += opening
        self._open.append(_CLOSES[opening])
        self._is_first, self._is_value = True, opening == "["

    def _opened(self, text: str) -> str | None:
        if not self._is_value:
            self.is_over = True
            return None
        self._part("")
        self._begin(text[0])
        return text[1:]

    def _closed(self, text: str) -> str | None:
        if text[0] != self._open[-1] or (text[0] == "}" and self._is_value):
            self.is_over = True
            return None
        self.arguments += self._open.pop()
        self.is_over = not self._open
        if self._open:
            self._is_first, self._is_value = False, self._open[-1] == "]"
        return text[1:]


def inner(text: str) -> str:
    """Returns the text as it stands within the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
