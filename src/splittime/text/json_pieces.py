"""The arguments of a call as the model writes them in JSON, piece by piece, but for what no JSON can have in it: a word
that is no value (`NaN`) becomes a text, and half of a surrogate pair the six characters of its escape. So do values of
those forms that are read whole (`argument_types.value_of`). Anything else comes out as it went in, also a broken end
and a word longer than MOST_WORD_CHARS.
"""

import json
import re

from splittime.text.argument_types import value_of

_WORD = re.compile(r"[\w.+-]+")
_OTHER = re.compile(r'[^"\w.+-]+')
_PLAIN = re.compile(r'[^"\\]+')
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HALF = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_PAIR_CHARS = 12
MOST_WORD_CHARS = 4300  # held back until its end is known; Python reads no longer number


class JsonPieces:
    """Give it the text in pieces of any size."""

    def __init__(self) -> None:
        self._is_in_text = False
        self._held = ""  # a word or an escape that may go on
        self._is_long = False  # what came last is of a word that is not held back

    def push(self, text: str, *, is_end: bool) -> str:
        """Returns what this piece makes sure. is_end: no other piece follows; what is not whole comes as it is."""
        text, at, said = self._held + text, 0, []
        while at < len(text):
            found = self._part(text, at)
            if found is None:
                break
            size, part = found
            said.append(part)
            at += size
        self._held = "" if is_end else text[at:]
        return "".join(said) + (text[at:] if is_end else "")

    def _part(self, text: str, at: int) -> tuple[int, str] | None:
        """Returns the size of what begins there, and what it becomes; None where more must come."""
        if text[at] == '"':
            self._is_in_text, self._is_long = not self._is_in_text, False
            return 1, '"'
        if self._is_in_text:
            return _escape(text, at) if text[at] == "\\" else _whole(_PLAIN.match(text, at))
        word = _WORD.match(text, at)
        if word is None:
            self._is_long = False
            return _whole(_OTHER.match(text, at))
        may_go_on = word.end() == len(text)
        if self._is_long or len(word[0]) > MOST_WORD_CHARS:
            self._is_long = may_go_on
            return _whole(word)
        return None if may_go_on else (len(word[0]), _value(word[0]))


def _whole(found: re.Match[str] | None) -> tuple[int, str]:
    assert found is not None
    return len(found[0]), found[0]


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
