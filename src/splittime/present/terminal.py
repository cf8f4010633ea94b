"""Text from strangers, made safe to print on a terminal, broken between its words, and short enough to quote."""

import re
from typing import TextIO
from unicodedata import category

from rich.cells import cell_len

MAX_QUOTED_CHARS = 500
_PARTS = re.compile(r"\n|[^\S\n]+|\S+")


def plain(text: str) -> str:
    """Replaces the characters that a terminal would obey instead of showing; line ends, tabs and spaces stay."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" or category(char) == "Zs" else "\ufffd" for char in text
    )


def clipped(text: str) -> str:
    """Returns the text as `plain` does, cut to `MAX_QUOTED_CHARS` characters."""
    text = plain(text[: MAX_QUOTED_CHARS + 1])
    return text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]} ..."


class WordWriter:
    """Writes a text that comes in pieces to a terminal of so many columns: a line ends between two words. The last word
    waits until it is whole; one that is longer than a line is broken by the terminal."""

    def __init__(self, out: TextIO, columns: int) -> None:
        self._out, self._columns, self._at, self._word = out, columns, 0, ""

    def write(self, text: str) -> None:
        *parts, self._word = [*_PARTS.findall(self._word + plain(text)), ""]
        if parts and not parts[-1].isspace():
            self._word = parts.pop()
        self._write(parts)

    def end(self) -> None:
        self._write([self._word])
        self._word = ""

    def _write(self, parts: list[str]) -> None:
        for part in parts:
            width = cell_len(part)
            if self._at and self._at + width > self._columns:
                self._out.write("\n")
                self._at = 0
                if part.isspace():
                    continue
            self._out.write(part)
            self._at = 0 if part == "\n" else self._at + width
            self._at -= self._columns * max(0, (self._at - 1) // self._columns)
        self._out.flush()
