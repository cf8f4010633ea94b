"""How many threads: measured at start, on the model and the machine at hand, unless it was asked for.

A small model's step is shorter than it takes to wake a second thread; a large one's is bound by memory that two cores
read faster than one. Where the border lies depends on the machine, and on who else uses it, so a decode step is
timed with one thread and with twice as many each, up to one for each core. The results are the same to the last bit.
"""

import time
from collections.abc import Callable

REPEATS = 6
WORTH = 0.9  # more threads must bring a step below this share of its time, since others may want the cores


def choose(step: Callable[[], object], set_threads: Callable[[int], None], cores: int) -> tuple[int, str]:
    """The number of threads to keep (it is set), and why. `step` runs one decode step."""
    best, timings = 1, {}
    threads = 1
    while True:
        set_threads(threads)
        timings[threads] = shortest_ns(step, REPEATS)
        if timings[threads] < WORTH * timings[best]:
            best = threads
        if threads == cores:
            break
        threads = min(2 * threads, cores)
    set_threads(best)
    shown = ", ".join(f"{count}: {ns / 1e6:.2f} ms" for count, ns in timings.items())
    return best, f"measured, a decode step by threads: {shown}"


def shortest_ns(step: Callable[[], object], repeats: int) -> int:
    taken = []
    for _ in range(repeats):
        begin = time.monotonic_ns()
        step()
        taken.append(time.monotonic_ns() - begin)
    return min(taken)
