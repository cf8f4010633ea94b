"""A step's record: who was in it, what it read, and where its own time went.

    plan_ns + launch_ns + offload_ns + restore_ns + device_ns + sample_ns + commit_ns == end_ns - begin_ns   (exactly)
    begin_ns - previous end_ns == host_gap_ns + idle_ns                                                    (exactly)

`host_gap_ns` is time between steps while there was work; `idle_ns` is waiting for work, of which the engine slept
`asleep_ns` (falling asleep and waking included). `verify_steps` checks all three.

A device apart from the host has a clock of its own. `gap_ns`, by its marks, is how long it had nothing to do between
the step before and this one while there was work. It is part of no sum, but lies in what the host did meanwhile:

    0 <= gap_ns <= (launch_ns + commit_ns of the step before) + host_gap_ns + plan_ns + launch_ns

`launch_ns` counts on both sides since it is whatever of the runner's time is neither forward pass nor sampling: before
them, telling the device; after them, until the host knows. Where the host computes, there is nothing to wait for:
`gap_ns`, `enqueue_ns` and `padded_rows` are 0. `collective_ns` lies in `device_ns + sample_ns`. `verify_steps` checks
these too.

The kernel's word on the thread that computes the step, of `host_gap_ns` and the step together; part of no sum, and None
where it is not known (no such kernel; another thread computes; for `off_cpu_ns` also a device apart from the host):

    cpu_wait_ns    ready to run, while others had the processor
    off_cpu_ns     neither running nor ready, and not waiting for other ranks: stopped, or blocked

    cpu_wait_ns + off_cpu_ns <= host_gap_ns + (end_ns - begin_ns)

What steps say of a device that is apart from the host: how long it worked, and how long it waited for the host.

    elapsed = length of the steps + the host's gaps before them            waiting for work (`idle_ns`) is left out
    busy    = forward pass + sampling, from the first to the last of a step's marks
    gap     = nothing to do between two steps, by its marks
    paced   = busy time of steps that it was told as slowly as it did them: it waited for single launches within them

A step is paced when telling it took at least `PACED` of what it took: a device that is slower than the host has all of
its step in line soon after it began. How much of a paced step was waiting is not known, so `paced_ns` is the most that
it can have been. Where the host computes (`execution` "host") none of this is there, and `device_time` is None.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
from msgspec import UNSET, UnsetType

from splittime.core.step import THOUSAND

EXECUTIONS = ("host", "eager", "captured")
Told = int | tuple[int, ...]  # of drafts: how many, or their chances in thousandths
Coming = tuple[str, str | int] | int  # as in `StepRecord.comings`
CAME, HELD, RELEASED, WENT_ON, LEFT, FAILED, UNTOLD = "came", "held", "released", "went_on", "left", "failed", "untold"


class StepRecord(msgspec.Struct, frozen=True, gc=False):
    """One step. `rows` are (request_id, start, num_tokens). `kv_tokens_read` counts the cached positions that attention
    read over all rows. `decode_tokens` counts the tokens of rows that sample after one known token, drafts among them,
    so a prompt of one token, or a last chunk of one, is too; a row that was late gave nothing, and is not. `verified`:
    the rows with drafts, as (request_id, drafts, accepted drafts); their `num_tokens` holds all drafts, since all were
    computed. `drafts`: the rows whose results brought drafts for the request's next row, as (request_id, chances): of
    each draft the chance, in thousandths, that it and all before it are right, or how many drafts there were, where
    nobody knew. Not written where there are none (`told_drafts`). `late`: the rows that were to sample and gave
    nothing, as what may come was not known in time, as (request_id, drafts); nobody looked at the drafts, and the last
    known token is computed again. Not written where there are none (`late_rows`). `draft_ns`: of `launch_ns`, what
    guessing drafts for the next step took. `victims` are the requests preempted while planning it. `hidden_ns`: what
    the host did for other steps while this one ran; part of no sum. `ahead_ns`: how long after its begin the engine
    planned what comes behind it, or found nothing to plan; None where it does not plan ahead, and in early ledgers.
    `execution`, `padded_rows`, `enqueue_ns` and `collective_ns` are those of `core.step.StepResult`; `enqueue_ns` is
    part of no sum, as the device may work then. `offload_ns`, `restore_ns`: copies of so many blocks of KV cache to
    host memory, and back. `mask_ns`: of `sample_ns`, finding what the forms of answers allow: waiting for what is
    looked for beside the rest, and looking at once behind the step's tokens. `num_refused`: requests that the server
    had refused for want of room since its start when it took this record in; accounts are kept of the latest of them
    only. `server_ran_ns`, `others_ran_ns`: how long this server's processes, and all others, had run on its processors
    since the machine began, as of then or up to a second before; None where the system does not tell. `throttled_ns`:
    as of then, how long this server's control groups have been throttled (`core.this_process`); None where none tells.
    `comings`: what the engine was told since the step before, in the order in which it took it in: (request_id, word),
    where the word says that the request came to the queue, was held beside it, was released, got rows again after a
    late one, or was ended from outside. Behind these stands of each request that ended in this step how many tokens it
    had, its prompt's among them, or that its row failed. A number alone is an instant at which nothing of what waited
    could be planned. `untold`, of no request: more came than is kept. Not written where there are none
    (`told_comings`); early ledgers have none at all."""

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
    ahead_ns: int | None = None
    asleep_ns: int = 0
    execution: str = "host"
    padded_rows: int = 0
    gap_ns: int = 0
    enqueue_ns: int = 0
    collective_ns: int = 0
    offload_ns: int = 0
    restore_ns: int = 0
    offloaded_blocks: int = 0
    restored_blocks: int = 0
    cpu_wait_ns: int | None = None
    off_cpu_ns: int | None = None
    num_refused: int = 0
    server_ran_ns: int | None = None
    others_ran_ns: int | None = None
    throttled_ns: int | None = None
    verified: tuple[tuple[str, int, int], ...] = ()
    draft_ns: int = 0
    drafts: tuple[tuple[str, Told], ...] | UnsetType = UNSET
    mask_ns: int = 0
    late: tuple[tuple[str, int], ...] | UnsetType = UNSET
    comings: tuple[Coming, ...] | UnsetType = UNSET

    @property
    def told_drafts(self) -> tuple[tuple[str, Told], ...]:
        """`drafts`, also where there are none."""
        return () if self.drafts is UNSET else self.drafts

    @property
    def late_rows(self) -> tuple[tuple[str, int], ...]:
        """`late`, also where there are none."""
        return () if self.late is UNSET else self.late

    @property
    def told_comings(self) -> tuple[Coming, ...]:
        """`comings`, also where there are none."""
        return () if self.comings is UNSET else self.comings

    @property
    def parts_ns(self) -> int:
        return self.plan_ns + self.launch_ns + self.busy_ns + self.commit_ns

    @property
    def length_ns(self) -> int:
        """Returns what it takes with the gap before it: the time by which the next token is later."""
        return self.end_ns - self.begin_ns + self.host_gap_ns

    @property
    def moves_ns(self) -> int:
        """Copies of blocks between the device and host memory."""
        return self.offload_ns + self.restore_ns

    @property
    def busy_ns(self) -> int:
        """Returns what the device worked, so far as is known: copies of blocks, forward pass and sampling."""
        return self.moves_ns + self.device_ns + self.sample_ns


def verify_steps(records: Sequence[StepRecord]) -> None:
    """Raise ValueError unless every record's parts sum to its length and the gaps between records are accounted for."""
    for record in records:
        if record.parts_ns != record.end_ns - record.begin_ns:
            raise ValueError(f"step {record.step_id}: parts {record.parts_ns} != {record.end_ns - record.begin_ns} ns")
        if not 0 <= record.asleep_ns <= record.idle_ns:
            raise ValueError(f"step {record.step_id}: asleep for {record.asleep_ns} ns of {record.idle_ns} idle ones")
        if not 0 <= (record.ahead_ns or 0) <= record.plan_ns + record.hidden_ns:
            words = f"{record.ahead_ns} ns after its begin, of {record.plan_ns + record.hidden_ns} ns of the host's"
            raise ValueError(f"step {record.step_id}: what comes behind it was planned {words}")
        _verify_execution(record)
        _verify_processor(record)
        verify_drafts(record)
        for moved_ns, blocks in (
            (record.offload_ns, record.offloaded_blocks),
            (record.restore_ns, record.restored_blocks),
        ):
            if moved_ns and not blocks:
                raise ValueError(f"step {record.step_id}: {moved_ns} ns for copies of no block")
    for before, after in pairwise(records):
        gap_ns = after.begin_ns - before.end_ns
        if after.step_id == before.step_id + 1 and after.host_gap_ns + after.idle_ns != gap_ns:
            raise ValueError(f"step {after.step_id}: gap {gap_ns} ns is not host_gap + idle")
        room_ns = gap_room_ns(before, after.host_gap_ns, after.plan_ns, after.launch_ns)
        if after.step_id == before.step_id + 1 and after.gap_ns > room_ns:
            raise ValueError(f"step {after.step_id}: the device waited {after.gap_ns} ns, the host only {room_ns} ns")


def verify_drafts(record: StepRecord) -> None:
    """Raises ValueError for drafts that cannot have been."""
    if not 0 <= record.draft_ns <= record.launch_ns:
        raise ValueError(
            f"step {record.step_id}: {record.draft_ns} ns of guessing in a launch of {record.launch_ns} ns"
        )
    if not record.verified and not record.drafts and not record.late:
        return
    num_tokens = {request_id: count for request_id, _, count in record.rows}
    for request_id, drafts in record.late_rows:
        if not 0 <= drafts < num_tokens.get(request_id, 0):
            raise ValueError(f"step {record.step_id}: a row with {drafts} drafts was late for {request_id}")
    for request_id, drafts, accepted in record.verified:
        if not 0 <= accepted <= drafts < num_tokens.get(request_id, 0):
            raise ValueError(f"step {record.step_id}: {accepted} of {drafts} drafts accepted for {request_id}")
    for request_id, told in record.told_drafts:
        is_told = told > 0 if isinstance(told, int) else told and min(told) >= 0 and max(told) <= THOUSAND
        if not is_told or request_id not in num_tokens:
            raise ValueError(f"step {record.step_id}: drafts of chances {told} told for {request_id}")


def gap_room_ns(before: StepRecord, host_gap_ns: int, plan_ns: int, launch_ns: int) -> int:
    """In how much of the host's time the device can have waited for a step."""
    return before.launch_ns + before.commit_ns + host_gap_ns + plan_ns + launch_ns


def _verify_execution(record: StepRecord) -> None:
    name, told = record.execution, (record.gap_ns, record.enqueue_ns, record.padded_rows)
    if name not in EXECUTIONS:
        raise ValueError(f"step {record.step_id}: execution {name!r} is not one of {', '.join(EXECUTIONS)}")
    if min(told) < 0 or (name == "host" and any(told)) or (name != "captured" and record.padded_rows):
        raise ValueError(f"step {record.step_id}: gap, enqueue and padded rows {told} of a step run {name}")
    if not 0 <= record.mask_ns <= record.sample_ns:
        raise ValueError(f"step {record.step_id}: {record.mask_ns} ns for masks, of {record.sample_ns} ns of sampling")
    computed_ns = record.device_ns + record.sample_ns
    if not 0 <= record.collective_ns <= computed_ns:
        raise ValueError(f"step {record.step_id}: collective {record.collective_ns} of {computed_ns} ns")


def _verify_processor(record: StepRecord) -> None:
    waited_ns, off_ns = record.cpu_wait_ns or 0, record.off_cpu_ns or 0
    room_ns = record.host_gap_ns + record.end_ns - record.begin_ns
    if min(waited_ns, off_ns) < 0 or waited_ns + off_ns > room_ns:
        told = f"{waited_ns} ns without a processor and {off_ns} ns off it"
        raise ValueError(f"step {record.step_id}: {told}, of {room_ns} ns")


PACED = 0.9


class DeviceTime(msgspec.Struct, frozen=True, kw_only=True):
    """What the device did in some steps. num_rows, num_padded: of the captured ones."""

    num_steps: int
    num_captured: int
    elapsed_ns: int
    busy_ns: int
    gap_ns: int
    paced_ns: int
    enqueue_ns: int
    num_rows: int
    num_padded: int

    @property
    def busy_share(self) -> float:
        return self.busy_ns / max(1, self.elapsed_ns)

    @property
    def gap_share(self) -> float:
        return self.gap_ns / max(1, self.elapsed_ns)

    @property
    def captured_share(self) -> float:
        """Returns the share of the steps that were captured."""
        return self.num_captured / max(1, self.num_steps)

    @property
    def padded_share(self) -> float:
        """Returns the share of padding among the rows that captured steps computed."""
        return self.num_padded / max(1, self.num_rows + self.num_padded)


def is_paced(step: StepRecord) -> bool:
    return step.execution == "eager" and 0 < PACED * step.busy_ns <= step.enqueue_ns


def device_time(steps: Iterable[StepRecord]) -> DeviceTime | None:
    """None where no step ran on a device apart from the host."""
    there = [step for step in steps if step.execution != "host"]
    if not there:
        return None
    captured = [step for step in there if step.execution == "captured"]
    return DeviceTime(
        num_steps=len(there),
        num_captured=len(captured),
        elapsed_ns=sum(step.end_ns - step.begin_ns + step.host_gap_ns for step in there),
        busy_ns=sum(step.busy_ns for step in there),
        gap_ns=sum(step.gap_ns for step in there),
        paced_ns=sum(step.busy_ns for step in there if is_paced(step)),
        enqueue_ns=sum(step.enqueue_ns for step in there),
        num_rows=sum(len(step.rows) for step in captured),
        num_padded=sum(step.padded_rows for step in captured),
    )


def sentence(found: DeviceTime) -> str:
    """In one line."""
    steps = f"{found.num_steps} step{'s' if found.num_steps > 1 else ''}"
    told = f"The device worked {found.busy_share:.1%} of the time of {steps} and waited {found.gap_share:.1%} between"
    told += f" them; {found.captured_share:.0%} of them captured"
    return told + (f", {found.padded_share:.0%} of their rows padding." if found.num_padded else ".")
