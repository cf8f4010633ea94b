"""What a client knows of its engine process without asking: its facts, and whether it sleeps.

`KnownFacts` holds what the process said at `Ready`, and what came after (ceilings, pauses, knobs). A successor of a
dead process says it all again; the ceilings of its predecessor hold until it has its own.

`Sleeping` holds what the client asked of its engine's sleep, what it was answered, and what a death meanwhile means.
An engine that dies while it sleeps stays asleep, and gets its successor when it is woken: until then somebody else may
have the memory that it would take.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from splittime.core.engine import ASLEEP, AWAKE, FALLING_ASLEEP, WAKING, Rest, SleepAsk, SleepReport
from splittime.core.facts import Machine
from splittime.drive.host_time import MAX_KEPT
from splittime.drive.messages import Ready, Sleep, SleepDone, ToEngine, Wake
from splittime.drive.residency import sleeps_already
from splittime.ledger.facts import Process, ServerFacts, start_book

Pauses = tuple[tuple[int, int], ...]
MAX_SLEEPS = 32


class KnownFacts:
    """Values only: whoever asks may keep what `now` returns, in any thread."""

    def __init__(self) -> None:
        self._said: ServerFacts | None = None
        self._process: Process | None = None
        self._machine: Machine | None = None

    def take_ready(self, ready: Ready, started_ns: int, restarts: int) -> None:
        self._said = ready.facts
        sleeps = self._process.sleeps if self._process is not None else ()
        self._process = Process(
            name="engine",
            started_ns=started_ns,
            ready_ns=ready.stats.now_ns,
            restarts=restarts,
            sleeps=sleeps,
            start=start_book(started_ns, ready.stats.now_ns, ready.timeline),
        )

    def take_machine(self, machine: Machine) -> None:
        self._machine = machine

    def add_pauses(self, pauses: Pauses) -> None:
        if pauses and self._process is not None:
            kept = (*self._process.pauses, *pauses)[-MAX_KEPT:]
            self._process = msgspec.structs.replace(self._process, pauses=kept)

    def add_sleep(self, report: SleepReport) -> None:
        if report.changed and self._process is not None:
            sleeps = (*self._process.sleeps, report)[-MAX_SLEEPS:]
            self._process = msgspec.structs.replace(self._process, sleeps=sleeps)

    def now(self, knobs: dict[str, Any]) -> ServerFacts | None:
        """With these knobs among the settings; None if the engine has not said anything yet."""
        said, process = self._said, self._process
        if said is None or process is None:
            return None
        machine = max(filter(None, (said.machine, self._machine)), key=_measured_at_unix_ns, default=None)
        return msgspec.structs.replace(said, settings=said.settings | knobs, machine=machine, processes=(process,))


def _measured_at_unix_ns(machine: Machine) -> int:
    return machine.measured_at_unix_ns or 0


log = logging.getLogger("splittime.engine")


class Sleeping:
    """rest: what the engine is, as far as it is known here. is_dead: it died in its sleep, and has no successor.

    require_up: raises if there is no engine to be asked. call: sends the message made of a call's number, and returns
    the answer. start_anew: starts another process, and returns when it is ready.
    """

    def __init__(
        self,
        require_up: Callable[[], None],
        call: Callable[[Callable[[int], ToEngine]], Awaitable[SleepReport]],
        start_anew: Callable[[], Awaitable[Ready]],
        facts: KnownFacts,
    ) -> None:
        self._require_up, self._call, self._start_anew, self._facts = require_up, call, start_anew, facts
        self.rest = Rest()
        self.is_dead = False
        self._num_open = 0  # calls of `sleep` and `wake` that are not answered
        self._asleep_since_ns = 0
        self._anew = asyncio.Lock()

    async def sleep(self, ask: SleepAsk) -> SleepReport:
        ask.validate()
        if self.is_dead:
            return sleeps_already(self.rest.level, ask.level)
        self._require_up()
        if self.rest.state == AWAKE:
            self.rest = Rest(FALLING_ASLEEP)
        return await self._ask(lambda call_id: Sleep(call_id, ask))

    async def wake(self) -> SleepReport:
        async with self._anew:
            if self.is_dead:
                return await self._wake_anew()
        self._require_up()
        if self.rest.state == ASLEEP:
            self.rest = Rest(WAKING, self.rest.level)
        return await self._ask(Wake)

    async def _ask(self, message: Callable[[int], ToEngine]) -> SleepReport:
        self._num_open += 1
        return await self._call(message)

    def take(self, answer: SleepDone) -> None:
        """Whether or not its caller still waits; the last answer says what the engine is."""
        self._num_open -= 1
        if not self._num_open:
            self.rest = answer.rest
        if answer.report is not None:
            self._keep(answer.report)

    def take_ready(self) -> None:
        self.rest, self.is_dead = Rest(), False

    def take_death(self) -> None:
        """The engine stays asleep if it slept or was waking when it died; else its successor will be awake."""
        self.is_dead = self.rest.state in (ASLEEP, WAKING)
        self.rest = Rest(ASLEEP, self.rest.level) if self.is_dead else Rest()
        self._num_open = 0

    def _keep(self, report: SleepReport) -> None:
        """In the facts and the log, unless nothing was done (or only a sleep called off)."""
        if not report.changed or not report.level:
            return
        self._facts.add_sleep(report)
        took_ms = (report.end_ns - report.begin_ns) / 1e6
        if report.action == "sleep":
            self._asleep_since_ns = report.end_ns
            log.info("asleep (level %d) after %.0f ms", report.level, took_ms)
        else:
            log.info("awake again after %.0f ms", took_ms)

    async def _wake_anew(self) -> SleepReport:
        begin_ns, level = time.monotonic_ns(), self.rest.level
        self.rest = Rest(WAKING, level)
        try:
            ready = await self._start_anew()
        except BaseException:  # a call that is cancelled too: whatever ended it, the engine still sleeps
            self.rest = Rest(ASLEEP, level)
            raise
        report = SleepReport(
            action="wake",
            level=level,
            begin_ns=begin_ns,
            end_ns=time.monotonic_ns(),
            parts=ready.timeline,
            slept_ns=begin_ns - self._asleep_since_ns,
            note="the engine had died in its sleep: a new process was started",
            restarted=True,
        )
        self._keep(report)
        return report
