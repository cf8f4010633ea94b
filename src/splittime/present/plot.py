"""A plot as HTML: an SVG that stretches, with its words as text beside it, so that they keep their size on any screen.

All of it is drawn here, in Python: it reads the same without scripts, on paper, and in the dark (colours are CSS
variables, named by the class `c-NAME` that each mark is given). Text is escaped by `Markup`, wherever it came from.
The bench report's script adds what needs a hand: zooming in time, and which request a dot is.

From values to places in a plot, and back to ticks that a reader knows: 0, 50, 100 or 1, 10, 100.

A plot is `WIDTH` by `HEIGHT` units, stretched to whatever room the page has; y grows downward, as in SVG. Latencies
whose spread is wide get a logarithmic scale, all others a linear one from 0: `fitting` decides, by `WIDE`.
"""

import math
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike, NDArray

WIDTH, HEIGHT = 100_000, 1_000
WIDE = 10.0  # the greatest over the 1st percentile, from which on a linear scale would hide the small ones
LABELLED_TICKS = 6

Array = NDArray[np.float64]


class Scale(NamedTuple):
    low: float
    high: float
    is_log: bool = False

    def share(self, values: ArrayLike) -> Array:
        """0 at `low`, 1 at `high`; what lies beyond is put on the edge."""
        array = np.clip(np.asarray(values, dtype=np.float64), self.low, self.high)
        if self.is_log:
            return np.log(array / self.low) / math.log(self.high / self.low)
        return (array - self.low) / (self.high - self.low)

    def x(self, values: ArrayLike) -> Array:
        return np.rint(self.share(values) * WIDTH)

    def y(self, values: ArrayLike) -> Array:
        return np.rint((1 - self.share(values)) * HEIGHT)

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.is_log else _linear_ticks(self.low, self.high)

    def edges(self, count: int) -> Array:
        """The bounds of so many bins, of one width on this scale."""
        space = np.geomspace if self.is_log else np.linspace
        return space(self.low, self.high, count + 1)


def from_zero(values: ArrayLike, headroom: float = 1.06) -> Scale:
    return Scale(0.0, float(np.max(np.asarray(values), initial=0.0)) * headroom or 1.0)


def fitting(values: ArrayLike) -> Scale:
    """For durations: logarithmic if they are wide apart, with room at both ends."""
    array = np.asarray(values, dtype=np.float64)
    above = array[array > 0]
    if not len(above):
        return Scale(0.0, 1.0)
    if above.max() / np.percentile(above, 1) < WIDE:
        return from_zero(above, 1.12)
    return Scale(float(above.min()) / 1.15, float(above.max()) * 1.5, is_log=True)


def around_zero(values: Sequence[float]) -> Scale:
    """Returns a scale for zero and all values, with a tenth of room where they reach."""
    low, high = min([*values, 0.0]), max([*values, 0.0])
    if low == high:
        return Scale(-1e-3, 1e-3)
    room = 0.1 * (high - low)
    return Scale(low - room if low < 0 else low, high + room if high > 0 else high)


def _linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / LABELLED_TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 2.5, 5, 10) if power * n >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**n for n in decades for digit in digits if low <= digit * 10.0**n <= high]
        if len(ticks) <= LABELLED_TICKS + 1:
            return ticks
    return ticks[:: math.ceil(len(ticks) / LABELLED_TICKS)]


def duration(ns: float) -> str:
    """A tick's label: `200 µs`, `50 ms`, `2.5 s`."""
    if ns == 0:
        return "0"
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if abs(ns) >= size * 0.9999:
            return f"{ns / size:,.4g} {unit}"
    return f"{ns:.4g} ns"


def number(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def share(value: float) -> str:
    return f"{100 * value:.4g} %"


MANY = 20_000  # dots, from which on they are put on a grid of about a pixel: no screen shows more
COARSE = np.array([WIDTH / 1500, HEIGHT / 300])
LAST = 0.97  # of the x axis, from which on a label would reach beyond the page
LAYERS = 4  # dots in so many see-through layers, so that where many lie it is darker


def plot_styles() -> str:
    """Returns the CSS of plots, with the colours that all pages share: one stage has one colour everywhere."""
    assets = files("splittime.present") / "assets"
    return "".join((assets / name).read_text("utf-8") for name in ("colours.css", "plot.css"))


class Plot:
    """Marks are drawn in the order they are added.

    title: what the y axis shows, written above it, and `key` the marks' inks with their words.
    described: a sentence for those who do not see it.
    """

    def __init__(self, x: Scale, y: Scale, *, title: str = "", described: str, height_px: int = 200) -> None:
        self.x, self.y = x, y
        self.title, self.described, self.height_px = title, described, height_px
        self._marks: list[Markup] = []
        self._notes: list[Markup] = []
        self._x_ticks: list[Markup] = []
        self._y_ticks: list[Markup] = []
        self._data: list[Markup] = []
        self._keys: list[Markup] = []

    def key(self, ink: str, words: str) -> None:
        self._keys.append(Markup('<span><i class="key k-{} c-{}"></i>{}</span>').format(ink, ink, words))

    def x_axis(self, label: Callable[[float], str], ticks: Sequence[float] | None = None) -> "Plot":
        """Labels beneath, and no lines: what lies above them is read by the y axis."""
        places = self.x.ticks() if ticks is None else ticks
        for value, place in zip(places, self.x.share(places), strict=True):
            side = "last" if place > LAST else ""
            words = Markup('<span class="{}" style="left:{:.3f}%">{}</span>').format(side, 100 * place, label(value))
            self._x_ticks.append(words)
        return self

    def y_axis(self, label: Callable[[float], str]) -> "Plot":
        ticks = self.y.ticks()
        for value, place in zip(ticks, self.y.share(ticks), strict=True):
            top = 100 * (1 - place)
            self._y_ticks.append(Markup('<span style="top:{:.2f}%">{}</span>').format(top, label(value)))
            self._path(f"M0 {self.y.y(value):.0f}H{WIDTH}", "grid")
        return self

    def dots(self, xs: ArrayLike, ys: ArrayLike, ink: str) -> None:
        """One place is drawn once, however many lie there; what is nan has none."""
        places = np.stack([self.x.x(xs), self.y.y(ys)], axis=1)
        places = places[~np.isnan(places).any(axis=1)]
        if len(places) > MANY:
            places = np.rint(places / COARSE) * COARSE
        places = np.unique(places, axis=0)
        for layer in range(min(LAYERS, len(places))):
            self._path("".join(f"M{x:.0f} {y:.0f}h.1" for x, y in places[layer::LAYERS]), f"dots c-{ink}")

    def line(self, xs: ArrayLike, ys: ArrayLike, ink: str) -> None:
        """Broken where y is nan."""
        places, pen = np.stack([self.x.x(xs), self.y.y(ys)], axis=1), "M"
        parts = []
        for x, y in places:
            if np.isnan(y):
                pen = "M"
                continue
            parts.append(f"{pen}{x:.0f} {y:.0f}")
            pen = "L"
        self._path("".join(parts), f"line c-{ink}")

    def steps(self, edges: Array, heights: Array, ink: str, kind: str = "line") -> None:
        """A height between each two edges; `kind` is `line` or `area`."""
        tops, bounds = self.y.y(heights), self.x.x(edges)
        parts = [f"M{bounds[0]:.0f} {HEIGHT}" if kind == "area" else f"M{bounds[0]:.0f} {tops[0]:.0f}"]
        parts += [f"V{top:.0f}H{right:.0f}" for top, right in zip(tops, bounds[1:], strict=True)]
        self._path("".join(parts) + (f"V{HEIGHT}Z" if kind == "area" else ""), f"{kind} c-{ink}")

    def band(self, begin: float, end: float, ink: str) -> None:
        """From top to bottom, between two places on the x axis."""
        left, right = self.x.x([begin, end])
        self._path(f"M{left:.0f} 0H{right:.0f}V{HEIGHT}H{left:.0f}Z", f"band c-{ink}")

    def upright(self, at: float, ink: str) -> None:
        self._path(f"M{self.x.x(at):.0f} 0V{HEIGHT}", f"upright c-{ink}")

    def rug(self, xs: ArrayLike, ink: str) -> None:
        """A short stroke at the upper edge for each."""
        self._path("".join(f"M{x:.0f} 0v60" for x in np.unique(self.x.x(xs))), f"line c-{ink}")

    def level(self, begin: float, end: float, height: float, ink: str) -> None:
        left, right = self.x.x([begin, end])
        self._path(f"M{left:.0f} {self.y.y(height):.0f}H{right:.0f}", f"level c-{ink}")

    def across(self, height: float, ink: str) -> None:
        """Draws a level over the whole width, where it lies within the plot."""
        if self.y.low <= height <= self.y.high:
            self.level(self.x.low, self.x.high, height, ink)

    def spans(self, xs: ArrayLike, lows: ArrayLike, highs: ArrayLike, ink: str) -> None:
        """Draws an upright line from low to high at each place: an interval."""
        ends = zip(self.x.x(xs), self.y.y(lows), self.y.y(highs), strict=True)
        self._path("".join(f"M{x:.0f} {low:.0f}V{high:.0f}" for x, low, high in ends), f"line c-{ink}")

    def note(
        self, text: str, x: float, y: float, ink: str = "text", side: str = "right", *, moves: bool = False
    ) -> None:
        """Words at a place; `side` of it: right, left or middle. `moves`: with a zoom in time."""
        left, top = 100 * float(self.x.share(x)), 100 * (1 - float(self.y.share(y)))
        place = Markup(' data-x="{:.6f}"').format(left / 100) if moves else ""
        self._notes.append(
            Markup('<span class="note {} c-{}" style="left:{:.3f}%;top:{:.2f}%"{}>{}</span>').format(
                side, ink, left, top, place, text
            )
        )

    def answers(self, x_field: str, y_fields: str) -> None:
        """Says of a dot which request it is: fields of the page's requests that were drawn."""
        self._data.append(
            Markup(' data-fields="{} {}" data-scales="{:.9g} {:.9g} {:d} {:.9g} {:.9g} {:d}"').format(
                x_field, y_fields, *self.x, *self.y
            )
        )

    def _path(self, drawn: str, classes: str) -> None:
        self._marks.append(Markup('<path class="{}" d="{}"/>').format(classes, drawn))

    def __html__(self) -> Markup:
        empty = Markup("")
        return Markup(
            '<div class="plot"{}>{}<div class="y">{}</div><div class="room" style="height:{}px">'
            '<svg viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>{}</div>'
            '<div class="x">{}</div></div>'
        ).format(
            empty.join(self._data),
            Markup('<p class="of"><b>{}</b>{}</p>').format(self.title, empty.join(self._keys)) if self.title else empty,
            empty.join(self._y_ticks),
            self.height_px,
            WIDTH,
            HEIGHT,
            self.described,
            empty.join(self._marks),
            empty.join(self._notes),
            empty.join(self._x_ticks),
        )
