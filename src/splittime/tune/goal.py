"""What tuning is for: first that the SLO is kept, then as much as can be had of one figure.

A run's *slack* says how far it is from its SLO: of each term the logarithm of limit over value (of value over limit
where more is better), and of these the least. Not below 0: kept. Its *worth* is the logarithm of the figure that is
sought, with its sign turned where less is better. So both are differences in shares: 0.05 is about five in a hundred.

Is a change what it was predicted to be? Runs of both sides by turns, until they decide or time is up.

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
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from splittime.bench.book.figures import summary
from splittime.bench.book.metrics import HIGHER_IS_BETTER, failed_by_lateness, parse_metric, value_of, void_for_more
from splittime.bench.book.records import Ending, Run
from splittime.bench.book.slo import SloResult, check_slo, check_terms, judge, limits_of, still_missed
from splittime.diagnose.compare import compare
from splittime.diagnose.comparison import Comparison, Terms, Verdict
from splittime.stats.intervals import CONFIDENCE

WORTH_IT = math.log(1.05)  # a smaller gain does not pay for a change: it is within what a machine's hours differ by
MOST = 5.0
FEW_STEPS = 20
CLEARLY = math.log(1.05)
LOOKS = (2, 4, 8)  # runs a side after which they are judged
OF_THE_CLIENT = {"itl": "chunk_gap"}  # what the server's own clock says has no interval between two servers

Measure = Callable[[Mapping[str, Any], int], Run]


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """slo: terms in base units, as `parse_slo` gives them. seeks: the metric that counts once the SLO is kept."""

    slo: dict[str, float]
    seeks: str = "throughput"

    def check(self) -> None:
        """Raises ConfigError for a term or a metric that nobody knows."""
        check_terms(self.slo)
        parse_metric(self.seeks)


class Score(NamedTuple):
    """A run by its goal. terms: the value of each of the SLO's, those that are known, in base units. weakest: the term
    that has the least slack. value: of the figure that is sought; None if the run cannot tell."""

    slack: float
    worth: float
    weakest: str
    terms: dict[str, float]
    value: float | None

    @property
    def keeps(self) -> bool:
        return self.slack >= 0


def score_of(run: Run, goal: Goal) -> Score:
    """Returns how a run, real or simulated, did."""
    found = summary(run, limits=limits_of(goal.slo, run.slo))
    results = judge(found, goal.slo)
    slack, weakest = min((slack_of(result), result.name) for result in results)
    terms = {result.name: result.value for result in results if result.value is not None}
    value = value_of(found, goal.seeks)
    return Score(slack, _worth(goal.seeks, value), weakest, terms, value)


def fault_of(run: Run, goal: Goal) -> str | None:
    """Returns why a void run tells nothing of the server; None for one that tells. Lateness only lengthens times: an
    SLO that was kept with it was kept, and one that is missed with the lateness taken off was missed."""
    if not run.is_void:
        return None
    results = check_slo(run, goal.slo)
    is_told = all(result.ok for result in results) or any(still_missed(run, result) for result in results)
    faults = void_for_more(run) or ([] if is_told else failed_by_lateness(run))
    return "; ".join(check.sentence for check in faults) or None


def slack_of(result: SloResult) -> float:
    """Returns the logarithm by which a term is kept, or missed if it is negative; at most `MOST` either way."""
    if result.value is None:
        return -MOST
    low, high = (result.limit, result.value) if result.name in HIGHER_IS_BETTER else (result.value, result.limit)
    if low <= 0:
        return MOST
    return max(-MOST, min(MOST, math.log(high / low))) if high > 0 else -MOST


def gain(before: Score, after: Score, is_missed: bool = False) -> float:
    """Returns what is gained from one to the other, as the logarithm of a ratio: of what the SLO lacks as long as it is
    missed, then of the figure that is sought. What breaks a kept SLO gains nothing, whatever else it does. is_missed:
    by real runs, whatever `before` says."""
    if is_missed or not before.keeps:
        return after.slack - before.slack
    return after.worth - before.worth if after.keeps else after.slack


def best_of(scores: Mapping[str, Score]) -> list[str]:
    """Returns the names, best first: those that keep the SLO before the others; of these by worth in steps of
    `WORTH_IT`, and within a step by slack; of the others by slack."""
    return sorted(scores, key=lambda name: _rank(scores[name]), reverse=True)


def _rank(score: Score) -> tuple[bool, float, float]:
    return (True, round(score.worth / WORTH_IT), score.slack) if score.keeps else (False, score.slack, score.worth)


def has_all_that_was_asked(run: Run, goal: Goal, score: Score) -> bool:
    """Returns whether nothing is left to gain: the SLO is kept, and the tokens a second do not say that the server
    writes fewer than asked. False for a goal that does not seek throughput, and without expected lengths."""
    asked = [o.expected_output_tokens for o in run.measured() if o.ending is not Ending.CANCELLED]
    seconds = (run.measured_until_ns - run.measured_from_ns) / 1e9
    if goal.seeks != "throughput" or not score.keeps or not score.value or None in asked or seconds <= 0:
        return False
    told = summary(run).output_token_rate.interval
    most = told.high if told is not None and told.high is not None else math.inf
    return max(most, score.value * math.exp(WORTH_IT)) >= sum(filter(None, asked)) / seconds


def _worth(name: str, value: float | None) -> float:
    if value is None or value <= 0:
        return -MOST * 10
    return math.log(value) if name in HIGHER_IS_BETTER else -math.log(value)


def quicker(before: Run, after: Run) -> float:
    """Returns how much quicker a step is, as the logarithm of a ratio: medians of steps of as many rows, weighted by
    how many there are. Queues make much of a little noise; steps do not. 0 where no such steps are in both."""
    one, other = (_by_rows(run) for run in (before, after))
    both = [rows for rows in one if len(one[rows]) >= FEW_STEPS and len(other.get(rows, ())) >= FEW_STEPS]
    weights = [min(len(one[rows]), len(other[rows])) for rows in both]
    ratios = [math.log(statistics.median(one[rows]) / statistics.median(other[rows])) for rows in both]
    return sum(map(operator.mul, weights, ratios)) / sum(weights) if both else 0.0


def _by_rows(run: Run) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for step in run.arms[0].steps:
        found.setdefault(len(step.rows), []).append(max(1, step.end_ns - step.begin_ns))
    return found


def best_terms(found: list[Score]) -> dict[str, float]:
    """Returns for each term of the SLO the best value that any of the runs had: what can be met of it on its own."""
    names = dict.fromkeys(name for score in found for name in score.terms)
    best = {}
    for name in names:
        values = [score.terms[name] for score in found if name in score.terms]
        best[name] = max(values) if name in HIGHER_IS_BETTER else min(values)
    return best


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
