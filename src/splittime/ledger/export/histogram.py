"""A histogram of durations: counts found by bisection, since prometheus_client's own searches its bounds one by one and
takes a lock for each sample. All share one set of edges, 10 us to 100 s, six to a decade (1, 1.5, 2, 3, 5, 7)."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from splittime.ledger.export.metrics import MetricSpec

EDGES_NS = (*(m * 10**e // 10 for e in range(4, 11) for m in (10, 15, 20, 30, 50, 70)), 10**11)
_EDGE_LABELS = [*(str(edge_ns / 1e9) for edge_ns in EDGES_NS), "+Inf"]


class Histogram:
    """Counts by label values over `EDGES_NS`; a sample equal to an edge is within it."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, ...], list[int]] = {}
        self.sums_ns: dict[tuple[str, ...], int] = {}

    def observe(self, labels: tuple[str, ...], duration_ns: float) -> None:
        counts = self.series.get(labels) or self._begin(labels)
        counts[bisect_left(EDGES_NS, duration_ns)] += 1
        self.sums_ns[labels] += int(duration_ns)

    def observe_all(self, labels: tuple[str, ...], durations_ns: Sequence[int]) -> None:
        counts = self.series.get(labels) or self._begin(labels)
        for duration_ns in durations_ns:
            counts[bisect_left(EDGES_NS, duration_ns)] += 1
        self.sums_ns[labels] += sum(durations_ns)

    def _begin(self, labels: tuple[str, ...]) -> list[int]:
        self.sums_ns[labels] = 0
        return self.series.setdefault(labels, [0] * (len(EDGES_NS) + 1))

    def merged(self, labels: tuple[str, ...]) -> "Histogram":
        """Returns all series as one, under these labels."""
        one = Histogram()
        if self.series:
            one.series[labels] = [sum(column) for column in zip(*list(self.series.values()), strict=True)]
            one.sums_ns[labels] = sum(list(self.sums_ns.values()))
        return one

    def lines(self, spec: MetricSpec) -> Iterator[str]:
        """The text form. Nothing is escaped: stages, causes and bucket names need it not."""
        yield f"# HELP {spec.name} {spec.help}\n# TYPE {spec.name} histogram\n"
        for values, counts in list(self.series.items()):
            pairs = ",".join(f'{label}="{value}"' for label, value in zip(spec.labels, values, strict=True))
            head = f"{spec.name}_bucket{{{pairs}{',' if pairs else ''}le="
            yield "".join(f'{head}"{edge}"}} {n}.0\n' for edge, n in zip(_EDGE_LABELS, accumulate(counts), strict=True))
            tail = f"{{{pairs}}}" if pairs else ""
            yield f"{spec.name}_sum{tail} {self.sums_ns[values] / 1e9}\n{spec.name}_count{tail} {sum(counts)}.0\n"
