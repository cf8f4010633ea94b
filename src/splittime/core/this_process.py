"""Facts of this process: when it was made, and its user's cache folder (of the XDG specification)."""

import os
import time
from contextlib import suppress
from pathlib import Path

_IMPORTED_NS = time.monotonic_ns()


def process_start_ns() -> int:
    """Returns when the kernel made this process, on the monotonic clock, to 10 ms; without /proc, our first import."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # proc_pid_stat(5), from the third on
        age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - int(fields[19]) * 10**9 // os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return _IMPORTED_NS
    return min(_IMPORTED_NS, time.monotonic_ns() - age_ns)


def cache_folder() -> Path | None:
    """Returns our folder for what may be deleted at any time; None for a user without a home, as in many containers."""
    with suppress(RuntimeError):
        home = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (home if home.is_absolute() else Path.home() / ".cache") / "splittime"
    return None
