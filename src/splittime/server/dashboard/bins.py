"""Time by the second, for the page's charts: how many requests were in which stage, and what the steps did.

A bin is one second of the host's monotonic clock, named by its number. An interval is shared out among the bins it lies
in, in integers, so the bins of an interval that lies within the horizon sum to it. Bins are additive: what later books
say of the same second is added by the page. Presence is time-averaged: 3e9 ns in one second means three requests.
"""

from collections import defaultdict
from collections.abc import Iterable

from splittime.ledger import derive
from splittime.ledger.account import StageInterval
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord

BIN_NS = 1_000_000_000
HORIZON_S = 300

# what is known of the steps in a bin, by column: counts of the steps that ended in it, time in it, the most in any step
SUMS = (
    "steps",
    "prefill_tokens",
    "decode_tokens",
    "device_ns",
    "sample_ns",
    "host_ns",
    "host_gap_ns",
    "idle_ns",
    "moves_ns",
    "kept_ns",
)
PEAKS = ("running", "waiting", "blocks_used")

Presence = dict[str, dict[int, int]]  # stage key -> bin -> ns
Span = tuple[str, int, int]  # stage key, begin_ns, end_ns


def stage_key(stage: Stage, cause: Cause | None) -> str:
    """`queue:batch_slots`, or `prefill` where there is no cause."""
    return stage.value if cause is None else f"{stage.value}:{cause.value}"


def spans(intervals: Iterable[StageInterval]) -> list[Span]:
    return [(stage_key(i.stage, i.cause), i.begin_ns, i.end_ns) for i in intervals]


def spread(into: dict[int, int], begin_ns: int, end_ns: int, since_ns: int) -> None:
    """Add the part of [begin, end) that lies after `since_ns` to its bins."""
    begin_ns = max(begin_ns, since_ns)
    while begin_ns < end_ns:
        at = begin_ns // BIN_NS
        until_ns = min(end_ns, (at + 1) * BIN_NS)
        into[at] += until_ns - begin_ns
        begin_ns = until_ns


def presence(books: Iterable[Iterable[Span]], since_ns: int) -> Presence:
    """Time in each stage by bin, over all books."""
    found: Presence = defaultdict(lambda: defaultdict(int))
    for book in books:
        for key, begin_ns, end_ns in book:
            at = begin_ns // BIN_NS
            if since_ns <= begin_ns < end_ns <= (at + 1) * BIN_NS:  # most stages lie in one bin
                found[key][at] += end_ns - begin_ns
            elif end_ns > since_ns:
                spread(found[key], begin_ns, end_ns, since_ns)
    return found


def presence_json(found: Presence) -> dict[str, list[tuple[int, int]]]:
    return {key: sorted(bins.items()) for key, bins in found.items()}


def step_bins(records: Iterable[StepRecord], since_ns: int, usual: float = 0.0) -> list[list[int]]:
    """`[bin, *SUMS, *PEAKS]` for each bin that a step touched. usual: `derive.usual_off_share` of the latest steps."""
    found: dict[int, list[int]] = defaultdict(lambda: [0] * (len(SUMS) + len(PEAKS)))
    for record in records:
        if record.end_ns > since_ns:
            row = found[record.end_ns // BIN_NS]
            _count(row, record)
            _book(found, row, record, since_ns, usual)
    return [[at, *row] for at, row in sorted(found.items())]


def _count(row: list[int], record: StepRecord) -> None:
    row[0] += 1
    row[1] += record.prefill_tokens
    row[2] += record.decode_tokens
    peaks = record.num_running, record.num_waiting, record.blocks_used
    row[len(SUMS) :] = map(max, row[len(SUMS) :], peaks)


def _book(found: dict[int, list[int]], row: list[int], record: StepRecord, since_ns: int, usual: float) -> None:
    at_ns = record.begin_ns - record.host_gap_ns - record.idle_ns
    is_within = at_ns >= since_ns and at_ns // BIN_NS == record.end_ns // BIN_NS  # most steps lie in one bin
    for column, duration_ns in ((7, record.idle_ns), *_parts(record, usual)):
        if is_within:
            row[column] += duration_ns
        else:
            bins: dict[int, int] = defaultdict(int)
            spread(bins, at_ns, at_ns + duration_ns, since_ns)
            for at, ns in bins.items():
                found[at][column] += ns
        at_ns += duration_ns


def _parts(record: StepRecord, usual: float) -> list[tuple[int, int]]:
    """Returns gap, plan and launch, copies of blocks, device, sample, commit: end to end, up to where the step ends.
    While the thread had no processor or was stopped it did nothing of these, nobody knows of which: as the doctor
    divides a step (`diagnose.timeline`), that comes first, and each has its share of the rest."""
    parts = [
        (6, record.host_gap_ns),
        (5, record.plan_ns + record.launch_ns),
        (8, record.moves_ns),
        (3, record.device_ns),
        (4, record.sample_ns),
        (5, record.commit_ns),
    ]
    length_ns = sum(ns for _, ns in parts)
    kept_ns = min(length_ns, (record.cpu_wait_ns or 0) + round(derive.stopped_ns(record, usual)))
    if not kept_ns:
        return parts
    left = [(column, ns * (length_ns - kept_ns) // length_ns) for column, ns in parts]
    return [(9, length_ns - sum(ns for _, ns in left)), *left]
