"""A flow as a drawing: boxes in columns, and a line from each box to each of the next column. HTML with one SVG in it.

Drawn here in Python, as `plot` is: the same on paper, in the dark, and without scripts. Text is escaped by `Markup`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from splittime.present.plot import plot_styles

BOX_WIDTH, LINE_HEIGHT, PAD, GAP_X, GAP_Y = 330, 17, 12, 90, 22
MARGIN = 8
MAX_LINE_CHARS = 44
_STYLES = """
body { background: var(--page); color: var(--text); font: 13px system-ui, sans-serif; margin: 24px; }
svg { max-width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--text); }
svg text.head { font-weight: 600; font-size: 13px; }
svg text.bad { fill: var(--bad); }
svg rect { fill: var(--card); stroke: var(--edge); }
svg path { fill: none; stroke: var(--edge); }
"""


class Box(NamedTuple):
    """head: its first line. lines: (words, whether they say that something is missing)."""

    head: str
    lines: Sequence[tuple[str, bool]] = ()

    @property
    def height(self) -> int:
        return 2 * PAD + LINE_HEIGHT * (1 + len(self.lines))


def flow_page(title: str, columns: Sequence[Sequence[Box]], described: str) -> str:
    """Returns a whole page. described: a sentence for those who do not see it."""
    page = Markup(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{}</title><style>{}</style></head>'
        "<body><h1>{}</h1>\n<p>{}</p>\n{}\n</body></html>\n"
    )
    return str(page.format(title, Markup(plot_styles() + _STYLES), title, described, _drawing(columns, described)))


def _drawing(columns: Sequence[Sequence[Box]], described: str) -> Markup:
    columns = [column for column in columns if column]
    heights = [sum(box.height + GAP_Y for box in column) - GAP_Y for column in columns]
    tallest = max(heights, default=0)
    drawn, ends = list[Markup](), list[int]()
    for number, column in enumerate(columns):
        x, y = MARGIN + number * (BOX_WIDTH + GAP_X), MARGIN + (tallest - heights[number]) // 2
        middles = []
        for box in column:
            drawn.append(_box(box, x, y))
            middles.append(y + box.height // 2)
            y += box.height + GAP_Y
        drawn += [_line(x - GAP_X, begin, x, end) for begin in ends for end in middles]
        ends = middles
    width = 2 * MARGIN + max(1, len(columns)) * (BOX_WIDTH + GAP_X) - GAP_X
    head = Markup('<svg viewBox="0 0 {} {}" width="{}" role="img" aria-label="{}">')
    return head.format(width, tallest + 2 * MARGIN, width, described) + Markup("").join(drawn) + Markup("</svg>")


def _box(box: Box, x: int, y: int) -> Markup:
    rect = Markup('<rect x="{}" y="{}" width="{}" height="{}" rx="6"/>').format(x, y, BOX_WIDTH, box.height)
    words = [_text("head", x, y + PAD + LINE_HEIGHT - 4, box.head)]
    for number, (line, is_missing) in enumerate(box.lines, 2):
        words.append(_text("bad" if is_missing else "", x, y + PAD + number * LINE_HEIGHT - 4, line))
    return rect + Markup("").join(words)


def _text(kind: str, x: int, y: int, words: str) -> Markup:
    shown = words if len(words) <= MAX_LINE_CHARS else words[: MAX_LINE_CHARS - 1] + "\N{HORIZONTAL ELLIPSIS}"
    whole = Markup("<title>{}</title>").format(words) if shown != words else ""
    return Markup('<text class="{}" x="{}" y="{}">{}{}</text>').format(kind, x + PAD, y, shown, whole)


def _line(x: int, y: int, to_x: int, to_y: int) -> Markup:
    bend = (x + to_x) // 2
    return Markup('<path d="M{} {} C{} {} {} {} {} {}"/>').format(x, y, bend, y, bend, to_y, to_x, to_y)
