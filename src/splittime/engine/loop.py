"""The loop of an engine process: take what came in, step, send what came of it. The only place that waits for work.

A thread receives, so that a message has its arrival time even while a step runs: what it waits after that is queueing
(`step_in_flight`), not hand-off. The loop itself is single-threaded and owns the engine.

The machine's ceilings are measured here, in short pieces, each after it has been quiet for `QUIET_S`: a request that
comes meanwhile waits for one piece at most, and its account says so (`measuring`).
"""

import threading
from collections import deque
from collections.abc import Callable

from splittime.core.clock import Clock
from splittime.core.errors import ConfigError, SplittimeError
from splittime.core.sleep import SleepReport
from splittime.engine.engine import Engine
from splittime.engine.messages import (
    Abort,
    Configure,
    ConfigureDone,
    Measured,
    Sleep,
    SleepDone,
    StepOutput,
    Submit,
    ToEngine,
    Wake,
)

Send = Callable[[StepOutput | ConfigureDone | SleepDone | Measured], None]
QUIET_S = 0.1


class Inbox:
    """Messages with their arrival times, from one receiving thread to the loop."""

    def __init__(self) -> None:
        self._messages: deque[tuple[ToEngine, int]] = deque()
        self._arrived = threading.Event()
        self.is_closed = False
        self._failure: SplittimeError | None = None

    def put(self, message: ToEngine, received_ns: int) -> None:
        self._messages.append((message, received_ns))
        self._arrived.set()

    def close(self) -> None:
        """The loop ends after what it is doing now."""
        self.is_closed = True
        self._arrived.set()

    def fail(self, error: SplittimeError) -> None:
        """The loop ends with this error, though it may be waiting for work."""
        self._failure = error
        self._arrived.set()

    def wait(self, timeout_s: float | None) -> bool:
        """Return when something has arrived (True), or after the timeout."""
        return self._arrived.wait(timeout_s)

    def take_all(self) -> list[tuple[ToEngine, int]]:
        self._arrived.clear()
        if self._failure is not None:
            raise self._failure
        taken = []
        while self._messages:
            taken.append(self._messages.popleft())
        return taken


def run_loop(engine: Engine, inbox: Inbox, send: Send, clock: Clock) -> None:
    """Run until the inbox is closed. An exception of the runner or the scheduler goes to the caller: the engine's state
    is not to be trusted after it."""
    while not inbox.is_closed:
        if not engine.has_work:
            _wait(engine, inbox, send, clock)
        for message, received_ns in inbox.take_all():
            _handle(engine, message, received_ns, send)
        if engine.falls_asleep_next:
            _measure_to_the_end(engine, send)
        output = engine.step()
        if output is not None:
            send(output)


def _wait(engine: Engine, inbox: Inbox, send: Send, clock: Clock) -> None:
    """Until something arrives or is due, or a piece of measuring is done."""
    timeout_s = _seconds_to_deadline(engine, clock)
    if engine.measuring is None or (timeout_s is not None and timeout_s <= QUIET_S):
        inbox.wait(timeout_s)
    elif not inbox.wait(QUIET_S):
        _measure(engine, send)


def _handle(engine: Engine, message: ToEngine, received_ns: int, send: Send) -> None:
    match message:
        case Submit(request):
            engine.submit(request, received_ns)
        case Abort(request_id):
            engine.abort(request_id)
        case Configure(call_id, knobs):
            try:
                send(ConfigureDone(call_id, engine.configure(knobs)))
            except ConfigError as error:
                send(ConfigureDone(call_id, error=error.info))
        case Sleep(call_id, ask):
            engine.sleep(ask, received_ns, lambda told: send(_slept(engine, call_id, told)))
        case Wake(call_id):
            try:
                send(_slept(engine, call_id, engine.wake()))
            except SplittimeError as error:
                send(_slept(engine, call_id, error))


def _slept(engine: Engine, call_id: int, told: SleepReport | SplittimeError) -> SleepDone:
    if isinstance(told, SplittimeError):
        return SleepDone(call_id, engine.bed.rest, engine.stats(), error=told.info)
    return SleepDone(call_id, engine.bed.rest, engine.stats(), told)


def _measure_to_the_end(engine: Engine, send: Send) -> None:
    """Before a sleep, which is to leave no memory behind: it takes some tenths of a second, once."""
    while engine.measuring is not None:
        _measure(engine, send)


def _measure(engine: Engine, send: Send) -> None:
    machine = engine.measure()
    if machine is not None:
        send(Measured(machine))


def _seconds_to_deadline(engine: Engine, clock: Clock) -> float | None:
    deadline_ns = engine.next_deadline_ns()
    return None if deadline_ns is None else max(deadline_ns - clock.now_ns(), 0) / 1e9
