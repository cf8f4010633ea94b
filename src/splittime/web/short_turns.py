"""Work beside an event loop that may have a token to write: it holds the interpreter's lock for `TURN_S` at a time, not
for Python's 5 ms."""

import sys
from collections.abc import Callable
from typing import Any

TURN_S = 0.0005


def in_short_turns(work: Callable[..., bytes], *args: Any) -> bytes:
    """Returns what the work does. One thread of a process at a time may call it."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(TURN_S)
    try:
        return work(*args)
    finally:
        sys.setswitchinterval(usual_s)
