"""What a run says in figures: one `Summary` of each arm, with an interval for each estimate, and the definitions.

The door to the client's figures; those of one request are in `requests`. Every figure is of the measured phase of one
arm; rates and concurrency also see what warm-up and cool-down had under way. These, and drift within a run, belong to
time and not to one request.

A rate counts what *arrived* in the measured window, whoever's it was (warm-up's and cool-down's requests too), over the
window's length. A mean over the wall time of a run would be low by its ramps, and so would the tokens of the measured
requests alone, whose last arrive after the window. A run that was stopped has the window until its last end. Only where
the window is shorter than the median request (all sent at once) is it the time from the window's begin to the last end,
and `RateWindow.is_makespan` says so.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import log

import msgspec
import numpy as np
from numpy.typing import NDArray

from splittime.bench.book.records import Ending, Outcome, Run
from splittime.bench.book.requests import (
    MAX_UNSEEN_SHARE,
    PER_REQUEST_LIMITS,
    SERIES,
    all_series,
    complete,
    in_time_order,
    is_good,
    sent_as,
    series,
    service_ns,
    token_arrivals,
    tpot_ns,
)
from splittime.ledger import derive
from splittime.stats import intervals
from splittime.stats.intervals import CONFIDENCE, Estimate, Interval, Pooled, Precision, nearest_rank, one_each

RATE_BINS = 200
DRIFT_MARGIN = 0.10
DRIFT_CONFIDENCE = 0.99
MIN_DRIFT_REQUESTS = 40
DEFINITIONS = (
    ("response time", "from the intended start to the end. What a user waits: a late client or a full pool is in it."),
    ("service time", "from the request's last byte given to the socket to the end. What most tools publish."),
    ("TTFT", "time to the first chunk with content; response TTFT from the intended start, service TTFT from sent."),
    ("E2E", "time to the end of the answer; response E2E from the intended start, service E2E from sent."),
    (
        "TPOT",
        "(E2E - TTFT) / (output tokens - tokens in the first chunk), the same by both clocks. Where chunks tell no "
        f"tokens, the first is taken for one token if at most {MAX_UNSEEN_SHARE:.0%} of the tokens came without a "
        "chunk of their own; otherwise TPOT is not known.",
    ),
    ("chunk gap", "between chunks with content, as the client read them; all gaps of all requests together."),
    ("token gap", "the chunk gap, and 0 between tokens that came in one chunk; only where chunks tell their tokens."),
    ("ITL", "between tokens by the server's own clock, from its accounts; only of a splittime server."),
    ("max stall", "a request's longest chunk gap."),
    (
        "schedule lag",
        "from the intended start to when the client turned to the request, less what it was held back on purpose.",
    ),
    (
        "start lag",
        "from the intended start to sent, less what it was held back on purpose and what connecting took: all that the "
        "client itself was late; checked, not shown.",
    ),
    (
        "throughput",
        "tokens that arrived, or requests that ended whole, within the measured window, whichever phase they belong to,"
        " over its length: neither ramp nor tail biases it. A chunk that tells no tokens has its request's mean.",
    ),
    (
        "goodput",
        "intended requests answered whole within every per-request limit / all intended. What failed, was refused,"
        " timed out or was never sent counts against; what was cancelled is left out. So for the error rate.",
    ),
    ("window", "what was intended in it is measured; no drain before it. Latencies are of its complete requests."),
    ("percentiles", "nearest rank: a value that did occur."),
    (
        "intervals",
        f"{intervals.CONFIDENCE:.0%}: neighbours share a queue, so n requests are worth fewer independent ones, by "
        f"their autocorrelation. An end shown as .. cannot be known from so few; below {intervals.MIN_FOR_LOW} "
        f"independent ones there is no interval, below {intervals.MIN_INDEPENDENT} no upper end, nor where it would be "
        f"over {intervals.MOST_ABOVE:.0f} times the figure. It reaches further up than down: a run that met no long "
        "queue cannot show it.",
    ),
    (
        "drift",
        f"the second half's mean over the first half's, {DRIFT_CONFIDENCE:.0%} interval; steady if wholly within "
        f"{DRIFT_MARGIN:.0%}, rising or falling if it leaves out 1, else unclear.",
    ),
)


class RateWindow(msgspec.Struct, frozen=True):
    """[from_ns, until_ns) of the run's clock."""

    from_ns: int
    until_ns: int
    is_makespan: bool = False

    @property
    def seconds(self) -> float:
        return (self.until_ns - self.from_ns) / 1e9


def rate_window(run: Run, arm: int = 0) -> RateWindow:
    measured = run.measured(arm)
    whole = complete(measured)
    durations_ns = [ns for outcome in whole if (ns := service_ns(outcome)) is not None]
    typical_ns = derive.percentile(durations_ns, 50) or 0
    last_ns = max((o.end_ns for o in measured if o.end_ns is not None), default=run.measured_until_ns)
    until_ns = min(run.measured_until_ns, last_ns) if run.stopped else run.measured_until_ns
    if until_ns - run.measured_from_ns >= max(1, typical_ns):
        return RateWindow(run.measured_from_ns, until_ns)
    return RateWindow(run.measured_from_ns, max(last_ns, run.measured_from_ns + 1), is_makespan=True)


def rate(at_ns: NDArray[np.int64], amounts: intervals.Array, window: RateWindow) -> intervals.Estimate:
    """Per second: what of these amounts came within the window."""
    parts = rate_parts(at_ns, amounts, window)
    value = float(parts.mean())
    if len(at_ns) < intervals.MIN_REQUESTS or not value:
        return intervals.Estimate(value)
    found = intervals.Precision(intervals.one_each(parts)).mean()
    return intervals.Estimate(value, None if found is None else intervals.never_negative(found))


def request_ends(outcomes: Sequence[Outcome]) -> tuple[NDArray[np.int64], intervals.Array]:
    """When each complete request ended, one each."""
    ends = np.array([o.end_ns for o in complete(outcomes) if o.end_ns is not None], dtype=np.int64)
    return ends, np.ones(len(ends))


def prompts_read(outcomes: Sequence[Outcome]) -> tuple[NDArray[np.int64], intervals.Array]:
    """When each first chunk came, and the prompt tokens that had been read for it."""
    known = [(o.chunk_ns[0], o.prompt_tokens) for o in outcomes if o.chunk_ns and o.prompt_tokens is not None]
    at_ns, tokens = np.array(known, dtype=np.int64).reshape(-1, 2).T
    return at_ns, tokens.astype(np.float64)


def rate_parts(at_ns: NDArray[np.int64], amounts: intervals.Array, window: RateWindow) -> intervals.Array:
    """Per second, in each of `RATE_BINS` equal parts of the window."""
    span_ns = window.until_ns - window.from_ns
    inside = (at_ns >= window.from_ns) & (at_ns < window.until_ns)
    part = ((at_ns - window.from_ns) * (RATE_BINS / span_ns)).astype(np.int64)[inside]
    sums: intervals.Array = np.bincount(part, amounts[inside], minlength=RATE_BINS)[:RATE_BINS].astype(np.float64)
    return sums * (RATE_BINS / window.seconds)


class Concurrency(msgspec.Struct, frozen=True):
    """Requests between sent and ended, of any phase, while the window lasted."""

    mean: float
    peak: int


def concurrency(outcomes: Sequence[Outcome], window: RateWindow) -> Concurrency:
    spans = [(o.sent_ns, o.end_ns) for o in outcomes if o.sent_ns is not None and o.end_ns is not None]
    if not spans:
        return Concurrency(0.0, 0)
    begins, ends = np.clip(np.array(spans, dtype=np.int64).T, window.from_ns, window.until_ns)
    lasting = ends > begins
    begins, ends = np.sort(begins[lasting]), np.sort(ends[lasting])
    running = np.arange(1, len(begins) + 1) - np.searchsorted(ends, begins, side="right")
    mean = float((ends - begins).sum()) / (window.until_ns - window.from_ns)
    return Concurrency(mean, int(running.max(initial=0)))


class Trend(StrEnum):
    STEADY = "steady"
    RISING = "rising"
    FALLING = "falling"
    UNCLEAR = "unclear"


class Drift(msgspec.Struct, frozen=True):
    """The second half's mean over the first half's. Steady is an interval wholly within `DRIFT_MARGIN`; rising or
    falling is one that leaves out 1 and is not steady; else there is too little to tell."""

    ratio: float | None
    interval: intervals.Interval | None
    trend: Trend


def drift(values: intervals.Array) -> Drift:
    """Returns how the second half of values in time order differs from the first, at `DRIFT_CONFIDENCE`."""
    if len(values) < MIN_DRIFT_REQUESTS or values.min() <= 0:
        return Drift(None, None, Trend.UNCLEAR)
    first, second = values[: len(values) // 2], values[len(values) // 2 :]
    before, after = (intervals.spread_beside_a_trend(half / half.mean()) for half in (first, second))
    middle, reach = log(second.mean() / first.mean()), intervals.together(before, after).reach(DRIFT_CONFIDENCE)
    ratio = intervals.Interval(middle - reach, middle + reach).exp()
    return Drift(float(second.mean() / first.mean()), ratio, _trend(ratio))


def _trend(ratio: intervals.Interval) -> Trend:
    low, high = ratio.low or 0.0, ratio.high or 0.0
    if low > 1 / (1 + DRIFT_MARGIN) and high < 1 + DRIFT_MARGIN:
        return Trend.STEADY
    if low > 1:
        return Trend.RISING
    return Trend.FALLING if high < 1 else Trend.UNCLEAR


PERCENTS = derive.PERCENTILES
BUCKET_SERIES = ("ttft", "tpot", "e2e")
DRIFT_SERIES = ("ttft", "tpot")


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution, in ns. `count` values of `num_requests` requests, which tell as much as `independent` that have
    nothing to do with each other; percentiles by `p50`, `p90`, `p95`, `p99`."""

    count: int
    num_requests: int
    independent: float
    mean: Estimate
    percentiles: dict[str, Estimate]
    max: float


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """`limits`: the per-request ones of the run's SLO. share = good / intended; per_s = good / the window's length."""

    limits: dict[str, float]
    intended: int
    good: int
    share: Estimate
    per_s: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One arm of a run. Counts are of the measured phase; `figures` by the names of `SERIES` and, if the server's
    accounts are there, `itl`. A figure that has no value is absent.

    counted: intended, less those that were cancelled: the denominator of goodput and of the error rate.
    errors: refused, failed, timed out or unsent. output_token_rate, prompt_token_rate, request_rate: per second of
    `window`. cached_share, expected_cached_share: of the prompt tokens. tpot_unknown: complete requests of several
    tokens that tell no TPOT.
    """

    label: str
    arm: int
    is_void: bool
    confidence: float = CONFIDENCE
    window: RateWindow
    intended: int
    counted: int
    endings: dict[str, int]
    errors: int
    error_rate: float | None
    intended_rate: float
    request_rate: Estimate
    output_token_rate: Estimate
    prompt_token_rate: Estimate
    concurrency: Concurrency
    figures: dict[str, Figure]
    buckets: dict[str, dict[str, Figure]]
    drift: dict[str, Drift]
    goodput: Goodput | None
    tpot_unknown: int
    cached_share: float | None
    expected_cached_share: float | None


def summary(run: Run, arm: int = 0, *, limits: Mapping[str, float] | None = None) -> Summary:
    """All figures of one arm. `limits` instead of the run's SLO."""
    measured = in_time_order(run.measured(arm))
    whole = complete(measured)
    mine = [outcome for outcome in run.outcomes if outcome.arm == arm]
    window = rate_window(run, arm)
    endings = Counter(outcome.ending.value for outcome in measured)
    counted = len(measured) - endings[Ending.CANCELLED.value]
    errors = counted - len(whole)
    return Summary(
        label=run.label,
        arm=arm,
        is_void=run.is_void,
        window=window,
        intended=len(measured),
        counted=counted,
        endings={ending.value: endings[ending.value] for ending in Ending},
        errors=errors,
        error_rate=errors / counted if counted else None,
        intended_rate=len(measured) / max(1e-9, (run.measured_until_ns - run.measured_from_ns) / 1e9),
        request_rate=rate(*request_ends(mine), window),
        output_token_rate=rate(*token_arrivals(mine), window),
        prompt_token_rate=rate(*prompts_read(mine), window),
        concurrency=concurrency(mine, window),
        figures=_figures(run, arm, whole),
        buckets=_buckets(whole),
        drift={name: drift(series(whole, name).values) for name in DRIFT_SERIES},
        goodput=goodput(run, arm, limits=limits),
        tpot_unknown=sum(len(outcome.chunk_ns) > 1 and tpot_ns(outcome) is None for outcome in whole),
        cached_share=share_of(whole, "cached_tokens", "prompt_tokens"),
        expected_cached_share=share_of(whole, "expected_cached_tokens", "expected_prompt_tokens"),
    )


def figure(pooled: Pooled) -> Figure | None:
    """Mean and percentiles with their intervals; None for no values."""
    if not len(pooled.values):
        return None
    precision = Precision(pooled)
    values, intervals = nearest_rank(pooled.values, PERCENTS), precision.percentiles(PERCENTS)
    found = zip(PERCENTS, values, intervals, strict=True)
    return Figure(
        count=len(pooled.values),
        num_requests=pooled.num_requests,
        independent=precision.effective,
        mean=Estimate(float(pooled.values.mean()), precision.mean()),
        percentiles={f"p{percent}": Estimate(value, between) for percent, value, between in found},
        max=float(pooled.values.max()),
    )


def _figures(run: Run, arm: int, whole: Sequence[Outcome]) -> dict[str, Figure]:
    pooled = all_series(whole)
    found = {name: figure(pooled[name]) for name in SERIES if name != "token_gap"}
    is_same = pooled["token_gap"] is pooled["chunk_gap"]
    found["token_gap"] = found["chunk_gap"] if is_same else figure(pooled["token_gap"])
    found["itl"] = figure(_server_gaps(run, arm, whole))
    return {name: value for name, value in found.items() if value is not None}


def _server_gaps(run: Run, arm: int, whole: Sequence[Outcome]) -> Pooled:
    """Gaps between tokens by the server's clock, of the complete requests whose accounts are there."""
    place = {outcome.request_id: i for i, outcome in enumerate(whole)}
    named = [(sent_as(account), account) for account in run.arms[arm].accounts]
    pairs = [(place[name], derive.itl_ns(account)) for name, account in named if name in place]
    owner = np.repeat([p for p, _ in pairs], [len(gaps) for _, gaps in pairs]).astype(np.int64)
    return Pooled(np.array([g for _, gaps in pairs for g in gaps], dtype=np.float64), owner, len(whole))


def prompt_tokens(outcome: Outcome) -> int | None:
    """As the server counted, else as the schedule meant it."""
    return outcome.prompt_tokens if outcome.prompt_tokens is not None else outcome.expected_prompt_tokens


def _buckets(whole: Sequence[Outcome]) -> dict[str, dict[str, Figure]]:
    """By prompt length, the shortest first; what has none told is in no bucket."""
    members: dict[str, list[Outcome]] = {}
    for outcome in sorted(whole, key=lambda o: prompt_tokens(o) or 0):
        if (tokens := prompt_tokens(outcome)) is not None:
            members.setdefault(derive.prompt_bucket(tokens), []).append(outcome)
    return {bucket: _bucket(in_time_order(its)) for bucket, its in members.items()}


def _bucket(outcomes: Sequence[Outcome]) -> dict[str, Figure]:
    found = {name: figure(series(outcomes, name)) for name in BUCKET_SERIES}
    return {name: value for name, value in found.items() if value is not None}


def goodput(run: Run, arm: int = 0, *, limits: Mapping[str, float] | None = None) -> Goodput | None:
    """None if the SLO has no per-request limit, or no request counts."""
    mine = {k: v for k, v in (run.slo if limits is None else limits).items() if k in PER_REQUEST_LIMITS}
    counted = [o for o in in_time_order(run.measured(arm)) if o.ending is not Ending.CANCELLED]
    if not mine or not counted:
        return None
    good = np.array([is_good(outcome, mine) for outcome in counted], dtype=np.float64)
    seconds = max(1e-9, (run.measured_until_ns - run.measured_from_ns) / 1e9)
    return Goodput(
        limits=mine,
        intended=len(counted),
        good=int(good.sum()),
        share=_share_estimate(good),
        per_s=float(good.sum()) / seconds,
    )


def _share_estimate(good: np.ndarray) -> Estimate:
    value = float(good.mean())
    if not 0 < value < 1:
        return Estimate(value)
    found = Precision(one_each(good)).mean()
    if found is None:
        return Estimate(value)
    return Estimate(value, Interval(max(0.0, found.low or 0.0), None if found.high is None else min(1.0, found.high)))


def share_of(outcomes: Sequence[Outcome], part: str, of: str) -> float | None:
    """Returns one field's share of another over all requests that tell both."""
    pairs = [(getattr(o, part), getattr(o, of)) for o in outcomes]
    known = [(p, t) for p, t in pairs if p is not None and t]
    return sum(p for p, _ in known) / sum(t for _, t in known) if known else None
