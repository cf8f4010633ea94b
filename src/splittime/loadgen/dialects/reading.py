"""What a server told between two scrapes, in our words: the arithmetic of `dialect`'s forms.

A counter that fell was reset by a restart in between: what it grew by is then what it shows, since the restart, and
`read` says so. What is not there is left out, never 0.
"""

from collections.abc import Mapping
from typing import NamedTuple

from splittime.loadgen.dialects.dialect import Dialect, Form, Quantity
from splittime.loadgen.scrape import Samples, values

RESTARTED = "A counter fell between the scrapes: the server was restarted, and what it told covers the time since."


class Told(NamedTuple):
    """One quantity as the server tells it. observations: how many a mean is of."""

    quantity: Quantity
    metric: str
    value: float
    observations: float | None = None


class Reading(NamedTuple):
    told: tuple[Told, ...]
    notes: tuple[str, ...]


def read(dialect: Dialect, before: Samples, after: Samples) -> Reading:
    """All quantities that are there, but for the states, which two scrapes cannot tell."""
    growth = Growth(before, after)
    found = [told for quantity in dialect.quantities if (told := _read_one(quantity, growth)) is not None]
    return Reading(tuple(found), (RESTARTED,) if growth.has_reset else ())


class Growth:
    """What counters grew by between two scrapes; notices resets."""

    def __init__(self, before: Samples, after: Samples) -> None:
        self._before, self._after = before, after
        self.has_reset = False

    def of(self, name: str, labels: Mapping[str, str]) -> float | None:
        """None if the later scrape has no such counter. One that appeared meanwhile grew from 0."""
        found = values(self._after, name, labels)
        if not found:
            return None
        after, before = sum(found), sum(values(self._before, name, labels))
        if after < before:
            self.has_reset = True
            return after
        return after - before


def _read_one(quantity: Quantity, growth: Growth) -> Told | None:
    if quantity.form is Form.STATE:
        return None
    labels = dict(quantity.labels)
    for metric in (quantity.metric, *quantity.older):
        if quantity.form is Form.GROWTH:
            grown = growth.of(metric, labels)
            if grown is not None:
                return Told(quantity, metric, grown)
            continue
        above, below = (metric + "_sum", metric + "_count") if quantity.form is Form.MEAN else (metric, quantity.per)
        part, whole = growth.of(above, labels), growth.of(below, labels)
        if part is not None and whole:
            return Told(quantity, metric, part / whole, whole)
    return None
