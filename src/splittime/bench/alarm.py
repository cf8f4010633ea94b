"""Callbacks at an instant of the monotonic clock, within microseconds.

An event loop's own timers have the grain of the millisecond that epoll is given: at 200 requests a second that is an
error in every arrival. `Alarm` has the kernel wake the loop at the nanosecond (timerfd on Linux). Where there is no
timerfd the loop's timer is asked for a little earlier, and the rest is spun away, one turn of the loop after another.
"""

import asyncio
import contextlib
import ctypes
import heapq
import os
import sys
import time
from collections.abc import Callable

now_ns = time.monotonic_ns

_CLOCK_MONOTONIC = 1
_NONBLOCK_CLOEXEC = 0o4000 | 0o2000000
_ABSOLUTE = 1
_GRAIN_NS = 1_500_000  # of an event loop's own timers


class AlarmEntry:
    """One callback to come. `cancel` forgets it."""

    __slots__ = ("at_ns", "callback", "place")

    def __init__(self, at_ns: int, place: int, callback: Callable[[], None]) -> None:
        self.at_ns, self.place = at_ns, place
        self.callback: Callable[[], None] | None = callback

    def __lt__(self, other: "AlarmEntry") -> bool:
        return (self.at_ns, self.place) < (other.at_ns, other.place)

    def cancel(self) -> None:
        self.callback = None


class Alarm:
    """All instants that one event loop waits for. Entries of one instant are called in the order they were made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._entries: list[AlarmEntry] = []
        self._count = 0
        self._armed_ns: int | None = None
        self._timer = make_timer(self._loop, self._ring)

    def call_at(self, at_ns: int, callback: Callable[[], None]) -> AlarmEntry:
        self._count += 1
        entry = AlarmEntry(at_ns, self._count, callback)
        heapq.heappush(self._entries, entry)
        self._arm()
        return entry

    async def sleep_until(self, at_ns: int) -> None:
        """Returns at once for an instant that has passed."""
        if at_ns <= now_ns():
            return
        rung = self._loop.create_future()
        entry = self.call_at(at_ns, lambda: None if rung.done() else rung.set_result(None))
        try:
            await rung
        finally:
            entry.cancel()

    def close(self) -> None:
        self._entries.clear()
        self._timer.close()

    def _arm(self) -> None:
        while self._entries and self._entries[0].callback is None:
            heapq.heappop(self._entries)
        first_ns = self._entries[0].at_ns if self._entries else None
        if first_ns is not None and (self._armed_ns is None or first_ns < self._armed_ns):
            self._armed_ns = first_ns
            self._timer.set(first_ns)

    def _ring(self) -> None:
        self._armed_ns = None
        at_ns = now_ns()
        while self._entries and self._entries[0].at_ns <= at_ns:
            entry = heapq.heappop(self._entries)
            callback, entry.callback = entry.callback, None  # what it holds is free at once
            if callback is not None:
                callback()
        self._arm()


class _ITimerSpec(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns"))


class KernelTimer:
    """A timerfd that the event loop watches."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._file = self._library.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop, self._on_ring = loop, ring
        loop.add_reader(self._file, self._read)

    def set(self, at_ns: int) -> None:
        seconds, rest_ns = divmod(max(1, at_ns), 1_000_000_000)
        value = _ITimerSpec(0, 0, seconds, rest_ns)
        self._library.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(value), None)

    def close(self) -> None:
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):  # set anew since it rang
            os.read(self._file, 8)
        self._on_ring()


class LoopTimer:
    """The event loop's own timer, and for the last stretch its turns."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop, self._on_ring = loop, ring
        self._handle: asyncio.Handle | None = None

    def set(self, at_ns: int) -> None:
        self.close()
        left_ns = at_ns - now_ns()
        if left_ns <= 0:
            self._handle = self._loop.call_soon(self._on_ring)
        elif left_ns <= _GRAIN_NS:
            self._handle = self._loop.call_soon(self.set, at_ns)
        else:
            self._handle = self._loop.call_later((left_ns - _GRAIN_NS) / 1e9, self.set, at_ns)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def make_timer(loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> KernelTimer | LoopTimer:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError, NotImplementedError):
            return KernelTimer(loop, ring)
    return LoopTimer(loop, ring)
