"""What the kernel says of the engine's thread: how long it ran, and how long it was ready to run and got no processor.

Linux counts both for each thread. What is left of a step's time after the two, the thread neither ran nor asked to: its
process was stopped, its group had used up its share, or its machine was not run by the one that hosts it.

    ran      CLOCK_THREAD_CPUTIME_ID, exact at the moment of reading
    waited   the second number of /proc/thread-self/schedstat
"""

import os
import time

from splittime.engine.recorder import ThreadTime

SCHEDSTAT = "/proc/thread-self/schedstat"


class ProcessorTime:
    """The processor time of the thread that makes this object. Only that thread may ask."""

    def __init__(self) -> None:
        """Raises OSError where the kernel does not count."""
        self._file = os.open(SCHEDSTAT, os.O_RDONLY)

    def now(self) -> ThreadTime:
        return ThreadTime(time.thread_time_ns(), int(os.pread(self._file, 64, 0).split(None, 2)[1]))

    def close(self) -> None:
        os.close(self._file)


def processor_time() -> ProcessorTime | None:
    """Returns this thread's, or None where the kernel does not count."""
    try:
        return ProcessorTime()
    except OSError:
        return None
