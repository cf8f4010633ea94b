"""How much is done, counted: for laws of cost that no clock is asked for."""

import sys
from collections.abc import Callable


def calls_of(work: Callable[[], object]) -> int:
    """Returns how many functions were called, those of C among them."""
    seen: list[str] = []
    sys.setprofile(lambda frame, event, argument: seen.append(event))
    try:
        work()
    finally:
        sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in seen)
