"""Times whose percentiles are wanted: up to a number of them each is kept, beyond it they are counted by length.

A million requests have a hundred million gaps between tokens. From `EXACT` values on they are counted in buckets whose
edges grow by `GROWTH`: a percentile is then the middle of its bucket, which is within 0.5 % of the value that it stands
for. Below that number it is exact.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np

from splittime.ledger import derive

EXACT = 1_000_000  # 8 MB
GROWTH = 1.01
ZERO = -1  # the bucket of what took no time


class TimeSample:
    """Times in ns, none negative. exact: so many are kept as they are."""

    def __init__(self, exact: int = EXACT) -> None:
        self._exact, self._values = exact, array("q")
        self._counts: Counter[int] = Counter()  # by bucket [GROWTH**i, GROWTH**(i + 1)); empty while all are kept

    def extend(self, values: Iterable[int]) -> None:
        self._values.extend(values)
        if len(self._values) > self._exact:
            self._count()

    def percentiles(self, percents: Iterable[float]) -> dict[str, float]:
        """`{"p50": ...}` by nearest rank, as `ledger.derive` has it; empty for no values."""
        if not self._counts:
            return derive.percentiles(self._values, percents)
        self._count()
        ranks = {f"p{percent:g}": math.ceil(self._counts.total() * percent / 100) for percent in percents}
        return {name: self._at(rank) for name, rank in ranks.items()}

    def _at(self, rank: int) -> float:
        """Returns the value of this rank, counted from 1."""
        ordered = sorted(self._counts)
        until = np.cumsum([self._counts[bucket] for bucket in ordered])
        bucket = ordered[int(np.searchsorted(until, rank))]
        return 0.0 if bucket == ZERO else math.sqrt(GROWTH) * GROWTH**bucket

    def _count(self) -> None:
        """Puts the values that are kept into the buckets."""
        values = np.array(self._values, dtype=np.float64)
        buckets = np.floor(np.log(np.maximum(values, 1)) / math.log(GROWTH)).astype(np.int64)
        kinds, counts = np.unique(np.where(values > 0, buckets, ZERO), return_counts=True)
        self._counts.update(dict(zip(kinds.tolist(), counts.tolist(), strict=True)))
        self._values = array("q")
