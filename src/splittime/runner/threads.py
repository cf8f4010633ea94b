"""How many threads a small model gets: measured at start, on the model and the machine at hand, unless asked for.

A small model's step is shorter than it takes to wake a second thread; a large one's is bound by memory that two cores
read faster than one. Where the border lies depends on the machine, and on who else uses it, so a decode step and a
prompt are timed with one thread, two, four, up to one for each core. The results are the same to the last bit. Above
`LARGE_BYTES` of weights nothing is measured: all cores pay there, and a neighbour's burst must not decide otherwise.
"""

import math
import time
from collections.abc import Callable, Sequence

LARGE_BYTES = 256 << 20
REPEATS = 6
WORTH = 0.9  # more threads must bring the typical step below this share of its time, since others may want the cores


def choose(steps: Sequence[Callable[[], object]], set_threads: Callable[[int], None], cores: int) -> tuple[int, str]:
    """The number of threads to keep (it is set), and why: the best by the geometric mean of the times of `steps`."""
    best, means, shown = 1, {}, []
    for count in _counts(cores):
        set_threads(count)
        taken_ns = [shortest_ns(step, REPEATS) for step in steps]
        means[count] = math.prod(taken_ns) ** (1 / len(steps))
        shown.append(f"{count}: {' and '.join(f'{ns / 1e6:.2f}' for ns in taken_ns)} ms")
        if means[count] < WORTH * means[best]:
            best = count
    set_threads(best)
    return best, f"measured, a decode step and a prompt by threads: {', '.join(shown)}"


def _counts(cores: int) -> list[int]:
    """1, 2, 4, .. and `cores`."""
    return [*(1 << bits for bits in range(cores.bit_length()) if 1 << bits < cores), cores]


def shortest_ns(step: Callable[[], object], repeats: int) -> int:
    taken = []
    for _ in range(repeats):
        begin = time.monotonic_ns()
        step()
        taken.append(time.monotonic_ns() - begin)
    return min(taken)
