"""Residency: whether an engine has its memory or sleeps, and what it takes to change that.

Owns the state, the one call that waits for sleep, and its time-out; the engine owns the requests, and its driver tells
when nothing runs any more. From the moment sleep is asked for, new requests are refused; those that are here end by
themselves, or by `mode="abort"`. Whoever asked gets exactly one answer: a report, or an error that says why the engine
is awake.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from splittime.core.clock import Clock
from splittime.core.engine import ASLEEP, FALLING_ASLEEP, WAY_OUT, Moved, Rest, SleepAsk, Sleeper, SleepReport
from splittime.core.errors import Conflict, EngineError, ErrorInfo, Overloaded, RequestError, SplittimeError

Answer = Callable[[SleepReport | SplittimeError], None]
REFUSED_CODE = "asleep"
IS_AWAKE = Rest()


@dataclass(frozen=True)
class Waiting:
    """A call that waits for the engine to fall asleep."""

    ask: SleepAsk
    asked_ns: int
    num_aborted: int
    answer: Answer

    @property
    def deadline_ns(self) -> int | None:
        return None if self.ask.timeout_s is None else self.asked_ns + int(self.ask.timeout_s * 1e9)


class Residency:
    """sleeper: what does the work; None: this engine cannot sleep. level: of its sleep, 0 while it is awake."""

    def __init__(self, sleeper: Sleeper | None, clock: Clock) -> None:
        self.level = 0
        self.sleeper = sleeper
        self._clock = clock
        self._waiting: Waiting | None = None
        self._since_ns = 0
        self._slept_ns = 0

    @property
    def rest(self) -> Rest:
        if self.level:
            return Rest(ASLEEP, self.level)
        return IS_AWAKE if self._waiting is None else Rest(FALLING_ASLEEP)

    @property
    def is_awaited(self) -> bool:
        """Somebody waits for the engine to fall asleep."""
        return self._waiting is not None

    @property
    def deadline_ns(self) -> int | None:
        """Until when that somebody waits."""
        return None if self._waiting is None else self._waiting.deadline_ns

    def refusal(self) -> Overloaded | None:
        """Returns what a new request is told; None while the engine is awake."""
        return refusal(self.rest) if self.level or self._waiting is not None else None

    def ask(self, ask: SleepAsk, asked_ns: int, num_aborted: int, answer: Answer) -> None:
        """The engine shall sleep as soon as nothing runs; `num_aborted` requests were ended for it."""
        self._waiting = Waiting(ask, asked_ns, num_aborted, answer)

    def answer_at_once(self, ask: SleepAsk) -> SplittimeError | SleepReport | None:
        """Returns what there is to answer without any work; None: it is to be done."""
        try:
            ask.validate()
        except RequestError as error:
            return error
        if self.level:
            try:
                return sleeps_already(self.level, ask.level)
            except Conflict as error:
                return error
        if self._waiting is not None:
            message = "the engine is falling asleep already: another call waits for its requests to end"
            return Conflict(message, code=FALLING_ASLEEP, hint="POST /wake calls that off")
        if self.sleeper is None:
            return Conflict(
                "this engine cannot sleep (a model that several ranks share does not, nor does an encoder)",
                code="cannot_sleep",
            )
        return None

    def give_up_late(self, now_ns: int, num_left: int) -> None:
        """Stay awake, if the one who waits has waited too long."""
        if self._waiting is not None and self._waiting.deadline_ns is not None and now_ns >= self._waiting.deadline_ns:
            timeout_s = self._waiting.ask.timeout_s
            self._call_off(
                Conflict(
                    f"{num_left} requests were still running after timeout_s={timeout_s:g}; the engine stays awake",
                    code="sleep_timeout",
                    param="timeout_s",
                    value=timeout_s,
                    hint="mode=abort ends them",
                )
            )

    def fall_asleep(self, forget: Callable[[], tuple[int, int]]) -> None:
        """Sleep now: nothing runs. forget: drops the cache's content, returns its tokens, and those in host memory."""
        waiting, self._waiting = self._waiting, None
        assert waiting is not None
        assert self.sleeper is not None
        begin_ns = self._clock.now_ns()
        try:
            moved = self.sleeper.sleep(waiting.ask.level)
        except SplittimeError as error:
            waiting.answer(error)
            return
        self.level, self._since_ns = waiting.ask.level, begin_ns
        report = _report("sleep", self.level, moved, ("drain", waiting.asked_ns, begin_ns), self._clock.now_ns())
        tokens, in_host = forget()
        aborted = waiting.num_aborted
        waiting.answer(_with(report, forgotten_tokens=tokens, forgotten_host_tokens=in_host, aborted_requests=aborted))

    def wake(self) -> SleepReport:
        """Raises what kept it asleep. One that is falling asleep stays awake."""
        if self._waiting is not None:
            self._call_off(Conflict("waking was asked for before the engine was asleep", code="sleep_called_off"))
            return _called_off(self._clock.now_ns())
        if not self.level:
            return SleepReport(action="wake", level=0, changed=False)
        assert self.sleeper is not None
        begin_ns = self._clock.now_ns()
        try:
            moved = self.sleeper.wake()
        except SplittimeError as error:
            raise stays_asleep(error) from error
        end_ns = self._clock.now_ns()
        slept_ns, level, self.level = begin_ns - self._since_ns, self.level, 0
        self._slept_ns += end_ns - self._since_ns
        return _with(_report("wake", level, moved, None, end_ns), begin_ns=begin_ns, slept_ns=slept_ns)

    def take_slept_ns(self) -> int:
        """Returns how long it slept since it was last asked, waking included."""
        slept_ns, self._slept_ns = self._slept_ns, 0
        return slept_ns

    def _call_off(self, error: SplittimeError) -> None:
        waiting, self._waiting = self._waiting, None
        assert waiting is not None
        waiting.answer(error)


def sleeps_already(level: int, asked: int) -> SleepReport:
    """Returns what a call for sleep is told by one that sleeps. Raises `Conflict` if that is at another level."""
    if level != asked:
        message = f"the engine is asleep at level {level}, and cannot go on to level {asked}"
        raise Conflict(message, code="asleep", param="level", value=asked, hint="wake it first")
    return SleepReport(action="sleep", level=level, changed=False)


def refusal(rest: Rest) -> Overloaded:
    """Returns what a request is told while the engine is not awake."""
    words = rest.state.replace("_", " ")
    return Overloaded(f"the engine is {words}", status=503, code=REFUSED_CODE, hint=WAY_OUT, retry_after_s=1.0)


def ended_by_sleep() -> ErrorInfo:
    """Returns what a running request is told that `mode="abort"` ends."""
    error = Overloaded(
        "the engine was put to sleep (mode=abort) before this request was done",
        status=503,
        code=REFUSED_CODE,
        hint=WAY_OUT,
        retry_after_s=1.0,
    )
    return error.info


def shutting_down() -> EngineError:
    """Returns what a call that waits is told when the client stops."""
    return EngineError("the server is shutting down", code="draining", status=503, retry_after_s=1.0)


def stays_asleep(error: SplittimeError) -> EngineError:
    """With the cause's own facts."""
    info, message = error.info, f"the engine could not wake and stays asleep: {error}"
    return EngineError(
        message, code="wake_failed", status=503, param=info.param, value=info.value, limit=info.limit, hint=info.hint
    )


def _called_off(now_ns: int) -> SleepReport:
    note = "the engine was not asleep yet: a call for sleep was called off"
    return SleepReport(action="wake", level=0, begin_ns=now_ns, end_ns=now_ns, note=note)


def _report(action: str, level: int, moved: Moved, first: tuple[str, int, int] | None, end_ns: int) -> SleepReport:
    parts = moved.parts if first is None else (first, *moved.parts)
    begin_ns = parts[0][1] if parts else end_ns
    facts = msgspec.structs.asdict(moved) | {"parts": parts}
    return SleepReport(action=action, level=level, begin_ns=begin_ns, end_ns=end_ns, **facts)


def _with(report: SleepReport, **changes: int) -> SleepReport:
    return msgspec.structs.replace(report, **changes)
