"""Facts of this process: when it was made, its user's cache folder (XDG's), its log, its heap, its parent's end.

What of this machine's processors and memory a process may use: by its affinity, and by its control groups.

A limit of a control group binds all groups below it, so those above a process's own count too, as far up as it sees
them (cgroups(7)). Version 1 has a tree of its own for each kind of limit, version 2 one for all; a machine may have
both. /proc/PID/cgroup names the groups, /proc/self/mountinfo where their trees are, and which part of each.

    quota        processor time in each period over the period: cpu.max, or cpu.cfs_quota_us and cpu.cfs_period_us
    throttled    how long it had none left while something wanted to run, summed over its processors: cpu.stat
"""

import ctypes
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath

_IMPORTED_NS = time.monotonic_ns()
PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of mallopt(3)
MOST_IN_HEAP, KEPT_FREE = 32 * 2**20, 16 * 2**20  # bytes; glibc moves its own bounds, these not


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


def log_to_stderr() -> None:
    """Tell there what is wrong, as a warning or an error, and of ours what happens, as information."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("splittime").setLevel(logging.INFO)


def share_one_heap() -> None:
    """Have all threads share one heap of glibc's malloc, which gives back what is free at its end beyond `KEPT_FREE`.
    By itself it makes one for each thread, each keeps the holes of the bodies that it read, and up to 64 MB at its
    end. Call it before there are threads. Blocks of megabytes stay in the heap: to map each anew made a body of 3 MB
    dearer by half, for its page faults."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda param, value: 0)  # of glibc alone
        for param, value in ((M_MMAP_THRESHOLD, MOST_IN_HEAP), (M_TRIM_THRESHOLD, KEPT_FREE), (M_ARENA_MAX, 1)):
            mallopt(param, value)


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


PROC = Path("/proc")


def num_cores() -> int:
    """Returns how many threads can run all the time. A part of a core is none: with one thread more than whole cores,
    all of them stand still for the rest of each period."""
    cores, quota = len(affinity()), quota_cores()
    return cores if quota is None else max(1, min(cores, int(quota)))


def affinity() -> set[int]:
    """Returns the numbers of the processors that may be used; all, where a system has no affinity."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def quota_cores() -> float | None:
    """Returns the smallest quota, in cores; None for none."""
    return min((quota for folder in _groups("cpu", "self") if (quota := _quota(folder)) is not None), default=None)


def throttled_ns(pids: Iterable[int]) -> int | None:
    """Returns how long the groups of these processes have been throttled since they were made; None if none tells."""
    told = [numbers(folder / "cpu.stat") for folder in {folder for pid in pids for folder in _groups("cpu", pid)}]
    found = [one.get("throttled_time", 1000 * one.get("throttled_usec", 0)) for one in told if "nr_throttled" in one]
    return sum(found) if found else None


def free_memory_bytes() -> int:
    """Returns what the system could give to a new process now: MemAvailable, and no more than what any group has left
    of its limit, where cached files give way."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = numbers(PROC / "meminfo").get("MemAvailable", free >> 10) << 10
    return min((free, *(room for folder in _groups("memory", "self") if (room := _room_bytes(folder)) is not None)))


def _quota(folder: Path) -> float | None:
    """Returns a group's quota in cores; None for no bound."""
    with suppress(OSError, ValueError):  # ValueError for "max"
        quota, period = map(int, (folder / "cpu.max").read_text().split())
        return quota / period
    with suppress(OSError, ValueError):
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period if quota > 0 else None
    return None


def _room_bytes(folder: Path) -> int | None:
    """Returns how much a group has left; None for no bound."""
    cached = numbers(folder / "memory.stat")
    for limit, used, files in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):  # ValueError for "max"
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            return max(0, left + cached.get(files, 0))
    return None


def _groups(controller: str, pid: int | str) -> Iterator[Path]:
    """Yields the folders of a process's groups, its own first, in both versions; none of a process that has ended."""
    with suppress(OSError):
        own = [line.split(":", 2)[1:] for line in (PROC / str(pid) / "cgroup").read_text().splitlines()]
        for name, root, mount in _trees(PROC / "self" / "mountinfo", controller):
            for path in (PurePosixPath(path) for names, path in own if name in names.split(",")):
                is_seen = path.is_relative_to(root) and ".." not in path.parts  # else it is mounted as the root
                inside = path.relative_to(root) if is_seen else PurePosixPath()
                yield from (Path(mount, folder) for folder in (inside, *inside.parents))


@cache
def _trees(mountinfo: Path, controller: str) -> tuple[tuple[str, str, str], ...]:
    """Returns of each tree of groups its name in /proc/PID/cgroup, the group that is mounted, and where."""
    found = []
    for line in mountinfo.read_text().splitlines():
        mounted, _, tree = line.partition(" - ")
        version, _, options = tree.split(" ", 2)
        if version == "cgroup2" or (version == "cgroup" and controller in options.split(",")):
            root, mount = mounted.split()[3:5]
            found.append(("" if version == "cgroup2" else controller, root, mount))
    return tuple(found)


def numbers(file: Path) -> dict[str, int]:
    """Returns its names with their numbers; {} if there is no such file."""
    with suppress(OSError):
        lines = (line.split() for line in file.read_text().splitlines())
        return {words[0].rstrip(":"): int(words[1]) for words in lines if words[1:] and words[1].isdigit()}
    return {}
