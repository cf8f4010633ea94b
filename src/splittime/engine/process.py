"""The client's side of the process boundary: an engine in a process of its own, restarted when it dies.

Owns the process (`generation`), one queue for each request in flight (`streams`) and the calls that await an answer
(`calls`). Promises that every stream ends: when the process dies, each request in flight gets a terminal output with
`engine_died`, `is_ready` turns false, the cause is logged, and a successor is started (not if it never got ready even
once: the same would happen again).

An engine that dies while it sleeps stays asleep, and gets its successor when it is woken: until then somebody else may
have the memory that it would take.
"""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from splittime.core.errors import EngineError, Overloaded, SplittimeError
from splittime.core.request import Request
from splittime.core.sleep import ASLEEP, AWAKE, FALLING_ASLEEP, WAKING, Rest, SleepAsk, SleepReport
from splittime.engine.calls import Calls
from splittime.engine.client import StreamItem
from splittime.engine.generation import Generation, cause_of_death, failure
from splittime.engine.known_facts import KnownFacts
from splittime.engine.messages import (
    Abort,
    Configure,
    ConfigureDone,
    EngineStats,
    Fatal,
    FromEngine,
    Loading,
    Measured,
    Ping,
    Ready,
    Sleep,
    SleepDone,
    StepOutput,
    Submit,
    ToEngine,
    Wake,
)
from splittime.engine.sleep import refusal, shutting_down, sleeps_already, stays_asleep
from splittime.engine.streams import Streams
from splittime.ledger.facts import ServerFacts

log = logging.getLogger("splittime.engine")

RESTART_DELAYS_S = (0.0, 1.0, 5.0, 15.0, 30.0)  # after deaths in a row; a minute of health starts over
HEALTHY_AFTER_S = 60.0
PING_EVERY_S = 1.0
SILENT_AFTER_S = 5.0  # not heard of for so long: not ready
HUNG_AFTER_S = 30.0  # for so long: ended and started anew
OnStep = Callable[[StepOutput], None]
OnLoading = Callable[[str], None]


class ProcessClient:
    """An `EngineClient`. `spawn` may be called before there is an event loop, to win time; `start` awaits readiness.

    command: starts a worker; the two endpoints are appended to it. settings: one line of JSON for its standard input.
    on_step: called with every step's output, in the event loop's thread, before the streams see it.
    on_loading: called with the progress of a start, as text.
    """

    def __init__(
        self,
        command: list[str] | None,
        settings: bytes,
        on_step: OnStep | None = None,
        on_loading: OnLoading | None = None,
    ) -> None:
        self._command = command or [sys.executable, "-m", "splittime.cli.worker"]
        self._settings = settings
        self._on_step = on_step or (lambda output: None)
        self._on_loading = on_loading or (lambda progress: None)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._streams = Streams()
        self._calls = Calls()
        self._changed_knobs: dict[str, Any] = {}
        self._stats = EngineStats(now_ns=time.monotonic_ns())
        self._known_facts = KnownFacts()
        self._rest = Rest()
        self._num_steps_before = self._last_step_id = 0  # of engine processes before this one; told by this one
        self._num_turns = 0  # calls of `sleep` and `wake` that are not answered
        self._asleep_since_ns = 0
        self._anew = asyncio.Lock()  # of starting a process at waking
        self._wake_failure: SplittimeError | None = None
        self._generation: Generation | None = None
        self._last_words: Fatal | None = None
        self._num_deaths_in_row = 0
        self._is_stopping = False
        self._was_ever_ready = False
        self._is_up = False
        self._heard_ns = 0  # when it last said anything
        self._died_ns: int | None = None  # when its predecessor did, until it is ready
        self._tasks: list[asyncio.Task[None]] = []  # those of the present generation
        self._context: zmq.asyncio.Context | None = None
        self.num_restarts = 0
        self.ready_info: Ready | None = None
        self.failure: SplittimeError | None = None

    @property
    def is_ready(self) -> bool:
        """It is up, and has been heard of lately: a hung process would serve nobody."""
        return self._is_up and time.monotonic_ns() - self._heard_ns < SILENT_AFTER_S * 1e9

    def spawn(self) -> None:
        """Start the process now; `start` does it otherwise."""
        if self._is_stopping:
            raise shutting_down()
        self._generation = Generation(self._command, self._settings)

    async def start(self) -> Ready:
        """Start if need be, and return when the engine can serve. Raises EngineError if it cannot start at all."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._became_ready = asyncio.Event()
        if self._generation is None:
            self.spawn()
        self._attend()
        await self._became_ready.wait()
        if self.failure is not None:
            raise self.failure
        assert self.ready_info is not None
        return self.ready_info

    async def stop(self) -> None:
        """End the process; requests still in flight get a terminal output."""
        self._is_stopping = True
        self._is_up = False
        if self._generation is not None:
            self._streams.end_all("the server is shutting down")
            generation, self._generation = self._generation, None
            self._cancel_tasks()
            self._calls.fail_all(shutting_down())
            if self._was_ever_ready:
                self._became_ready.set()
            await generation.end()
        if self._context is not None:
            self._context.term()

    # ---- the client's calls ---------------------------------------------------------------------------------------

    @property
    def rest(self) -> Rest:
        return self._rest

    def submit(self, request: Request) -> None:
        if self._rest.state != AWAKE:
            raise refusal(self._rest)
        self._require_up()
        self._streams.open(request)
        self._send(Submit(request))

    def stream(self, request_id: str) -> AsyncIterator[StreamItem]:
        return self._streams.read(request_id)

    def abort(self, request_id: str) -> None:
        if request_id in self._streams and self.is_ready:
            self._send(Abort(request_id))

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(self._stats, rest=self._rest)

    def facts(self) -> ServerFacts | None:
        return self._known_facts.now(self._stats.knobs)

    async def configure(self, knobs: dict[str, Any], *, lasts: bool = True) -> dict[str, Any]:
        answer = await self._call(lambda call_id: Configure(call_id, knobs))
        if lasts:
            self._changed_knobs |= knobs
        return answer

    async def sleep(self, ask: SleepAsk) -> SleepReport:
        ask.validate()
        if self._generation is None and self._rest.state == ASLEEP:  # it died in its sleep
            return sleeps_already(self._rest.level, ask.level)
        self._require_up()
        if self._rest.state == AWAKE:
            self._rest = Rest(FALLING_ASLEEP)
        return await self._turn(lambda call_id: Sleep(call_id, ask))

    async def wake(self) -> SleepReport:
        async with self._anew:
            if self._is_stopping:
                raise shutting_down()
            if self._generation is None and self._rest.state == ASLEEP:
                return await self._wake_anew()
        self._require_up()
        if self._rest.state == ASLEEP:
            self._rest = Rest(WAKING, self._rest.level)
        return await self._turn(Wake)

    async def _turn(self, message: Callable[[int], ToEngine]) -> SleepReport:
        """One call of `sleep` or `wake`."""
        self._num_turns += 1
        report: SleepReport = await self._call(message)
        return report

    def _take_turn(self, answer: SleepDone) -> None:
        """Whether or not its caller still waits; the last answer says what the engine is."""
        self._num_turns -= 1
        if not self._num_turns:
            self._rest = answer.rest
        self._stats = answer.stats
        if answer.report is not None:
            self._take_report(answer.report)
        self._calls.settle(answer.call_id, answer.report, answer.error)

    def _take_report(self, report: SleepReport) -> None:
        """Into the facts and the log, unless nothing was done (or only a sleep called off)."""
        if not report.changed or not report.level:
            return
        self._known_facts.add_sleep(report)
        took_ms = (report.end_ns - report.begin_ns) / 1e6
        if report.action == "sleep":
            self._asleep_since_ns = report.end_ns
            log.warning("asleep (level %d) after %.0f ms", report.level, took_ms)
        else:
            log.warning("awake again after %.0f ms", took_ms)

    async def _wake_anew(self) -> SleepReport:
        """A successor for the engine that died in its sleep."""
        begin_ns, level = time.monotonic_ns(), self._rest.level
        self._rest, self._wake_failure = Rest(WAKING, level), None
        self._became_ready.clear()
        self.num_restarts += 1
        if self._succeed():
            await self._became_ready.wait()
        else:
            self._wake_failure = EngineError("the system would not start a process")
        if self._is_stopping:
            self._rest = Rest(ASLEEP, level)
            raise shutting_down()
        if self._wake_failure is not None:
            self._rest = Rest(ASLEEP, level)
            raise stays_asleep(self._wake_failure)
        assert self.ready_info is not None
        report = SleepReport(
            action="wake",
            level=level,
            begin_ns=begin_ns,
            end_ns=time.monotonic_ns(),
            parts=self.ready_info.timeline,
            slept_ns=begin_ns - self._asleep_since_ns,
            note="the engine had died in its sleep: a new process was started",
            restarted=True,
        )
        self._take_report(report)
        return report

    async def _call(self, message: Callable[[int], ToEngine]) -> Any:
        """Send what `message` makes of a call's number, and await its answer."""
        self._require_up()
        number = self._calls.new_number()
        self._send(message(number))
        return await self._calls.answer(number)

    def _require_up(self) -> None:
        if not self.is_ready:
            raise Overloaded("the engine is not running", status=503, code="engine_not_ready", retry_after_s=2.0)

    @property
    def num_in_flight(self) -> int:
        return len(self._streams)

    @property
    def pid(self) -> int | None:
        return None if self._generation is None else self._generation.process.pid

    def _send(self, message: ToEngine) -> None:
        assert self._generation is not None
        self._generation.push.send(self._encoder.encode(message))  # queued in here until it can go

    # ---- what the engine says -------------------------------------------------------------------------------------

    def _attend(self) -> None:
        """Read what this generation sends, ask whether it is there, and watch for its death."""
        generation = self._generation
        assert generation is not None
        assert self._context is not None
        generation.connect(self._context)
        self._tasks = [self._loop.create_task(work) for work in (self._read(generation), self._ping(generation))]
        threading.Thread(target=self._watch, args=(generation,), name="engine-watch", daemon=True).start()

    async def _read(self, generation: Generation) -> None:
        try:
            while True:
                self._handle(self._decoder.decode(await generation.pull.recv()))
        except Exception:  # nobody would hear the engine any more, and all would wait for ever: start over
            log.exception("what the engine process %d says cannot be taken in; ending it", generation.process.pid)
            generation.process.kill()

    async def _ping(self, generation: Generation) -> None:
        """Once it is up, it must be heard of; one that is silent for too long is ended, and a successor started."""
        while not self._is_up or time.monotonic_ns() - self._heard_ns < HUNG_AFTER_S * 1e9:
            await asyncio.sleep(PING_EVERY_S)
            if self._is_up:
                self._send(Ping())
        log.error("the engine process %d has been silent for %.0f s; ending it", generation.process.pid, HUNG_AFTER_S)
        generation.process.kill()

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _handle(self, message: FromEngine) -> None:
        self._heard_ns = time.monotonic_ns()
        match message:
            case StepOutput():
                self._take_step(message)
            case Loading():
                self._on_loading(message.progress)
            case Ready():
                self.ready_info, self._stats = message, message.stats
                assert self._generation is not None
                self._known_facts.take_ready(message, self._generation.started_ns, self.num_restarts)
                self._repeat_knobs()
                if self._died_ns is not None and self._rest.state == AWAKE:
                    log.warning("the engine is ready again after %.1f s", (time.monotonic_ns() - self._died_ns) / 1e9)
                self._is_up = self._was_ever_ready = True
                self._rest, self._died_ns = Rest(), None
                self._became_ready.set()
            case Measured(machine):
                self._known_facts.take_machine(machine)
            case ConfigureDone():
                self._take_answer(message)
            case SleepDone():
                self._take_turn(message)
            case Fatal():
                self._last_words = message

    def _take_step(self, output: StepOutput) -> None:
        output = output.counted_on(self._num_steps_before)
        self._last_step_id = max(self._last_step_id, output.step_id)
        self._stats = output.stats
        self._known_facts.add_pauses(output.pauses)
        self._on_step(output)
        self._streams.put(output)

    def _take_answer(self, answer: ConfigureDone) -> None:
        if answer.error is None:
            is_paused = bool(answer.knobs.get("paused"))
            self._stats = msgspec.structs.replace(self._stats, knobs=answer.knobs, is_paused=is_paused)
        self._calls.settle(answer.call_id, answer.knobs, answer.error)

    def _repeat_knobs(self) -> None:
        """What was changed on its predecessor holds for a successor too; it hears of it before any request."""
        if self._changed_knobs:
            self._send(Configure(self._calls.new_number(), self._changed_knobs))

    # ---- death and succession -------------------------------------------------------------------------------------

    def _watch(self, generation: Generation) -> None:
        """In a thread: wait for the process to end, and tell the event loop."""
        status = generation.process.wait()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_death, generation, status)

    def _on_death(self, generation: Generation, status: int) -> None:
        if generation is not self._generation or self._is_stopping:
            return
        self._loop.create_task(self._bury(generation, status))

    async def _bury(self, generation: Generation, status: int) -> None:
        self._is_up = False
        await asyncio.sleep(0.02)  # its last words may still be in the socket
        self._cancel_tasks()
        words, self._last_words = self._last_words, None
        cause = cause_of_death(status, words)
        self._streams.end_all(f"the engine process died: {cause}")
        died = EngineError("the engine process died", hint="try again when /ready says so")
        self._calls.fail_all(died if self._rest.state != WAKING else stays_asleep(failure(cause, words)))
        generation.close()
        self._stats, self._num_turns = EngineStats(now_ns=time.monotonic_ns()), 0
        if self._rest.state in (ASLEEP, WAKING):
            self._sleep_on(generation, cause, words)
            return
        self._rest = Rest()
        if not self._was_ever_ready:  # whoever awaits `start` is told
            self.failure = failure(cause, words)
            self._became_ready.set()
            return
        log.error("engine process %d died: %s", generation.process.pid, cause)
        self._died_ns = self._died_ns or time.monotonic_ns()
        await self._restart(generation)

    def _sleep_on(self, dead: Generation, cause: str, words: Fatal | None) -> None:
        """It died in its sleep, or while it woke: no successor before somebody wants it awake."""
        log.error("engine process %d died asleep: %s; waking starts a new one", dead.process.pid, cause)
        self._generation, self._rest = None, Rest(ASLEEP, self._rest.level)
        self._wake_failure = failure(cause, words)
        self._became_ready.set()

    async def _restart(self, dead: Generation) -> None:
        if time.monotonic_ns() - dead.started_ns > HEALTHY_AFTER_S * 1e9:
            self._num_deaths_in_row = 0
        while not self._is_stopping:
            delay_s = RESTART_DELAYS_S[min(self._num_deaths_in_row, len(RESTART_DELAYS_S) - 1)]
            self._num_deaths_in_row += 1
            self.num_restarts += 1
            log.warning("starting a new engine process in %.0f s (restart %d)", delay_s, self.num_restarts)
            await asyncio.sleep(delay_s)
            if self._is_stopping or self._succeed():
                return

    def _succeed(self) -> bool:
        """Start a successor; False if the system would not have it now (no memory, no file descriptors)."""
        try:
            self.spawn()
        except OSError as error:
            log.error("no new engine process: %s", error)
            return False
        if self._last_step_id:
            self._num_steps_before = self._last_step_id + 1  # no step of its own follows one of its predecessor's
        self._attend()
        return True
