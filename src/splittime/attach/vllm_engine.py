"""vLLM's engine core, so far as it decides: its loop around its scheduler, under a virtual clock.

What has come is taken in, a step is planned and runs, and aborts that came meanwhile are heeded before its result. With
asynchronous scheduling the next step is planned before that, as `EngineCore.step_with_batch_queue` does it:

    host      plan 1, plan 2 | wait for 1 | result 1, host_gap | plan 3 | wait for 2 | ..
    device    [ step 1 ][ step 2 ][ ..

What the requests are told goes to the server of `simulate.run`, in the words in which our own engine tells it.
"""

from collections import deque
from collections.abc import Callable, Sequence

from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.request import RequestStatus

from splittime.attach.engine_books import DecidedPlan
from splittime.attach.request_book import EndedBook
from splittime.attach.settings import VllmSettings
from splittime.attach.vllm_offline import PlannedStep, TimeOf, offline_request, offline_scheduler, plan_step, sampled
from splittime.core.clock import VirtualClock
from splittime.core.engine_stats import EngineStats
from splittime.core.errors import ConfigError
from splittime.core.request import FinishReason
from splittime.drive.messages import Abort, FromEngine, StepOutput, Submit, ToEngine
from splittime.ledger.account import Mark
from splittime.ledger.stages import Stage
from splittime.scheduler.events import RequestOutput
from splittime.simulate.costed import Answers, StepCosts
from splittime.simulate.door import Door
from splittime.simulate.shape import StepShape
from splittime.simulate.trace import TracedRequest

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

    def _take_aborts(self, door: Door) -> None:
        """While a step runs vLLM reads both and heeds aborts alone."""
        for message, at_ns in door.take_all():
            if isinstance(message, Submit):
                self._come.append((message, at_ns))
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
        self._take_aborts(door)
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
