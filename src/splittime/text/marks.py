"""Marks in a text that comes in pieces: what may be the beginning of one, and a mark whatever the white space in it."""

import re
from functools import lru_cache


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
