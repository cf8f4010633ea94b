"""Work that an event loop with a token to write need not wait for: beside it, the interpreter's lock is held for
`TURN_S` at a time, not for Python's 5 ms; in it, what can be put off leaves the rest to a later turn of the loop.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

TURN_S = 0.0005
MOST_PUT_OFF_NS = 2_000_000  # of a processor, in a turn of the loop

Result = TypeVar("Result")


class _Turns:
    """Has the interpreter change its turns while some thread is at such work."""

    def __init__(self) -> None:
        self._lock, self._num_at_work, self._usual_s = threading.Lock(), 0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._num_at_work += 1
            if self._num_at_work == 1:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(TURN_S)

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._num_at_work -= 1
            if self._num_at_work == 0:
                sys.setswitchinterval(self._usual_s)


_TURNS = _Turns()


def in_short_turns(work: Callable[..., Result], *args: object) -> Result:
    """Returns what the work does."""
    with _TURNS:
        return work(*args)


class LoopTurn:
    """A turn of the event loop, shared by what can be put off, in the order in which it comes: where 64 answers end at
    once, who comes need not wait for all their books."""

    def __init__(self) -> None:
        self._begin_ns: int | None = None

    async def room(self) -> None:
        """Returns in a turn that has room left."""
        while (now_ns := time.thread_time_ns()) - (self._begin_ns or now_ns) >= MOST_PUT_OFF_NS:
            await asyncio.sleep(0)
        if self._begin_ns is None:
            self._begin_ns = now_ns
            asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        self._begin_ns = None
