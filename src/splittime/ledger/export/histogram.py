"""A histogram: counts found by bisection, since prometheus_client's own searches its bounds one by one and takes a lock
for each sample. Durations share one set of edges, 10 us to 100 s, six to a decade (1, 1.5, 2, 3, 5, 7)."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from splittime.ledger.export.metrics import MetricSpec


class Edges(NamedTuple):
    """Upper bounds in whole units, of which `per_unit` are one of the unit that is shown."""

    bounds: tuple[int, ...]
    per_unit: float


EDGES_NS = (*(m * 10**e // 10 for e in range(4, 11) for m in (10, 15, 20, 30, 50, 70)), 10**11)
DURATIONS = Edges(EDGES_NS, 1e9)


class Histogram:
    """Counts by label values over the edges; a sample equal to an edge is within it."""

    def __init__(self, edges: Edges = DURATIONS) -> None:
        self.edges = edges
        self.series: dict[tuple[str, ...], list[int]] = {}
        self.sums: dict[tuple[str, ...], int] = {}

    def observe(self, labels: tuple[str, ...], amount: float) -> None:
        counts = self.series.get(labels) or self._begin(labels)
        counts[bisect_left(self.edges.bounds, amount)] += 1
        self.sums[labels] += int(amount)

    def observe_all(self, labels: tuple[str, ...], amounts: Sequence[int]) -> None:
        counts, bounds = self.series.get(labels) or self._begin(labels), self.edges.bounds
        for amount in amounts:
            counts[bisect_left(bounds, amount)] += 1
        self.sums[labels] += sum(amounts)

    def _begin(self, labels: tuple[str, ...]) -> list[int]:
        self.sums[labels] = 0
        return self.series.setdefault(labels, [0] * (len(self.edges.bounds) + 1))

    def merged(self, labels: tuple[str, ...]) -> "Histogram":
        """Returns all series as one, under these labels."""
        one = Histogram(self.edges)
        if self.series:
            one.series[labels] = [sum(column) for column in zip(*list(self.series.values()), strict=True)]
            one.sums[labels] = sum(list(self.sums.values()))
        return one

    def lines(self, spec: MetricSpec, most: int | None = None) -> Iterator[str]:
        """The text form; most: no edge above it is written. Nothing is escaped: stages, causes and bucket names need
        it not."""
        yield f"# HELP {spec.name} {spec.help}\n# TYPE {spec.name} histogram\n"
        bounds, per_unit = self.edges
        num_shown = len(bounds) if most is None else sum(bound <= most for bound in bounds)
        edges = [str(bound / per_unit) for bound in bounds[:num_shown]]
        for values, counts in list(self.series.items()):
            pairs = ",".join(f'{label}="{value}"' for label, value in zip(spec.labels, values, strict=True))
            head = f"{spec.name}_bucket{{{pairs}{',' if pairs else ''}le="
            total = sum(counts)
            yield "".join(f'{head}"{edge}"}} {n}.0\n' for edge, n in zip(edges, accumulate(counts), strict=False))
            tail = f"{{{pairs}}}" if pairs else ""
            yield f'{head}"+Inf"}} {total}.0\n'
            yield f"{spec.name}_sum{tail} {self.sums[values] / per_unit}\n{spec.name}_count{tail} {total}.0\n"
