"""Marks in a text that comes in pieces: what may be the beginning of one, a mark whatever the white space in it, how
often what is undecided is looked at, and where an answer begins."""

import re
from collections import deque
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

SHORT_CHARS = 512  # of what is undecided: it is looked at with each piece
GROWTH = 16  # what is longer is looked at again when it has grown by this part of it


class ReasoningPlace(StrEnum):
    """Where an answer begins. before: it may begin with reasoning. within: its prompt has opened it. behind: its prompt
    has closed it, or its text goes on."""

    BEFORE = "before"
    WITHIN = "within"
    BEHIND = "behind"


class ToldApart(NamedTuple):
    reasoning: str
    content: str


class Undecided:
    """Holds pieces of a text back until it is worth looking at what is undecided once more: so the work is in
    proportion to the text, in how many pieces it comes and however long nothing can be decided."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._num_chars = 0

    def grown(self, text: str, piece: str, *, is_end: bool) -> str | None:
        """Returns the undecided text with all that has come behind it; None where that is to wait for more. is_end: no
        other piece follows."""
        self._pieces.append(piece)
        self._num_chars += len(piece)
        if not is_end and len(text) > SHORT_CHARS and self._num_chars * GROWTH < len(text):
            return None
        whole = text + "".join(self._pieces)
        self._pieces, self._num_chars = [], 0
        return whole


class ToldApartParser:
    """Tells reasoning from content. Give it the answer's text in pieces, and of each token where in it that begins."""

    def __init__(self) -> None:
        self._text, self._undecided = "", Undecided()  # what has come and is not decided yet
        self._num_chars = 0  # of what has come
        self._offsets: deque[int] = deque()  # of tokens in what is not decided yet
        self._num_tokens = 0

    def note_token(self, offset: int) -> None:
        """A token begins at this character of the answer."""
        self._offsets.append(offset)

    def push(self, text: str, *, is_end: bool = False) -> ToldApart:
        """Returns what this piece makes sure. is_end: no other piece follows."""
        grown = self._undecided.grown(self._text, text, is_end=is_end)
        if grown is None:
            return ToldApart("", "")
        self._num_chars += len(grown) - len(self._text)
        self._text = grown
        return self._told_apart(is_end)

    def _told_apart(self, is_end: bool) -> ToldApart:
        raise NotImplementedError


def overlap(text: str, mark: str) -> int:
    """Returns the length of the longest end of the text that begins the mark and is not all of it."""
    most = min(len(text), len(mark) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(mark[:size])), 0)


def trigger(mark: str) -> str:
    """Returns the mark up to its first white space: what is looked for in a text."""
    return mark.split()[0] if mark.strip() else ""


def last_word(mark: str) -> str:
    """Returns the mark from its last white space on."""
    return mark.split()[-1] if mark.strip() else ""


def behind(text: str, mark: str) -> str | None:
    """Returns what follows the mark that the text begins with, whatever the white space before and in it; the text
    itself where it does not begin so, None where that is not known yet."""
    found = _loosely(mark).match(text)
    if found is not None:
        return text[found.end() :]
    return None if _beginning(mark).fullmatch(text) else text


@lru_cache(maxsize=256)
def _loosely(mark: str) -> re.Pattern[str]:
    return re.compile(r"\s*" + r"\s*".join(map(re.escape, mark.split())))


@lru_cache(maxsize=256)
def _beginning(mark: str) -> re.Pattern[str]:
    """Matches all of a text that may yet become this mark."""
    pattern = ""
    for word in reversed(mark.split()):
        for character in reversed(word):
            pattern = rf"(?:{re.escape(character)}{pattern})?"
        pattern = rf"\s*{pattern}"
    return re.compile(pattern)
