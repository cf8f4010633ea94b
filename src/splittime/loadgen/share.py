"""What one process of a run is told and what it tells: plain data, to cross a pipe unchanged."""

import msgspec

from splittime.loadgen.jobs import Job
from splittime.loadgen.target import Target


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One process' part of a run, as plain data. `concurrency` is of each arm; None for an open loop."""

    jobs: tuple[Job, ...]
    concurrency: int | None
    duration_ns: int | None
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
    loop_lag_ns: tuple[int, ...]
    cpu_share: float
    most_sockets: int
    sockets_limit: int
    out_of_sockets: int
    sockets_without_nodelay: int
    died: str | None = None

    @staticmethod
    def empty(worker: int, died: str) -> "Vitals":
        """Of a process that told nothing."""
        return Vitals(
            worker=worker,
            loop_lag_ns=(),
            cpu_share=0.0,
            most_sockets=0,
            sockets_limit=0,
            out_of_sockets=0,
            sockets_without_nodelay=0,
            died=died,
        )


class News(msgspec.Struct, kw_only=True):
    """What happened since the last news. in_flight: by arm, now. ttft_ns: of each first chunk, when it came from the
    run's begin, and its response TTFT."""

    begun: int = 0
    ended: int = 0
    failed: int = 0
    output_tokens: int = 0
    in_flight: tuple[int, ...] = ()
    ttft_ns: list[tuple[int, int]] = []
    is_measured_done: bool = False
