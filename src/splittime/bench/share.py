"""The values that cross between a run and its processes, unchanged by a pipe, and the progress that the counts add up
to.
"""

from collections.abc import Callable

import msgspec

from splittime.bench.schedule import Job
from splittime.ledger.derive import percentile
from splittime.wire.target import Target


class LoadShare(msgspec.Struct, frozen=True, kw_only=True):
    """One process' part of a run, as plain data. `concurrency` is of each arm; None for an open loop."""

    jobs: tuple[Job, ...]
    concurrency: int | None = None
    duration_ns: int | None = None
    targets: tuple[Target, ...]
    kinds: tuple[str, ...]
    models: tuple[str | None, ...]
    run_id: str
    timeout_s: float
    max_in_flight: int | None = None
    worker: int = 0


class Vitals(msgspec.Struct, frozen=True, kw_only=True):
    """How one process of the client fared. loop_lag_ns: how late a callback came, every `LAG_PROBE_NS`."""

    worker: int
    loop_lag_ns: tuple[int, ...] = ()
    cpu_share: float = 0.0
    most_sockets: int = 0
    sockets_limit: int = 0
    out_of_sockets: int = 0
    sockets_without_nodelay: int = 0
    died: str | None = None


class LoadCounts(msgspec.Struct, kw_only=True):
    """What happened since the last counts were taken. in_flight: by arm, now. ttft_ns: of each first chunk, when it
    came from the run's begin, and its response TTFT."""

    begun: int = 0
    ended: int = 0
    failed: int = 0
    output_tokens: int = 0
    in_flight: tuple[int, ...] = ()
    ttft_ns: list[tuple[int, int]] = []
    is_measured_done: bool = False

    def add(self, later: "LoadCounts") -> None:
        """Counts what happened since; what holds now is as the later ones say."""
        self.begun += later.begun
        self.ended += later.ended
        self.failed += later.failed
        self.output_tokens += later.output_tokens
        self.ttft_ns += later.ttft_ns
        self.in_flight, self.is_measured_done = later.in_flight, later.is_measured_done

    def latest_ttft_s(self, percent: float) -> float | None:
        """Returns a percentile of the latest first chunks' TTFT."""
        found = percentile([ttft for _, ttft in self.ttft_ns[-LATEST:]], percent)
        return None if found is None else found / 1e9


LATEST = 500  # of first chunks, for the percentiles so far


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run is. `ends_at_s`: when the last is sent. TTFT: response time, of the latest first chunks."""

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

    def per_s(self, number: int) -> float:
        """Returns a number's rate over the time in which requests are sent: after it, answers are awaited."""
        sending_s = min(self.elapsed_s, self.ends_at_s or self.elapsed_s)
        return number / sending_s if sending_s > 0 else 0.0


OnProgress = Callable[[Progress], None]
