"""How many threads a small model gets: measured at start, on the model and the machine at hand, unless asked for.

A small model's step is shorter than it takes to wake a second thread; a large one's is bound by memory that two cores
read faster than one. Where the border lies depends on the machine, so steps as they will be served (one request, a
batch, a prompt) are timed with one thread, two, four, up to one for each core. The results are the same to the last
bit. Above `LARGE_BYTES` of weights nothing is measured: all cores pay there.

A choice must not hang on a burst of somebody else's load. The numbers of threads take turns, round after round, and are
compared within a round; what counts is the median of the rounds. Measuring goes on until nearly all rounds agree about
each comparison, or the time is up; more threads are taken only where they do. So where the difference is noise there is
one thread, at every start.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

LARGE_BYTES = 256 << 20
MIN_ROUNDS = 5
BUDGET_S = 0.4  # a start may take so much longer by it, beyond the least number of rounds
WORTH = 0.9  # more threads must bring the typical step below this share of its time, since others may want the cores
AGREE = 0.8  # of the rounds

Step = Callable[[], object]


class ThreadCount(msgspec.Struct, frozen=True):
    """reason: the evidence, in words."""

    threads: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    reason: str


@dataclass(frozen=True)
class Round:
    """One turn of each number of threads: what each step took, in ns."""

    taken_ns: dict[int, list[int]]

    def ratio(self, more: int, fewer: int) -> float:
        """Returns the ratio of the times of all steps with these numbers of threads: the geometric mean."""
        pairs = zip(self.taken_ns[more], self.taken_ns[fewer], strict=True)
        return math.prod(one / other for one, other in pairs) ** (1 / len(self.taken_ns[more]))


def choose(steps: Mapping[str, Step], set_threads: Callable[[int], None], cores: int) -> ThreadCount:
    """The number of threads to keep; it is set. steps: by what they are."""
    counts, rounds = _counts(cores), list[Round]()
    begin_ns = time.monotonic_ns()
    while len(rounds) < MIN_ROUNDS or not _is_sure(rounds, counts):
        if len(rounds) >= MIN_ROUNDS and time.monotonic_ns() - begin_ns > BUDGET_S * 1e9:
            break
        rounds.append(_round(list(steps.values()), set_threads, counts))
    best = _best(rounds, counts)
    set_threads(best)
    return ThreadCount(best, _reason(list(steps), rounds, counts))


def _counts(cores: int) -> list[int]:
    """1, 2, 4, .. and `cores`."""
    return [*(1 << bits for bits in range(cores.bit_length()) if 1 << bits < cores), cores]


def _round(steps: Sequence[Step], set_threads: Callable[[int], None], counts: Sequence[int]) -> Round:
    taken_ns: dict[int, list[int]] = {}
    for count in counts:
        set_threads(count)
        taken_ns[count] = [shortest_ns(step, 2) for step in steps]  # the first call wakes the threads
    return Round(taken_ns)


def shortest_ns(step: Step, repeats: int) -> int:
    taken = []
    for _ in range(repeats):
        begin_ns = time.monotonic_ns()
        step()
        taken.append(time.monotonic_ns() - begin_ns)
    return max(1, min(taken))


def _best(rounds: Sequence[Round], counts: Sequence[int]) -> int:
    best = counts[0]
    for count in counts[1:]:
        if _share_that_pays(rounds, count, best) >= AGREE:
            best = count
    return best


def _is_sure(rounds: Sequence[Round], counts: Sequence[int]) -> bool:
    """Nearly all rounds say the same of each number against the best of those before it."""
    shares = [_share_that_pays(rounds, count, _best(rounds, counts[:at])) for at, count in enumerate(counts) if at]
    return all(share >= AGREE or share <= 1 - AGREE for share in shares)


def _share_that_pays(rounds: Sequence[Round], more: int, fewer: int) -> float:
    """Returns the share of the rounds in which the larger number is worth it."""
    return statistics.fmean(one.ratio(more, fewer) < WORTH for one in rounds)


def _reason(names: Sequence[str], rounds: Sequence[Round], counts: Sequence[int]) -> str:
    told = []
    for count in counts:
        typical = (statistics.median(taken) / 1e6 for taken in zip(*(r.taken_ns[count] for r in rounds), strict=True))
        against = statistics.median(one.ratio(count, 1) for one in rounds)
        worth = f" ({against:.2f} of the time with 1)" if count > 1 else ""
        told.append(f"{count}: {' and '.join(f'{ms:.2f}' for ms in typical)} ms{worth}")
    return f"measured in {len(rounds)} rounds, {', '.join(names)} by threads: {', '.join(told)}"
