"""Where time comes from. Only drivers and the two edges (receive, send) hold a clock; the rest is told `now_ns`.

`SystemClock` is `CLOCK_MONOTONIC`, which all processes of one Linux host share, so a server and its engine may
compare readings. `VirtualClock` is moved by hand: the simulator and the law tests run the real loop under it.
"""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    def now_ns(self) -> int:
        """Nanoseconds on a monotonic clock."""
        ...


class SystemClock:
    now_ns = staticmethod(time.monotonic_ns)


class VirtualClock:
    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance(self, delta_ns: int) -> None:
        if delta_ns < 0:
            raise ValueError(f"time cannot go back: delta_ns={delta_ns}")
        self._now_ns += delta_ns

    def advance_to(self, at_ns: int) -> None:
        """Unless it is later already."""
        self._now_ns = max(self._now_ns, at_ns)


def utc_text(unix_s: float) -> str:
    """Returns an instant to the second, as 2026-11-28T20:11:00Z."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
