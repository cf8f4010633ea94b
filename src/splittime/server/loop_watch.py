"""The event loop's own stalls: how long it did not look at its sockets, and what may have lain there meanwhile.

A request's account begins when its head has been read. The time that it lay in the socket before, because the loop was
busy with others' work, is in no account: the kernel does not say when bytes came. But a loop goes round, sockets,
timers, tasks, sockets ..., so a tick that is due in each turn bounds it: bytes that are read now came after the sockets
were looked at the time before, and that was between the last tick and the one before. The bound is what `unseen_ns`
says, 0 where it is short. A new connection is taken in one turn and read in the next, so its first request may have
waited since the tick before that.
"""

import asyncio
from typing import NamedTuple

from splittime.core.clock import Clock

TICK_S = 0.005
LONG_NS = 15_000_000
"""Three ticks: less may be the ticks' own length."""
MAX_KEPT = 64


class Accepted(NamedTuple):
    """When a connection was taken: at which tick, and since when it may have waited for that."""

    num_ticks: int
    since_ns: int


class LoopWatch:
    """Ticks from `start` to `stop`.

    latest: (begin, duration) in ns of the latest stalls of `LONG_NS` and more, oldest first; never changed in place.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self.num_ticks = 0
        self.ticked_ns = self._ticked_before_ns = 0  # the last tick, and the one before
        self.num_stalls = self.total_ns = self.longest_ns = 0
        self.latest: tuple[tuple[int, int], ...] = ()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ticked_ns = self._ticked_before_ns = self._clock.now_ns()
        self._timer = loop.call_later(TICK_S, self._tick, loop)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def accept(self) -> "Accepted":
        """To be called when a connection is taken, and kept for its first request."""
        return Accepted(self.num_ticks, self._since_ns)

    def unseen_ns(self, now_ns: int, accepted: "Accepted | None") -> int:
        """How long, at the most, what is read now lay in its socket; 0 if that is short."""
        is_first = accepted is not None and self.num_ticks - accepted.num_ticks <= 1
        since_ns = accepted.since_ns if accepted is not None and is_first else self._since_ns
        return now_ns - since_ns if self._timer is not None and now_ns - since_ns >= LONG_NS else 0

    @property
    def _since_ns(self) -> int:
        """No later than the last look at the sockets; the last tick where that cannot have been long before it."""
        return self._ticked_before_ns if self.ticked_ns - self._ticked_before_ns >= LONG_NS else self.ticked_ns

    def summary(self) -> dict[str, float | int]:
        return {"stalls": self.num_stalls, "total_ms": self.total_ns / 1e6, "longest_ms": self.longest_ns / 1e6}

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now_ns = self._clock.now_ns()
        stall_ns = now_ns - self.ticked_ns
        if stall_ns >= LONG_NS:
            self.num_stalls += 1
            self.total_ns += stall_ns
            self.longest_ns = max(self.longest_ns, stall_ns)
            self.latest = (*self.latest[1 - MAX_KEPT :], (self.ticked_ns, stall_ns))
        self.num_ticks += 1
        self._ticked_before_ns, self.ticked_ns = self.ticked_ns, now_ns
        self._timer = loop.call_later(TICK_S, self._tick, loop)
