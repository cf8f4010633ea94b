"""The arguments of a call as the model writes them in JSON, piece by piece up to the brace that closes them.

They come out as they went in, also a broken end and a word longer than MOST_WORD_CHARS. Only what JSON cannot have is
changed: a word that is no value (`NaN`) becomes a text, half of a surrogate pair the six characters of its escape, and
a line break in a text its escape; a comma before what closes goes.
So do values of those forms that are read whole (`argument_types.value_of`).
"""

import json
import re

from splittime.text.argument_types import value_of

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
