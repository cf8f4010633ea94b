"""Is B better than A? A ratio B / A for each metric, with an interval, and one of four verdicts.

    EQUIVALENT     the whole interval lies within the margin, 1 / (1 + margin) to 1 + margin
    BETTER, WORSE  the interval leaves out 1 (and is not within the margin)
    INCONCLUSIVE   neither: the data allow both a difference that matters and none

The intervals hold *together* with the confidence asked for (Bonferroni): with no difference at all the chance of any
BETTER or WORSE is at most 1 - confidence. The overall verdict: WORSE if any metric is, else BETTER if any is, else that
of the first metric, the primary: by default the mean response time. Every delay is in it, at a fixed concurrency it is
the throughput's inverse (Little's law), and some hundred requests estimate it, where a p99 rests on a few of them. A
void run makes everything INCONCLUSIVE, unless the client's own lateness alone voids it and the verdict would be the
same with all that lateness taken off either side (`bench.book.metrics`).

How the interval is made:
    paired     one run of two servers, or two runs of one schedule: each request on both sides, so that what they share
               (lengths, arrivals) cancels
    unpaired   two runs, each on its own
    runs       two or more runs a side: Welch's t on the logarithms of the runs' own figures, as a server differs from
               start to start
Neighbouring requests count for fewer independent ones, as in a run's own figures (`stats.intervals`).
Shares (goodput, error rate) are compared by their difference, the margin being `SHARE_MARGIN`.

`compare_accounts` compares two sets of a gateway's accounts, never paired. A request is intended and sent when its
account begins; its first chunk is the first byte of the answer that was given. What its client broke off is not
counted; whatever else ended with an error, a refusal included, is a failure.

A side is one arm of one run. `contrast` gives the metric of both sides and the spread of what lies between them.
`reasons_to_doubt` and `notes_of` say why figures may say nothing, and what else differs.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, inf, log
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from splittime.bench.book.figures import Trend, drift, rate_parts, rate_window, request_ends
from splittime.bench.book.metrics import RATES, Metric, failed_by_lateness, off_ns, parse_metric, void_for_more
from splittime.bench.book.records import Arm, Ending, Outcome, Phase, Run, load_run
from splittime.bench.book.requests import (
    PER_REQUEST_LIMITS,
    complete,
    in_time_order,
    is_good,
    output_tokens,
    per_request,
    series,
    token_arrivals,
)
from splittime.bench.book.slo import SloResult, check_slo
from splittime.core.errors import ConfigError
from splittime.core.request import FinishReason
from splittime.diagnose.comparison import SHARE_MARGIN, Compared, Comparison, Design, Terms, Verdict
from splittime.ledger.account import ClosedAccount
from splittime.stats import intervals
from splittime.stats.intervals import Interval, welch

POOLED = ("chunk_gap", "token_gap")


class Side(NamedTuple):
    run: Run
    arm: int

    @property
    def measured(self) -> list[Outcome]:
        return in_time_order(self.run.measured(self.arm))


Pairs = Sequence[tuple[Outcome, Outcome]]


def pair(a: Side, b: Side) -> list[tuple[Outcome, Outcome]] | None:
    """The measured requests of both sides by their place in the schedule; None if they are not of one schedule."""
    is_one_run = a.run is b.run
    if not is_one_run and (not a.run.schedule_digest or a.run.schedule_digest != b.run.schedule_digest):
        return None
    of_b = {outcome.index: outcome for outcome in b.measured}
    pairs = [(outcome, of_b[outcome.index]) for outcome in a.measured if outcome.index in of_b]
    return pairs if len(pairs) >= intervals.MIN_REQUESTS else None


class Contrast(NamedTuple):
    """How far B is from A. spread: that of the logarithm of b / a, or for a share of b - a; None if it is out of reach.
    num_requests: of the side with fewer."""

    a: float
    b: float
    spread: intervals.Spread | None
    num_requests: int


def contrast(
    metric: Metric, a: Side, b: Side, pairs: Pairs | None, limits: Mapping[str, float], level: float
) -> Contrast | None:
    """None if either side has not enough that could tell the metric."""
    are_paired = pairs is not None and metric.name not in RATES
    samples = _paired(metric, pairs or (), limits) if are_paired else _apart(metric, a, b, limits)
    num_requests = min(pooled.num_requests for pooled in samples)
    if num_requests < intervals.MIN_REQUESTS or not all(len(one.values) for one in samples):
        return None
    first, second = (value(metric, pooled) for pooled in samples)
    if not metric.is_share and min(first, second) <= 0:
        return Contrast(first, second, None, num_requests)
    added = [_added(metric, pooled, level) for pooled in samples]
    return Contrast(first, second, _spread(*added, is_joint=pairs is not None), num_requests)


def _spread(a: intervals.Array | None, b: intervals.Array | None, *, is_joint: bool) -> intervals.Spread | None:
    if a is None or b is None:
        return None
    return (
        intervals.spread_of(b - a) if is_joint else intervals.together(intervals.spread_of(a), intervals.spread_of(b))
    )


def _added(metric: Metric, pooled: intervals.Pooled, level: float) -> intervals.Array | None:
    """What each request adds to the metric: to its logarithm, or to a share itself."""
    if metric.is_share:
        added: intervals.Array = pooled.values - pooled.values.mean()
        return added
    precision = intervals.Precision(pooled)
    return precision.log_mean() if metric.percent is None else precision.log_percentile(metric.percent, level)


def value(metric: Metric, pooled: intervals.Pooled) -> float:
    if metric.percent is None:
        return float(pooled.values.mean())
    return intervals.nearest_rank(pooled.values, [metric.percent])[0]


def _apart(metric: Metric, a: Side, b: Side, limits: Mapping[str, float]) -> tuple[intervals.Pooled, intervals.Pooled]:
    return sample(metric, a, limits), sample(metric, b, limits)


def sample(metric: Metric, side: Side, limits: Mapping[str, float]) -> intervals.Pooled:
    """One side's values, in time order."""
    if metric.name in RATES:
        window = rate_window(side.run, side.arm)
        mine = [outcome for outcome in side.run.outcomes if outcome.arm == side.arm]
        events = token_arrivals(mine) if metric.name == "throughput" else request_ends(mine)
        return intervals.one_each(rate_parts(*events, window))
    measured = side.measured
    if metric.is_share:
        return intervals.one_each(_marks(metric, _counted(measured), limits))
    return series(complete(measured), metric.series)


def _counted(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.ending is not Ending.CANCELLED]


def _marks(metric: Metric, outcomes: Sequence[Outcome], limits: Mapping[str, float]) -> list[float]:
    if metric.name == "error_rate":
        return [float(outcome.ending is not Ending.COMPLETE) for outcome in outcomes]
    mine = {name: limit for name, limit in limits.items() if name in PER_REQUEST_LIMITS}
    return [float(is_good(outcome, mine)) for outcome in outcomes]


def _paired(metric: Metric, pairs: Pairs, limits: Mapping[str, float]) -> tuple[intervals.Pooled, intervals.Pooled]:
    """Returns both samples, from the pairs in which both sides have a value."""
    if metric.is_share:
        counted = [pair for pair in pairs if len(_counted(pair)) == 2]
        first, second = (_marks(metric, [pair[i] for pair in counted], limits) for i in (0, 1))
        return intervals.one_each(first), intervals.one_each(second)
    whole = [pair for pair in pairs if len(complete(pair)) == 2 and _tells(metric, pair)]
    sides = [[pair[i] for pair in whole] for i in (0, 1)]
    if metric.series in POOLED:
        return series(sides[0], metric.series), series(sides[1], metric.series)
    a, b = (per_request(side, metric.series) for side in sides)
    both = ~(np.isnan(a) | np.isnan(b))
    return intervals.one_each(a[both]), intervals.one_each(b[both])


def _tells(metric: Metric, pair: tuple[Outcome, Outcome]) -> bool:
    return metric.series != "token_gap" or all(len(o.chunk_tokens or ()) == len(o.chunk_ns) for o in pair)


def ratio_interval(a: float, b: float, spread: intervals.Spread, level: float) -> intervals.Interval:
    """Returns the interval of b / a."""
    return about(log(b / a), spread, level).exp()


def about(middle: float, spread: intervals.Spread, level: float) -> intervals.Interval:
    reach = spread.widening() * spread.reach(level)
    return intervals.Interval(middle - reach, middle + reach)


def out_of_reach(metric: Metric, found: Contrast, level: float) -> bool:
    """Whether more than chance may lie beyond the least or greatest value of so few."""
    if metric.percent is None or found.spread is None:
        return False
    share = max(metric.percent, 100 - metric.percent) / 100
    return share**found.spread.effective > (1 - level) / 2


def too_few(metric: Metric, found: Contrast, level: float) -> str:
    assert metric.percent is not None
    independent = log((1 - level) / 2) / log(max(metric.percent, 100 - metric.percent) / 100)
    times = found.num_requests / found.spread.effective if found.spread is not None else 1.0
    needed = max(2 * found.num_requests, ceil(independent * times / 10) * 10)
    return f"{found.num_requests} requests do not bound its p{metric.percent:g}; about {needed} would."


def share_interval(found: Contrast, level: float) -> intervals.Interval:
    """Returns the interval of the difference. A share of exactly 0 or 1 has no spread in the data, but -ln(tail)/n is
    still possible."""
    assert found.spread is not None
    middle = about(found.b - found.a, found.spread, level)
    possible = -log((1 - level) / 2) / found.spread.effective
    up = possible * ((found.b == 0) + (found.a == 1))
    down = possible * ((found.b == 1) + (found.a == 0))
    return intervals.Interval((middle.low or 0.0) - down, (middle.high or 0.0) + up)


NOTED_DIFFERENCE = 0.01


def reasons_to_doubt(a: Sequence[Side], b: Sequence[Side]) -> list[str]:
    """Says which runs are void, since their figures are about the client. Each verdict reckons with lateness itself."""
    return [
        f"{name} is void: {'; '.join(check.sentence for check in void_for_more(run))}"
        for name, sides in (("A", a), ("B", b))
        for run, _ in sides
        if void_for_more(run)
    ]


def notes_of(a: Sequence[Side], b: Sequence[Side], *, is_paired: bool) -> Iterator[str]:
    if len(a) == 1 and a[0].run is not b[0].run:
        yield "One run a side: what changes from one start of a server to the next is not in the intervals."
    if not is_paired and len({run.schedule_digest for run, _ in (*a, *b)}) > 1:
        yield "The runs did not send the same requests: differences of the load are in the figures."
    for name, sides in (("A", a), ("B", b)):
        yield from _notes_of_side(name, sides)
    for what, means in (("prompt", _mean_prompts(a, b)), ("output", _mean_outputs(a, b))):
        if None not in means and abs(means[1] / means[0] - 1) > NOTED_DIFFERENCE:  # type: ignore[operator]
            yield f"Mean {what} tokens differ: {means[0]:.1f} in A, {means[1]:.1f} in B."


def _notes_of_side(name: str, sides: Sequence[Side]) -> Iterator[str]:
    for side in sides:
        for check in failed_by_lateness(side.run):
            yield f"{name}'s client was late: {check.sentence}. Verdicts hold even if {name} were better by all of it."
        if side.run.stopped:
            yield f"{name} was stopped: {side.run.stopped}"
        trend = drift(series(complete(side.measured), "ttft").values).trend
        if trend in (Trend.RISING, Trend.FALLING):
            yield f"TTFT was {trend.value} during {name}: it was not in a steady state."
        counted = [outcome for outcome in side.measured if outcome.ending is not Ending.CANCELLED]
        if missing := len(counted) - len(complete(counted)):
            yield f"{missing} of {len(counted)} requests of {name} were not answered: they are in no latency."


Means = tuple[float | None, float | None]


def _mean_prompts(a: Sequence[Side], b: Sequence[Side]) -> Means:
    return _mean([o.prompt_tokens for s in a for o in s.measured]), _mean(
        [o.prompt_tokens for s in b for o in s.measured]
    )


def _mean_outputs(a: Sequence[Side], b: Sequence[Side]) -> Means:
    first, second = ([output_tokens(o) for s in sides for o in complete(s.measured)] for sides in (a, b))
    return _mean(first), _mean(second)


def _mean(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value]
    return float(np.mean(known)) if known else None


METRICS = ("e2e_mean", "ttft_p50", "error_rate")


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


class FileComparison(msgspec.Struct, frozen=True):
    """A comparison of saved runs, and what became of the SLO that was asked of B alone."""

    comparison: Comparison
    slo: tuple[SloResult, ...]


def compare_files(files: Sequence[Path], terms: Terms, slo: Mapping[str, float]) -> FileComparison:
    """Compares A and B, or A B A B ..., or the two servers of one run. Raises `ConfigError` for files that cannot be
    two sides, and what `load_run` does."""
    _refuse_twice(files)
    runs = [_labelled(load_run(path), path) for path in files]
    if len(runs) == 1:
        found, of_b = compare_arms(runs[0], terms), [(runs[0], 1)]
    elif len(runs) % 2:
        hint = "name them in turn, A B A B, or one run that was made with two servers"
        raise ConfigError(f"{len(runs)} runs cannot be two sides", param="files", value=len(runs), hint=hint)
    else:
        found, of_b = compare(runs[::2], runs[1::2], terms), [(run, 0) for run in runs[1::2]]
    results = [result for run, arm in of_b for result in (check_slo(run, slo, arm) if slo else ())]
    return FileComparison(found, tuple(results))


def _refuse_twice(files: Sequence[Path]) -> None:
    """Refuses a run beside itself, which would be EQUIVALENT whatever the server did."""
    seen: set[Path] = set()
    for path in files:
        if path.resolve() in seen:
            hint = "compare it with another run"
            raise ConfigError(f"{path} is named twice", param="files", value=str(path), hint=hint)
        seen.add(path.resolve())


def _labelled(run: Run, path: Path) -> Run:
    return run if run.label else msgspec.structs.replace(run, label=path.name)


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
    found = contrast(metric, a[0], b[0], pairs, limits, terms.level)
    if found is None:
        return _unknown(metric, "too few requests tell it.")
    if not metric.is_share and min(found.a, found.b) <= 0:
        return _unknown(metric, "it is 0 in some of the data, and a ratio to 0 says nothing.", found.a, found.b)
    if metric.is_share:
        return _judged(metric, found.a, found.b, share_interval(found, terms.level), terms)
    late = _late(metric, a, found.a), _late(metric, b, found.b)
    if found.spread is None or out_of_reach(metric, found, terms.level):
        return _judged(metric, found.a, found.b, Interval(None, None), terms, too_few(metric, found, terms.level))
    between = ratio_interval(found.a, found.b, found.spread, terms.level)
    return _despite_lateness(_judged(metric, found.a, found.b, between, terms), metric, late, terms)


def _late(metric: Metric, sides: Sequence[Side], value: float) -> float:
    """The share of a figure that may be the client's lateness; 0 where its own checks found none worth telling."""
    off_by = [off_ns(run, arm, metric) for run, arm in sides if failed_by_lateness(run)]
    return min(1.0, max(off_by, default=0.0) / value)


def _despite_lateness(found: Compared, metric: Metric, late: tuple[float, float], terms: Terms) -> Compared:
    """The verdict, if it is the same with all of A's lateness taken off A, and all of B's off B."""
    if found.interval is None or found.interval.low is None or found.interval.high is None or not any(late):
        return found
    high = found.interval.high / (1 - late[0]) if late[0] < 1 else inf
    if judge(Interval(found.interval.low * (1 - late[1]), high), terms.margin, metric) is found.verdict:
        return found
    why = f"the client was late, by up to {max(late):.0%} of it, which may be the whole difference."
    return msgspec.structs.replace(found, verdict=Verdict.INCONCLUSIVE, why=why)


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
    a_mean, b_mean = (float(np.exp(np.log(values).mean())) for values in (first, second))
    late = _late(metric, a, a_mean), _late(metric, b, b_mean)
    judged = _judged(metric, a_mean, b_mean, Interval(low, high).exp(), terms)
    return _despite_lateness(judged, metric, late, terms)


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


def compare_accounts(
    a: Sequence[ClosedAccount], b: Sequence[ClosedAccount], margin: float, confidence: float
) -> Comparison:
    """Returns B against A. confidence: of all metrics together."""
    terms = Terms(metrics=METRICS, margin=margin, confidence=confidence)
    return compare(_run(a, "A"), _run(b, "B"), terms)


def _run(accounts: Sequence[ClosedAccount], label: str) -> Run:
    ordered = sorted(accounts, key=lambda account: account.start_ns)
    begin_ns = ordered[0].start_ns if ordered else 0
    until_ns = max((account.end_ns for account in ordered), default=begin_ns) - begin_ns
    return Run(
        label=label,
        begin_ns=begin_ns,
        begin_unix_ns=ordered[0].started_at_unix_ns if ordered else 0,
        measured_from_ns=0,
        measured_until_ns=until_ns,
        arms=(Arm(url=label, kind="splittime"),),
        outcomes=tuple(_outcome(number, account, begin_ns) for number, account in enumerate(ordered)),
    )


def _outcome(number: int, account: ClosedAccount, begin_ns: int) -> Outcome:
    first_ns = account.attempts[-1].first_byte_ns if account.attempts else None
    start_ns = account.start_ns - begin_ns
    return Outcome(
        index=number,
        request_id=account.request_id,
        phase=Phase.MEASURED,
        ending=_ending(account),
        intended_ns=start_ns,
        picked_up_ns=start_ns,
        connect_ns=0,
        sent_ns=start_ns,
        chunk_ns=() if first_ns is None else (first_ns - begin_ns,),
        end_ns=account.end_ns - begin_ns,
    )


def _ending(account: ClosedAccount) -> Ending:
    if account.finish_reason == FinishReason.ABORT:
        return Ending.CANCELLED
    return Ending.COMPLETE if account.error is None else Ending.FAILED
