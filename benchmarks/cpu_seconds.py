"""CPU seconds of the processes that this one has started and that still live, and of theirs: `/proc/*/stat` (Linux)."""

import os
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds_of_children(parent: int | None = None) -> float:
    """User and system time, with that of the children they have waited for. A process that ends meanwhile counts 0."""
    stats = [found for path in Path("/proc").glob("[0-9]*/stat") if (found := _stat(path)) is not None]
    mine = {os.getpid() if parent is None else parent}
    while grown := {pid for pid, of, _ in stats if of in mine} - mine:
        mine |= grown
    root = os.getpid() if parent is None else parent
    return sum(ticks for pid, _, ticks in stats if pid in mine and pid != root) / TICKS_PER_S


def _stat(path: Path) -> tuple[int, int, int] | None:
    """Its id, its parent, and its ticks: fields 1, 4, and 14 to 17 of proc_pid_stat(5)."""
    try:
        rest = path.read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(path.parent.name), int(rest[1]), sum(map(int, rest[11:15]))
