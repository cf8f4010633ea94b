"""The loop of an engine: take what came in, turn the crank, send what came of it, and wait where there is no work.

In an engine process messages come through an `Inbox`: a thread receives, so that a message has its arrival time even
while a step runs: what it waits after that is queueing (`step_in_flight`), not hand-off. Under a virtual clock they
come from a timetable (`simulate.replay`). The loop itself is single-threaded and owns the engine.

The machine's ceilings are measured here, in short pieces, each after it has been quiet for `QUIET_S`: a request that
comes meanwhile waits for one piece at most, and its account says so (`measuring`).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from splittime.core.engine import SleepReport
from splittime.core.errors import ConfigError, SplittimeError
from splittime.core.facts import Machine
from splittime.drive import messages
from splittime.drive.crank import Crank

Send = Callable[
    [
        messages.StepOutput
        | messages.ConfigureDone
        | messages.SleepDone
        | messages.Measured
        | messages.AdapterLoaded
        | messages.Exported
    ],
    None,
]
QUIET_S = 0.1
AWAITING_S = 0.001


class Arrivals(Protocol):
    """Where a loop's messages come from, each with its arrival time."""

    is_closed: bool

    def wait(self, timeout_s: float | None) -> bool:
        """Return when something has arrived (True), or after the timeout."""
        ...

    def take_all(self) -> Iterable[tuple[messages.ToEngine, int]]: ...


class Inbox:
    """Messages with their arrival times, from one receiving thread to the loop."""

    def __init__(self) -> None:
        self._messages: deque[tuple[messages.ToEngine, int]] = deque()
        self._arrived = threading.Event()
        self.is_closed = False
        self._failure: SplittimeError | None = None

    def put(self, message: messages.ToEngine, received_ns: int) -> None:
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

    def take_all(self) -> list[tuple[messages.ToEngine, int]]:
        self._arrived.clear()
        if self._failure is not None:
            raise self._failure
        taken = []
        while self._messages:
            taken.append(self._messages.popleft())
        return taken


def run_loop(crank: Crank, arrivals: Arrivals, send: Send) -> None:
    """Run until no more can arrive. An exception of the runner or the scheduler goes to the caller: the engine's state
    is not to be trusted after it."""
    while not arrivals.is_closed:
        if not crank.has_work:
            _wait(crank, arrivals, send)
        for message, received_ns in arrivals.take_all():
            _handle(crank, message, received_ns, send)
        if crank.falls_asleep_next:  # which is to leave no memory behind: some tenths of a second, once
            _tell_measured(crank.measuring.finish(), send)
        output = crank.turn()
        if output is not None:
            send(output)
        elif crank.has_work:  # nobody gets a row before something comes: what may come in an answer, say
            arrivals.wait(AWAITING_S)


def _wait(crank: Crank, arrivals: Arrivals, send: Send) -> None:
    """Until something arrives or is due, or a piece of measuring is done."""
    timeout_s = crank.seconds_to_deadline()
    if not crank.measuring.is_due or (timeout_s is not None and timeout_s <= QUIET_S):
        arrivals.wait(timeout_s)
    elif not arrivals.wait(QUIET_S):
        _tell_measured(crank.measuring.measure_piece(), send)


def _tell_measured(machine: Machine | None, send: Send) -> None:
    if machine is not None:
        send(messages.Measured(machine))


def _handle(crank: Crank, message: messages.ToEngine, received_ns: int, send: Send) -> None:
    match message:
        case messages.Submit(request, held_for):
            crank.submit(request, received_ns, held_for)
        case messages.Release(request_id):
            crank.release(request_id, received_ns)
        case messages.MaskFound(request_id):
            crank.go_on(request_id)
        case messages.Fail(request_id, error):
            crank.fail(request_id, error)
        case messages.Abort(request_id):
            crank.abort(request_id)
        case messages.Hold(request_id, cause):
            crank.hold(request_id, cause)
        case messages.BlocksArrived(names, numbers):
            crank.take_in(names, numbers)
        case messages.Export(call_id, ask):
            send(messages.Exported(call_id, crank.export(ask)))
        case messages.Configure(call_id, knobs):
            try:
                send(messages.ConfigureDone(call_id, crank.configure(knobs)))
            except ConfigError as error:
                send(messages.ConfigureDone(call_id, error=error.info))
        case messages.AdapterLoaded():
            send(message)
        case messages.Sleep(call_id, ask):
            crank.sleep(ask, received_ns, lambda answer: send(_sleep_done(crank, call_id, answer)))
        case messages.Wake(call_id):
            try:
                send(_sleep_done(crank, call_id, crank.wake()))
            except SplittimeError as error:
                send(_sleep_done(crank, call_id, error))


def _sleep_done(crank: Crank, call_id: int, answer: SleepReport | SplittimeError) -> messages.SleepDone:
    rest, stats = crank.residency.rest, crank.stats()
    if isinstance(answer, SplittimeError):
        return messages.SleepDone(call_id, rest, stats, error=answer.info)
    return messages.SleepDone(call_id, rest, stats, answer)
