"""What becomes of each step in the books: its record, and the gap before it.

Between two steps the gap is `host_gap` while there was work, `idle` while there was none, of which the engine slept for
`asleep`. What the runner tells of its own parts is held to the interval that the host saw, so that a record's parts sum
to its length exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from splittime.core.plan import StepPlan, StepResult
from splittime.engine.processor_time import Given, ProcessorTime
from splittime.engine.sleep import Bed
from splittime.ledger.steps import StepRecord, gap_room_ns
from splittime.scheduler.scheduler import Scheduler


@dataclass(frozen=True)
class Flight:
    """A step that was launched. is_queued: while another ran. victims: preempted to plan it."""

    plan: StepPlan
    begin_ns: int
    planned_ns: int
    is_queued: bool
    victims: tuple[str, ...]


class Lapse(NamedTuple):
    """When a step was, and what the host took of it. hidden_ns: as in `StepRecord`."""

    begin_ns: int
    end_ns: int
    plan_ns: int
    commit_ns: int
    hidden_ns: int


class Recorder:
    """Makes the records of one engine, in order."""

    def __init__(self, scheduler: Scheduler, bed: Bed) -> None:
        self.previous: StepRecord | None = None
        self.num_steps = 0
        self._scheduler, self._bed = scheduler, bed
        self._idle_since_ns: int | None = None
        self._idle_ns = 0
        self._victims: tuple[str, ...] = ()  # preempted for a step that there was nothing left to do in
        self._processor: ProcessorTime | None = None
        self._given: Given | None = None  # by the end of the step before, or of idling

    def watch_processor(self, processor: ProcessorTime | None) -> None:
        """From now on records tell what the processor gave this thread, which is to run the steps."""
        self._processor = processor
        self._given = processor.now() if processor is not None else None

    def note_victims(self, victims: Sequence[str]) -> None:
        """Preempted for a plan of which no step came: the next record names them."""
        self._victims += tuple(victims)

    def start_idling(self, now_ns: int) -> None:
        if self._idle_since_ns is None:
            self._idle_since_ns = now_ns

    def stop_idling(self, now_ns: int) -> None:
        if self._idle_since_ns is not None:
            self._idle_ns += now_ns - self._idle_since_ns
            self._idle_since_ns = None
            self.watch_processor(self._processor)

    def record(self, flight: Flight, result: StepResult, lapse: Lapse) -> StepRecord:
        """Returns the record of a step that has ended."""
        plan, (begin_ns, end_ns, plan_ns, commit_ns, hidden_ns) = flight.plan, lapse
        ran_ns = end_ns - begin_ns - plan_ns - commit_ns
        told_ns = (result.offload_ns, result.restore_ns, result.device_ns, result.sample_ns)
        (offload_ns, restore_ns, device_ns, sample_ns), launch_ns = _within(ran_ns, told_ns)
        gap_ns = 0 if self.previous is None else begin_ns - self.previous.end_ns
        idle_ns = min(self._idle_ns, gap_ns)
        rows = tuple((row.request_id, row.start, len(row.token_ids)) for row in plan.rows)
        num_tokens = sum(row[2] for row in rows)
        decode_tokens = sum(1 for row in plan.rows if row.samples and len(row.token_ids) == 1)
        scheduler = self._scheduler
        victims, self._victims = flight.victims + self._victims, ()
        cpu_wait_ns, off_cpu_ns = self._without_processor(end_ns - begin_ns + gap_ns - idle_ns, result)
        self.previous = StepRecord(
            step_id=plan.step_id,
            begin_ns=begin_ns,
            end_ns=end_ns,
            plan_ns=plan_ns,
            launch_ns=launch_ns,
            device_ns=device_ns,
            sample_ns=sample_ns,
            commit_ns=commit_ns,
            host_gap_ns=gap_ns - idle_ns,
            idle_ns=idle_ns,
            asleep_ns=min(self._bed.take_slept_ns(), idle_ns),
            rows=rows,
            prefill_tokens=num_tokens - decode_tokens,
            decode_tokens=decode_tokens,
            kv_tokens_read=sum(start + count for _, start, count in rows),
            blocks_used=scheduler.cache.num_used,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            victims=victims,
            hidden_ns=hidden_ns,
            execution=result.execution,
            padded_rows=result.padded_rows,
            gap_ns=self._device_gap_ns(result.gap_ns - idle_ns, gap_ns - idle_ns, plan_ns, launch_ns),
            enqueue_ns=result.enqueue_ns,
            collective_ns=min(result.collective_ns, device_ns + sample_ns),
            offload_ns=offload_ns,
            restore_ns=restore_ns,
            offloaded_blocks=len(plan.offloads),
            restored_blocks=len(plan.restores),
            cpu_wait_ns=cpu_wait_ns,
            off_cpu_ns=off_cpu_ns,
        )
        self._idle_ns = 0
        self.num_steps += 1
        return self.previous

    def _without_processor(self, lasted_ns: int, result: StepResult) -> tuple[int | None, int | None]:
        """How long of so much time this thread waited for a processor, and how long it was off it otherwise."""
        before = self._given
        if self._processor is None or before is None:
            return None, None
        self._given = given = self._processor.now()
        waited_ns = min(given.waited_ns - before.waited_ns, lasted_ns)
        if result.execution != "host":
            return waited_ns, None
        off_ns = lasted_ns - waited_ns - (given.ran_ns - before.ran_ns) - result.collective_ns
        return waited_ns, max(0, off_ns)

    def _device_gap_ns(self, told_ns: int, host_gap_ns: int, plan_ns: int, launch_ns: int) -> int:
        """What the device's clock says that it waited, held to what the host's says that it can have."""
        if told_ns <= 0 or self.previous is None:
            return 0
        return min(told_ns, gap_room_ns(self.previous, host_gap_ns, plan_ns, launch_ns))


def _within(total_ns: int, told_ns: Sequence[int]) -> tuple[list[int], int]:
    """The parts as they were told, held to what is left of the total for each; and what is left after all."""
    parts_ns = []
    for part_ns in told_ns:
        parts_ns.append(min(part_ns, total_ns))
        total_ns -= parts_ns[-1]
    return parts_ns, total_ns
