"""Who had this machine's processors: the processes of this server, and all others.

Linux counts for each processor how long it was busy (proc(5), /proc/stat), and for each process how long it ran, with
its children that have ended (/proc/PID/stat). Of the processors that this process may use:

    others = busy - ran by this process and its descendants

All of it counts from the machine's start, in ticks of a hundredth of a second, so a difference over a second is right
to some hundredths. What the hypervisor took is no busy time. In a container without a view of its own of /proc/stat the
others are those of the whole host.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from splittime.ledger.store import Ran

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
        own = sum(map(_own_ticks, _tree(os.getpid())))
        return Ran(own * self._tick_ns, max(0, _busy_ticks() - own) * self._tick_ns)


def machine_time() -> MachineTime | None:
    """Returns None where the system does not tell."""
    try:
        return MachineTime()
    except (OSError, ValueError):
        return None


def _busy_ticks() -> int:
    """Returns the busy time of the processors that this process may use."""
    usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
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
