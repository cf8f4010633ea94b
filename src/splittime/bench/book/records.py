"""The client's book: what a load generator saw of each request, and all that belongs to one run of it.

It is the other of the two books: the server's account says where its time went, this says what the user felt. A `Run`
is one file of JSON with everything in it (`save`, `load_run`): a report, a comparison or a diagnosis is made from it
later, elsewhere, again.

Every time is in ns on the client's monotonic clock, from the run's begin (`Run.begin_ns`). The clocks of two hosts are
never subtracted: the joined account keeps its own, and only durations are compared.

    intended --(schedule lag)--> picked up --(pool, connect)--> sent --> headers --> first chunk .. last chunk --> end
    |<------------------------------------ response time ------------------------------------------------------->|
                                                            |<---------------- service time ------------------->|
"""

from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from splittime.core.errors import ConfigError, NotFound
from splittime.core.files import write_whole
from splittime.ledger.account import ClosedAccount
from splittime.ledger.facts import ServerFacts
from splittime.ledger.steps import StepRecord

FORMAT = 1


class Ending(StrEnum):
    """How a request ended, as the client saw it. Every intended request has exactly one."""

    COMPLETE = "complete"  # the answer came whole
    CANCELLED = "cancelled"  # hung up, as the schedule said or the run was stopped
    REFUSED = "refused"  # an HTTP status of 400 or above
    FAILED = "failed"  # no connection, broken off, or an error inside the stream
    TIMED_OUT = "timed_out"
    UNSENT = "unsent"  # the run was stopped before its turn


class Phase(StrEnum):
    """Warm-up is not counted; there is no drain between it and what is measured. What is intended after the window's
    end keeps the load up while the window's last requests finish, and is not counted either."""

    WARM_UP = "warm_up"
    MEASURED = "measured"
    COOL_DOWN = "cool_down"


class Outcome(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One intended request. What did not happen, or was not told, is None.

    index: its place in the schedule. arm: which of the servers, when two are compared in one run.
    request_id: sent as X-Request-Id, and the name of the server's account.
    held_ns: how long it was held back on purpose, by a cap on requests in flight or by its session's turn before.
    picked_up_ns: when the client turned to it; sent_ns: its last byte had been given to a socket; connect_ns: how long
        the connection took, 0 for one that was open already. resent: so often an open one was closed on it without an
        answer, and it was sent again.
    chunk_ns: when each chunk with content was read off the socket; chunk_tokens: the tokens in each, if told.
    prompt_tokens, output_tokens, cached_tokens: as the server's usage says; expected_*: as the schedule meant them.
    """

    index: int
    request_id: str
    phase: Phase
    ending: Ending
    intended_ns: int
    arm: int = 0
    session: int | None = None
    turn: int = 0
    worker: int = 0
    held_ns: int = 0
    picked_up_ns: int | None = None
    connect_ns: int | None = None
    resent: int = 0
    sent_ns: int | None = None
    headers_ns: int | None = None
    chunk_ns: tuple[int, ...] = ()
    chunk_tokens: tuple[int, ...] | None = None
    end_ns: int | None = None
    status: int | None = None
    error: str | None = None
    finish_reason: str | None = None
    expected_prompt_tokens: int | None = None
    expected_output_tokens: int | None = None
    expected_cached_tokens: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    tags: dict[str, str] = {}


class RunCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One thing the client asked itself: a name, what was found, what is allowed, and the sentence for people.

    voids: the client is at fault if it fails, and the figures are about it. If not, it is a note about the server or
    the workload: the figures stand.
    """

    name: str
    ok: bool
    value: float | None = None
    limit: float | None = None
    unit: str = ""
    sentence: str
    voids: bool = True


class Sample(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The state at an instant: the client's own requests in flight, and what the server's metrics said, if anything.

    deferred: of the waiting ones, those that wait for something of their own (a grammar, an adapter)."""

    at_ns: int
    arm: int = 0
    in_flight: int
    waiting: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    deferred: float | None = None


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One server of a run.

    kind: splittime, vllm, sglang, tgi, llama.cpp, mock or unknown. max_model_len: prompt and output, in tokens.
    connect_ns, round_trip_ns: probed on their own, before and after the load.
    metrics_before, metrics_after: every sample of its /metrics by name with labels, as scraped; {} if it has none.
    accounts, steps, facts: a splittime server's own book of these requests.
    """

    url: str
    kind: str
    model: str | None = None
    version: str | None = None
    max_model_len: int | None = None
    connect_ns: tuple[int, ...] = ()
    round_trip_ns: tuple[int, ...] = ()
    metrics_before: dict[str, float] = {}
    metrics_after: dict[str, float] = {}
    accounts: tuple[ClosedAccount, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    facts: ServerFacts | None = None
    notes: tuple[str, ...] = ()


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. The measured window is [measured_from_ns, measured_until_ns) of *intended* starts.

    settings: as asked, for the reader; schedule_digest: of the schedule that was run, so that two runs can be seen to
    have asked the same. loop_lag_ns: how late the client came to what it read, by statistic, of its latest process.
    stopped: why it ended before its schedule, if it did.
    """

    format: int = FORMAT
    label: str = ""
    begin_ns: int
    begin_unix_ns: int
    measured_from_ns: int
    measured_until_ns: int
    settings: dict[str, Any] = {}
    schedule_digest: str = ""
    seed: int = 0
    slo: dict[str, float] = {}
    arms: tuple[Arm, ...]
    outcomes: tuple[Outcome, ...]
    samples: tuple[Sample, ...] = ()
    checks: tuple[RunCheck, ...] = ()
    loop_lag_ns: dict[str, float] = {}
    stopped: str | None = None

    @property
    def is_void(self) -> bool:
        """The client was at fault: the figures are about it, not about the server."""
        return any(check.voids and not check.ok for check in self.checks)

    def measured(self, arm: int = 0) -> list[Outcome]:
        return [o for o in self.outcomes if o.phase is Phase.MEASURED and o.arm == arm]


def save(run: Run, path: Path) -> None:
    """Write whole or not at all. Raises `ConfigError` where it cannot be written; it says where the run is then."""
    write_whole(path, msgspec.json.encode(run), keeps=True)


def load_run(path: Path) -> Run:
    """Raises `NotFound` for no file and `ConfigError` for one that is no run."""
    if not path.is_file():
        raise NotFound(f"no run file at {path}", param="run", value=str(path))
    try:
        run = msgspec.json.decode(path.read_bytes(), type=Run)
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise ConfigError(f"{path} is not a run of splittime bench: {error}", param="run", value=str(path)) from error
    if run.format != FORMAT:
        raise ConfigError(f"{path} has format {run.format}, this splittime reads {FORMAT}", param="run")
    return run
