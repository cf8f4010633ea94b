"""The client's side of the process boundary: an engine in a process of its own, restarted when it dies.

Owns the process (`Incarnation`), one queue for each request in flight (`streams`), the calls that await an answer
(`calls`) and what is known of sleep (`sleeping`). Promises that every stream ends: when the process dies, each request
in flight gets a terminal output with `engine_died`, `is_ready` turns false, the cause is logged, and a successor is
started (not if it never got ready even once: the same would happen again; nor, before it is woken, if it slept).

Messages of a dead process cannot be read by its successor: each has sockets of its own.
"""

import asyncio
import contextlib
import logging
import shutil
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from splittime.core.engine import AWAKE, WAKING, BlocksAsk, BlocksTold, EngineStats, Rest, SleepAsk, SleepReport
from splittime.core.errors import EngineError, Overloaded, SplittimeError, error_from_info
from splittime.core.request import Request
from splittime.drive import head_start, messages
from splittime.drive.client import Calls, StreamItem, Streams
from splittime.drive.gates import KeptAdapters
from splittime.drive.head_start import WORKER
from splittime.drive.known import KnownFacts, Sleeping
from splittime.drive.messages import Fatal, FromEngine, Ping, ToEngine
from splittime.drive.residency import refusal, shutting_down, stays_asleep
from splittime.ledger.facts import ServerFacts
from splittime.ledger.steps import StepRecord

PATIENCE_S = 5.0  # with a process that was asked to leave
PING_EVERY_S = 1.0
SILENT_AFTER_S = 5.0  # not heard of for so long: not ready
HUNG_AFTER_S = 30.0  # for so long: ended


class Incarnation:
    """is_up: it has said that it can serve."""

    def __init__(self, command: Sequence[str], settings: bytes) -> None:
        taken = head_start.take(command)
        self.folder, self.process, self.started_ns = taken.folder, taken.process, taken.started_ns
        assert self.process.stdin is not None
        self.process.stdin.write(settings + b"\n")
        self.process.stdin.flush()
        self.is_up = False
        self._heard_ns = 0  # when it last said anything
        self._endpoints = taken.inbound, taken.outbound
        self._sockets: tuple[zmq.asyncio.Socket, ...] = ()
        self._tasks: list[asyncio.Task[None]] = []
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(FromEngine)

    @property
    def is_ready(self) -> bool:
        """The process is up, and has been heard of lately: a hung one would serve nobody."""
        return self.is_up and time.monotonic_ns() - self._heard_ns < SILENT_AFTER_S * 1e9

    def connect(self, context: zmq.asyncio.Context) -> None:
        inbound, outbound = self._endpoints
        self.push = context.socket(zmq.PUSH)
        self.pull = context.socket(zmq.PULL)
        self._sockets = self.push, self.pull
        for socket in self._sockets:
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
        self.push.bind(inbound)
        self.pull.bind(outbound)

    def attend(
        self,
        context: zmq.asyncio.Context,
        take: Callable[[FromEngine], None],
        on_death: Callable[["Incarnation", int], None],
    ) -> None:
        """Read what it says, ask whether it is there, and watch for its death. on_death: also called with its exit
        status, in the event loop."""
        self.connect(context)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(work) for work in (self._read(take), self._ping())]

        def watch() -> None:
            status = self.process.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(on_death, self, status)

        threading.Thread(target=watch, name="engine-watch", daemon=True).start()

    def send(self, message: ToEngine) -> None:
        self.push.send(self._encoder.encode(message))  # queued in here until it can go

    async def _read(self, take: Callable[[FromEngine], None]) -> None:
        try:
            while True:
                message = self._decoder.decode(await self.pull.recv())
                self._heard_ns = time.monotonic_ns()
                take(message)
        except Exception:  # nobody would hear the engine any more, and all would wait for ever: start over
            log.exception("what the engine process %d says cannot be taken in; ending it", self.process.pid)
            self.process.kill()

    async def _ping(self) -> None:
        """Once it is up, it must be heard of; one that is silent for too long is ended."""
        while not self.is_up or time.monotonic_ns() - self._heard_ns < HUNG_AFTER_S * 1e9:
            await asyncio.sleep(PING_EVERY_S)
            if self.is_up:
                self.send(Ping())
        log.error("the engine process %d has been silent for %.0f s; ending it", self.process.pid, HUNG_AFTER_S)
        self.process.kill()

    def close(self) -> None:
        """Close what leads to the process. One that still runs leaves, since its standard input ends."""
        for task in self._tasks:
            task.cancel()
        if self.process.stdin is not None:
            self.process.stdin.close()
        for socket in self._sockets:
            socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def end(self) -> None:
        """Close it, and wait until it has left; it is killed if it does not."""
        self.close()
        await asyncio.to_thread(self._wait_or_kill)

    def _wait_or_kill(self) -> None:
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def cause_of_death(status: int, words: Fatal | None) -> str:
    """words: the last that it said, if any."""
    if words is None:
        return f"killed by signal {-status}" if status < 0 else f"exit status {status}, no last words"
    if words.trace:
        log.error("%s", words.trace.rstrip())
    return words.message


def failure(cause: str, words: Fatal | None) -> SplittimeError:
    """The settings' own error, if that is what it died of."""
    return EngineError(cause) if words is None or words.error is None else error_from_info(words.error)


log = logging.getLogger("splittime.engine")
LAST_WORDS_S = 0.02  # for what a process said last to come out of its socket
RESTART_DELAYS_S = (0.0, 1.0, 5.0, 15.0, 30.0)  # after deaths in a row; a minute of health starts over
HEALTHY_AFTER_S = 60.0


class ProcessClient:
    """An `EngineClient`. `spawn` may be called before there is an event loop, to win time; `start` awaits readiness.

    command: starts a worker; the two endpoints are appended to it. settings: one line of JSON for its standard input.
    on_record: called with every step's record, in the event loop's thread, before the streams have its tokens.
    on_loading: called with the progress of a start.
    """

    def __init__(
        self,
        command: list[str] | None,
        settings: bytes,
        on_record: Callable[[StepRecord], None] | None = None,
        on_loading: Callable[[messages.Loading], None] | None = None,
    ) -> None:
        self._command = command or WORKER
        self._settings, self._on_record, self._on_loading = settings, on_record, on_loading or (lambda told: None)
        self._streams, self._calls, self._known_facts = Streams(), Calls(), KnownFacts()
        self._sleeping = Sleeping(self._require_up, self._call, self._start_anew, self._known_facts)
        self._changed_knobs: dict[str, Any] = {}
        self._adapters, self._deaths = KeptAdapters(), DeathsInRow()
        self._stats = EngineStats(now_ns=time.monotonic_ns())
        self._num_steps_before = self._last_step_id = 0  # of engine processes before this one; told by this one
        self._incarnation: Incarnation | None = None
        self._started: asyncio.Future[messages.Ready] | None = None  # of who waits for a process to be ready
        self._last_words: messages.Fatal | None = None
        self._died_ns: int | None = None  # when a predecessor did, until there is one that is ready
        self._is_stopping = self._was_ever_ready = False
        self._context: zmq.asyncio.Context | None = None
        self.num_restarts = 0

    @property
    def is_ready(self) -> bool:
        return self._incarnation is not None and self._incarnation.is_ready and not self._is_stopping

    @property
    def pid(self) -> int | None:
        return None if self._incarnation is None else self._incarnation.process.pid

    def spawn(self) -> None:
        """Start the process now; `start` does it otherwise."""
        if self._is_stopping:
            raise shutting_down()
        self._incarnation = Incarnation(self._command, self._settings)

    async def start(self) -> messages.Ready:
        """Start if need be, and return when the engine can serve. Raises EngineError if it cannot start at all."""
        self._loop, self._context = asyncio.get_running_loop(), zmq.asyncio.Context()
        self._started = self._loop.create_future()
        if self._incarnation is None:
            self.spawn()
        self._attend()
        return await self._started

    async def stop(self) -> None:
        """End the process; requests still in flight get a terminal output."""
        self._is_stopping = True
        if self._incarnation is not None:
            self._streams.end_all("the server is shutting down")
            incarnation, self._incarnation = self._incarnation, None
            self._calls.fail_all(shutting_down())
            if self._was_ever_ready:
                self._fail_start(shutting_down())
            await incarnation.end()
        if self._context is not None:
            self._context.term()

    # ---- the client's calls ---------------------------------------------------------------------------------------

    @property
    def rest(self) -> Rest:
        return self._sleeping.rest

    def submit(self, request: Request) -> None:
        if self.rest.state != AWAKE:
            raise refusal(self.rest)
        self._require_up()
        self._streams.open(request)
        self._send(messages.Submit(request))

    def stream(self, request_id: str) -> AsyncIterator[StreamItem]:
        return self._streams.read(request_id)

    def abort(self, request_id: str) -> None:
        if request_id in self._streams and self.is_ready:
            self._send(messages.Abort(request_id))

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(self._stats, rest=self.rest)

    def facts(self) -> ServerFacts | None:
        return self._known_facts.now(self._stats.knobs)

    async def configure(self, knobs: dict[str, Any], *, lasts: bool = True) -> dict[str, Any]:
        answer: dict[str, Any] = await self._call(lambda call_id: messages.Configure(call_id, knobs))
        if lasts:
            self._changed_knobs |= knobs
        return answer

    async def load_adapter(self, adapter_id: str, folder: str) -> int:
        num_parameters: int = await self._call(lambda call_id: messages.LoadAdapter(call_id, adapter_id, folder))
        self._adapters.folders[adapter_id] = folder
        return num_parameters

    def unload_adapter(self, adapter_id: str) -> None:
        self._adapters.folders.pop(adapter_id, None)
        if self.is_ready:
            self._send(messages.UnloadAdapter(adapter_id))

    async def sleep(self, ask: SleepAsk) -> SleepReport:
        return await self._sleeping.sleep(ask)

    async def wake(self) -> SleepReport:
        if self._is_stopping:
            raise shutting_down()
        return await self._sleeping.wake()

    async def export(self, ask: BlocksAsk) -> BlocksTold | None:
        told: BlocksTold | None = await self._call(lambda call_id: messages.Export(call_id, ask))
        return told

    async def _call(self, message: Callable[[int], messages.ToEngine]) -> Any:
        """Send what `message` makes of a call's number, and await its answer."""
        self._require_up()
        number = self._calls.new_number()
        self._send(message(number))
        return await self._calls.answer(number)

    def _require_up(self) -> None:
        if not self.is_ready:
            raise Overloaded("the engine is not running", status=503, code="engine_not_ready", retry_after_s=2.0)

    def _send(self, message: messages.ToEngine) -> None:
        assert self._incarnation is not None
        self._incarnation.send(message)

    # ---- what the engine says -------------------------------------------------------------------------------------

    def _take(self, message: messages.FromEngine) -> None:
        match message:
            case messages.StepOutput():
                self._take_step(message)
            case messages.Loading():
                self._on_loading(message)
            case messages.Ready():
                self._take_ready(message)
            case messages.Measured(machine):
                self._known_facts.take_machine(machine)
            case messages.ConfigureDone():
                self._take_knobs(message)
            case messages.AdapterLoaded():
                self._take_adapter(message)
            case messages.SleepDone():
                self._stats = message.stats
                self._sleeping.take(message)
                self._calls.settle(message.call_id, message.report, message.error)
            case messages.Exported(call_id, told):
                self._calls.settle(call_id, told, None)
            case messages.Fatal():
                self._last_words = message

    def _take_step(self, output: messages.StepOutput) -> None:
        if self._num_steps_before:
            output = output.counted_on(self._num_steps_before)
        self._last_step_id = max(self._last_step_id, output.step_id)
        self._stats = output.stats
        self._known_facts.add_pauses(output.pauses)
        if output.record is not None and self._on_record is not None:
            self._on_record(output.record)
        self._streams.put(output)

    def _take_ready(self, ready: messages.Ready) -> None:
        assert self._incarnation is not None
        self._stats = ready.stats
        self._known_facts.take_ready(ready, self._incarnation.started_ns, self.num_restarts)
        if self._changed_knobs:  # they hold for a successor too; it hears of them before any request
            self._send(messages.Configure(self._calls.new_number(), self._changed_knobs))
        if self._died_ns is not None and self.rest.state == AWAKE:
            log.info("the engine is ready again after %.1f s", (time.monotonic_ns() - self._died_ns) / 1e9)
        for ask in self._adapters.read_again(self._calls.new_number):
            self._send(ask)
        self._incarnation.is_up = not self._adapters.are_awaited
        self._was_ever_ready, self._died_ns = True, None
        self._sleeping.take_ready()
        if self._started is not None and not self._started.done():
            self._started.set_result(ready)

    def _take_adapter(self, answer: messages.AdapterLoaded) -> None:
        if not self._adapters.take(answer):
            self._calls.settle(answer.call_id, answer.num_parameters, answer.error)
        elif self._incarnation is not None:
            self._incarnation.is_up = not self._adapters.are_awaited

    def _take_knobs(self, answer: messages.ConfigureDone) -> None:
        if answer.error is None:
            knobs, is_paused = answer.knobs, bool(answer.knobs.get("paused"))
            self._stats = msgspec.structs.replace(self._stats, knobs=knobs, is_paused=is_paused)
        self._calls.settle(answer.call_id, answer.knobs, answer.error)

    # ---- death and succession -------------------------------------------------------------------------------------

    def _attend(self) -> None:
        assert self._incarnation is not None
        assert self._context is not None
        self._incarnation.attend(self._context, self._take, self._on_death)

    def _on_death(self, dead: Incarnation, status: int) -> None:
        if dead is self._incarnation and not self._is_stopping:
            self._loop.create_task(self._bury(dead, status))

    async def _bury(self, dead: Incarnation, status: int) -> None:
        dead.is_up = False
        await asyncio.sleep(LAST_WORDS_S)
        words, self._last_words = self._last_words, None
        cause = cause_of_death(status, words)
        self._streams.end_all(f"the engine process died: {cause}")
        died: SplittimeError = EngineError("the engine process died", hint="try again when /ready says so")
        self._calls.fail_all(stays_asleep(failure(cause, words)) if self.rest.state == WAKING else died)
        dead.close()
        self._stats = EngineStats(now_ns=time.monotonic_ns())
        self._sleeping.take_death()
        if self._sleeping.is_dead:
            log.error("engine process %d died asleep: %s; waking starts a new one", dead.process.pid, cause)
            self._incarnation = None
            self._fail_start(stays_asleep(failure(cause, words)))
        elif not self._was_ever_ready:
            self._fail_start(failure(cause, words))
        else:
            log.error("engine process %d died: %s", dead.process.pid, cause)
            self._died_ns = self._died_ns or time.monotonic_ns()
            await self._restart(dead)

    def _fail_start(self, error: SplittimeError) -> None:
        """Tell whoever waits for a process to be ready."""
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)

    async def _restart(self, dead: Incarnation) -> None:
        self._deaths.begin(dead.started_ns)
        while not self._is_stopping:
            self.num_restarts += 1
            await self._deaths.wait(self.num_restarts)
            if self._is_stopping or self._succeed():
                return

    async def _start_anew(self) -> messages.Ready:
        """For who wakes an engine that died in its sleep. Raises what keeps it asleep."""
        self._started = self._loop.create_future()
        self.num_restarts += not self._is_stopping
        if not self._succeed():
            raise stays_asleep(EngineError("the system would not start a process"))
        return await self._started

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


class DeathsInRow:
    def __init__(self) -> None:
        self._number = 0

    def begin(self, started_ns: int) -> None:
        """A process died that was started then."""
        if time.monotonic_ns() - started_ns > HEALTHY_AFTER_S * 1e9:
            self._number = 0

    async def wait(self, num_restarts: int) -> None:
        """Returns when the next process is to be started, which may fail too. num_restarts: with that one."""
        delay_s = RESTART_DELAYS_S[min(self._number, len(RESTART_DELAYS_S) - 1)]
        self._number += 1
        log.warning("starting a new engine process in %.0f s (restart %d)", delay_s, num_restarts)
        await asyncio.sleep(delay_s)
