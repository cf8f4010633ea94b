"""Is a change what it was predicted to be? Runs of both sides by turns, until they decide or time is up.

The order is A B B A A B B A, so that a slow drift of the machine falls on both. After two, four and eight runs a side
(`LOOKS`):

    the SLO decides    one side keeps it in every run, the other misses it clearly (by `CLEARLY`) in every run
    figures decide     `diagnose.compare` of the runs (Welch's t on their logarithms): of the term that lacks most where
                       the present settings miss the SLO, else of the figure that is sought
    neither            more runs, up to the last look; then INCONCLUSIVE. The last four are made only for a change that
                       gained so far: p99 at an edge differs tenfold from run to run, so four a side cannot tell

Each look at the figures gets a part of the chance of a wrong verdict (Bonferroni). A change that improves the figure
but breaks an SLO that was kept is WORSE.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from splittime.bench.book.records import Run
from splittime.bench.book.slo import limits_of
from splittime.diagnose.compare import compare
from splittime.diagnose.comparison import Comparison, Terms, Verdict
from splittime.stats.intervals import CONFIDENCE
from splittime.tune.goal import WORTH_IT, Goal, Score, gain, score_of

CLEARLY = math.log(1.05)
LOOKS = (2, 4, 8)  # runs a side after which they are judged
OF_THE_CLIENT = {"itl": "chunk_gap"}  # what the server's own clock says has no interval between two servers

Measure = Callable[[Mapping[str, Any], int], Run]


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """before, after: the scores of both sides' runs. comparison: None where the SLO decided, or nothing could."""

    verdict: Verdict
    why: str
    before: tuple[Score, ...]
    after: tuple[Score, ...]
    comparison: Comparison | None = None

    @property
    def gain(self) -> float | None:
        """Returns what was gained, from the middle run of one side to the other's."""
        if not self.before or not self.after:
            return None
        return gain(middle(self.before), middle(self.after))


def middle(scores: Sequence[Score]) -> Score:
    """Returns the one with the median slack, the lower of two."""
    return sorted(scores, key=lambda score: score.slack)[(len(scores) - 1) // 2]


def verify(
    measure: Measure, base: Mapping[str, Any], changed: Mapping[str, Any], goal: Goal, has_time: Callable[[], bool]
) -> Verified:
    """Returns the verdict on `changed` against `base`. measure: gives the run of these changes with that number.
    has_time: whether another pair of runs may be made."""
    a, b = list[Run](), list[Run]()
    found = Verified(verdict=Verdict.INCONCLUSIVE, why="no time was left to measure it.", before=(), after=())
    while len(a) < runs_for(len(a), found.gain) and has_time():
        sides = ((a, base), (b, changed))
        for side, changes in sides if len(a) % 2 == 0 else reversed(sides):
            side.append(measure(changes, len(side)))
        found = decided(a, b, goal)
        if found.verdict is not Verdict.INCONCLUSIVE:
            break
    return found


def runs_for(made: int, gained: float | None) -> int:
    """Returns how many runs a side a change gets that has so many, has gained so much and is not decided."""
    has_more = made > LOOKS[-2] or (made == LOOKS[-2] and gained is not None and gained > WORTH_IT)
    return LOOKS[-1] if has_more else LOOKS[-2]


def decided(a: Sequence[Run], b: Sequence[Run], goal: Goal) -> Verified:
    """Returns what these runs say of B against A."""
    before, after = (tuple(score_of(run, goal) for run in runs) for runs in (a, b))
    if len(a) not in LOOKS:
        judged_after = f"{', '.join(map(str, LOOKS[:-1]))} and {LOOKS[-1]}"
        why = f"time was up after {len(a)} a side; runs are judged after {judged_after}."
        return Verified(verdict=Verdict.INCONCLUSIVE, why=why, before=before, after=after)
    by_slo = _by_slo(before, after)
    if by_slo is not None:
        return Verified(verdict=by_slo[0], why=by_slo[1], before=before, after=after)
    metric = _metric(before, goal)
    limits = limits_of(goal.slo, {}) or None
    found = compare(a, b, Terms(metrics=(metric,), confidence=1 - (1 - CONFIDENCE) / len(LOOKS), limits=limits))
    verdict, why = found.verdict, found.why
    if verdict is Verdict.BETTER and middle(before).keeps and not middle(after).keeps:
        verdict, why = Verdict.WORSE, f"{why} But {middle(after).weakest} of the SLO is missed with it."
    return Verified(verdict=verdict, why=why, before=before, after=after, comparison=found)


def _by_slo(before: Sequence[Score], after: Sequence[Score]) -> tuple[Verdict, str] | None:
    """Returns a verdict where one side keeps the SLO and the other clearly does not."""
    for verdict, kept, missed, words in (
        (Verdict.BETTER, after, before, "kept with it and missed without it"),
        (Verdict.WORSE, before, after, "kept without it and missed with it"),
    ):
        if all(score.keeps for score in kept) and all(score.slack < -CLEARLY for score in missed):
            return verdict, f"{middle(missed).weakest} of the SLO is {words}, in each of {len(kept)} runs a side."
    return None


def _metric(before: Sequence[Score], goal: Goal) -> str:
    """Returns the figure that decides: what is sought if the present settings keep the SLO, else the term of the SLO
    that lacks most (`OF_THE_CLIENT` where it is the server's). For a share (goodput, errors) `compare` takes the
    difference."""
    if middle(before).keeps:
        return goal.seeks
    series, _, statistic = middle(before).weakest.rpartition("_")
    return f"{OF_THE_CLIENT[series]}_{statistic}" if series in OF_THE_CLIENT else middle(before).weakest
