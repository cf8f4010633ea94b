"""vLLM's engine core, so far as it decides: its loop around its scheduler, under a virtual clock.

What has come is taken in, a step is planned and runs, and aborts that came meanwhile are heeded before its result. With
asynchronous scheduling the next step is planned before that, as `EngineCore.step_with_batch_queue` does it:

    host      plan 1, plan 2 | wait for 1 | result 1, host_gap | plan 3 | wait for 2 | ..
    device    [ step 1 ][ step 2 ][ ..

What the requests are told goes to the server of `simulate.run`, in the words in which our own engine tells it.

`replay` is a recorded run of vLLM again, with the step times of its ledger: does its scheduler decide what it decided
then?

    divergence = replay(recorded)        None: the same decisions in every step

What has to be known of each step but its times, and where the ledger has it:

    who had been taken in when it was planned    in the order of receipt, as many as ran, waited or had ended by then
    who was ended from outside, and when         `freed_ns`: before a plan, or before the result of a step that ran
    who ended by itself                          `freed_ns` is the instant of the result of a step in which it was
    what was planned while a step ran, and when  `ahead_ns`; the next step if that one begins where this one ends

Where steps are planned ahead, an end by a token is not foreseen, and a row behind it may be in the air. In an order by
priority, those of one priority go by when the API process had read them: vLLM's own stamp is not in the ledger. A
request that waited for its grammar cannot be replayed: nobody knows when that was there.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.request import RequestStatus

from splittime.attach.engine_books import DecidedPlan, RowOf
from splittime.attach.request_book import EndedBook
from splittime.attach.settings import VllmSettings, settings_of
from splittime.attach.vllm_offline import PlannedStep, TimeOf, offline_request, offline_scheduler, plan_step, sampled
from splittime.core.clock import VirtualClock
from splittime.core.engine import EngineStats
from splittime.core.errors import ConfigError
from splittime.core.request import FinishReason
from splittime.drive.messages import Abort, FromEngine, StepOutput, Submit, ToEngine
from splittime.ledger.account import ClosedAccount, Mark
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord
from splittime.scheduler.events import RequestOutput
from splittime.simulate.costed import Answers, StepCosts
from splittime.simulate.door import Door
from splittime.simulate.fit import is_queued
from splittime.simulate.recorded import Recorded
from splittime.simulate.replay import Divergence, UnknownStep, first_divergence, require_whole, time_of
from splittime.simulate.shape import StepShape, StepTime
from splittime.simulate.trace import TracedRequest, ended_by_token, traced_requests

EMPTY_NS = 1_000_000  # for which vLLM's loop sleeps after a plan without rows
MOST_EMPTY = 3  # plans without rows behind each other, of which the first may preempt


def by_plan(costs: StepCosts) -> TimeOf:
    """Returns what says how long the step takes that has a plan."""
    return lambda plan, now_ns: costs.of(_shape_of(plan), now_ns)


def _shape_of(plan: DecidedPlan) -> StepShape:
    """Returns what the record of this plan will show (`simulate.shape.shape_of_record`)."""
    rows = plan.rows
    tokens = sum(count for _, _, count in rows)
    pairs = sum(count * start + count * (count + 1) // 2 for _, start, count in rows if count > 1)
    return StepShape(len(rows), tokens, plan.decode_tokens, plan.kv_tokens_read, pairs)


class VllmEngine:
    """vLLM's engine core, so far as it decides. requests: all that may come: what has not come yet is not looked at."""

    def __init__(
        self,
        settings: VllmSettings,
        clock: VirtualClock,
        time_of: TimeOf,
        answers: Answers,
        requests: Sequence[TracedRequest],
    ) -> None:
        self._settings, self._clock, self._answers = settings, clock, answers
        self._scheduler = offline_scheduler(settings, clock, time_of)
        self._traced = {traced.request.request_id: traced for traced in requests}
        self._come: deque[tuple[Submit, int]] = deque()  # while a step ran
        self._num_told: dict[str, int] = {}  # marks, by request
        self._flying: deque[tuple[PlannedStep, int]] = deque()  # planned, and when each will be done
        self._most_flying = 2 if settings.async_scheduling else 1
        self._device_free_ns = 0
        self._num_empty = 0

    def after_step_ns(self) -> int:
        """How long after a step the next may begin."""
        return self._scheduler.books.ended.host_gap_ns

    def run(self, door: Door, take: Callable[[FromEngine], None]) -> None:
        """Until nobody can come any more."""
        while not door.is_closed:
            if not self._scheduler.has_unfinished_requests() and not self._come and not self._flying:
                door.wait(None)
            self._take_in(door)
            if self._scheduler.has_requests() and self._launch():
                continue
            output = self._end(door) if self._flying else None
            if output is not None:
                take(output)

    def _take_in(self, door: Door) -> None:
        while self._come:
            self._submit(*self._come.popleft())
        for message, at_ns in door.take_all():
            if isinstance(message, Submit):
                self._submit(message, at_ns)
            else:
                self._abort(message)

    def _submit(self, message: Submit, at_ns: int) -> None:
        traced = self._traced[message.request.request_id]
        if at_ns != traced.received_ns:  # it waited for another's answer
            traced = traced.moved(at_ns - traced.received_ns)
        self._scheduler.add_request(offline_request(traced, self._settings))

    def _abort(self, message: ToEngine) -> None:
        assert isinstance(message, Abort)
        self._scheduler.finish_requests([message.request_id], RequestStatus.FINISHED_ABORTED)

    def _launch(self) -> bool:
        """Plans a step. Returns whether another may be planned before the first of those that run is waited for."""
        planned, done_ns = plan_step(self._scheduler), self._clock.now_ns()
        has_rows = bool(planned.plan.num_scheduled_tokens)
        if has_rows:
            time = self._scheduler.books.planned
            runs_ns = max(1, time.launch_ns + time.device_ns + time.sample_ns)
            self._device_free_ns = done_ns = max(self._device_free_ns, done_ns) + runs_ns
            self._num_empty = 0
        self._flying.append((planned, done_ns))
        return len(self._flying) < self._most_flying and (has_rows or self._scheduler.has_requests())

    def _end(self, door: Door) -> StepOutput | None:
        """Waits for the first of the steps that run, and takes its result in."""
        scheduler, clock = self._scheduler, self._clock
        planned, done_ns = self._flying.popleft()
        if not planned.plan.num_scheduled_tokens:
            scheduler.update_from_output(planned.plan, EMPTY_MODEL_RUNNER_OUTPUT)
            if not any(each.plan.num_scheduled_tokens for each, _ in self._flying):
                self._note_empty()
            return self._output_of_step(())
        clock.advance_to(done_ns - 1)
        for message, at_ns in door.take_all():  # while a step runs vLLM reads both and heeds aborts alone
            if isinstance(message, Submit):
                self._come.append((message, at_ns))
            else:
                self._abort(message)
        clock.advance_to(max(done_ns, clock.now_ns() + 1))  # who was ended just before did not end by this result
        of_clients = scheduler.update_from_output(planned.plan, sampled(scheduler, planned, self._answers))
        new = {each.request_id: each.new_token_ids for outputs in of_clients.values() for each in outputs.outputs}
        return self._output_of_step(tuple((name, tuple(ids)) for name, ids in new.items() if ids))

    def _note_empty(self) -> None:
        """Raises ConfigError where a request waits for more blocks than there are: vLLM would wait for ever."""
        if not self._scheduler.has_unfinished_requests():
            return
        self._num_empty += 1
        self._clock.advance(EMPTY_NS)
        if self._num_empty == MOST_EMPTY:
            first = next(iter(self._scheduler.requests))
            words = f"request {first} never fits into {self._settings.num_blocks} blocks of KV cache"
            raise ConfigError(words, param="num_blocks", value=self._settings.num_blocks)

    # ---- what the requests are told

    def _output_of_step(self, new: Sequence[tuple[str, tuple[int, ...]]]) -> StepOutput | None:
        """new: tokens by request."""
        ended, record = self._scheduler.told.take()
        if not ended and record is None:
            return None
        tokens = dict(new)
        outputs = [self._ended(book, tokens.pop(book.request_id, ())) for book in ended]
        outputs += [self._output(name, ids) for name, ids in tokens.items()]
        now_ns = self._clock.now_ns()
        if record is None:
            return StepOutput(0, now_ns, tuple(outputs), EngineStats(now_ns))
        ready_ns = record.end_ns - record.commit_ns
        return StepOutput(record.step_id, ready_ns, tuple(outputs), EngineStats(now_ns), record)

    def _output(self, request_id: str, token_ids: tuple[int, ...]) -> RequestOutput:
        book = self._scheduler.books.books[request_id]
        return RequestOutput(
            request_id,
            token_ids,
            marks=self._new_marks(request_id, book.account.marks),
            num_cached_tokens=book.cached_tokens,
            num_preemptions=book.num_preemptions,
        )

    def _ended(self, book: EndedBook, token_ids: tuple[int, ...]) -> RequestOutput:
        marks = self._new_marks(book.request_id, [*book.marks, Mark(Stage.DELIVER, None, book.ended_ns)])
        del self._num_told[book.request_id]
        return RequestOutput(
            book.request_id,
            token_ids,
            marks=marks,
            finish_reason=FinishReason(book.finish_reason),
            num_cached_tokens=book.cached_tokens,
            num_preemptions=book.num_preemptions,
            freed_ns=book.ended_ns,
        )

    def _new_marks(self, request_id: str, marks: Sequence[Mark]) -> tuple[Mark, ...]:
        num_told = self._num_told.get(request_id, 0)
        self._num_told[request_id] = len(marks)
        return tuple(marks[num_told:])


def replay(recorded: Recorded) -> Divergence | None:
    """Returns the first divergence, None if there is none. What was planned beside the last step is not compared: no
    record tells of it. Raises ConfigError for what cannot be replayed."""
    settings = settings_of(recorded.facts)
    require_whole(recorded)
    for account in recorded.accounts:
        if any(each.cause in (Cause.GRAMMAR, Cause.KV_TRANSFER) for each in account.intervals):
            words = f"request {account.request_id} waited for a grammar or a transfer; nobody knows when it was there"
            raise ConfigError(words, param="ledger", hint="Replay a run without such requests.")
    length = settings.max_model_len
    course = VllmCourse(traced_requests(recorded.accounts, length), recorded.steps, length)
    again = VllmAgain(settings, course)
    replayed: list[StepRecord] = []
    try:
        for record, after in zip(recorded.steps, [*recorded.steps[1:], None], strict=True):
            replayed.append(again.take(record, after))
    except UnknownStep as unknown:
        return first_divergence(recorded.steps, replayed, unknown.rows)
    return first_divergence(recorded.steps, replayed, None)


def ready_ns(record: StepRecord) -> int:
    """Returns when the step's result was there: who ends with it ends then."""
    return record.end_ns - record.commit_ns


class VllmCourse:
    """Who was asked when, and who was ended from outside when. is_ahead: steps were planned while others ran."""

    def __init__(self, requests: Sequence[TracedRequest], records: Sequence[StepRecord], max_model_len: int) -> None:
        self.is_ahead, self._max_model_len = records[0].ahead_ns is not None, max_model_len
        by_result = {ready_ns(record): record for record in records}
        self.requests: list[TracedRequest] = []
        self._ends: list[int] = []
        self._aborts: list[tuple[int, str]] = []
        for traced in requests:
            name, freed_ns = traced.request.request_id, _freed_ns(traced.account)
            self._ends.append(freed_ns)
            row = _row_of(name, by_result.get(freed_ns))
            if row is not None:
                self.requests.append(self._ended_by_itself(traced, row))
            else:
                self.requests.append(_ended_from_outside(traced))
                self._aborts.append((freed_ns, name))
        self._ends.sort()
        self._aborts.sort(reverse=True)

    def _ended_by_itself(self, traced: TracedRequest, last_row: RowOf) -> TracedRequest:
        """Returns the request as one whose last token is that of this row."""
        _, start, count = last_row
        num_tokens = max(1, start + count + 1 - len(traced.request.prompt_token_ids))
        is_foreseen = num_tokens == traced.account.max_tokens or start + count + 1 == self._max_model_len
        if self.is_ahead and not is_foreseen:
            return ended_by_token(traced, num_tokens)
        return _with_most(traced, num_tokens)

    def num_taken(self, record: StepRecord, planned_ns: int) -> int:
        """Returns how many requests had been taken in when the step was planned."""
        return record.num_running + record.num_waiting + bisect_right(self._ends, planned_ns)

    def aborts_until(self, at_ns: int) -> Iterator[str]:
        """Yields who is ended from outside by then, once."""
        while self._aborts and self._aborts[-1][0] <= at_ns:
            yield self._aborts.pop()[1]


def _freed_ns(account: ClosedAccount) -> int:
    """Returns when the engine was done with it. A simulated one that met its stop string was over for both at once."""
    if account.freed_ns is not None:
        return account.freed_ns
    return next((each.begin_ns for each in account.intervals if each.stage is Stage.DELIVER), account.end_ns)


def _row_of(request_id: str, record: StepRecord | None) -> RowOf | None:
    return None if record is None else next((row for row in record.rows if row[0] == request_id), None)


def _ended_from_outside(traced: TracedRequest) -> TracedRequest:
    return _with_most(traced, traced.account.max_tokens or traced.account.output_tokens + 1)


def _with_most(traced: TracedRequest, max_tokens: int) -> TracedRequest:
    request = traced.request
    sampling = msgspec.structs.replace(request.sampling, max_tokens=max_tokens)
    return traced._replace(request=msgspec.structs.replace(request, sampling=sampling))


class VllmAgain:
    """The engine, step by step."""

    def __init__(self, settings: VllmSettings, course: VllmCourse) -> None:
        self._settings, self._course = settings, course
        self._clock, self._answers = VirtualClock(), Answers()
        self._scheduler = offline_scheduler(settings, self._clock, self._time_of)
        self._planning: StepRecord | None = None  # whose step is to be planned
        self._planned: PlannedStep | None = None
        self._num_taken = 0
        self._unknown: UnknownStep | None = None  # planned behind a step that is as recorded
        for traced in course.requests:
            self._answers.learn(traced.request.request_id, len(traced.request.prompt_token_ids), traced.answer)

    def take(self, record: StepRecord, after: StepRecord | None) -> StepRecord:
        """Returns the record of the next step, which is to be this one's. Raises UnknownStep for one of other rows.
        after: of the step behind it."""
        if self._unknown is not None:
            raise self._unknown
        planned, self._planned = self._planned or self._plan_at(record.begin_ns, record), None
        if self._course.is_ahead:
            self._plan_beside(record, after if after is not None and is_queued(record, after) else None)
        self._clock.advance_to(ready_ns(record))
        self._end(self._course.aborts_until(ready_ns(record)))
        self._scheduler.update_from_output(planned.plan, sampled(self._scheduler, planned, self._answers))
        _, again = self._scheduler.told.take()
        assert again is not None
        return again

    def _plan_at(self, at_ns: int, record: StepRecord) -> PlannedStep:
        """vLLM plans again at once where a plan has no rows: its only request has made room for itself."""
        self._reach(at_ns, self._course.num_taken(record, at_ns))
        self._planning = record
        for _ in range(MOST_EMPTY):
            planned = plan_step(self._scheduler)
            if planned.plan.num_scheduled_tokens:
                return planned
            self._scheduler.update_from_output(planned.plan, EMPTY_MODEL_RUNNER_OUTPUT)
        raise UnknownStep(())

    def _plan_beside(self, record: StepRecord, queued: StepRecord | None) -> None:
        """Plans what comes behind a step that runs. queued: the record of that; None if there was nothing to plan, for
        those who had come by the plan before. Where the engine did not look (it was paused, or had nobody left),
        `ahead_ns` is 0."""
        if queued is None and not record.ahead_ns:
            return
        at_ns = record.begin_ns + (record.ahead_ns or 0)
        try:
            if queued is not None:
                self._planned = self._plan_at(at_ns, queued)
                return
            self._reach(at_ns, self._num_taken)
            self._planning = None
            if self._scheduler.has_requests():
                nothing = plan_step(self._scheduler)
                self._scheduler.update_from_output(nothing.plan, EMPTY_MODEL_RUNNER_OUTPUT)
        except UnknownStep as unknown:
            self._unknown = unknown

    def _reach(self, at_ns: int, num_taken: int) -> None:
        """Goes on to the instant of a plan, before which so many have been taken in."""
        self._clock.advance_to(at_ns)
        for traced in self._course.requests[self._num_taken : num_taken]:
            if traced.received_ns > self._clock.now_ns():
                break
            self._scheduler.add_request(offline_request(traced, self._settings))
            self._num_taken += 1
        self._end(self._course.aborts_until(at_ns))

    def _end(self, names: Iterable[str]) -> None:
        for name in names:
            self._scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def _time_of(self, plan: DecidedPlan, now_ns: int) -> StepTime:
        if self._planning is None or plan.rows != self._planning.rows:
            raise UnknownStep(plan.rows)
        return time_of(self._planning)
