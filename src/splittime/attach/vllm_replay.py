"""A recorded run of vLLM again, with the step times of its ledger: does its scheduler decide what it decided then?

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
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.request import RequestStatus

from splittime.attach.engine_books import DecidedPlan, RowOf
from splittime.attach.settings import VllmSettings, settings_of
from splittime.attach.vllm_offline import PlannedStep, offline_request, offline_scheduler, plan_step, sampled
from splittime.core.clock import VirtualClock
from splittime.core.errors import ConfigError
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord
from splittime.simulate.costed import Answers
from splittime.simulate.host_parts import is_queued
from splittime.simulate.recorded import Recorded
from splittime.simulate.replay import Divergence, first_divergence, require_whole
from splittime.simulate.retaken import UnknownStep, time_of
from splittime.simulate.shape import StepTime
from splittime.simulate.trace import TracedRequest, ended_by_token, traced_requests

MOST_EMPTY = 3  # plans without rows before a step


def replay(recorded: Recorded) -> Divergence | None:
    """Returns the first divergence, None if there is none. What was planned beside the last step is not compared: no
    record tells of it. Raises ConfigError for what cannot be replayed."""
    settings = settings_of(recorded.facts)
    require_whole(recorded)
    _require_known_waits(recorded.accounts)
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


def _require_known_waits(accounts: Iterable[ClosedAccount]) -> None:
    for account in accounts:
        if any(each.cause in (Cause.GRAMMAR, Cause.KV_TRANSFER) for each in account.intervals):
            words = f"request {account.request_id} waited for a grammar or a transfer; nobody knows when it was there"
            raise ConfigError(words, param="ledger", hint="Replay a run without such requests.")


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
        self._submit_until(num_taken)
        self._end(self._course.aborts_until(at_ns))

    def _submit_until(self, num_taken: int) -> None:
        """Takes in so many of all, as far as they have come."""
        for traced in self._course.requests[self._num_taken : num_taken]:
            if traced.received_ns > self._clock.now_ns():
                break
            self._scheduler.add_request(offline_request(traced, self._settings))
            self._num_taken += 1

    def _end(self, names: Iterable[str]) -> None:
        for name in names:
            self._scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def _time_of(self, plan: DecidedPlan, now_ns: int) -> StepTime:
        if self._planning is None or plan.rows != self._planning.rows:
            raise UnknownStep(plan.rows)
        return time_of(self._planning)
