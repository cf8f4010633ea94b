"""How one kind of server speaks of itself on `/metrics`: which of its names is which of our quantities, and what to
mind when reading it. A dialect is data; `read` reads by it, `bench.server_view` shows it beside what the client
measured.

Everything is read between two scrapes, before and after the load. So other clients of the same server are in it too,
and what was in flight at a scrape is in it in part.

A counter that fell was reset by a restart in between: what it grew by is then what it shows, since the restart, and
`read` says so. What is not there is left out, never 0.

Metrics in Prometheus' text form, read.

    parse(text)             every sample by its name with labels, as the server wrote it, labels in alphabetical order
    parse(text, names)      a few names only, at little cost: for scraping while a load runs
    labels(samples, name)   what a server tells in labels, such as its settings
    values(samples, name)   the samples of one name: of all its label values, or of those asked for

(prometheus_client's own parser gives counters other names than the server does, and takes five times as long.)
"""

import contextlib
import math
import re
from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from typing import NamedTuple

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")  # name {labels} value time stamp
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Samples = dict[str, float]


def parse(text: str, names: tuple[str, ...] | None = None) -> Samples:
    """Every sample, or those of some names, by name with labels. Lines that are no samples are passed over."""
    found: Samples = {}
    for line in text.split("\n"):
        if names is not None and not line.startswith(names):
            continue
        match = _SAMPLE.fullmatch(line)
        if match is None or (names is not None and match[1] not in names):
            continue
        with contextlib.suppress(ValueError):
            value = float(match[3])
            if math.isfinite(value):  # NaN, as a summary has it that saw nothing yet, tells nothing; JSON has no word
                found[_key(match[1], match[2])] = value
    return found


def _key(name: str, labels: str | None) -> str:
    """`name{a="1",b="2"}`, or the bare name."""
    pairs = sorted(_LABEL.findall(labels)) if labels else []
    return name + "{" + ",".join(f'{label}="{value}"' for label, value in pairs) + "}" if pairs else name


def labels(samples: Samples, name: str) -> dict[str, str]:
    """The labels of the first sample of this name; {} if there is none."""
    key = next((key for key in samples if key.startswith(name + "{")), "")
    return dict(_LABEL.findall(key))


def values(samples: Samples, name: str, labels: Mapping[str, str] | None = None) -> list[float]:
    """Returns what samples of this name say, of all label values or of those with these."""
    pairs = [f'{label}="{value}"' for label, value in (labels or {}).items()]

    def is_wanted(key: str) -> bool:
        rest = key.removeprefix(name)
        is_of_name = key == name or (len(rest) < len(key) and rest.startswith("{"))
        return is_of_name and all("{" + pair in rest or "," + pair in rest for pair in pairs)

    return [value for key, value in samples.items() if is_wanted(key)]


class Notation(StrEnum):
    MEAN = "mean"  # of a histogram or summary: growth of NAME_sum over growth of NAME_count
    GROWTH = "growth"  # of a counter
    PER = "per"  # growth of one counter over growth of another, `per`
    STATE = "state"  # a gauge, as sampled during the load


class Quantity(NamedTuple):
    """One of our words in one of a server's.

    name: as in the docstring of `bench.server_view`. older: names that earlier versions gave it.
    trap: a sentence on what the server means by it, where that is not what one would think.
    """

    name: str
    metric: str
    trap: str = ""
    form: Notation = Notation.MEAN
    per: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    older: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        return UNITS.get(self.name, "s")


mean = partial(Quantity, form=Notation.MEAN)
growth = partial(Quantity, form=Notation.GROWTH)
ratio = partial(Quantity, form=Notation.PER)
state = partial(Quantity, form=Notation.STATE)
UNITS = {
    **dict.fromkeys(("requests", "refused", "waiting", "running", "deferred"), "requests"),
    **dict.fromkeys(("prompt_tokens", "output_tokens", "prefix_hit_tokens"), "tokens"),
    **dict.fromkeys(("preemptions", "preempted"), "preemptions"),
    **dict.fromkeys(("prefix_hits", "kv_usage"), "share"),
    "steps": "steps",
}


class Dialect(NamedTuple):
    """cannot: what no metric of it tells. beware: sentences that belong to no one quantity.
    cheap_path: answers without a model. metrics_hint: how to get metrics from a server that shows none.
    cache_config, block_label: the gauge whose labels are its cache's settings, and the label of a block's tokens.
    """

    kind: str
    prefix: str
    quantities: tuple[Quantity, ...]
    cannot: tuple[str, ...]
    cheap_path: str
    metrics_hint: str
    beware: tuple[str, ...] = ()
    cache_config: str = ""
    block_label: str = ""

    def metrics(self, name: str) -> tuple[str, ...]:
        """The server's own names of a quantity, today's first; none if it has none."""
        return next(((quantity.metric, *quantity.older) for quantity in self.quantities if quantity.name == name), ())

    def state_values(self, name: str, samples: Samples) -> list[float]:
        """Returns what a scrape says of a state, of each of the server's engines."""
        labels = next((dict(quantity.labels) for quantity in self.quantities if quantity.name == name), {})
        return [value for metric in self.metrics(name) for value in values(samples, metric, labels)]


def states(waiting: str, running: str, waiting_trap: str = "", running_trap: str = "") -> tuple[Quantity, ...]:
    """The two gauges that every server has."""
    return state("waiting", waiting, waiting_trap), state("running", running, running_trap)


RESTARTED = "A counter fell between the scrapes: the server was restarted, and what it told covers the time since."


class Stated(NamedTuple):
    """One quantity as the server tells it. observations: how many a mean is of."""

    quantity: Quantity
    metric: str
    value: float
    observations: float | None = None


class Reading(NamedTuple):
    told: tuple[Stated, ...]
    notes: tuple[str, ...]


def read(dialect: Dialect, before: Samples, after: Samples) -> Reading:
    """All quantities that are there, but for the states, which two scrapes cannot tell."""
    growth = Growth(before, after)
    found = [known for quantity in dialect.quantities if (known := _read_one(quantity, growth)) is not None]
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


def _read_one(quantity: Quantity, growth: Growth) -> Stated | None:
    if quantity.form is Notation.STATE:
        return None
    labels = dict(quantity.labels)
    for metric in (quantity.metric, *quantity.older):
        if quantity.form is Notation.GROWTH:
            grown = growth.of(metric, labels)
            if grown is not None:
                return Stated(quantity, metric, grown)
            continue
        above, below = (
            (metric + "_sum", metric + "_count") if quantity.form is Notation.MEAN else (metric, quantity.per)
        )
        part, whole = growth.of(above, labels), growth.of(below, labels)
        if part is not None and whole:
            return Stated(quantity, metric, part / whole, whole)
    return None
