"""Is B better than A? A ratio B / A for each metric, with an interval, and one of four verdicts.

    EQUIVALENT     the whole interval lies within the margin, 1 / (1 + margin) to 1 + margin
    BETTER, WORSE  the interval leaves out 1 (and is not within the margin)
    INCONCLUSIVE   neither: the data allow both a difference that matters and none

The intervals hold *together* with the confidence asked for: each has 1 - (1 - confidence) / metrics (Bonferroni), so
with no difference at all the chance of any BETTER or WORSE is at most 1 - confidence. The overall verdict: WORSE if any
metric is (a gain elsewhere does not pay for it), else BETTER if any is, else that of the first metric, the primary. By
default that is the mean response time: every delay of a request is in it, none can hide by moving from TTFT to TPOT, at
a fixed concurrency it is the throughput's inverse (Little's law), and some hundred requests estimate it, where a p99 of
their TTFT rests on a few of them. A void run makes everything INCONCLUSIVE.

How the interval is made:
    paired     one run of two servers, or two runs of one schedule: the same requests are drawn on both sides, so that
               what they share (lengths, arrivals) cancels
    unpaired   two runs: blocks over time, drawn on each side on its own
    runs       two or more runs a side: Welch's t on the logarithms of the runs' own figures, as a server differs from
               start to start and a bootstrap of three runs knows only three values
Shares (goodput, error rate) are compared by their difference, the margin being `SHARE_MARGIN`.
"""

from collections.abc import Mapping, Sequence
from math import ceil, log

import msgspec
import numpy as np

from splittime.core.errors import ConfigError
from splittime.diagnose.compare_notes import notes_of, reasons_to_doubt
from splittime.diagnose.compare_sample import Drawn, Pairs, Side, draw, pair, sample, value
from splittime.diagnose.comparison import (
    DEFAULT_METRICS,
    EXIT_CODES,
    SHARE_MARGIN,
    Compared,
    Comparison,
    Design,
    Terms,
    Verdict,
)
from splittime.ledger.client_book import Run
from splittime.ledger.client_intervals import Interval, interval, t_quantile
from splittime.ledger.client_metrics import Metric, parse_metric
from splittime.ledger.client_request import PER_REQUEST_LIMITS

__all__ = [
    "DEFAULT_METRICS",
    "EXIT_CODES",
    "SHARE_MARGIN",
    "Compared",
    "Comparison",
    "Design",
    "Terms",
    "Verdict",
    "compare",
    "compare_arms",
    "judge",
    "overall",
    "welch",
]


def compare(
    a: Run | Sequence[Run], b: Run | Sequence[Run], terms: Terms | None = None, **changes: object
) -> Comparison:
    """B against A; each a run, or several of the same. `changes` are to the terms: metrics, margin, confidence, ..."""
    first, second = ([Side(run, 0) for run in ([given] if isinstance(given, Run) else given)] for given in (a, b))
    return _compare(first, second, msgspec.structs.replace(terms or Terms(), **changes))


def compare_arms(run: Run, terms: Terms | None = None, **changes: object) -> Comparison:
    """The two servers of one interleaved run: arm 1 against arm 0."""
    if len(run.arms) != 2:
        hint = "give two runs, or one that was made with two servers"
        raise ConfigError(f"the run has {len(run.arms)} server(s), not two", param="run", hint=hint)
    return _compare([Side(run, 0)], [Side(run, 1)], msgspec.structs.replace(terms or Terms(), **changes))


def _compare(a: Sequence[Side], b: Sequence[Side], terms: Terms) -> Comparison:
    terms.validate()
    if not a or not b or min(len(a), len(b)) == 1 < max(len(a), len(b)):
        hint = "one run a side, or two or more on each"
        raise ConfigError(f"{len(a)} runs against {len(b)}", param="run", hint=hint)
    pairs = pair(a[0], b[0]) if len(a) == len(b) == 1 else None
    design = Design.RUNS if len(a) > 1 else Design.UNPAIRED if pairs is None else Design.PAIRED
    doubts = reasons_to_doubt(a, b)
    found = [_compared(parse_metric(name), a, b, pairs, terms) for name in terms.metrics]
    if doubts:
        found = [msgspec.structs.replace(one, verdict=Verdict.INCONCLUSIVE, why=doubts[0]) for one in found]
    verdict, why = overall(found)
    return Comparison(
        label_a=_label(a, "A"),
        label_b=_label(b, "B"),
        design=design,
        runs_a=len(a),
        runs_b=len(b),
        num_pairs=None if pairs is None else len(pairs),
        margin=terms.margin,
        confidence=terms.confidence,
        level=terms.level,
        metrics=tuple(found),
        verdict=verdict,
        why=" ".join(doubts) or why,
        notes=tuple(notes_of(a, b, is_paired=pairs is not None)),
    )


def _label(sides: Sequence[Side], name: str) -> str:
    run, arm = sides[0]
    return (run.arms[arm].url if len(run.arms) > 1 else run.label) or name


def overall(found: Sequence[Compared]) -> tuple[Verdict, str]:
    """The rule of the module's docstring, and why in a sentence."""
    for verdict in (Verdict.WORSE, Verdict.BETTER):
        names = [one.name for one in found if one.verdict is verdict]
        gains = [one.name for one in found if one.verdict is Verdict.BETTER]
        if names:
            despite = f", though {_and(gains)} got better" if verdict is Verdict.WORSE and gains else ""
            return verdict, f"{_and(names)} got {verdict.value.lower()}{despite}."
    primary = found[0]
    return primary.verdict, f"No metric got better or worse; the primary one, {primary.name}: {primary.why}"


def _and(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _compared(metric: Metric, a: Sequence[Side], b: Sequence[Side], pairs: Pairs | None, terms: Terms) -> Compared:
    limits = terms.limits if terms.limits is not None else a[0].run.slo
    if metric.name == "goodput" and not set(limits) & set(PER_REQUEST_LIMITS):
        hint = "name what makes a request good, for example --slo ttft=300ms,tpot=40ms"
        raise ConfigError("goodput needs a limit for each request", param="metric", value="goodput", hint=hint)
    if len(a) > 1:
        return _of_runs(metric, a, b, limits, terms)
    drawn = draw(metric, a[0], b[0], pairs, limits, terms.seed, terms.replicates)
    if drawn is None:
        return _unknown(metric, "too few requests tell it.")
    if not metric.is_share and min(drawn.a, drawn.b, drawn.replicates_a.min(), drawn.replicates_b.min()) <= 0:
        return _unknown(metric, "it is 0 in some of the data, and a ratio to 0 says nothing.", drawn.a, drawn.b)
    found = _share_interval(drawn, terms) if metric.is_share else _ratio_interval(metric, drawn, terms)
    if found.low is None and metric.percent is not None:
        needed = _requests_needed(metric.percent, drawn, terms.level)
        why = f"{drawn.num_requests} requests do not bound its p{metric.percent:g}; about {needed} would."
        return _judged(metric, drawn.a, drawn.b, found, terms, why)
    return _judged(metric, drawn.a, drawn.b, found, terms)


def _ratio_interval(metric: Metric, drawn: Drawn, terms: Terms) -> Interval:
    """Without both ends if the percentile lies so far out that more may lie beyond the data (see `bounded`)."""
    if metric.percent is not None and _out_of_reach(metric.percent, drawn.effective_requests, terms.level):
        return Interval(None, None)
    logs = np.log(drawn.replicates_b / drawn.replicates_a)
    return interval(logs, drawn.num_blocks, terms.level, widen=drawn.widen).exp()


def _out_of_reach(percent: float, requests: float, level: float) -> bool:
    share = max(percent, 100 - percent) / 100
    return share**requests > (1 - level) / 2


def _requests_needed(percent: float, drawn: Drawn, level: float) -> int:
    independent = log((1 - level) / 2) / log(max(percent, 100 - percent) / 100)
    return ceil(independent * drawn.num_requests / drawn.effective_requests / 10) * 10


def _share_interval(drawn: Drawn, terms: Terms) -> Interval:
    """Of the difference. A share of exactly 0 or 1 has no spread in the data, but -ln(tail)/n is still possible."""
    differences = drawn.replicates_b - drawn.replicates_a
    found = interval(differences, drawn.num_blocks, terms.level, widen=drawn.widen)
    possible = -log((1 - terms.level) / 2) / drawn.effective_requests
    up = possible * ((drawn.b == 0) + (drawn.a == 1))
    down = possible * ((drawn.b == 1) + (drawn.a == 0))
    return Interval((found.low or 0.0) - down, (found.high or 0.0) + up)


def _of_runs(
    metric: Metric, a: Sequence[Side], b: Sequence[Side], limits: Mapping[str, float], terms: Terms
) -> Compared:
    """Welch's t interval on the runs' own figures, logarithms of them for a ratio."""
    samples = [[sample(metric, side, limits) for side in sides] for sides in (a, b)]
    if not all(len(pooled.values) for side in samples for pooled in side):
        return _unknown(metric, "a run has no request that tells it.")
    first, second = (np.array([value(metric, pooled) for pooled in side]) for side in samples)
    if metric.is_share:
        low, high = welch(first, second, terms.level)
        return _judged(metric, first.mean(), second.mean(), Interval(low, high), terms)
    if min(first.min(), second.min()) <= 0:
        return _unknown(metric, "it is 0 in some run, and a ratio to 0 says nothing.")
    low, high = welch(np.log(first), np.log(second), terms.level)
    a_mean, b_mean = np.exp(np.log(first).mean()), np.exp(np.log(second).mean())
    return _judged(metric, a_mean, b_mean, Interval(low, high).exp(), terms)


def welch(a: np.ndarray, b: np.ndarray, level: float) -> tuple[float, float]:
    """The interval of mean(b) - mean(a), variances not taken for equal (Welch 1947)."""
    parts = [float(side.var(ddof=1)) / len(side) for side in (a, b)]
    difference, variance = float(b.mean() - a.mean()), sum(parts)
    if variance == 0:
        return difference, difference
    freedom = variance**2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (a, b), strict=True))
    reach = t_quantile((1 + level) / 2, freedom) * variance**0.5
    return difference - reach, difference + reach


def _judged(metric: Metric, a: float, b: float, found: Interval, terms: Terms, why: str = "") -> Compared:
    verdict = judge(found, terms.margin, metric)
    return Compared(
        name=metric.name,
        a=float(a),
        b=float(b),
        effect=float(b - a) if metric.is_share else float(b / a),
        interval=found,
        is_difference=metric.is_share,
        verdict=verdict,
        why=why or _WHY[verdict],
    )


_WHY = {
    Verdict.BETTER: "the interval leaves out no difference.",
    Verdict.WORSE: "the interval leaves out no difference.",
    Verdict.EQUIVALENT: "the whole interval is within the margin.",
    Verdict.INCONCLUSIVE: "no difference and one that matters are both possible: more requests or runs would tell.",
}


def judge(found: Interval, margin: float, metric: Metric) -> Verdict:
    low, high = found.low, found.high
    if low is None or high is None:
        return Verdict.INCONCLUSIVE
    none = 0.0 if metric.is_share else 1.0
    least, most = (-SHARE_MARGIN, SHARE_MARGIN) if metric.is_share else (1 / (1 + margin), 1 + margin)
    if least <= low and high <= most:
        return Verdict.EQUIVALENT
    if low <= none <= high:
        return Verdict.INCONCLUSIVE
    return Verdict.BETTER if (low > none) is metric.higher_is_better else Verdict.WORSE


def _unknown(metric: Metric, why: str, a: float | None = None, b: float | None = None) -> Compared:
    return Compared(
        name=metric.name,
        a=a,
        b=b,
        effect=None,
        interval=None,
        is_difference=metric.is_share,
        verdict=Verdict.INCONCLUSIVE,
        why=why,
    )
