"""A process that must not outlive another: the one that started it, or any that it is told of."""

import ctypes
import os
import select
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1


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
