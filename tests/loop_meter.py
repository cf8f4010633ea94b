"""How long an event loop is at work at a time: processor time of its thread, so that a busy machine changes nothing."""

import asyncio
import threading
import time


class LoopMeter:
    """Measures each turn of a loop that runs in another thread, or in this one, from `begin` to `longest_ms`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._longest_ns, self._last_ns, self._is_on = loop, 0, 0, False

    def begin(self) -> None:
        self._run(self._start)

    def longest_ms(self) -> float:
        """Ends it, and returns the time of the longest turn."""
        self._run(self._stop)
        return self._longest_ns / 1e6

    def _run(self, what) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            done = threading.Event()
            self._loop.call_soon_threadsafe(lambda: (what(), done.set()))
            assert done.wait(60)
        else:
            what()

    def _start(self) -> None:
        self._longest_ns, self._last_ns, self._is_on = 0, time.thread_time_ns(), True
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self._is_on:
            now_ns = time.thread_time_ns()
            self._longest_ns = max(self._longest_ns, now_ns - self._last_ns)
            self._last_ns = now_ns
            self._loop.call_later(0.0002, self._turn)

    def _stop(self) -> None:
        self._turn()
        self._is_on = False
