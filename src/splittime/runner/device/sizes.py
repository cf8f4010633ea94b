"""For which numbers of decode rows a step is captured.

More sizes are less padding, but each keeps memory and takes start-up time. Which pay depends on the model and the card:
where a step is as long as reading the weights takes, 5 rows cost what 8 cost. So candidates are captured, replayed and
timed, and one is kept only if the next larger one that is kept would take noticeably longer.
"""

from collections.abc import Mapping

CANDIDATES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
LEAST_SAVING = 0.02
"""Of a step's time: less is within the spread of replays."""


def candidates(max_num_seqs: int) -> tuple[int, ...]:
    """Up to the smallest that holds as many as may run, if there is one."""
    below = [size for size in CANDIDATES if size < max_num_seqs]
    return (*below, *[size for size in CANDIDATES if size >= max_num_seqs][:1])


def worth_keeping(times_ns: Mapping[int, float], least_saving: float = LEAST_SAVING) -> tuple[int, ...]:
    """Of the sizes whose replays take so long: the largest, and each that saves as much beside the next one kept."""
    kept: list[int] = []
    for size in sorted(times_ns, reverse=True):
        if not kept or times_ns[size] <= (1 - least_saving) * times_ns[kept[-1]]:
            kept.append(size)
    return tuple(reversed(kept))
