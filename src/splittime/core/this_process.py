"""Facts of this process: when it was made, its user's cache folder (of the XDG specification), and its parent's end."""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

_IMPORTED_NS = time.monotonic_ns()
PR_SET_PDEATHSIG = 1


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


def end_with(parent: int, sign: signal.Signals = signal.SIGKILL) -> None:
    """Leave this process to end with its parent, by this signal; at once, if it is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, sign)
    if os.getppid() != parent:
        os._exit(0)


def end_when_gone(pid: int, sign: signal.Signals = signal.SIGTERM) -> None:
    """Leave this process to get a signal when another has ended, which need not be its parent; it ends at once if that
    is gone already. Linux alone can watch so; elsewhere `AttributeError`."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(0)
    threading.Thread(target=_signal_when_readable, args=(watched, sign), name="watching", daemon=True).start()


def _signal_when_readable(watched: int, sign: signal.Signals) -> None:
    select.select([watched], [], [])
    os.kill(os.getpid(), sign)
