"""What a run says of itself while it goes on, for whoever shows it."""

from collections.abc import Callable

import msgspec

from splittime.ledger.derive import percentile
from splittime.loadgen.share import News

LATEST = 500  # of first chunks, for the percentiles so far


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """So far. `begun_per_s` over the time since the begin; TTFT is response time, of the latest first chunks."""

    elapsed_s: float
    planned: int
    due: int
    begun: int
    ended: int
    failed: int
    in_flight: int
    output_tokens: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    ends_at_s: float | None

    @property
    def begun_per_s(self) -> float:
        return self.begun / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def due_per_s(self) -> float:
        return self.due / self.elapsed_s if self.elapsed_s > 0 else 0.0


OnProgress = Callable[[Progress], None]


class Tally:
    """Adds up the news of all processes."""

    def __init__(self) -> None:
        self.begun = self.ended = self.failed = self.output_tokens = 0
        self.ttft_ns: list[tuple[int, int]] = []

    def add(self, news: News) -> None:
        self.begun += news.begun
        self.ended += news.ended
        self.failed += news.failed
        self.output_tokens += news.output_tokens
        self.ttft_ns += news.ttft_ns

    def ttft_s(self, percent: float) -> float | None:
        found = percentile([ttft for _, ttft in self.ttft_ns[-LATEST:]], percent)
        return None if found is None else found / 1e9
