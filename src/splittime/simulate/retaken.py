"""The steps of a ledger, taken again: an engine whose steps take what they took, and its messages, when they came.

An engine in turn plans a step, runs it, and takes messages in before the next. One that plans ahead takes messages in,
plans step k + 1 at the instant that the record of step k tells (`ahead_ns`), and then waits for step k.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from splittime.core.clock import VirtualClock
from splittime.core.step import Row, RowResult, StepPlan, StepResult
from splittime.drive.crank import EngineParts
from splittime.drive.messages import ToEngine
from splittime.engine.engine import Engine
from splittime.ledger.steps import FAILED, StepRecord, Told
from splittime.scheduler.scheduler import Scheduler
from splittime.simulate.costed import Answers, costed_engine
from splittime.simulate.shape import StepTime

Rows = tuple[tuple[str, int, int], ...]


class UnknownStep(Exception):
    """The replay has come to a step that the records do not have: nobody knows how long it takes."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows = rows


class RecordedSteps:
    """The records, one after the other: the costs of the replay's steps and the instants at which they begin."""

    def __init__(self, records: Sequence[StepRecord]) -> None:
        self.records = records
        self.num_ended = 0

    @property
    def next(self) -> StepRecord | None:
        """The record of the next step to end."""
        return self.records[self.num_ended] if self.num_ended < len(self.records) else None

    @property
    def latest(self) -> StepRecord:
        """The record of the step that was taken last."""
        return self.records[self.num_ended - 1]

    @property
    def looked_ns(self) -> int:
        """When the engine planned what comes behind the next step to end."""
        return 0 if self.next is None else self.next.begin_ns + (self.next.ahead_ns or 0)

    def take(self, plan: StepPlan) -> StepRecord:
        """Returns the record of the next step to end. Raises UnknownStep if it is not this one's."""
        record, rows = self.next, tuple((row.request_id, row.start, row.num_tokens) for row in plan.rows)
        if record is None or record.rows != rows:
            raise UnknownStep(rows)
        self.num_ended += 1
        return record

    def time_of(self, plan: StepPlan, now_ns: int) -> StepTime:
        """Returns what a step takes beside which nothing is planned."""
        return time_of(self.take(plan))


def time_of(record: StepRecord) -> StepTime:
    """Returns the parts of a recorded step; how long after it the next began, its own record does not say."""
    return StepTime(
        record.plan_ns, record.launch_ns, record.moves_ns, record.device_ns, record.sample_ns, record.commit_ns
    )


class RecordedArrivals:
    """The messages of a recorded run, handed over before the step that the engine was at, in the order in which it took
    them in.

    `Arrivals` of a loop. Each turn of the loop begins when a recorded step did, or when the engine looked and could
    plan nothing. asked: says what the engine was asked before a step. forget: drops what is cached; an engine that has
    slept has lost it.
    """

    def __init__(
        self,
        clock: VirtualClock,
        steps: RecordedSteps,
        asked: Callable[[StepRecord], Iterable[tuple[int, ToEngine | None]]],
        forget: Callable[[], object],
    ) -> None:
        self.is_closed, self._forget = False, forget
        self._clock, self._steps, self._asked = clock, steps, asked
        self._messages: deque[tuple[int, ToEngine | None]] = deque()
        self._record: StepRecord | None = None
        self._came_to: tuple[int, int] | None = None  # when it was last asked for messages

    def wait(self, timeout_s: float | None) -> bool:
        return True  # time goes on in `take_all`

    def _require_progress(self) -> None:
        """Raises UnknownStep if nothing has come or ended since the last turn: then nothing ever does, for the replay
        has nobody to compute where the recorded run had a step."""
        now_at = self._steps.num_ended, len(self._messages)
        if now_at == self._came_to:
            raise UnknownStep(())
        self._came_to = now_at

    def take_all(self) -> Iterator[tuple[ToEngine, int]]:
        record = self._steps.next
        if record is None:
            self.is_closed = True
            return
        if record is not self._record:
            self._record = record
            self._messages.extend(self._asked(record))
        self._require_progress()
        while self._messages:
            at_ns, message = self._messages.popleft()
            self._clock.advance_to(at_ns)
            if message is None:
                return
            yield message, at_ns
        if record.asleep_ns:
            self._forget()
        self._clock.advance_to(record.begin_ns)


class RecordedAnswers(Answers):
    """The answers of a replay: as many drafts are right as the step's record says, and it tells the next ones.
    Rows that were late give nothing, nor do those that failed."""

    def __init__(self, steps: RecordedSteps) -> None:
        super().__init__()
        self._steps = steps
        self._record: StepRecord | None = None
        self._num_right: dict[str, int] = {}
        self._told: dict[str, Told] = {}
        self._without: dict[str, RowResult] = {}

    def result(self, row: Row) -> RowResult:
        record = self._steps.latest
        if record is not self._record:
            self._look_at(record)
        if (without := self._without.get(row.request_id)) is not None:
            return without
        if not row.num_samples or not (record.verified or record.drafts):
            return super().result(row)
        return self.accepted(row, self._num_right.get(row.request_id, 0), self._told.get(row.request_id, 0))

    def _look_at(self, record: StepRecord) -> None:
        self._record, self._told = record, dict(record.told_drafts)
        self._num_right = {request_id: num_right for request_id, _, num_right in record.verified}
        self._without = {name: RowResult(name, is_late=True) for name, _ in record.late_rows}
        failed = [one[0] for one in record.told_comings if not isinstance(one, int) and one[1] == FAILED]
        self._without |= {name: RowResult(name, error=FAILED) for name in failed}


class EngineAhead(Engine):
    """Plans the next step when the recorded engine did."""

    def __init__(self, scheduler: Scheduler, steps: RecordedSteps, clock: VirtualClock) -> None:
        super().__init__(scheduler, plans_ahead=True)
        self._steps, self._clock = steps, clock

    def begin(self, now_ns: int) -> StepPlan | None:
        if self.num_in_flight:
            self._clock.advance_to(self._steps.looked_ns)
        return super().begin(self._clock.now_ns())


class RunnerAhead:
    """An `AsyncRunner` whose steps end when they did. A step that is not the recorded one is noticed when it is to end,
    behind all before it."""

    def __init__(self, steps: RecordedSteps, clock: VirtualClock, answers: Answers) -> None:
        self._steps, self._clock, self._answers = steps, clock, answers
        self._launched: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)

    def collect(self) -> StepResult:
        plan = self._launched.popleft()
        record = self._steps.take(plan)
        self._clock.advance_to(record.end_ns)
        rows = tuple([self._answers.result(row) for row in plan.rows])
        return StepResult(plan.step_id, rows, record.device_ns, record.sample_ns, record.execution)


def engine_again(
    scheduler: Scheduler, steps: RecordedSteps, clock: VirtualClock, answers: Answers, is_ahead: bool
) -> EngineParts:
    """Returns an engine whose steps take what they took. is_ahead: it plans ahead, as the recorded one did."""
    if is_ahead:
        return EngineParts(EngineAhead(scheduler, steps, clock), RunnerAhead(steps, clock, answers))
    engine, runner, _ = costed_engine(scheduler, steps.time_of, clock, steps.records[0].execution)
    runner.answers = answers
    return EngineParts(engine, runner)
