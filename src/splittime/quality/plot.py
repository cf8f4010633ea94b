"""Plots as SVG inside HTML, drawn here: no script, no library, readable on paper and in both lights.

The SVG stretches with the page and its words stand beside it as text, as in the bench's report; colours are CSS
variables. Text is escaped by `Markup`, wherever it came from.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike

from splittime.quality.statistics import Floats

WIDTH, HEIGHT = 10_000, 1_000
MOST_TICKS = 6
LAST = 0.97  # of the x axis, from which on a label would reach beyond the page


class Scale(NamedTuple):
    low: float
    high: float
    is_log: bool = False

    def share(self, values: ArrayLike) -> Floats:
        """0 at `low`, 1 at `high`; what lies beyond is put on the edge."""
        array = np.clip(np.asarray(values, dtype=np.float64), self.low, self.high)
        if self.is_log:
            return np.log(array / self.low) / math.log(self.high / self.low)
        return (array - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self.is_log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            step = max(1, math.ceil((last - first + 1) / MOST_TICKS))
            return [10.0**power for power in range(first, last + 1, step)]
        rough = (self.high - self.low) / MOST_TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step_size = next(power * n for n in (1, 2, 2.5, 5, 10) if power * n >= rough * 0.999)
        first = math.ceil(self.low / step_size - 1e-9)
        return [n * step_size for n in range(first, math.floor(self.high / step_size + 1e-9) + 1)]


def around(values: Sequence[float]) -> Scale:
    """Zero and all values, with a tenth of room where they reach."""
    low, high = min([*values, 0.0]), max([*values, 0.0])
    if low == high:
        return Scale(-1e-3, 1e-3)
    room = 0.1 * (high - low)
    return Scale(low - room if low < 0 else low, high + room if high > 0 else high)


class Plot:
    """Marks are drawn in the order they are added. title: what the y axis shows. described: for who cannot see it."""

    def __init__(self, x: Scale, y: Scale, *, title: str, described: str) -> None:
        self.x, self.y, self.title, self.described = x, y, title, described
        self._marks: list[Markup] = []
        self._words: list[Markup] = []
        self._keys: list[Markup] = []

    def axes(
        self, x_label: Callable[[float], str], y_label: Callable[[float], str], x_ticks: Sequence[float]
    ) -> "Plot":
        for value, place in zip(x_ticks, self.x.share(x_ticks), strict=True):
            kind = "x last" if place > LAST else "x"
            self._word(kind, f"left:{100 * place:.2f}%", x_label(value))
        for value, place in zip(self.y.ticks(), self.y.share(self.y.ticks()), strict=True):
            self._word("y", f"top:{100 * (1 - place):.2f}%", y_label(value))
            self._path("grid", f"M0 {self._down(place)}H{WIDTH}")
        return self

    def key(self, ink: str, words: str) -> None:
        self._keys.append(Markup('<span><i class="key c-{}"></i>{}</span>').format(ink, words))

    def line(self, xs: ArrayLike, ys: ArrayLike, ink: str) -> None:
        places = zip(self.x.share(xs) * WIDTH, self.y.share(ys), strict=True)
        drawn = " ".join(f"{x:.0f} {self._down(y)}" for x, y in places)
        self._path(f"line c-{ink}", f"M{drawn}")

    def bars(self, edges: ArrayLike, heights: ArrayLike, ink: str) -> None:
        """One between each two edges, from 0 up or down."""
        places = (self.x.share(edges) * WIDTH).tolist()
        floor = self._down(float(self.y.share(0.0)))
        tops = [self._down(place) for place in self.y.share(heights)]
        drawn = [
            f"M{left:.0f} {floor}V{top}H{right:.0f}V{floor}Z"
            for left, right, top in zip(places[:-1], places[1:], tops, strict=True)
        ]
        self._path(f"area c-{ink}", "".join(drawn))

    def spans(self, xs: ArrayLike, lows: ArrayLike, highs: ArrayLike, ink: str) -> None:
        """An upright line from low to high at each place: an interval."""
        ends = zip(self.x.share(xs) * WIDTH, self.y.share(lows), self.y.share(highs), strict=True)
        self._path(f"line c-{ink}", "".join(f"M{x:.0f} {self._down(a)}V{self._down(b)}" for x, a, b in ends))

    def dots(self, xs: ArrayLike, ys: ArrayLike, ink: str) -> None:
        places = zip(self.x.share(xs) * WIDTH, self.y.share(ys), strict=True)
        self._path(f"dots c-{ink}", "".join(f"M{x:.0f} {self._down(y)}h.1" for x, y in places))

    def level(self, at: float, ink: str) -> None:
        """A line across, where it lies within the plot."""
        if self.y.low <= at <= self.y.high:
            self._path(f"level c-{ink}", f"M0 {self._down(float(self.y.share(at)))}H{WIDTH}")

    def upright(self, at: float, ink: str) -> None:
        if self.x.low <= at <= self.x.high:
            self._path(f"level c-{ink}", f"M{float(self.x.share(at)) * WIDTH:.0f} 0V{HEIGHT}")

    def __html__(self) -> Markup:
        empty = Markup("")
        return Markup(
            '<div class="plot"><p class="of"><b>{}</b>{}</p><div class="room">'
            '<svg viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>{}</div></div>'
        ).format(
            self.title,
            empty.join(self._keys),
            WIDTH,
            HEIGHT,
            self.described,
            empty.join(self._marks),
            empty.join(self._words),
        )

    def _down(self, share: float) -> int:
        return round((1 - share) * HEIGHT)

    def _path(self, classes: str, drawn: str) -> None:
        self._marks.append(Markup('<path class="{}" d="{}"/>').format(classes, drawn))

    def _word(self, classes: str, style: str, words: str) -> None:
        self._words.append(Markup('<span class="{}" style="{}">{}</span>').format(classes, style, words))
