"""What tuning is for: first that the SLO is kept, then as much as can be had of one figure.

A run's *slack* says how far it is from its SLO: of each term the logarithm of limit over value (of value over limit
where more is better), and of these the least. Not below 0: kept. Its *worth* is the logarithm of the figure that is
sought, with its sign turned where less is better. So both are differences in shares: 0.05 is about five in a hundred.
"""

import math
import operator
import statistics
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from splittime.bench.book.figures import summary
from splittime.bench.book.metrics import HIGHER_IS_BETTER, failed_by_lateness, parse_metric, value_of, void_for_more
from splittime.bench.book.records import Ending, Run
from splittime.bench.book.slo import SloResult, check_slo, check_terms, judge, limits_of, still_missed

WORTH_IT = math.log(1.05)  # a smaller gain does not pay for a change: it is within what a machine's hours differ by
MOST = 5.0
FEW_STEPS = 20


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
    """Returns whether nothing is left to gain: the SLO is kept, and the server writes as many tokens a second as the
    load asks for. False for a goal that does not seek throughput, and for a load without expected lengths."""
    asked = [o.expected_output_tokens for o in run.measured() if o.ending is not Ending.CANCELLED]
    seconds = (run.measured_until_ns - run.measured_from_ns) / 1e9
    if goal.seeks != "throughput" or not score.keeps or score.value is None or None in asked or seconds <= 0:
        return False
    return score.value * math.exp(WORTH_IT) >= sum(filter(None, asked)) / seconds


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
