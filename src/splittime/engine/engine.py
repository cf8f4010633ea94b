"""The engine: a pure machine of steps over one scheduler. It reads no clock, waits for nothing and computes nothing.

    plan = engine.begin(now_ns)            scheduler.plan: what the next step computes
    engine.end(result, now_ns)             scheduler.commit: what came of it
    record = engine.close(times)           the step's record, from what the driver measured
    outputs = engine.take_outputs()        what the requests are told

Whoever calls it is its driver (`drive.crank`), which owns the clock, the runner, the waiting and the thread. An engine
that plans ahead may begin a step while one is in flight; steps end in the order in which they began:

    driver   begin 1  launch 1  begin 2  launch 2  (wait)  end 1  begin 3  launch 3  (wait)  end 2 ..
    runner                      [====== step 1 ======][======= step 2 =======][==== step 3 ..

A step that was launched while another ran begins, in its record (`recorder`), where that one ended: what the host did
meanwhile cost nothing and is in no part of it (`hidden_ns` tells it), and what the device did not compute of the time,
waiting to be told, is `launch_ns`.
"""

from collections import deque

import msgspec

from splittime.core.engine import EngineStats
from splittime.core.errors import ErrorInfo, RequestError, SplittimeError
from splittime.core.request import FinishReason, Request
from splittime.core.step import StepPlan, StepResult
from splittime.engine.recorder import InFlight, Recorder, StepTimes
from splittime.ledger.account import Account
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import CAME, HELD, LEFT, RELEASED, WENT_ON, StepRecord
from splittime.scheduler.events import RequestOutput
from splittime.scheduler.scheduler import Scheduler

NOT_PLANNED = "not_told"  # in the stats, the cause of who waits before any plan has looked at it


class Engine:
    """Not thread-safe. Every submitted request ends in exactly one output with a finish reason.

    plans_ahead: whether a step may begin while another is in flight.
    """

    def __init__(self, scheduler: Scheduler, plans_ahead: bool = False) -> None:
        self.scheduler = scheduler
        self.plans_ahead = plans_ahead
        self._recorder = Recorder(scheduler)
        self._in_flight: deque[InFlight] = deque()
        self._ended: tuple[InFlight, StepResult] | None = None
        self._looked_ns: int | None = None  # when what comes behind the oldest in flight was planned
        self._outputs: list[RequestOutput] = []
        self._config, self._knobs = scheduler.config, scheduler.config.knobs()

    # ---- requests -------------------------------------------------------------------------------------------------

    def submit(
        self, request: Request, received_ns: int, now_ns: int, measured_ns: int = 0, held_for: Cause | None = None
    ) -> None:
        """Take a request in; one that can never be served ends at once with `error`.

        received_ns: when it reached the driver. measured_ns: the end of the driver's last measurement of the machine.
        held_for: it waits for this beside the queue, until `release`.
        """
        if held_for is None:
            self._recorder.stop_idling(now_ns)
        try:
            self.scheduler.submit(request, received_ns, measured_ns, held_for)
            self._recorder.note((request.request_id, CAME if held_for is None else HELD))
        except RequestError as error:
            self.refuse(request, received_ns, error)

    def refuse(self, request: Request, received_ns: int, error: SplittimeError) -> None:
        """End a request at once that is not taken in."""
        self._outputs.append(_refusal(request, max(received_ns, request.submitted_ns), error))

    def hold(self, request_id: str, cause: Cause, now_ns: int) -> bool:
        """Set a waiting request aside until `release`, as `Scheduler.hold` does. Returns whether it waits."""
        is_held = self.scheduler.hold(request_id, cause, now_ns)
        if is_held:
            self._recorder.note((request_id, HELD))
        return is_held

    def release(self, request_id: str, received_ns: int, now_ns: int) -> bool:
        """Queues a request, with its rank: what it was held for is there. Returns whether it was held."""
        was_held = self.scheduler.release(request_id, received_ns)
        if was_held:
            self._recorder.note((request_id, RELEASED))
            self._recorder.stop_idling(now_ns)
        return was_held

    def go_on(self, request_id: str, now_ns: int) -> bool:
        """Gives a request rows again: what may come in its answer is known. Returns whether it waited for that."""
        waited = self.scheduler.go_on(request_id)
        if waited:
            self._recorder.note((request_id, WENT_ON))
            self._recorder.stop_idling(now_ns)
        return waited

    def abort(self, request_id: str, now_ns: int) -> None:
        """End a request, if it is still here. Its blocks are free when this returns."""
        output = self._end(request_id, now_ns)
        if output is not None:
            self._outputs.append(output)

    def fail(self, request_id: str, error: ErrorInfo, now_ns: int) -> None:
        """End a request with this error, if it is still here."""
        output = self._end(request_id, now_ns)
        if output is not None:
            self._outputs.append(msgspec.structs.replace(output, finish_reason=FinishReason.ERROR, error=error))

    def fail_all(self, error: ErrorInfo, now_ns: int) -> int:
        """End every request with this error; returns how many there were."""
        ended = [self._end(request_id, now_ns) for request_id in self.scheduler.request_ids]
        why = {"finish_reason": FinishReason.ERROR, "error": error}
        self._outputs.extend(msgspec.structs.replace(output, **why) for output in ended if output is not None)
        return len(ended)

    def _end(self, request_id: str, now_ns: int) -> RequestOutput | None:
        """End a request from outside; None if it is not here."""
        output = self.scheduler.abort(request_id, now_ns)
        if output is not None:
            self._recorder.note((request_id, LEFT))
        return output

    # ---- steps ----------------------------------------------------------------------------------------------------

    def begin(self, now_ns: int) -> StepPlan | None:
        """The plan of the next step, which is in flight from here on; None if there is nothing to compute."""
        assert self.may_begin, "a step is in flight"
        if self._in_flight:
            self._looked_ns = now_ns
        expired = self.scheduler.expire(now_ns)
        self._outputs.extend(expired)
        plan = self.scheduler.plan(now_ns)
        if plan is None:
            self._without_plan(now_ns, has_changed=bool(expired or self.scheduler.victims))
            return None
        self._recorder.stop_idling(now_ns)
        self._in_flight.append(InFlight(plan, now_ns, bool(self._in_flight), tuple(self.scheduler.victims)))
        return plan

    def _without_plan(self, now_ns: int, *, has_changed: bool) -> None:
        recorder = self._recorder
        recorder.note_victims(self.scheduler.victims)
        if not self._in_flight:  # else it was at the instant that the record of the step in flight tells
            if has_changed or len(self.scheduler.queue):
                recorder.note_empty_plan(now_ns, is_again=not has_changed)
            recorder.start_idling(now_ns)

    def end(self, result: StepResult, now_ns: int) -> None:
        """Commit the result of the oldest step in flight. `close` is to follow."""
        step = self._in_flight.popleft()
        if self._looked_ns is not None:
            step, self._looked_ns = step._replace(looked_ns=self._looked_ns), None
        self._ended = step, result
        outputs = self.scheduler.commit(step.plan, result, now_ns)
        self._recorder.note_ends(step.plan, outputs)
        self._outputs.extend(outputs)

    def close(self, times: StepTimes) -> StepRecord:
        """The record of the step that ended last."""
        assert self._ended is not None, "no step has ended"
        (step, result), self._ended = self._ended, None
        record = self._recorder.record(step, result, times, self.plans_ahead)
        if not self._has_steps:
            self._recorder.start_idling(times.end_ns)
        return record

    def take_over(self, last: StepRecord, count: int) -> None:
        """Go on behind so many steps that were taken and recorded elsewhere; this is the last."""
        self._recorder.take_over(last, count)
        if not self._has_steps:
            self._recorder.start_idling(last.end_ns)

    def call_off(self) -> None:
        """Forget the newest step in flight, of which no result will come. Its requests cannot go on: end them."""
        self._in_flight.pop()

    def take_outputs(self) -> tuple[RequestOutput, ...]:
        """Returns what the requests are told, once."""
        outputs, self._outputs = tuple(self._outputs), []
        return outputs

    # ---- what there is to do --------------------------------------------------------------------------------------

    @property
    def may_begin(self) -> bool:
        return len(self._in_flight) <= self.plans_ahead

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_outputs(self) -> bool:
        return bool(self._outputs)

    @property
    def has_work(self) -> bool:
        """A turn would have something to compute or to tell."""
        return bool(self._outputs) or self._has_steps

    @property
    def _has_steps(self) -> bool:
        return bool(self._in_flight) or (self.scheduler.has_work and not self.scheduler.config.paused)

    @property
    def is_empty(self) -> bool:
        """No step is in flight, no request is here, and nothing is left to tell."""
        return not (self._outputs or self._in_flight or self.scheduler.has_requests)

    @property
    def is_idle(self) -> bool:
        """There has been nothing to do since the last step, or the last look."""
        return self._recorder.is_idle

    # ---- the rest -------------------------------------------------------------------------------------------------

    def forget_cache(self) -> tuple[int, int]:
        """Drop cached prefixes. Returns their tokens: of the cache, and of its copies in host memory."""
        cache, enabled = self.scheduler.cache, self.scheduler.cache.enable_prefix_caching
        in_host = 0 if cache.host is None else cache.host.num_held
        tokens = cache.num_cached * cache.block_size, in_host * cache.block_size
        cache.set_prefix_caching(False)
        cache.set_prefix_caching(enabled)
        return tokens

    def stats(self, now_ns: int) -> EngineStats:
        """Gauges and counters; what only a driver knows has its default."""
        if self.scheduler.config is not self._config:  # making the knobs anew takes a microsecond of each step
            self._config, self._knobs = self.scheduler.config, self.scheduler.config.knobs()
        scheduler, cache, host = self.scheduler, self.scheduler.cache, self.scheduler.cache.host
        num_waiting, waiting_for = scheduler.num_waiting - len(scheduler.prompts_ahead), {}
        if num_waiting:
            waiting_for = {cause or NOT_PLANNED: count for cause, count in scheduler.waiting_for().items()}
        return EngineStats(
            now_ns=now_ns,
            num_waiting=num_waiting,
            waiting_for=waiting_for,
            num_running=scheduler.num_running,
            waiting_prompt_tokens=scheduler.num_waiting_tokens,
            blocks_used=cache.num_used,
            blocks_total=cache.num_blocks,
            blocks_cached=cache.num_cached,
            num_steps=self._recorder.num_steps,
            is_paused=scheduler.config.paused,
            knobs=self._knobs,
            **vars(scheduler.counts),
            adapters_running=scheduler.adapter_slots.names,
            adapters_waiting=scheduler.adapter_slots.waiting_names,
            host_blocks_used=0 if host is None else host.num_held,
            host_blocks_total=0 if host is None else host.num_slots,
            offloaded_tokens=0 if host is None else host.num_offloaded * cache.block_size,
            restored_tokens=0 if host is None else host.num_restored * cache.block_size,
        )


def _refusal(request: Request, now_ns: int, error: SplittimeError) -> RequestOutput:
    """The terminal event of a request that was not taken in."""
    account = Account(request.request_id, request.submitted_ns, Stage.HANDOFF)
    account.enter(Stage.DELIVER, now_ns)
    return RequestOutput(
        request_id=request.request_id,
        marks=tuple(account.marks),
        finish_reason=FinishReason.ERROR,
        error=error.info,
        freed_ns=now_ns,
    )
