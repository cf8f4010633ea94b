"""What broke off or came too late, as verdicts: no connection, no byte in time, an answer without its end.

Whether an upstream lives that writes an answer which comes as a whole.

Of such an answer no byte comes before its end, so how long none came says nothing: a limit of `first_byte_s` cut every
long one, had it written again elsewhere, and opened breakers for everybody. From `first_byte_s` on the upstream is
asked for `/health` instead, once a period for all who wait there. Any answer that is no 5xx is a sign of life, so a
server without that path lives too, and so does one that takes its time: it has `SILENT_S` for it. After that, or after
`DEAD_AFTER` answers in a row that were no sign of life, the answers are given up. An upstream that lives has until
`whole_answer_s`.

How late this process is itself: a time-out that ran out while the event loop stood still speaks of no upstream.

A gateway that gets no processor (too many requests, other processes, a machine that sleeps) sees answers late that were
there in time, and its timers run out first. Were each of these a failure of the upstream, the breakers would open for
everybody at the worst moment. So a timer knocks every `LAG_PERIOD_S`; when it comes later than `LATE_S` that is kept,
and a time-out of an attempt that saw such a moment opens no breaker. The request is treated as after any time-out.
"""

import asyncio
import time
from typing import NamedTuple

from splittime.core.errors import DeadlineExceeded, UpstreamError
from splittime.gateway.config import UpstreamConfig
from splittime.gateway.decoded_answer import ask_whole
from splittime.gateway.upstream_connections import NoConnection, UpstreamAnswer, UpstreamConnections
from splittime.gateway.verdict import AnswerVerdict, Whose, failed
from splittime.wire.target import Address

LAG_PERIOD_S, LATE_S = 0.1, 0.25
TIME_OUTS = frozenset({"upstream_connect_timeout", "upstream_first_byte_timeout", "upstream_stalled"})
PATH = "/health"
PERIOD_S = 5.0  # between two questions; first_byte_s where that is less
SILENT_S = 30.0  # for an answer; ten times first_byte_s where that is less
DEAD_AFTER = 4
MAX_BYTES = 64 * 1024
now_ns = time.monotonic_ns
BROKEN = (OSError, ValueError)
DIED, STALLED = "upstream_died", "upstream_stalled"


class UpstreamSilent(TimeoutError):
    """An upstream does not say that it lives."""


class UpstreamPulse:
    """Watches over the whole answers of one upstream. quiet_s: how long one is awaited before the upstream is asked."""

    def __init__(self, address: Address, key: str | None, quiet_s: float) -> None:
        self._address, self._key, self._quiet_s = address, key, quiet_s
        self._period_s, self._silent_s = min(PERIOD_S, quiet_s), min(SILENT_S, 10 * quiet_s)
        self._due_s: dict[UpstreamAnswer, float] = {}  # of the loop's clock, the earliest first
        self._asking: asyncio.Task[None] | None = None

    def watch(self, answer: UpstreamAnswer, connections: UpstreamConnections) -> None:
        """Give the answer up, with `UpstreamSilent`, when the upstream does not live; until `leave`."""
        loop = asyncio.get_running_loop()
        self._due_s[answer] = loop.time() + self._quiet_s
        if self._asking is None:
            self._asking = loop.create_task(self._ask(connections))

    def leave(self, answer: UpstreamAnswer) -> None:
        """Nobody waits for it any more."""
        self._due_s.pop(answer, None)

    async def _ask(self, connections: UpstreamConnections) -> None:
        num_silent = 0
        try:
            while self._due_s:
                quiet_s = min(self._due_s.values()) - asyncio.get_running_loop().time()
                if quiet_s > 0:
                    num_silent = 0
                    await asyncio.sleep(quiet_s)
                    continue
                signs, _ = await asyncio.gather(self._no_signs(connections), asyncio.sleep(self._period_s))
                num_silent = num_silent + signs if signs else 0
                if num_silent >= DEAD_AFTER:
                    self._give_up()
        finally:
            self._asking = None

    async def _no_signs(self, connections: UpstreamConnections) -> int:
        """Returns 0 for a sign of life, 1 for an answer that is none, and all that it takes for no answer."""
        where = connections, self._address, PATH, self._key
        try:
            status, _ = await ask_whole(*where, within_s=self._silent_s, max_bytes=MAX_BYTES)
        except TimeoutError:
            return DEAD_AFTER
        except (OSError, ValueError):
            return 1
        return int(status >= 500)

    def _give_up(self) -> None:
        at_s = asyncio.get_running_loop().time()
        for answer in [one for one, due_s in self._due_s.items() if due_s <= at_s]:
            del self._due_s[answer]
            answer.end(UpstreamSilent())


class Deadline(NamedTuple):
    """The instant at which a request is given up. is_clients: its client said so, else the config."""

    at_ns: int
    is_clients: bool

    def within(self, seconds: float) -> tuple[float, bool]:
        """Returns how long something may take that may take so long at most, and whether the deadline says so. An event
        loop's timers are a millisecond coarse: what has run out is not asked of a clock afterwards."""
        left_s = max(0.0, (self.at_ns - now_ns()) / 1e9)
        return (left_s, True) if left_s <= seconds else (seconds, False)


class AttemptBreaks:
    """What became of one attempt at the upstream of this config, within this deadline."""

    def __init__(self, config: UpstreamConfig, deadline: Deadline) -> None:
        self._config, self._deadline, self._name = config, deadline, config.name

    def before(self, error: BaseException, limit_s: float, *, is_deadline: bool) -> AnswerVerdict | None:
        """Returns the verdict on an attempt of which no byte came within `limit_s`; None for what is no such error."""
        name, config = self._name, self._config
        if isinstance(error, UpstreamSilent):
            return self.silent()
        if isinstance(error, NoConnection):
            if not error.is_too_late:
                return failed(f"no connection to upstream {name!r}", "upstream_unreachable", is_reached=False)
            if config.connect_s < limit_s:
                words = f"no connection to upstream {name!r} within {config.connect_s:g} s"
                return failed(words, "upstream_connect_timeout", 504, is_reached=False)
        if isinstance(error, NoConnection | TimeoutError):
            if is_deadline:
                return self.too_late()
            words = f"no byte of an answer from upstream {name!r} within {config.first_byte_s:g} s"
            return failed(words, "upstream_first_byte_timeout", 504)
        if isinstance(error, BROKEN):
            return failed(f"upstream {name!r} broke off before its answer", "upstream_broke_off")
        return None

    def within(self, error: BaseException, *, is_deadline: bool) -> AnswerVerdict:
        """Returns the verdict on an answer whose next piece did not come."""
        if isinstance(error, UpstreamSilent):
            return self.silent()
        if not isinstance(error, TimeoutError):
            return self.died()
        if is_deadline:
            return self.too_late()
        return failed(f"upstream {self._name!r} sent nothing for {self._config.between_s:g} s", STALLED, 504)

    def died(self) -> AnswerVerdict:
        return failed(f"upstream {self._name!r} broke off in the middle of its answer", DIED)

    def silent(self) -> AnswerVerdict:
        """Returns the verdict on an upstream that owes a whole answer and does not say that it lives."""
        words = f"no answer from upstream {self._name!r} in more than {self._config.first_byte_s:g} s"
        words += ", and it does not say that it lives"
        return failed(words, "upstream_first_byte_timeout", 504, is_reached=False)

    def whole_too_late(self) -> AnswerVerdict:
        """Returns the verdict on a whole answer that took too long, which says nothing of an upstream that lives."""
        whole_s = self._config.whole_s
        words = f"the answer took longer than {whole_s:g} s (whole_answer_s of upstream {self._name!r})"
        hint = "ask for a stream, or for fewer tokens"
        told = UpstreamError(words, code="upstream_whole_answer_timeout", status=504, limit=whole_s, hint=hint)
        return AnswerVerdict(Whose.REQUEST, told.info.code, told)

    def not_resumed(self, verdict: AnswerVerdict, reason: str) -> AnswerVerdict:
        """Returns the verdict on a break that no other upstream mends."""
        info = (verdict.error or UpstreamError("it broke off")).info
        words = f"{info.message}; it does not go on at another: {reason}"
        return verdict._replace(error=UpstreamError(words, code=info.code, status=info.status))

    def too_late(self) -> AnswerVerdict:
        """Returns the verdict on a request whose time is over, which says nothing of the upstream."""
        if self._deadline.is_clients:
            error = DeadlineExceeded.before("its answer was complete")
            return AnswerVerdict(Whose.REQUEST, error.info.code, error)
        total_s = self._config.total_s
        words = f"the answer took longer than {total_s:g} s (total_s of upstream {self._name!r})"
        told = UpstreamError(words, code="upstream_total_timeout", status=504, limit=total_s)
        return AnswerVerdict(Whose.REQUEST, told.info.code, told)


class LoopLag:
    """longest_ns: the longest so far. `begin` and `end` inside the event loop."""

    def __init__(self) -> None:
        self.longest_ns = 0
        self._due_ns: int | None = None
        self._late_ns = 0  # when the loop was last found late
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._due_ns = now_ns() + int(LAG_PERIOD_S * 1e9)
        self._timer = asyncio.get_running_loop().call_later(LAG_PERIOD_S, self._knock)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def explains(self, code: str, begin_ns: int) -> bool:
        """Returns whether a failure of this code, of an attempt that began then, may be this process's own."""
        return code in TIME_OUTS and self.was_late(begin_ns)

    def was_late(self, begin_ns: int) -> bool:
        """Returns whether this process has been late since then."""
        if self._due_ns is None:
            return False
        is_late = now_ns() - self._due_ns > LATE_S * 1e9  # and the timer has not been asked yet
        return is_late or self._late_ns >= begin_ns

    def _knock(self) -> None:
        at_ns = now_ns()
        late_ns = at_ns - (self._due_ns or at_ns)
        self.longest_ns = max(self.longest_ns, late_ns)
        if late_ns > LATE_S * 1e9:
            self._late_ns = at_ns
        self.begin()
