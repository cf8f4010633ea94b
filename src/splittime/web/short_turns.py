"""Work beside an event loop that may have a token to write: it holds the interpreter's lock for `TURN_S` at a time, not
for Python's 5 ms.
"""

import sys
import threading
from collections.abc import Callable
from typing import TypeVar

TURN_S = 0.0005

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
