"""How one kind of server speaks of itself on `/metrics`: which of its names is which of our quantities, and what to
mind when reading it. A dialect is data; `reading` reads by it, `view` shows it beside what the client measured.

Everything is read between two scrapes, before and after the load. So other clients of the same server are in it too,
and what was in flight at a scrape is in it in part.
"""

from enum import StrEnum
from typing import NamedTuple

from splittime.loadgen.scrape import Samples, values


class Form(StrEnum):
    MEAN = "mean"  # of a histogram or summary: growth of NAME_sum over growth of NAME_count
    GROWTH = "growth"  # of a counter
    PER = "per"  # growth of one counter over growth of another, `per`
    STATE = "state"  # a gauge, as sampled during the load


class Quantity(NamedTuple):
    """One of our words in one of a server's.

    name: as in the docstring of `view`. older: names that earlier versions gave it.
    trap: a sentence on what the server means by it, where that is not what one would think.
    """

    name: str
    metric: str
    form: Form
    trap: str = ""
    unit: str = "s"
    per: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    older: tuple[str, ...] = ()


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
        """What a scrape says of a state, of each of the server's engines."""
        labels = next((dict(quantity.labels) for quantity in self.quantities if quantity.name == name), {})
        return [value for metric in self.metrics(name) for value in values(samples, metric, labels)]


def states(waiting: str, running: str, waiting_trap: str = "", running_trap: str = "") -> tuple[Quantity, ...]:
    """The two gauges that every server has."""
    return (
        Quantity("waiting", waiting, Form.STATE, waiting_trap, "requests"),
        Quantity("running", running, Form.STATE, running_trap, "requests"),
    )
