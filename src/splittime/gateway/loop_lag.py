"""How late this process is itself: a time-out that ran out while the event loop stood still speaks of no upstream.

A gateway that gets no processor (too many requests, other processes, a machine that sleeps) sees answers late that were
there in time, and its timers run out first. Were each of these a failure of the upstream, the breakers would open for
everybody at the worst moment. So a timer knocks every `PERIOD_S`; when it comes later than `LATE_S` that is kept, and a
time-out of an attempt that saw such a moment opens no breaker. The request is treated as after any time-out.
"""

import asyncio
import time

PERIOD_S, LATE_S = 0.1, 0.25
TIME_OUTS = frozenset({"upstream_connect_timeout", "upstream_first_byte_timeout", "upstream_stalled"})

now_ns = time.monotonic_ns


class LoopLag:
    """longest_ns: the longest so far. `begin` and `end` inside the event loop."""

    def __init__(self) -> None:
        self.longest_ns = 0
        self._due_ns: int | None = None
        self._late_ns = 0  # when the loop was last found late
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._due_ns = now_ns() + int(PERIOD_S * 1e9)
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._knock)

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
