"""The figures that sum up a ledger, real or simulated, in one pass and bounded memory.

Times are in ms: `ttft_ms_p99`, `itl_ms_p50`, `e2e_ms_mean`, ...

Times whose percentiles are wanted: up to a number of them each is kept, beyond it they are counted by length.

A million requests have a hundred million gaps between tokens. From `EXACT` values on they are counted in buckets whose
edges grow by `GROWTH`: a percentile is then the middle of its bucket, which is within 0.5 % of the value that it stands
for. Below that number it is exact.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np

from splittime.core.errors import ConfigError
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord

Figures = dict[str, float]
PERCENTS = (50, 90, 99)
EXACT = 1_000_000  # 8 MB
GROWTH = 1.01
ZERO = -1  # the bucket of what took no time


class RunningFigures:
    """The figures of a run, from accounts and steps that are handed over one by one and not kept. Percentiles of up to
    `sample.EXACT` times of a kind are exact; those of more are within 0.5 %."""

    def __init__(self) -> None:
        self._times = {name: TimeSample() for name in ("ttft", "itl", "e2e", "queue")}
        self._begin_ns: int | None = None
        self._end_ns = self._output_tokens = self._preemptions = self._refused = 0
        self._served = self._e2e_ns = self._steps = self._rows = 0

    def add_account(self, account: ClosedAccount) -> None:
        self._refused += account.is_turned_away
        if account.is_refused or not account.prompt_tokens:
            return
        self._begin_ns = min(account.start_ns, account.start_ns if self._begin_ns is None else self._begin_ns)
        self._end_ns = max(account.end_ns, self._end_ns)
        self._served += 1
        self._e2e_ns += derive.e2e_ns(account)
        self._output_tokens += account.output_tokens
        self._preemptions += account.num_preemptions
        first_ns = derive.ttft_ns(account)
        self._times["ttft"].extend(() if first_ns is None else (first_ns,))
        self._times["itl"].extend(derive.itl_ns(account))
        self._times["e2e"].extend((derive.e2e_ns(account),))
        self._times["queue"].extend((derive.stage_ns(account).get(Stage.QUEUE, 0),))

    def add_step(self, step: StepRecord) -> None:
        self._steps += 1
        self._rows += len(step.rows)

    def figures(self) -> Figures:
        """Returns the figures, times in ms. Raises ConfigError for a run that served nobody."""
        if self._begin_ns is None or not self._steps:
            raise ConfigError("a run that served nobody has no figures", param="requests", value=0, limit=1)
        found = {
            f"{name}_ms_{percent}": value / 1e6
            for name, times in self._times.items()
            for percent, value in times.percentiles(PERCENTS).items()
        }
        return found | {
            "e2e_ms_mean": self._e2e_ns / self._served / 1e6,
            "output_tokens_per_s": self._output_tokens / ((self._end_ns - self._begin_ns) / 1e9),
            "refused": self._refused,
            "preemptions": self._preemptions,
            "mean_running": self._rows / self._steps,
            "steps": self._steps,
        }


def figures(accounts: Iterable[ClosedAccount], steps: Iterable[StepRecord]) -> Figures:
    """Returns the figures of a whole run, times in ms. Raises ConfigError for one that served nobody."""
    running = RunningFigures()
    for account in accounts:
        running.add_account(account)
    for step in steps:
        running.add_step(step)
    return running.figures()


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
