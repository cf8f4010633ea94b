"""What a step computes, in the numbers that its time depends on, and how long its parts take.

A `StepShape` comes from a recorded step or from a plan that is yet to run. A `StepTime` comes from a cost model
(`simulate.cost`), or from the record itself (`simulate.replay`).
"""

from typing import NamedTuple

from splittime.core.step import StepPlan
from splittime.ledger.steps import StepRecord


class StepShape(NamedTuple):
    """What a step computes.

    rows: requests in it, of which `decode_rows` sample after one known token. tokens: computed ones, drafts included.
    kv_tokens: positions that are read or written: start + num_tokens, summed over the rows.
    prompt_pairs: pairs of positions that attention compares in rows of more than one token; a row of n tokens from
        position s on has n s + n (n + 1) / 2.
    moved_blocks: copies to host memory and back. execution: as in `core.step.StepResult`.
    """

    rows: int
    tokens: int
    decode_rows: int
    kv_tokens: int
    prompt_pairs: int
    moved_blocks: int = 0
    execution: str = "host"


class StepTime(NamedTuple):
    """How long the parts of a step take, in ns, in their order; moves_ns: copies of blocks. host_gap_ns: from its end
    to the begin of the next step, if there is work."""

    plan_ns: int = 0
    launch_ns: int = 0
    moves_ns: int = 0
    device_ns: int = 0
    sample_ns: int = 0
    commit_ns: int = 0
    host_gap_ns: int = 0

    @property
    def step_ns(self) -> int:
        """From the begin of the step to its end."""
        return sum(self) - self.host_gap_ns

    def offload_ns(self, num_offloads: int, num_restores: int) -> int:
        """Returns the part of `moves_ns` that copies to host memory took: each copy takes as long, either way."""
        return self.moves_ns * num_offloads // (num_offloads + num_restores) if num_offloads else 0


def shape_of_record(record: StepRecord) -> StepShape:
    num_drafts = sum(drafts for _, drafts, _ in record.verified)
    late_drafts = dict(record.late_rows)  # such a row costs what others do
    num_late = sum(count == 1 + late_drafts.get(name, count) for name, _, count in record.rows) if late_drafts else 0
    moved = record.offloaded_blocks + record.restored_blocks
    tokens, pairs = record.prefill_tokens + record.decode_tokens, 0
    if tokens > len(record.rows):  # else each row has one token
        pairs = sum(count * start + count * (count + 1) // 2 for _, start, count in record.rows if count > 1)
    return StepShape(
        rows=len(record.rows),
        tokens=tokens,
        decode_rows=record.decode_tokens - num_drafts + num_late,
        kv_tokens=record.kv_tokens_read,
        prompt_pairs=pairs,
        moved_blocks=moved,
        execution=record.execution,
    )


def shape_of_plan(plan: StepPlan, execution: str = "host") -> StepShape:
    """Returns what the record of this plan will show."""
    tokens = decode_rows = kv_tokens = pairs = 0
    for row in plan.rows:
        num_known, start = len(row.token_ids), row.start
        count = num_known + len(row.draft_token_ids)
        tokens += count
        kv_tokens += start + count
        if count > 1:
            pairs += count * start + count * (count + 1) // 2
        if num_known == 1 and row.num_samples:
            decode_rows += 1
    moved = len(plan.offloads) + len(plan.restores)
    return StepShape(len(plan.rows), tokens, decode_rows, kv_tokens, pairs, moved, execution)


def features_of(shape: StepShape) -> tuple[float, ...]:
    """Returns the values of `simulate.cost.FEATURES`."""
    _, tokens, decode_rows, kv_tokens, pairs, _, _ = shape
    prompt_tokens = tokens - decode_rows
    if prompt_tokens > 0:
        return (1.0, 1.0, float(decode_rows), float(prompt_tokens), float(kv_tokens), float(pairs))
    return (1.0, 0.0, float(decode_rows), 0.0, float(kv_tokens), 0.0)
