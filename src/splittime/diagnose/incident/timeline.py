"""What happened when, from shareable books: the moments that changed something, and equal slices of the time between.

All of it is counted or copied from the books; nothing is concluded here, that is the doctor's part.
Instants are of the host's monotonic clock. `unix_ns` is the same by the wall clock, as the latest account tells; None
where there is no account.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime

import msgspec

from splittime.core.sleep import Part
from splittime.diagnose.books import Books
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord

NUM_SLICES = 60
MAX_MOMENTS = 500
LONG_PAUSE_NS = 100_000_000
LONG_GAP_NS = 1_000_000_000
LONG_PARTS = 3  # of a start that are told
MS = 1e6

ToUnix = Callable[[int], int | None]


class Moment(msgspec.Struct, frozen=True):
    """Something that happened. what: a word to search for. text: for people."""

    at_ns: int
    unix_ns: int | None
    what: str
    text: str


class TimeSlice(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the time: what ended in it, and what its steps saw. Percentiles are None where nothing was served."""

    begin_ns: int
    unix_ns: int | None
    ended: int
    refused: int
    failed: int
    output_tokens: int
    preemptions: int
    ttft_ms_p50: float | None
    ttft_ms_p95: float | None
    e2e_ms_p95: float | None
    queue_ms_p95: float | None
    steps: int
    longest_step_ms: float | None
    most_waiting: int | None
    most_blocks_used: int | None


class IncidentTimeline(msgspec.Struct, frozen=True):
    """slice_ns: the length of each slice. moments: in order; of more than `MAX_MOMENTS` the latest."""

    begin_ns: int
    end_ns: int
    slice_ns: int
    moments: tuple[Moment, ...]
    slices: tuple[TimeSlice, ...]


def timeline(books: Books) -> IncidentTimeline:
    """Returns the timeline of all that the books hold; without any slice where they hold no account."""
    accounts, steps = books.accounts, books.steps
    begin_ns = min((account.start_ns for account in accounts), default=0)
    end_ns = max((account.end_ns for account in accounts), default=0)
    slice_ns = max(1, -(-(end_ns - begin_ns + 1) // NUM_SLICES))
    to_unix = _wall_clock(accounts)
    found = sorted((*_of_processes(books), *_of_requests(accounts), *_of_steps(steps)))
    moments = tuple(Moment(at_ns, to_unix(at_ns), what, text) for at_ns, what, text in found[-MAX_MOMENTS:])
    slices = _slices(accounts, steps, begin_ns, slice_ns, to_unix) if accounts else ()
    return IncidentTimeline(begin_ns, end_ns, slice_ns, moments, tuple(slices))


def timeline_text(told: IncidentTimeline) -> str:
    """Returns the moments, a line each, for people."""
    lines = (f"{_when(moment, told.begin_ns)}  {moment.what:<14} {moment.text}\n" for moment in told.moments)
    return "".join(lines)


# ---- moments

Found = tuple[int, str, str]  # at_ns, what, text


def _of_processes(books: Books) -> Iterator[Found]:
    facts = books.facts
    if facts is None:
        return
    if facts.knobs_changed_ns:
        yield facts.knobs_changed_ns, "knobs_changed", "a setting was changed on the live server, the last time"
    for process in facts.processes:
        yield process.started_ns, "started", f"{process.name}, {process.restarts} restarts so far"
        if process.ready_ns is not None:
            took = _s(process.ready_ns - process.started_ns)
            yield process.ready_ns, "ready", f"{process.name}, {took} later{_most(process.start)}"
        for at_ns, lasted_ns in process.pauses:
            if lasted_ns >= LONG_PAUSE_NS:
                yield at_ns, "gc_pause", f"{process.name} collected garbage for {_s(lasted_ns)}"
        for sleep in process.sleeps:
            lasted = _s(sleep.end_ns - sleep.begin_ns)
            yield sleep.begin_ns, sleep.action, f"{process.name}, level {sleep.level}, {lasted}"


def _most(start: Sequence[Part]) -> str:
    """Says what took longest of a start."""
    longest = sorted(start, key=lambda part: part[1] - part[2])[:LONG_PARTS]
    told = ", ".join(f"{name} {_s(end_ns - begin_ns)}" for name, begin_ns, end_ns in longest)
    return f" ({told})" if told else ""


def _of_requests(accounts: Sequence[ClosedAccount]) -> Iterator[Found]:
    yield from _first_and_last(accounts)
    yield from _of_versions(accounts)
    slowest = max(accounts, key=derive.e2e_ns, default=None)
    if slowest is not None:
        yield slowest.end_ns, "slowest", f"{slowest.request_id} took {_s(derive.e2e_ns(slowest))}"


def _first_and_last(accounts: Sequence[ClosedAccount]) -> Iterator[Found]:
    """Yields of each code of an error when it came first, and how often in all."""
    by_code: dict[str, list[ClosedAccount]] = {}
    for account in accounts:
        if account.error is not None:
            by_code.setdefault(account.error.code, []).append(account)
    for code, failed in by_code.items():
        first, last = failed[0], failed[-1]
        yield first.end_ns, "first_error", f"{code}: {first.request_id}, {len(failed)} in all"
        if last is not first:
            yield last.end_ns, "last_error", f"{code}: {last.request_id}"


def _of_versions(accounts: Sequence[ClosedAccount]) -> Iterator[Found]:
    known = set[str]()
    for account in sorted(accounts, key=lambda account: account.start_ns):
        if account.config_version and account.config_version not in known:
            known.add(account.config_version)
            yield account.start_ns, "config", f"the first request under version {account.config_version}"


def _of_steps(steps: Sequence[StepRecord]) -> Iterator[Found]:
    for step in steps:
        if step.host_gap_ns >= LONG_GAP_NS:
            yield step.begin_ns, "gap", f"nothing ran for {_s(step.host_gap_ns)} before step {step.step_id}"
        if step.victims:
            yield step.begin_ns, "preempted", f"{len(step.victims)} requests, in step {step.step_id}"
    longest = max(steps, key=lambda step: step.end_ns - step.begin_ns, default=None)
    if longest is not None:
        yield longest.begin_ns, "longest_step", f"step {longest.step_id} took {_s(longest.end_ns - longest.begin_ns)}"


# ---- slices


def _slices(
    accounts: Sequence[ClosedAccount], steps: Sequence[StepRecord], begin_ns: int, slice_ns: int, to_unix: ToUnix
) -> Iterator[TimeSlice]:
    ended: list[list[ClosedAccount]] = [[] for _ in range(NUM_SLICES)]
    run: list[list[StepRecord]] = [[] for _ in range(NUM_SLICES)]
    for account in accounts:
        ended[(account.end_ns - begin_ns) // slice_ns].append(account)
    for step in steps:
        if 0 <= (place := (step.begin_ns - begin_ns) // slice_ns) < NUM_SLICES:
            run[place].append(step)
    for number, (those, these) in enumerate(zip(ended, run, strict=True)):
        at_ns = begin_ns + number * slice_ns
        yield _slice(at_ns, to_unix(at_ns), those, these)


def _slice(at_ns: int, unix_ns: int | None, ended: Sequence[ClosedAccount], steps: Sequence[StepRecord]) -> TimeSlice:
    served = [account for account in ended if account.error is None]
    ttft_ns = [ns for account in served if (ns := derive.ttft_ns(account)) is not None]
    queue_ns = [_queue_ns(account) for account in served]
    return TimeSlice(
        begin_ns=at_ns,
        unix_ns=unix_ns,
        ended=len(ended),
        refused=sum(account.is_refused for account in ended),
        failed=sum(account.error is not None and not account.is_refused for account in ended),
        output_tokens=sum(account.output_tokens for account in ended),
        preemptions=sum(len(step.victims) for step in steps),
        ttft_ms_p50=_ms(ttft_ns, 50),
        ttft_ms_p95=_ms(ttft_ns, 95),
        e2e_ms_p95=_ms([derive.e2e_ns(account) for account in served], 95),
        queue_ms_p95=_ms(queue_ns, 95),
        steps=len(steps),
        longest_step_ms=_ms([step.end_ns - step.begin_ns for step in steps], 100),
        most_waiting=max((step.num_waiting for step in steps), default=None),
        most_blocks_used=max((step.blocks_used for step in steps), default=None),
    )


def _queue_ns(account: ClosedAccount) -> int:
    """Returns how long a request waited for its turn: that is `admit` at a gateway, and of a server a moment."""
    by_stage = derive.stage_ns(account)
    return by_stage.get(Stage.QUEUE, 0) + by_stage.get(Stage.ADMIT, 0)


def _ms(values_ns: Sequence[int], percent: float) -> float | None:
    found = derive.percentile(values_ns, percent)
    return None if found is None else round(found / MS, 3)


# ---- clocks


def _wall_clock(accounts: Iterable[ClosedAccount]) -> ToUnix:
    latest = max(accounts, key=lambda account: account.end_ns, default=None)
    if latest is None:
        return lambda at_ns: None
    offset_ns = latest.started_at_unix_ns - latest.start_ns
    return lambda at_ns: at_ns + offset_ns


def _when(moment: Moment, begin_ns: int) -> str:
    if moment.unix_ns is None:
        return f"{(moment.at_ns - begin_ns) / 1e9:+.3f} s"
    at = datetime.fromtimestamp(moment.unix_ns / 1e9, UTC)
    return at.isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")


def _s(duration_ns: int) -> str:
    return f"{duration_ns / 1e9:.3f} s"
