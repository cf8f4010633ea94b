"""A step's record: who was in it, what it read, and where its own time went.

    plan_ns + launch_ns + device_ns + sample_ns + commit_ns == end_ns - begin_ns       (exactly)
    begin_ns - previous end_ns == host_gap_ns + idle_ns                                (exactly)

`host_gap_ns` is time between steps while there was work; `idle_ns` is waiting for work. `verify_steps` checks both.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec


class StepRecord(msgspec.Struct, frozen=True, gc=False):
    """One step. `rows` are (request_id, start, num_tokens). `kv_tokens_read` counts the cached positions that attention
    read over all rows. `decode_tokens` counts the rows of one token that sample, so a prompt of one token, or a last
    chunk of one, is among them. `victims` are the requests preempted while planning it. `hidden_ns`: what the host did
    for other steps while this one ran; part of no sum."""

    step_id: int
    begin_ns: int
    end_ns: int
    plan_ns: int
    launch_ns: int
    device_ns: int
    sample_ns: int
    commit_ns: int
    host_gap_ns: int
    idle_ns: int
    rows: tuple[tuple[str, int, int], ...]
    prefill_tokens: int
    decode_tokens: int
    kv_tokens_read: int
    blocks_used: int
    num_running: int
    num_waiting: int
    victims: tuple[str, ...] = ()
    hidden_ns: int = 0

    @property
    def parts_ns(self) -> int:
        return self.plan_ns + self.launch_ns + self.device_ns + self.sample_ns + self.commit_ns


def verify_steps(records: Sequence[StepRecord]) -> None:
    """Raise ValueError unless every record's parts sum to its length and the gaps between records are accounted for."""
    for record in records:
        if record.parts_ns != record.end_ns - record.begin_ns:
            raise ValueError(f"step {record.step_id}: parts {record.parts_ns} != {record.end_ns - record.begin_ns} ns")
    for before, after in pairwise(records):
        gap_ns = after.begin_ns - before.end_ns
        if after.step_id == before.step_id + 1 and after.host_gap_ns + after.idle_ns != gap_ns:
            raise ValueError(f"step {after.step_id}: gap {gap_ns} ns is not host_gap + idle")
