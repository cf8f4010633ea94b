"""How long an event loop is at work at a time: processor time of its thread, so that a busy machine changes nothing.
And for how long others keep it from its turn: all threads share the interpreter's lock, and one call may hold it."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path

import orjson

MOST_MS = 15  # of a turn: the goal is 10, and what hostile bodies took before was 15 to 130
MOST_KEPT_MS = 50  # it is 15 beside a body of 4 MB, and was 4,000
NUMBERS = b"[" + b"1," * 999_999 + b"1]"
TURN_READS, KEPT_READS = 2, 8  # on a slow machine: as long as so many readings of `NUMBERS`, measured at that moment
TRIES = 5  # where others are at work on this machine


def is_too_long(turn_ms: float, kept_ms: float = 0.0) -> bool:
    if turn_ms <= MOST_MS and kept_ms <= MOST_KEPT_MS:
        return False
    now_ms = reading_ms()
    return turn_ms > max(MOST_MS, TURN_READS * now_ms) or kept_ms > max(MOST_KEPT_MS, KEPT_READS * now_ms)


def reading_ms() -> float:
    """Returns what this machine takes now to read a million numbers, which one call does under the lock."""
    taken_ms = []
    for _ in range(3):
        begin_ns = time.thread_time_ns()
        orjson.loads(NUMBERS)
        taken_ms.append((time.thread_time_ns() - begin_ns) / 1e6)
    return min(taken_ms)


def waited_ns() -> int:
    """Returns how long this thread has been ready without a processor since it began: no wait for a lock is in it."""
    return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1])


class LoopMeter:
    """Measures each turn of a loop that runs in another thread, or in this one, from `begin` to `longest_ms`.

    What the tests before have left is kept from collections meanwhile, as servers keep what they were started with."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._longest_ns, self._last_ns, self._is_on = loop, 0, 0, False
        self._longest_kept_ns = self._last_wall_ns = self._last_process_ns = self._last_waited_ns = 0

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
        the while, less what the loop waited for a processor."""
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
        self._longest_ns, self._longest_kept_ns, self._is_on = 0, 0, True
        self._last_ns, self._last_wall_ns = time.thread_time_ns(), time.perf_counter_ns()
        self._last_process_ns, self._last_waited_ns = time.process_time_ns(), waited_ns()
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
        wall_ns, process_ns, ready_ns = time.perf_counter_ns(), time.process_time_ns(), waited_ns()
        others_ns = process_ns - self._last_process_ns - own_ns
        away_ns = wall_ns - self._last_wall_ns - own_ns - (ready_ns - self._last_waited_ns)
        self._longest_kept_ns = max(self._longest_kept_ns, min(others_ns, away_ns))
        self._last_wall_ns, self._last_process_ns, self._last_waited_ns = wall_ns, process_ns, ready_ns

    def _stop(self) -> None:
        self._turn()
        self._is_on = False


def tried(meter: LoopMeter, ask: Callable[[], object]) -> tuple[float, float]:
    """Ask, up to `TRIES` times, until it is not too long. Returns the longest turn, and how long the loop was kept
    from one, in ms."""
    taken_ms = (0.0, 0.0)
    for _ in range(TRIES):
        meter.begin()
        ask()
        taken_ms = (meter.longest_ms(), meter.longest_kept_ms())
        if not is_too_long(*taken_ms):
            break
    return taken_ms
