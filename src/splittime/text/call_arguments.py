"""What kinds of values a schema allows for one argument, for families of tools that write a text as it is and anything
else as JSON: only the schema says whether `12` is a number.

The arguments of a call as the model writes them in JSON, piece by piece up to the brace that closes them.

They come out as they went in, also a broken end and a word longer than MOST_WORD_CHARS. Only what JSON cannot have is
changed: a word that is no value (`NaN`) becomes a text, half of a surrogate pair the six characters of its escape, and
a line break in a text its escape; a comma before what closes goes.
So do values of those forms that are read whole (`value_of`).
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

MOST_PARTS = 1024  # of a schema, looked at for one value's types
MOST_REFERENCE_CHARS = 1024
MAX_LITERAL_CHARS = 2**16  # of a value in Python's form
MAX_LITERAL_DEPTH = 64
_TEXTS = re.compile(r"""('{3}|"{3}|["'])(?:\\.|(?!\1).)*(?:\1|\Z)""", re.DOTALL)
_SIGNS = re.compile(rf"(?:[-+~]\s*){{{MAX_LITERAL_DEPTH}}}")
_WORDS = {"True": True, "False": False, "None": None}  # as some templates write them


def followed(schema: Any, root: Mapping[str, Any]) -> Sequence[Any]:
    """Returns the schema and, in order, those that its chain of references within `root` leads to."""
    chain = [schema]
    while len(chain) <= MOST_PARTS and (found := _behind_reference(chain[-1], root)) is not None:
        chain.append(found)
    return chain


def _behind_reference(schema: Any, root: Mapping[str, Any]) -> Any:
    """Returns what the reference in this schema leads to; None for none, or one too long or that leads nowhere."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or len(reference) > MOST_REFERENCE_CHARS or not reference.startswith("#/"):
        return None
    found: Any = root
    for name in reference[2:].split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str] | None:
    """Returns JSON's types that a value may have by the schema; None where any may be, or where the schema has more
    than MOST_PARTS parts that say so."""
    found: set[str] = set()
    looked_at: set[int] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if id(part) in looked_at:
            continue
        looked_at.add(id(part))
        types, parts = _of_part(part, root)
        if (types is None and not parts) or len(looked_at) > MOST_PARTS:
            return None
        found |= types or frozenset()
        waiting += parts
    return frozenset(found) or None


def _of_part(schema: Any, root: Mapping[str, Any]) -> tuple[frozenset[str] | None, Sequence[Any]]:
    """Returns the types that the schema itself names, or None and the schemas whose types it has: none of these either
    where any type may be."""
    behind = _behind_reference(schema, root)
    if behind is not None:
        return None, [behind]
    if not isinstance(schema, Mapping):
        return None, []
    own = _own_types(schema)
    if own is not None:
        return own, []
    return None, next((schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)), [])


def _own_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    if "const" in schema:
        return frozenset({type_of(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(map(type_of, {type(each): each for each in schema["enum"]}.values()))
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list):
        return frozenset(each for each in given if isinstance(each, str))
    return None


def type_of(value: Any) -> str:
    """Returns JSON's type of this value."""
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list() | tuple():
            return "array"
    return "object"


def is_text(types: frozenset[str] | None) -> bool:
    """Returns whether a value can be but a text, which is written as it is."""
    return types == {"string"}


def value_of(written: str, types: frozenset[str] | None) -> Any:
    """Returns the value that these characters are, of one of these types if they can be; the text itself if not."""
    if is_text(types):
        return written
    try:
        value = _json_value(written)
    except (ValueError, RecursionError):
        return written
    found = type_of(value)
    fits = types is None or found in types or (found == "integer" and "number" in types)
    return value if fits or types is None or "string" not in types else written


def python_value_of(written: str) -> Any:
    """Returns the value of a literal of Python's, or of JSON's; the text itself where it is neither."""
    bare = written.strip()
    try:
        return _json_value(bare)
    except (ValueError, RecursionError):
        pass
    if len(bare) > MAX_LITERAL_CHARS or _is_deep(bare):
        return bare
    try:
        return _writable(ast.literal_eval(bare))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return bare


def _json_value(written: str) -> Any:
    """Returns the value of JSON, or of a word of Python's. Raises ValueError for what is neither, or not writable."""
    bare = written.strip()
    return _WORDS[bare] if bare in _WORDS else _writable(json.loads(written))


def _writable(value: Any) -> Any:
    """Returns the value. Raises ValueError for one with half of a surrogate pair, an infinity or NaN in it, and
    TypeError for one of a type that JSON has not: no answer can hold them."""
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    return value


def _is_deep(written: str) -> bool:
    """Returns whether brackets or signs, of those outside of texts, stand too many in each other."""
    bare = _TEXTS.sub("", written)
    depths = accumulate((sign in "([{") - (sign in ")]}") for sign in bare)
    return max(depths, default=0) > MAX_LITERAL_DEPTH or _SIGNS.search(bare) is not None


_WORD = re.compile(r"[\w.+-]+")
_OTHER = re.compile(r'[^"\w.+{}[\]-]+')
_PLAIN = re.compile(r'[^"\\]+')
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_UNDECIDED = re.compile(rf"[\w.+-]+|\\|{_OTHER.pattern}")
_CONTROLS = {code: json.dumps(chr(code))[1:-1] for code in range(32)}
_HALF = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_PAIR_CHARS = 12
MOST_BETWEEN_CHARS = 64  # held back likewise, for a comma that is one too many
MOST_WORD_CHARS = 4300  # held back until its end is known; Python reads no longer number


class JsonPieces:
    """Give it the text in pieces of any size. depth: of objects and lists, where it begins. is_closed: the outermost is
    whole, and what follows is not looked at."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self.is_closed = depth, False
        self._is_in_text = False
        self._held = ""  # a word or an escape that may go on
        self._is_long = False  # what came last is of a word that is not held back

    def push(self, text: str, *, is_end: bool) -> tuple[str, str]:
        """Returns what this piece makes sure, and what follows the brace that closes all. is_end: no other piece
        follows; what is not whole comes as it is."""
        text, at, said = self._held + text, 0, []
        while at < len(text) and not self.is_closed:
            found = self._part(text, at)
            if found is None and not is_end:
                break
            size, part = found or _whole(_UNDECIDED.match(text, at))
            said.append(part)
            at += size
        self._held, rest = ("", text[at:]) if self.is_closed else (text[at:], "")
        return "".join(said), rest

    def _part(self, text: str, at: int) -> tuple[int, str] | None:
        """Returns the size of what begins there, and what it becomes; None where more must come."""
        if text[at] == '"':
            self._is_in_text, self._is_long = not self._is_in_text, False
            return 1, '"'
        if self._is_in_text:
            size, plain = (0, "") if text[at] == "\\" else _whole(_PLAIN.match(text, at))
            return (size, plain.translate(_CONTROLS)) if size else _escape(text, at)
        word = _WORD.match(text, at)
        if word is None:
            self._is_long = False
            return (
                self._bracket(text[at]) if text[at] in "{[]}" else _between(*_whole(_OTHER.match(text, at)), text[at:])
            )
        may_go_on = word.end() == len(text)
        if self._is_long or len(word[0]) > MOST_WORD_CHARS:
            self._is_long = may_go_on
            return _whole(word)
        return None if may_go_on else (len(word[0]), _value(word[0]))

    def _bracket(self, bracket: str) -> tuple[int, str]:
        self._depth += 1 if bracket in "{[" else -1
        self.is_closed = self._depth == 0
        return 1, bracket


def _whole(found: re.Match[str] | None) -> tuple[int, str]:
    assert found is not None
    return len(found[0]), found[0]


def _between(size: int, between: str, text: str) -> tuple[int, str] | None:
    """Returns what stands between two parts: no comma before what closes, if that is near."""
    if "," in between and size == len(text) <= MOST_BETWEEN_CHARS:
        return None
    return size, between.replace(",", "") if text[size : size + 1] in ("}", "]") else between


def _escape(text: str, at: int) -> tuple[int, str] | None:
    rest = text[at : at + _PAIR_CHARS]
    if _PAIR.match(rest):
        return _PAIR_CHARS, rest
    if _HALF.match(rest):
        may_go_on = len(rest) < _PAIR_CHARS and "\\u".startswith(rest[6:8])
        return None if may_go_on else (6, "\\" + rest[:6])
    is_whole = len(rest) >= 6 or (len(rest) > 1 and rest[1] != "u")
    return (2, rest[:2]) if is_whole else None


def _value(word: str) -> str:
    """Returns a word as JSON has it: itself, if that is a value."""
    found = value_of(word, None)
    return word if not isinstance(found, str) and word.isascii() and word not in _PYTHON else json.dumps(found)


_PYTHON = ("True", "False", "None")
