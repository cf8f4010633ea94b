"""How long an event loop is at work at a time: processor time of its thread, so that a busy machine changes nothing.
And for how long others keep it from its turn: all threads share the interpreter's lock, and one call may hold it."""

import asyncio
import gc
import threading
import time
from functools import cache

import orjson

MOST_MS = 15  # of a turn: the goal is 10, and what hostile bodies took before was 15 to 130
MOST_KEPT_MS = 50  # it is 15 beside a body of 4 MB, and was 4,000; on a slow machine `READS` readings of such a body
NUMBERS, READS = b"[" + b"1," * 999_999 + b"1]", 8
TRIES = 3  # where others are at work on this machine


def is_too_long(turn_ms: float, kept_ms: float) -> bool:
    return turn_ms > MOST_MS or (kept_ms > MOST_KEPT_MS and kept_ms > READS * reading_ms())


@cache
def reading_ms() -> float:
    """Returns what this machine takes to read a million numbers, which one call does under the lock."""
    taken_ms = []
    for _ in range(5):
        begin_ns = time.thread_time_ns()
        orjson.loads(NUMBERS)
        taken_ms.append((time.thread_time_ns() - begin_ns) / 1e6)
    return min(taken_ms)


class LoopMeter:
    """Measures each turn of a loop that runs in another thread, or in this one, from `begin` to `longest_ms`.

    What the tests before have left is kept from collections meanwhile, as servers keep what they were started with."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._longest_ns, self._last_ns, self._is_on = loop, 0, 0, False
        self._longest_kept_ns = self._last_wall_ns = self._last_process_ns = 0

    def begin(self) -> None:
        gc.freeze()
        self._run(self._start)

    def longest_ms(self) -> float:
        """Ends it, and returns the time of the longest turn."""
        self._run(self._stop)
        gc.unfreeze()
        return self._longest_ns / 1e6

    def longest_kept_ms(self) -> float:
        """Returns, once it has ended, the longest time without a turn in which this process's other threads worked all
        the while. On a machine that has no processor for the loop some of that may be nobody's fault."""
        return self._longest_kept_ns / 1e6

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
        self._longest_kept_ns, self._last_wall_ns, self._last_process_ns = (
            0,
            time.perf_counter_ns(),
            time.process_time_ns(),
        )
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self._is_on:
            now_ns = time.thread_time_ns()
            own_ns = now_ns - self._last_ns
            self._longest_ns = max(self._longest_ns, own_ns)
            self._last_ns = now_ns
            self._look_at_others(own_ns)
            self._loop.call_later(0.0002, self._turn)

    def _look_at_others(self, own_ns: int) -> None:
        wall_ns, process_ns = time.perf_counter_ns(), time.process_time_ns()
        others_ns, away_ns = process_ns - self._last_process_ns - own_ns, wall_ns - self._last_wall_ns - own_ns
        self._longest_kept_ns = max(self._longest_kept_ns, min(others_ns, away_ns))
        self._last_wall_ns, self._last_process_ns = wall_ns, process_ns

    def _stop(self) -> None:
        self._turn()
        self._is_on = False
