"""How a call is read whose arguments are an object of a family's own kind (`Style.QUOTED`): `f{a:<escape>x<escape>}`.

Names stand bare, texts between quotes that are marks, as they are, and anything else as in JSON. What is none of this
ends the call: its arguments stay as far as they came.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from splittime.text.argument_types import MAX_LITERAL_CHARS, value_of
from splittime.text.call_readers import CallReader, inner
from splittime.text.marks import overlap
from splittime.text.tool_families import ToolFamily

_WORD = re.compile(r'[^,:{}\[\]<"]+')
_IN_STRING = re.compile(r'(?:[^"\\]|\\.)*')
_CLOSES = {"{": "}", "[": "]"}


class QuotedReader(CallReader):
    """Gives texts as they come, and any other value when it is whole."""

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
