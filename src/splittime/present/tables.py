"""What is printed, made to fit the terminal that it is printed on: no figure is cut off, no line is broken twice.

Both know the width only when they are printed. A `Sentence` is wrapped once; a `FittingTable` table is the first of its
forms that has room, widest first. Where even the last has none, its cells are folded: ugly, but whole.
`at_most` holds either within `COLUMNS`, which is what a file or a pipe gets. tests/bench/test_narrow.py checks it.
"""

import textwrap

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

COLUMNS = 100
UNLIMITED = 10_000


class Sentence:
    """Words, wrapped where they are printed. head: dim words before the first line. indent: of all other lines."""

    def __init__(self, words: str, style: str = "", *, head: str = "", indent: int = 0) -> None:
        self._words, self._style, self._head, self._indent = words, style, head, indent

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wrapped = textwrap.fill(
            self._words,
            max(1, options.max_width),
            initial_indent=self._head,
            subsequent_indent=" " * self._indent,
            break_on_hyphens=False,
        )
        text = Text(wrapped, style=self._style)
        text.stylize("dim", 0, len(self._head))
        yield text


class FittingTable:
    """A table in several forms, widest first."""

    def __init__(self, *forms: Table) -> None:
        self._forms = forms

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(width=UNLIMITED)
        fitting = (form for form in self._forms if _columns_of(console, unlimited, form) <= options.max_width)
        yield next(fitting, self._forms[-1])


def _columns_of(console: Console, unlimited: ConsoleOptions, table: Table) -> int:
    """With no cell folded."""
    return Measurement.get(console, unlimited, table).maximum


def at_most(shown: RenderableType, columns: int = COLUMNS) -> RenderableType:
    """The terminal's width, but no more than this."""
    return Constrain(shown, columns)
