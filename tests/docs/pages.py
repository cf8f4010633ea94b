"""Reads the commands out of README.md and the guides.

A block of code is run if its language is `sh`, `console` (lines after `$ `, and after `> ` what goes on; the others are
what is printed) or `python`. A comment on the line before the block says otherwise:

    <!-- not run: REASON -->                  the block is not run here
    <!-- exits 0, 3: REASON -->               the block may end with one of these codes, not with 0 alone
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "docs/start.md", *sorted(f"docs/guides/{p.name}" for p in (ROOT / "docs" / "guides").iterdir())]
BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]*) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"(?:not run|exits (?P<codes>\d+(?:, \d+)*)): (?P<reason>.+)")
RUN = ("sh", "console", "python")


@dataclass(frozen=True)
class Block:
    """One block of a page. reason: why it is not run, or None. printed: what the page says that it prints."""

    page: str
    line: int
    language: str
    text: str
    exits: frozenset[int] = frozenset({0})
    reason: str | None = None
    printed: str = ""

    @property
    def is_server(self) -> bool:
        return self.text.startswith("splittime serve")

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text.splitlines()[0]}"


def blocks(page: str) -> list[Block]:
    """Returns the page's blocks that are to be run, and those that say why they are not."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [_block(page, text, found) for found in BLOCK.finditer(text) if found["language"] in RUN]


def runnable(page: str) -> list[Block]:
    """Returns what is to be run, in the page's order; its Python as one program at the end, as in one session."""
    listed = [block for block in blocks(page) if block.reason is None]
    python = [block for block in listed if block.language == "python"]
    merged = [replace(python[0], text="".join(block.text for block in python))] if python else []
    return [block for block in listed if block.language != "python"] + merged


def _block(page: str, text: str, found: re.Match[str]) -> Block:
    line = text.count("\n", 0, found.start("text")) + 1
    commands, printed = found["text"], ""
    if found["language"] == "console":
        lines = commands.splitlines(keepends=True)
        commands = "".join(line[2:] for line in lines if line.startswith(("$ ", "> ")))
        printed = "".join(line for line in lines if not line.startswith(("$ ", "> ")))
    mark = MARK.fullmatch(found["mark"] or "")
    if mark is None:
        assert found["mark"] is None, f"{page}:{line}: {found['mark']!r} is no marker"
        return Block(page, line, found["language"], commands, printed=printed)
    if mark["codes"] is None:
        return Block(page, line, found["language"], commands, reason=mark["reason"], printed=printed)
    exits = frozenset(map(int, mark["codes"].split(",")))
    return Block(page, line, found["language"], commands, exits, printed=printed)
