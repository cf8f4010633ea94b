"""From values to places in a plot, and back to ticks that a reader knows: 0, 50, 100 or 1, 10, 100.

A plot is `WIDTH` by `HEIGHT` units, stretched to whatever room the page has; y grows downward, as in SVG. Latencies
whose spread is wide get a logarithmic scale, all others a linear one from 0: `fitting` decides, by `WIDE`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
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
