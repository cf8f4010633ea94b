"""What the host took of recorded steps: to plan, launch, sample, commit, and until it planned again.

Where steps are planned ahead, the host plans one while another runs, and the step's own record has nothing of that. It
follows from the record before, whose turn planned it:

    planned and told     from begin_ns + ahead_ns of the step before until the host had nothing left to do but wait
    launch               what is left of the step once the host waits, if the device has not worked then

What was hidden behind the device is in no sum; how long a step takes is the longer of the two (`simulate.costed`).
"""

import math
from collections.abc import Sequence

from splittime.ledger.steps import StepRecord


def host_parts(records: Sequence[StepRecord]) -> list[list[float]]:
    """Returns for each step a value for each of `cost.HOST_PARTS`; the gap is that behind the step, NaN where nobody
    knows it."""
    return [
        [_plan_ns(before, record), _launch_ns(record), record.sample_ns, record.commit_ns, _gap_ns(record, after)]
        for before, record, after in zip([None, *records[:-1]], records, [*records[1:], None], strict=True)
    ]


def taken_ns(records: Sequence[StepRecord]) -> list[int]:
    """Returns what each step took, host and device, without moves of blocks and without gaps."""
    own = zip([None, *records[:-1]], records, strict=True)
    return [
        _plan_ns(before, record) + _launch_ns(record) + record.device_ns + record.sample_ns + record.commit_ns
        for before, record in own
    ]


def is_queued(before: StepRecord | None, record: StepRecord) -> bool:
    """Whether it was planned while the one before ran."""
    if before is None or before.ahead_ns is None or record.step_id != before.step_id + 1:
        return False
    return before.end_ns == record.begin_ns and not record.plan_ns


def _plan_ns(before: StepRecord | None, record: StepRecord) -> int:
    if before is None or not is_queued(before, record):
        return record.plan_ns
    return max(0, before.plan_ns + before.hidden_ns - (before.ahead_ns or 0))


def _launch_ns(record: StepRecord) -> int:
    if record.ahead_ns is None:
        return record.launch_ns
    waited_ns = record.end_ns - record.begin_ns - record.plan_ns - record.hidden_ns
    return max(0, min(record.launch_ns, waited_ns))


def _gap_ns(record: StepRecord, after: StepRecord | None) -> float:
    if after is None or after.step_id != record.step_id + 1 or after.idle_ns:
        return math.nan
    return (after.ahead_ns or 0) if is_queued(record, after) else after.host_gap_ns
