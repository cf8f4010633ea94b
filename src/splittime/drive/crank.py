"""One turn of an engine: begin a step, have it computed, end it, with its record. Every driver turns this crank.

    in the engine process     `drive.loop`           waits in real time for messages
    in your own process       `InlineDriver`         `splittime.LLM`
    under a virtual clock     `simulate.run`         time passes as a model says that steps take it

The crank owns what an engine must not know: the clock, the runner, whether the engine sleeps (`residency`), the pieces
in which the machine is measured (`Measuring`), pauses of the garbage collector and the processor time of the thread
that turns it. Who waits for work is outside.

In your process it is turned in your thread, or in one of its own: there a slow consumer's time is not the engine's.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from splittime.core.clock import Clock
from splittime.core.engine import (
    AWAKE,
    MAX_NAMES,
    MAX_TOLD_BYTES,
    BlocksAsk,
    BlocksTold,
    EngineStats,
    SleepAsk,
    Sleeper,
    SleepReport,
)
from splittime.core.errors import EngineError, ErrorInfo, RequestError, SplittimeError
from splittime.core.facts import Machine
from splittime.core.request import Request
from splittime.core.step import AsyncRunner, Runner, StepPlan, StepResult
from splittime.drive.gates import AdapterLoader, GrammarCompiler
from splittime.drive.host_time import GcPauses, ProcessorTime
from splittime.drive.kv_gate import BlockSharing
from splittime.drive.messages import StepOutput
from splittime.drive.residency import Answer, Residency, ended_by_sleep
from splittime.engine.engine import Engine
from splittime.engine.recorder import StepTimes, ThreadTime
from splittime.ledger.facts import ServerFacts
from splittime.ledger.stages import Cause

Pieces = Iterator[Machine | None]
"""Each `next` is a short piece of the measurement; the last one yields the result."""


class Measuring:
    """The measurement of the machine. pieces: what is left of it; None: nothing. ended_ns: the end of the latest piece;
    the account of a request that came before that says that it waited for it (`measuring`)."""

    def __init__(self, pieces: Pieces | None, clock: Clock) -> None:
        self.ended_ns = 0
        self._pieces, self._clock = pieces, clock

    @property
    def is_due(self) -> bool:
        return self._pieces is not None

    def measure_piece(self) -> Machine | None:
        """Do a piece; the last one gives the result."""
        machine = None if self._pieces is None else next(self._pieces)
        if machine is not None:
            self._pieces = None
        self.ended_ns = self._clock.now_ns()
        return machine

    def finish(self) -> Machine | None:
        """Do all that is left; None if nothing was."""
        machine = None
        while self._pieces is not None:
            machine = self.measure_piece()
        return machine


Watch = Callable[[Callable[[SplittimeError], None]], None]  # be told, in another thread, that no step can be run


@dataclass(frozen=True)
class EngineParts:
    """An engine and what its driver needs beside it, complete; `assemble.worker.build_engine` makes it.

    runner: an `AsyncRunner` if the engine plans ahead. sleeper: None: this engine cannot sleep. measuring: pieces of
    measuring the machine's ceilings that are still to be done. watch: tells that the runner has failed for good.
    grammars: compiles what answers are held to; None: this engine holds them to nothing. adapters: loads those that
    requests may name; None: they may name none. sharing: with which servers it shares blocks of KV cache; None: with
    none. resolved: what the machine decided.
    """

    engine: Engine
    runner: Runner | AsyncRunner
    facts: ServerFacts | None = None
    sleeper: Sleeper | None = None
    measuring: Pieces | None = None
    watch: Watch | None = None
    grammars: GrammarCompiler | None = None
    sharing: BlockSharing | None = None
    adapters: AdapterLoader | None = None
    resolved: dict[str, Any] = field(default_factory=dict)


class Crank:
    """Not thread-safe. pauses: of the garbage collector; processor: time of the thread that turns the crank. Both are
    told with each step; None: not."""

    def __init__(
        self, parts: EngineParts, clock: Clock, pauses: GcPauses | None = None, processor: ProcessorTime | None = None
    ) -> None:
        self.engine = parts.engine
        self.facts = parts.facts
        self._grammars = parts.grammars
        self._sharing = parts.sharing
        self.residency = Residency(parts.sleeper, clock)
        self.measuring = Measuring(parts.measuring, clock)
        ahead = parts.engine.plans_ahead
        self._runner = cast(AsyncRunner, parts.runner) if ahead else InTurn(cast(Runner, parts.runner))
        self._clock = clock
        self._planned_ns: deque[int] = deque()  # of the steps in flight
        self._pauses = pauses
        self._pauses_told: tuple[tuple[int, int], ...] = ()
        self._processor = None if ahead else processor  # ahead, another thread computes
        self._thread = processor.now() if processor is not None else None

    # ---- requests -------------------------------------------------------------------------------------------------

    def submit(self, request: Request, received_ns: int, held_for: Cause | None = None) -> None:
        """Take a request in; one that cannot be served, ever or while the engine sleeps, ends at once with `error`.
        held_for: it waits for this beside the queue, until `release`."""
        error = self.residency.refusal() or self._grammar_fault(request, held_for)
        if error is not None:
            self.engine.refuse(request, received_ns, error)
            return
        self._skip_idle_time()
        self.engine.submit(request, received_ns, self._clock.now_ns(), self.measuring.ended_ns, held_for)

    def _grammar_fault(self, request: Request, held_for: Cause | None) -> SplittimeError | None:
        """Returns why the answer cannot be held to its form; None where it can be, or will be known before `release`.
        Compiles what is not known: who must not wait for that submits it held."""
        grammar = request.sampling.grammar
        if not grammar or held_for is Cause.GRAMMAR:
            return None
        if self._grammars is None:
            return RequestError("this engine cannot hold answers to a form", code="grammar", param="grammar")
        try:
            self._grammars.compile(grammar, request.tenant)
        except SplittimeError as error:
            return error
        return None

    def hold(self, request_id: str, cause: Cause) -> bool:
        """Set a waiting request aside until `release`, as `Scheduler.hold` does. Returns whether it waits."""
        return self.engine.hold(request_id, cause, self._clock.now_ns())

    def release(self, request_id: str, received_ns: int) -> bool:
        """Queues a request, with its rank: what it was held for is there. Returns whether it was held."""
        self._skip_idle_time()
        return self.engine.release(request_id, received_ns, self._clock.now_ns())

    def go_on(self, request_id: str) -> bool:
        """Gives a request rows again: what may come in its answer is known. Returns whether it waited for that."""
        self._skip_idle_time()
        return self.engine.go_on(request_id, self._clock.now_ns())

    def fail(self, request_id: str, error: ErrorInfo) -> None:
        """End a request with this error, if it is still here."""
        self.engine.fail(request_id, error, self._clock.now_ns())

    def abort(self, request_id: str) -> None:
        """End a request, if it is still here. Its blocks are free when this returns."""
        self.engine.abort(request_id, self._clock.now_ns())

    def take_in(self, names: Sequence[bytes], numbers: Sequence[int]) -> None:
        """Blocks that another server has sent go into the prefix cache, unless the engine sleeps, is about to, or has
        slept since they were asked for: it may have other weights."""
        assert self._sharing is not None
        has_place = self.residency.refusal() is None and self._sharing.port.layout
        unwanted = self.engine.scheduler.cache.adopt(names, numbers) if has_place else numbers
        self._sharing.port.drop(unwanted)

    def export(self, ask: BlocksAsk) -> BlocksTold | None:
        """Returns what there is of the blocks that another server wants, as many as one answer holds; None where they
        are not given, or are of another layout."""
        sharing = self._sharing
        if sharing is None or not sharing.gives or not ask.layout or ask.layout != sharing.port.layout:
            return None
        most = max(1, min(MAX_NAMES, MAX_TOLD_BYTES // sharing.port.block_bytes))
        found = self.engine.scheduler.cache.exportable(ask.names, ask.skip, most)
        return BlocksTold(tuple(name for name, _ in found), sharing.port.read([block_id for _, block_id in found]))

    def configure(self, knobs: dict[str, Any]) -> dict[str, Any]:
        """Change live knobs; returns them all. Raises ConfigError with nothing changed."""
        return self.engine.scheduler.configure(knobs)

    # ---- sleep ----------------------------------------------------------------------------------------------------

    def sleep(self, ask: SleepAsk, asked_ns: int, answer: Answer) -> None:
        """Sleep as soon as nothing runs. From now on new requests are refused; `answer` is called once, now or in a
        later `turn`, with the report or with why the engine is awake."""
        at_once = self.residency.answer_at_once(ask)
        if at_once is not None:
            answer(at_once)
            return
        ends_requests = ask.mode == "abort"
        num_ended = self.engine.fail_all(ended_by_sleep(), self._clock.now_ns()) if ends_requests else 0
        self.residency.ask(ask, asked_ns, num_ended, answer)

    def wake(self) -> SleepReport:
        """Raises what kept it asleep. One that is falling asleep stays awake."""
        return self.residency.wake()

    @property
    def falls_asleep_next(self) -> bool:
        """The next `turn` puts it to sleep: somebody waits for that, and nothing runs any more."""
        return self.residency.is_awaited and self.engine.is_empty

    def _fall_asleep(self) -> bool:
        """Puts the engine to sleep if somebody waits for that and nothing runs any more; returns whether it did."""
        if not self.residency.is_awaited:
            return False
        if self.engine.is_empty:
            self.residency.fall_asleep(self.engine.forget_cache)
            return True
        self.residency.give_up_late(self._clock.now_ns(), len(self.engine.scheduler.request_ids))
        return False

    # ---- turning --------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """A turn would have something to do (or to say)."""
        return self.engine.has_work or self.falls_asleep_next

    def seconds_to_deadline(self) -> float | None:
        """Returns how long until a turn has something to do though nothing comes in; None: it never has."""
        known = (self.engine.scheduler.next_deadline_ns(), self.residency.deadline_ns)
        deadline_ns = min((at_ns for at_ns in known if at_ns is not None), default=None)
        return None if deadline_ns is None else max(deadline_ns - self._clock.now_ns(), 0) / 1e9

    def turn(self) -> StepOutput | None:
        """Ends one step, with the next one launched before it if the engine plans ahead. None if there was nothing to
        do and nothing to say. An interrupt while it waits for an `AsyncRunner` leaves all steps in flight, for the
        next call."""
        if self.residency.is_awaited and self._fall_asleep():
            return None
        engine, clock = self.engine, self._clock
        self._skip_idle_time()
        if not engine.num_in_flight and not self._launch():
            if not engine.has_outputs:  # refusals, aborts, expired deadlines
                return None
            now_ns = clock.now_ns()
            return StepOutput(0, now_ns, engine.take_outputs(), self._stats(now_ns))
        if engine.may_begin:
            self._launch()
        waiting_ns = clock.now_ns() if engine.plans_ahead else 0
        result = self._collect()
        ready_ns = clock.now_ns()
        engine.end(result, ready_ns)
        end_ns = clock.now_ns()
        slept_ns, thread = self.residency.take_slept_ns(), self._thread_time()
        times = StepTimes(self._planned_ns.popleft(), waiting_ns, ready_ns, end_ns, slept_ns, thread)
        record = engine.close(times)
        outputs, pauses = engine.take_outputs(), self._new_pauses()
        return StepOutput(record.step_id, ready_ns, outputs, self._stats(end_ns), record, pauses)

    def _launch(self) -> bool:
        """Plans a step and has it begun; returns whether there was one."""
        plan = self.engine.begin(self._clock.now_ns())
        if self._sharing is not None:  # contents whose blocks the plan has given away
            self._sharing.port.drop(self.engine.scheduler.cache.take_unwanted())
        if plan is None:
            return False
        self._planned_ns.append(self._clock.now_ns())
        self._runner.launch(plan)
        return True

    def _collect(self) -> StepResult:
        try:
            return self._runner.collect()
        except BaseException:  # an interrupt too: whatever ended it, the books must not wait for this step
            if not self.engine.plans_ahead:  # its runner has stopped half-way, and nothing comes of the step
                self.engine.call_off()
                self._planned_ns.pop()
            raise

    # ---- what only a driver knows ---------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Gauges and counters as of now."""
        return self._stats(self._clock.now_ns())

    def _stats(self, now_ns: int) -> EngineStats:
        stats, rest, pauses = self.engine.stats(now_ns), self.residency.rest, self._pauses
        if pauses is None:
            return msgspec.structs.replace(stats, rest=rest)
        collections = pauses.num_collections
        return msgspec.structs.replace(stats, rest=rest, gc_pause_ns=pauses.total_ns, gc_collections=collections)

    def _new_pauses(self) -> tuple[tuple[int, int], ...]:
        """The long collections of garbage since it was last asked."""
        latest = self._pauses.latest if self._pauses is not None else ()
        if latest is self._pauses_told:
            return ()
        last_ns = self._pauses_told[-1][0] if self._pauses_told else -1
        self._pauses_told = latest
        return tuple(pause for pause in latest if pause[0] > last_ns)

    def _skip_idle_time(self) -> None:
        """What the thread is given while there is nothing to do belongs to no step."""
        if self._processor is not None and self.engine.is_idle:
            self._thread = self._processor.now()

    def _thread_time(self) -> ThreadTime | None:
        """Returns what the thread was given since the last call, or since the engine was idle."""
        if self._processor is None or self._thread is None:
            return None
        before, self._thread = self._thread, self._processor.now()
        return ThreadTime(self._thread.ran_ns - before.ran_ns, self._thread.waited_ns - before.waited_ns)


class InTurn:
    """A `Runner` as an `AsyncRunner`: a step is computed when its result is asked for."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._plan: StepPlan | None = None

    def launch(self, plan: StepPlan) -> None:
        self._plan = plan

    def collect(self) -> StepResult:
        plan, self._plan = self._plan, None
        assert plan is not None, "no step was launched"
        return self._runner.run(plan)


class InlineDriver:
    """Not thread-safe, whichever thread computes. note: called in the caller's thread with every output, also with what
    nobody reads."""

    def __init__(self, crank: Crank, note: Callable[[StepOutput], None] = lambda output: None) -> None:
        self.crank, self._note = crank, note
        self._thread: EngineThread | None = None

    def submit(self, request: Request) -> None:
        """Only while no thread runs."""
        assert self._thread is None, "the engine runs in its thread"
        self.crank.submit(request, time.monotonic_ns())

    def abort(self, request_id: str) -> None:
        """Before the next step, and in the thread that owns the engine."""
        (self._thread or self.crank).abort(request_id)

    def outputs(self, in_thread: bool = False) -> Generator[StepOutput, None, None]:
        """Until there is no more work. Closing it ends the thread when the step in flight is done."""
        if in_thread:
            yield from self._outputs_of_thread()
            return
        while self.crank.has_work:
            output = self.crank.turn()
            if output is not None:
                self._note(output)
                yield output

    def run_dry(self) -> None:
        """Turn until there is no more work, for the books alone."""
        for _ in self.outputs():
            pass

    def sleep(self, level: int) -> SleepReport:
        """Do what there is to do, then give memory back. Raises why it stays awake: a request that is held or stands
        still would be waited for without end, since nobody can release it meanwhile."""
        if self.crank.residency.rest.state == AWAKE:
            self.run_dry()
        answers: list[SleepReport | SplittimeError] = []
        self.crank.sleep(SleepAsk(level, timeout_s=0.0), time.monotonic_ns(), answers.append)
        while not answers:
            self.crank.turn()
        if isinstance(answers[0], SplittimeError):
            raise answers[0]
        return answers[0]

    def _outputs_of_thread(self) -> Generator[StepOutput, None, None]:
        self._thread = thread = EngineThread(self.crank)
        try:
            for output in thread.outputs():
                self._note(output)
                yield output
        finally:
            self._thread = None
            for output in thread.stop():
                self._note(output)


class EngineThread:
    """Turns a crank in a thread until it has no more work."""

    def __init__(self, crank: Crank) -> None:
        self._crank = crank
        self._queue: queue.SimpleQueue[StepOutput | Exception | None] = queue.SimpleQueue()
        self._aborts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def outputs(self) -> Iterator[StepOutput]:
        """Until there is no more work. Raises what ended the thread."""
        while (item := self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item if isinstance(item, SplittimeError) else EngineError(str(item)) from item
            yield item

    def abort(self, request_id: str) -> None:
        """Before the next step, in the engine's thread: an engine is not thread-safe."""
        self._aborts.put(request_id)

    def stop(self) -> list[StepOutput]:
        """Returns when the step in flight is done, with what nobody has taken out."""
        self._is_stopping = True
        self._thread.join()
        left = [self._queue.get() for _ in range(self._queue.qsize())]
        return [item for item in left if isinstance(item, StepOutput)]

    def _run(self) -> None:
        try:
            while self._crank.has_work and not self._is_stopping:
                while not self._aborts.empty():
                    self._crank.abort(self._aborts.get())
                output = self._crank.turn()
                if output is not None:
                    self._queue.put(output)
        except Exception as error:  # handed to the consumer, who is the caller
            self._queue.put(error)
        self._queue.put(None)
