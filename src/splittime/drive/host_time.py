"""Where the host's time went beside the engine: to the garbage collector, and to whoever had the processors.

`GcPauses`. A full collection walks every live object: 100 ms and more in a large heap, when nobody expects it.
`freeze_heap` moves what start-up made out of the collector's sight and makes the young generation rarer; `GcPauses`
adds up what is left, and keeps the latest long ones with their times, for a diagnosis to hold against the gaps that
requests saw.

`ProcessorTime`. Linux counts for each thread how long it ran, and how long it was ready to run and got no processor.
What is left of a step's time after the two, the thread neither ran nor asked to: its process was stopped, its group had
used up its share, or its machine was not run by the one that hosts it.

    ran      CLOCK_THREAD_CPUTIME_ID, exact at the moment of reading
    waited   the second number of /proc/thread-self/schedstat

`MachineTime`. Linux counts for each processor how long it was busy (proc(5), /proc/stat), and for each process how long
it ran, with its children that have ended (/proc/PID/stat). Of the processors that this process may use:

    others = busy - ran by this process and its descendants

All of it counts from the machine's start, in ticks of a hundredth of a second, so a difference over a second is right
to some hundredths. What the hypervisor took is no busy time. In a container without a view of its own of /proc/stat the
others are those of the whole host.
"""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from splittime.core.clock import Clock
from splittime.core.this_process import affinity, throttled_ns
from splittime.engine.recorder import ThreadTime
from splittime.ledger.store import Ran

YOUNG_GENERATION, YOUNG_PER_MIDDLE, MIDDLE_PER_FULL = 2_000, 4, 500
"""Allocations between young collections, and how many of them there are between two of the older ones. What a hundred
open streams hold survives each young one: with 10,000 a young one had 27,000 objects to look at, a middle one 40,000
and more, and all waited for 17 ms. CPython's default of 700 costs a pass every few steps."""
LONG_NS = 1_000_000
MAX_KEPT = 64


def freeze_heap() -> None:
    """Call once, after warm-up: collect, then take all that survives out of later collections."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_GENERATION, YOUNG_PER_MIDDLE, MIDDLE_PER_FULL)


@contextmanager
def importing() -> Iterator[None]:
    """For imports of hundreds of modules, of a process of our own: nothing is collected meanwhile, and what they made
    is out of the collector's sight afterwards. They leave little garbage, which stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class GcPauses:
    """Counts collections and their time from its creation to `close`.

    latest: (begin, duration) in ns of the latest of `LONG_NS` and more, oldest first; never changed in place, so that
        any thread may read it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begin_ns = 0
        self.total_ns = 0
        self.longest_ns = 0
        self.num_collections = 0
        self.latest: tuple[tuple[int, int], ...] = ()
        gc.callbacks.append(self._on_gc)

    def summary(self) -> dict[str, float | int]:
        return {
            "collections": self.num_collections,
            "total_ms": self.total_ns / 1e6,
            "longest_ms": self.longest_ns / 1e6,
        }

    def close(self) -> None:
        gc.callbacks.remove(self._on_gc)

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begin_ns = self._clock.now_ns()
            return
        pause_ns = self._clock.now_ns() - self._begin_ns
        self.total_ns += pause_ns
        self.longest_ns = max(self.longest_ns, pause_ns)
        self.num_collections += 1
        if pause_ns >= LONG_NS:
            self.latest = (*self.latest[1 - MAX_KEPT :], (self._begin_ns, pause_ns))


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


EVERY_NS = 10**9  # a reading takes some tenths of a millisecond
STAT = Path("/proc/stat")
BUSY = (1, 2, 3, 6, 7)  # user, nice, system, irq, softirq, behind the processor's name
OWN = slice(11, 15)  # behind the process's name: user, system, and those of ended children


class MachineTime:
    """Tells `Ran`, read once a second at most."""

    def __init__(self) -> None:
        """Raises OSError where the system does not tell, ValueError where it tells something else."""
        self._tick_ns = 10**9 // os.sysconf("SC_CLK_TCK")
        self._latest, self._read_ns = self._read(), time.monotonic_ns()

    def __call__(self) -> Ran | None:
        now_ns = time.monotonic_ns()
        if now_ns - self._read_ns >= EVERY_NS:
            self._read_ns = now_ns
            try:
                self._latest = self._read()
            except (OSError, ValueError):  # a reading that fails is told as the one before
                return self._latest
        return self._latest

    def _read(self) -> Ran:
        pids = list(_tree(os.getpid()))
        own = sum(map(_own_ticks, pids))
        return Ran(own * self._tick_ns, max(0, _busy_ticks() - own) * self._tick_ns, throttled_ns(pids))


def machine_time() -> MachineTime | None:
    """Returns None where the system does not tell."""
    try:
        return MachineTime()
    except (OSError, ValueError):
        return None


def _busy_ticks() -> int:
    """Returns the busy time of the processors that this process may use."""
    usable = {f"cpu{number}" for number in affinity()}
    lines = (line.split() for line in STAT.read_text().splitlines() if line.startswith("cpu"))
    found = [sum(int(words[field]) for field in BUSY) for words in lines if words[0] in usable]
    if not found:
        raise ValueError(f"{STAT} names none of the processors {sorted(usable)}")
    return sum(found)


def _own_ticks(pid: int) -> int:
    """Returns the time of a process; 0 for one that has just ended."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return sum(map(int, told.rpartition(")")[2].split()[OWN]))


def _tree(pid: int) -> Iterator[int]:
    """A process and its descendants. Raises OSError if its children are not told."""
    yield pid
    for thread in os.listdir(f"/proc/{pid}/task"):
        for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
            try:
                yield from _tree(int(child))
            except OSError:  # it has just ended
                continue
