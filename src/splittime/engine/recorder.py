"""What becomes of each step in the books: its record, and the gap before it.

Between two steps the gap is `host_gap` while there was work, `idle` while there was none, of which the engine slept for
`asleep`. What the runner tells of its own parts is held to the interval that the host saw, so that a record's parts sum
to its length exactly.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from splittime.core.step import THOUSAND, RowResult, StepPlan, StepResult
from splittime.ledger.steps import FAILED, UNTOLD, Coming, StepRecord, Told, gap_room_ns
from splittime.scheduler.events import RequestOutput
from splittime.scheduler.scheduler import Scheduler

MOST_COMINGS = 65_536  # of one step


class InFlight(NamedTuple):
    """A step that has begun. is_queued: while another ran. victims: preempted to plan it. looked_ns: when the engine
    planned what comes behind it, or found nothing to plan; None: it has not looked."""

    plan: StepPlan
    begin_ns: int
    is_queued: bool
    victims: tuple[str, ...]
    looked_ns: int | None = None


class ThreadTime(NamedTuple):
    """What the kernel gave a thread: how long it ran, and how long it was ready to run and got no processor."""

    ran_ns: int
    waited_ns: int


class StepTimes(NamedTuple):
    """What a driver measured of one step.

    planned_ns: when its plan was made. waiting_ns: since when the host had nothing left to do but wait for its result.
    ready_ns: when the result was there. end_ns: when it was committed.
    slept_ns: how long the engine slept since the step before.
    thread: what the thread that computes was given since the step before, or since there was work again; None where
        nobody knows.
    """

    planned_ns: int
    waiting_ns: int
    ready_ns: int
    end_ns: int
    slept_ns: int = 0
    thread: ThreadTime | None = None


class Span(NamedTuple):
    """When a step was, and what the host took of it. hidden_ns: as in `StepRecord`."""

    begin_ns: int
    end_ns: int
    plan_ns: int
    commit_ns: int
    hidden_ns: int


class Parts(NamedTuple):
    """What the runner took of a step, in the order in which it says so; launch_ns: what is left."""

    offload_ns: int
    restore_ns: int
    device_ns: int
    sample_ns: int
    launch_ns: int


class StepWork(NamedTuple):
    """What a step computes, as its record tells it. draft_tokens: among the others. late: as in `StepRecord`."""

    rows: tuple[tuple[str, int, int], ...]
    num_tokens: int
    decode_tokens: int
    draft_tokens: int
    kv_tokens_read: int
    late: tuple[tuple[str, int], ...] | UnsetType


class Recorder:
    """Makes the records of one engine, in order."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.num_steps = 0
        self._previous: StepRecord | None = None
        self._scheduler = scheduler
        self._idle_since_ns: int | None = None
        self._idle_ns = 0
        self._victims: tuple[str, ...] = ()  # preempted while planning steps that came out empty
        self._comings: list[Coming] = []

    def note_victims(self, victims: Sequence[str]) -> None:
        """Preempted for a plan of which no step came: the next record names them."""
        self._victims += tuple(victims)

    def note(self, coming: Coming) -> None:
        """The next record tells of it."""
        if len(self._comings) >= MOST_COMINGS:
            self._comings = [("", UNTOLD)]
        self._comings.append(coming)

    def note_empty_plan(self, now_ns: int, *, is_again: bool) -> None:
        """Nothing of what waits could be planned. is_again: as it will be until something comes: told once."""
        if not (is_again and self._comings and isinstance(self._comings[-1], int)):
            self.note(now_ns)

    def note_ends(self, plan: StepPlan, outputs: Sequence[RequestOutput]) -> None:
        """These are what was told behind a step."""
        for output in outputs:
            if output.finish_reason is not None:
                row = next(row for row in plan.rows if row.request_id == output.request_id)
                num_tokens = row.start + len(row.token_ids) + len(output.token_ids)
                self.note((output.request_id, num_tokens if output.error is None else FAILED))

    def start_idling(self, now_ns: int) -> None:
        if self._idle_since_ns is None:
            self._idle_since_ns = now_ns

    def stop_idling(self, now_ns: int) -> None:
        if self._idle_since_ns is not None:
            self._idle_ns += now_ns - self._idle_since_ns
            self._idle_since_ns = None

    @property
    def is_idle(self) -> bool:
        return self._idle_since_ns is not None

    def take_over(self, last: StepRecord, count: int) -> None:
        """Go on behind a number of steps that were recorded elsewhere, without idle time among them."""
        self._previous = last
        self.num_steps += count

    def record(self, step: InFlight, result: StepResult, times: StepTimes, is_overlapped: bool) -> StepRecord:
        """Returns the record of a step that has ended. is_overlapped: the host went on while it was computed."""
        span = self._overlapped(step, times) if is_overlapped else _in_turn(step, times)
        gap_ns = 0 if self._previous is None else span.begin_ns - self._previous.end_ns
        idle_ns = min(self._idle_ns, gap_ns)
        step = step._replace(victims=step.victims + self._victims) if self._victims else step
        self._previous = self._record(step, result, times, span, _parts(span, result), gap_ns - idle_ns, idle_ns)
        self._victims, self._comings, self._idle_ns = (), [], 0
        self.num_steps += 1
        return self._previous

    def _record(
        self,
        step: InFlight,
        result: StepResult,
        times: StepTimes,
        span: Span,
        parts: Parts,
        host_gap_ns: int,
        idle_ns: int,
    ) -> StepRecord:
        plan, scheduler, work = step.plan, self._scheduler, _work(step.plan, result)
        lasted_ns = span.end_ns - span.begin_ns + host_gap_ns
        cpu_wait_ns, off_cpu_ns = _without_processor(times.thread, lasted_ns, result)
        return StepRecord(
            step_id=plan.step_id,
            begin_ns=span.begin_ns,
            end_ns=span.end_ns,
            plan_ns=span.plan_ns,
            launch_ns=parts.launch_ns,
            device_ns=parts.device_ns,
            sample_ns=parts.sample_ns,
            commit_ns=span.commit_ns,
            host_gap_ns=host_gap_ns,
            idle_ns=idle_ns,
            asleep_ns=min(times.slept_ns, idle_ns),
            rows=work.rows,
            prefill_tokens=work.num_tokens - work.decode_tokens,
            decode_tokens=work.decode_tokens,
            kv_tokens_read=work.kv_tokens_read,
            blocks_used=scheduler.cache.num_used,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            victims=step.victims,
            verified=_verified(plan, result) if work.draft_tokens else (),
            drafts=UNSET if scheduler.speculation.costs is None else _told_drafts(result),
            hidden_ns=span.hidden_ns,
            ahead_ns=None if step.looked_ns is None else step.looked_ns - span.begin_ns,
            execution=result.execution,
            padded_rows=result.padded_rows,
            gap_ns=self._device_gap_ns(result.gap_ns - idle_ns, host_gap_ns, span.plan_ns, parts.launch_ns),
            enqueue_ns=result.enqueue_ns,
            collective_ns=min(result.collective_ns, parts.device_ns + parts.sample_ns),
            offload_ns=parts.offload_ns,
            restore_ns=parts.restore_ns,
            offloaded_blocks=len(plan.offloads),
            restored_blocks=len(plan.restores) + len(plan.imports),
            cpu_wait_ns=cpu_wait_ns,
            off_cpu_ns=off_cpu_ns,
            draft_ns=min(result.draft_ns, parts.launch_ns),
            mask_ns=min(result.mask_ns, parts.sample_ns),
            late=work.late,
            comings=tuple(self._comings) or UNSET,
        )

    def _overlapped(self, step: InFlight, times: StepTimes) -> Span:
        """The span of a step beside which the host went on until `waiting_ns`."""
        previous = self._previous
        if step.is_queued and previous is not None:
            hidden_ns = times.waiting_ns - previous.end_ns
            return Span(previous.end_ns, times.ready_ns, plan_ns=0, commit_ns=0, hidden_ns=hidden_ns)
        plan_ns, hidden_ns = times.planned_ns - step.begin_ns, times.waiting_ns - times.planned_ns
        return Span(step.begin_ns, times.ready_ns, plan_ns, commit_ns=0, hidden_ns=hidden_ns)

    def _device_gap_ns(self, reported_ns: int, host_gap_ns: int, plan_ns: int, launch_ns: int) -> int:
        """Returns what the device's clock says that it waited, held to what the host's says that it can have."""
        if reported_ns <= 0 or self._previous is None:
            return 0
        return min(reported_ns, gap_room_ns(self._previous, host_gap_ns, plan_ns, launch_ns))


def _in_turn(step: InFlight, times: StepTimes) -> Span:
    """The span of a step that the host did nothing beside."""
    plan_ns, commit_ns = times.planned_ns - step.begin_ns, times.end_ns - times.ready_ns
    return Span(step.begin_ns, times.end_ns, plan_ns, commit_ns, hidden_ns=0)


def _without_processor(thread: ThreadTime | None, lasted_ns: int, result: StepResult) -> tuple[int | None, int | None]:
    """Returns how long of so much time the thread waited for a processor, and how long it was off it otherwise."""
    if thread is None:
        return None, None
    waited_ns = min(thread.waited_ns, lasted_ns)
    if result.execution != "host":
        return waited_ns, None
    return waited_ns, max(0, lasted_ns - waited_ns - thread.ran_ns - result.collective_ns)


def _work(plan: StepPlan, result: StepResult) -> StepWork:
    """Counts a plan's rows, in one pass: every row of every step comes by here."""
    rows, late = [], []
    num_tokens = decode_tokens = draft_tokens = kv_tokens_read = 0
    for row, one in zip(plan.rows, result.rows, strict=True):
        num_drafts, start = len(row.draft_token_ids), row.start
        count = len(row.token_ids) + num_drafts
        rows.append((row.request_id, start, count))
        num_tokens += count
        kv_tokens_read += start + count
        draft_tokens += num_drafts
        if one.is_late:
            late.append((row.request_id, num_drafts))
        elif row.num_samples and count == 1 + num_drafts:
            decode_tokens += count
    return StepWork(tuple(rows), num_tokens, decode_tokens, draft_tokens, kv_tokens_read, tuple(late) or UNSET)


def _verified(plan: StepPlan, result: StepResult) -> tuple[tuple[str, int, int], ...]:
    """The rows with drafts that were looked at, with how many they had and how many were right."""
    return tuple(
        (row.request_id, len(row.draft_token_ids), max(0, len(one.token_ids) - 1))
        for row, one in zip(plan.rows, result.rows, strict=True)
        if row.draft_token_ids and not one.is_late
    )


def _told_drafts(result: StepResult) -> tuple[tuple[str, Told], ...] | UnsetType:
    """The rows whose results brought drafts, with what is told of them."""
    told = [(row.request_id, _chances(row)) for row in result.rows if row.draft_token_ids]
    return tuple(told) if told else UNSET


def _chances(row: RowResult) -> Told:
    if not row.draft_survival:
        return len(row.draft_token_ids)
    return tuple([round(THOUSAND * chance) for chance in row.draft_survival])


def _parts(span: Span, result: StepResult) -> Parts:
    """The parts as the runner reports them, held to what is left of the step's time for each."""
    left_ns = span.end_ns - span.begin_ns - span.plan_ns - span.commit_ns
    parts_ns = []
    for reported_ns in (result.offload_ns, result.restore_ns, result.device_ns, result.sample_ns):
        parts_ns.append(min(reported_ns, left_ns))
        left_ns -= parts_ns[-1]
    return Parts._make((*parts_ns, left_ns))
