"""How many processors this process may use."""

import os


def num_cores() -> int:
    """Returns how many threads can run at the same time: what the affinity allows; all, where a system has none."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
