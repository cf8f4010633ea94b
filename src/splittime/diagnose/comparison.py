"""What a comparison is asked and what it says: `Terms`, `Compared` of each metric, `Comparison`. Plain data."""

from enum import StrEnum

import msgspec

from splittime.bench.book.metrics import parse_metric
from splittime.core.errors import ConfigError
from splittime.stats.intervals import CONFIDENCE, Interval

DEFAULT_METRICS = ("e2e_mean", "ttft_p50", "ttft_p99", "tpot_p50", "error_rate")
MARGIN = 0.05
SHARE_MARGIN = 0.01


class Verdict(StrEnum):
    BETTER = "BETTER"
    WORSE = "WORSE"
    EQUIVALENT = "EQUIVALENT"
    INCONCLUSIVE = "INCONCLUSIVE"


EXIT_CODES = {Verdict.BETTER: 0, Verdict.EQUIVALENT: 0, Verdict.WORSE: 1, Verdict.INCONCLUSIVE: 2}


class Design(StrEnum):
    PAIRED = "paired"
    UNPAIRED = "unpaired"
    RUNS = "runs"


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One metric. `effect` is b / a, or b - a for a share; an end of the interval is None if it cannot be known."""

    name: str
    a: float | None
    b: float | None
    effect: float | None
    interval: Interval | None
    is_difference: bool
    verdict: Verdict
    why: str


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """`level`: the confidence of each interval, so that all hold together with `confidence`."""

    label_a: str
    label_b: str
    design: Design
    runs_a: int
    runs_b: int
    num_pairs: int | None
    margin: float
    confidence: float
    level: float
    metrics: tuple[Compared, ...]
    verdict: Verdict
    why: str
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """How to compare. limits: of each request, for goodput; by default those of A's SLO."""

    metrics: tuple[str, ...] = DEFAULT_METRICS
    margin: float = MARGIN
    confidence: float = CONFIDENCE
    limits: dict[str, float] | None = None

    @property
    def level(self) -> float:
        return 1 - (1 - self.confidence) / len(self.metrics)

    def validate(self) -> None:
        """Raises `ConfigError` for a value out of range or a metric that nobody knows."""
        for name in self.metrics:
            if parse_metric(name).series == "itl":
                hint = "compare tpot_mean or chunk_gap_p99, which the client saw itself"
                raise ConfigError("itl is the server's own figure", param="metric", value=name, hint=hint)
        if not self.metrics or len(set(self.metrics)) < len(self.metrics):
            raise ConfigError("metrics must be named, each once", param="metric", value=", ".join(self.metrics))
        if not 0 < self.margin < 1:
            raise ConfigError("margin must be between 0 and 1", param="margin", value=self.margin, limit=1)
        if not 0.5 <= self.confidence < 1:
            raise ConfigError("confidence must be from 0.5 to below 1", param="confidence", value=self.confidence)
