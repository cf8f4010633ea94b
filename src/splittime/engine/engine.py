"""The engine: one scheduler, one runner, one clock. `step` is the whole of it: plan -> run -> commit, with its record.

Over an `AsyncRunner` the next step is planned and launched while one runs, and the scheduler is the same:

    host     plan 1  launch 1  plan 2  launch 2  (wait)  commit 1  plan 3  launch 3  (wait)  commit 2 ..
    device                     [====== step 1 ======][======= step 2 =======][==== step 3 ..

A step that was launched while another ran begins, in its record (`recorder`), where that one ended: what the host did
meanwhile cost nothing and is in no part of it (`hidden_ns` tells it), and what the device did not compute of the time,
waiting to be told, is `launch_ns`. The caller (the loop in a process, `LLM.generate` in yours) owns waiting for work.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from splittime.core.clock import Clock
from splittime.core.errors import Overloaded, RequestError, SplittimeError
from splittime.core.plan import AsyncRunner, Runner
from splittime.core.request import FinishReason, Request
from splittime.core.sleep import SleepAsk, SleepReport
from splittime.engine.gc_pauses import GcPauses
from splittime.engine.messages import EngineStats, StepOutput
from splittime.engine.processor_time import ProcessorTime
from splittime.engine.recorder import Flight, Lapse, Recorder
from splittime.engine.sleep import Answer, Bed, ended_by_sleep
from splittime.engine.stats import engine_stats
from splittime.ledger.account import Account
from splittime.ledger.facts import Machine, ServerFacts
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord
from splittime.scheduler.events import RequestOutput
from splittime.scheduler.scheduler import Scheduler

Watch = Callable[[Callable[[SplittimeError], None]], None]  # be told, in another thread, that no step can be run
Measuring = Iterator[Machine | None]
"""Measures the machine's ceilings: each `next` is a short piece of it, to be taken while there is nothing else to do;
the last one yields the result."""


class Engine:
    """Not thread-safe. Every submitted request ends in exactly one output with a finish reason.

    ahead: what carries out the runner's steps while the next are planned; None: one step after the other.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, clock: Clock, ahead: AsyncRunner | None = None) -> None:
        self.scheduler = scheduler
        self.facts: ServerFacts | None = None  # set by who built it, and so is the next
        self.measuring: Measuring | None = None
        self._measured_ns = 0  # until when
        self.watch: Watch | None = None
        self.bed = Bed(clock)
        self._recorder = Recorder(scheduler, self.bed)
        self._runner = runner
        self._ahead = ahead
        self._flight: Flight | None = None  # the step that runs
        self._following: Flight | None = None  # launched behind it
        self._clock = clock
        self.gc_pauses: GcPauses | None = None  # set by a process that has frozen its heap and wants them counted
        self._pending: list[RequestOutput] = []  # news made between steps
        self._told_pauses: tuple[tuple[int, int], ...] = ()

    def watch_processor(self, processor: ProcessorTime | None) -> None:
        """Have the records tell what the processor gave this thread. Where another one computes, they do not."""
        self._recorder.watch_processor(None if self.plans_ahead else processor)

    def submit(self, request: Request, received_ns: int) -> None:
        """Take a request in; one that cannot be served, ever or while the engine sleeps, ends at once with `error`."""
        try:
            self.bed.refuse_requests()
            self._recorder.stop_idling(self._clock.now_ns())
            self.scheduler.submit(request, received_ns, self._measured_ns)
        except (RequestError, Overloaded) as error:
            self._pending.append(_refusal(request, max(received_ns, request.submitted_ns), error))

    def measure(self) -> Machine | None:
        """A short piece of `measuring`; the last one gives the result. Who comes meanwhile waits for its end, and is
        told so."""
        machine = None if self.measuring is None else next(self.measuring)
        if machine is not None:
            self.measuring = None
        self._measured_ns = self._clock.now_ns()
        return machine

    def abort(self, request_id: str) -> None:
        """End a request, if it is still here. Its blocks are free when this returns."""
        output = self.scheduler.abort(request_id, self._clock.now_ns())
        if output is not None:
            self._pending.append(output)

    def configure(self, knobs: dict[str, Any]) -> dict[str, Any]:
        """Change live knobs; returns them all. Raises ConfigError with nothing changed."""
        return self.scheduler.configure(knobs)

    def sleep(self, ask: SleepAsk, asked_ns: int, answer: Answer) -> None:
        """Sleep as soon as nothing runs. From now on new requests are refused; `answer` is called once, now or in a
        later `step`, with the report or with why the engine is awake."""
        told = self.bed.answer_at_once(ask)
        if told is not None:
            answer(told)
            return
        here = [state.request_id for state in (*self.scheduler.queue, *self.scheduler.running)]
        now_ns = self._clock.now_ns()
        ended = [self.scheduler.abort(request_id, now_ns) for request_id in here if ask.mode == "abort"]
        why = {"finish_reason": FinishReason.ERROR, "error": ended_by_sleep()}
        self._pending.extend(msgspec.structs.replace(output, **why) for output in ended if output is not None)
        self.bed.ask(ask, asked_ns, len(ended), answer)

    def wake(self) -> SleepReport:
        """Raises what kept it asleep. One that is falling asleep stays awake."""
        return self.bed.wake()

    def next_deadline_ns(self) -> int | None:
        """When a step has something to do at the earliest, though nothing comes in."""
        known = (self.scheduler.next_deadline_ns(), self.bed.deadline_ns)
        return min((at_ns for at_ns in known if at_ns is not None), default=None)

    @property
    def falls_asleep_next(self) -> bool:
        """The next `step` puts it to sleep: somebody waits for that, and nothing runs any more."""
        return self.bed.is_awaited and self._is_quiet

    def _falls_asleep(self) -> bool:
        """Whether it sleeps from here on, because somebody waits for that and nothing runs any more."""
        if not self.bed.is_awaited:
            return False
        now_ns = self._clock.now_ns()
        if not self._is_quiet:
            self.bed.give_up_late(now_ns, self.scheduler.num_waiting + self.scheduler.num_running)
            return False
        self._recorder.start_idling(now_ns)
        self.bed.fall(self._forget_cache)
        return True

    def _forget_cache(self) -> tuple[int, int]:
        """Tokens whose keys and values are forgotten: of the cache, and of its copies in host memory."""
        cache, enabled = self.scheduler.cache, self.scheduler.cache.enable_prefix_caching
        in_host = 0 if cache.host is None else cache.host.num_held
        tokens = cache.num_cached * cache.block_size, in_host * cache.block_size
        cache.set_prefix_caching(False)
        cache.set_prefix_caching(enabled)
        return tokens

    @property
    def _is_quiet(self) -> bool:
        """Nothing runs, nobody waits, and nothing is left to say."""
        return not (self.has_news or self._flight or self._following or self.scheduler.has_requests)

    @property
    def plans_ahead(self) -> bool:
        return self._ahead is not None

    @property
    def has_news(self) -> bool:
        return bool(self._pending)

    @property
    def has_work(self) -> bool:
        """A step would have something to do (or to say)."""
        return (
            self.has_news
            or self._flight is not None
            or (self.scheduler.has_requests and not self.scheduler.config.paused)
            or self.falls_asleep_next
        )

    def step(self) -> StepOutput | None:
        """One step. None if there was nothing to do and nothing to say."""
        if self._falls_asleep():
            return None
        if self._ahead is not None:
            return self._step_ahead(self._ahead)
        flight = self._plan(is_queued=False)
        if flight is None:
            return self._take_news(self._clock.now_ns())
        result = self._runner.run(flight.plan)
        ready_ns = self._clock.now_ns()
        self._pending.extend(self.scheduler.commit(flight.plan, result, ready_ns))
        end_ns = self._clock.now_ns()
        plan_ns, commit_ns = flight.planned_ns - flight.begin_ns, end_ns - ready_ns
        lapse = Lapse(flight.begin_ns, end_ns, plan_ns, commit_ns, hidden_ns=0)
        return self._told(self._recorder.record(flight, result, lapse), ready_ns, end_ns)

    def _step_ahead(self, ahead: AsyncRunner) -> StepOutput | None:
        """The end of the step that runs, with the next one launched before it. An interrupt while it waits leaves both
        in flight, for the next call."""
        flight = self._flight = self._flight or self._launch(ahead, is_queued=False)
        if flight is None:
            return self._take_news(self._clock.now_ns())
        self._following = self._following or self._launch(ahead, is_queued=True)
        waiting_ns = self._clock.now_ns()
        result = ahead.collect()
        ready_ns = self._clock.now_ns()
        self._flight, self._following = self._following, None
        self._pending.extend(self.scheduler.commit(flight.plan, result, ready_ns))
        record = self._recorder.record(flight, result, self._lapse(flight, waiting_ns, ready_ns))
        return self._told(record, ready_ns, self._clock.now_ns())

    def _lapse(self, flight: Flight, waiting_ns: int, ready_ns: int) -> Lapse:
        """Of a step beside which the host went on until `waiting_ns`."""
        previous = self._recorder.previous
        if flight.is_queued and previous is not None:
            return Lapse(previous.end_ns, ready_ns, plan_ns=0, commit_ns=0, hidden_ns=waiting_ns - previous.end_ns)
        plan_ns, hidden_ns = flight.planned_ns - flight.begin_ns, waiting_ns - flight.planned_ns
        return Lapse(flight.begin_ns, ready_ns, plan_ns, commit_ns=0, hidden_ns=hidden_ns)

    def _plan(self, is_queued: bool) -> Flight | None:
        """The next step, or None if there is nothing to do."""
        begin_ns = self._clock.now_ns()
        self._pending.extend(self.scheduler.expire(begin_ns))
        plan = self.scheduler.plan(begin_ns)
        if plan is None:
            self._recorder.note_victims(self.scheduler.victims)
            if not is_queued:
                self._recorder.start_idling(begin_ns)
            return None
        self._recorder.stop_idling(begin_ns)
        return Flight(plan, begin_ns, self._clock.now_ns(), is_queued, tuple(self.scheduler.victims))

    def _launch(self, ahead: AsyncRunner, is_queued: bool) -> Flight | None:
        flight = self._plan(is_queued)
        if flight is not None:
            ahead.launch(flight.plan)
        return flight

    def _told(self, record: StepRecord, ready_ns: int, now_ns: int) -> StepOutput:
        """A step's news."""
        outputs, self._pending = tuple(self._pending), []
        if not self.has_work:
            self._recorder.start_idling(now_ns)
        return StepOutput(record.step_id, ready_ns, outputs, self.stats(now_ns), record, self._new_pauses())

    def stats(self, now_ns: int | None = None) -> EngineStats:
        """Gauges and counters as of now."""
        now_ns = self._clock.now_ns() if now_ns is None else now_ns
        return engine_stats(now_ns, self.scheduler, self.bed.rest, self._recorder.num_steps, self.gc_pauses)

    def _new_pauses(self) -> tuple[tuple[int, int], ...]:
        """The long collections of garbage since it was last asked."""
        latest = self.gc_pauses.latest if self.gc_pauses is not None else ()
        if latest is self._told_pauses:
            return ()
        last_ns = self._told_pauses[-1][0] if self._told_pauses else -1
        self._told_pauses = latest
        return tuple(pause for pause in latest if pause[0] > last_ns)

    def _take_news(self, now_ns: int) -> StepOutput | None:
        """News without a step: refusals, aborts, expired deadlines."""
        if not self._pending:
            return None
        outputs, self._pending = tuple(self._pending), []
        return StepOutput(0, now_ns, outputs, self.stats(now_ns))


def _refusal(request: Request, now_ns: int, error: SplittimeError) -> RequestOutput:
    """The terminal event of a request that the scheduler would not take."""
    account = Account(request.request_id, request.submitted_ns, Stage.HANDOFF)
    account.enter(Stage.DELIVER, now_ns)
    return RequestOutput(
        request_id=request.request_id,
        marks=tuple(account.marks),
        finish_reason=FinishReason.ERROR,
        error=error.info,
        freed_ns=now_ns,
    )
