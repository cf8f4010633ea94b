"""Work beside an event loop that may have a token to write: it holds the interpreter's lock for `TURN_S` at a time, not
for Python's 5 ms.

What a client sent is read here (`read_beside`), unless it is short: what is made of a body of 4 MB takes up to 0.1 s.
The largest bodies have a thread of their own, so that no other waits behind them.
"""

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

TURN_S = 0.0005
SHORT_BYTES = 2**15  # of a body, read in at most 2 ms
GIANT_BYTES = 2**18

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


@cache
def _reader(is_giant: bool) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="reading-giants" if is_giant else "reading-bodies")


async def read_beside(num_bytes: int, work: Callable[..., Result], *args: object) -> Result:
    """Returns what the work makes of so many bytes: of few of them here and now, else in a thread."""
    if num_bytes <= SHORT_BYTES:
        return work(*args)
    reader = _reader(num_bytes > GIANT_BYTES)
    return await asyncio.get_running_loop().run_in_executor(reader, in_short_turns, work, *args)
