"""What a run says in figures: one `Summary` of each arm, with an interval for each estimate, and the definitions.

The door to the client's figures: of one request in `client_request`, of many in `client_series`, over time in
`client_rates`, how sure in `client_intervals`. Every figure is of the measured phase of one arm; rates and concurrency
also see what warm-up and cool-down had under way.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from splittime.bench.book.rates import (
    Concurrency,
    Drift,
    RateWindow,
    concurrency,
    drift,
    prompts_read,
    rate,
    rate_window,
    request_ends,
)
from splittime.bench.book.records import Ending, Outcome, Run
from splittime.bench.book.requests import (
    PER_REQUEST_LIMITS,
    SERIES,
    all_series,
    complete,
    in_time_order,
    is_good,
    sent_as,
    series,
    token_arrivals,
    tpot_ns,
)
from splittime.ledger import derive
from splittime.stats.intervals import CONFIDENCE, Estimate, Interval, Pooled, Precision, nearest_rank, one_each

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

    counted: intended, less those that the schedule cancelled: the denominator of goodput and of the error rate.
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
        tpot_unknown=_tpot_unknown(whole),
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


def _tpot_unknown(whole: Sequence[Outcome]) -> int:
    return sum(len(outcome.chunk_ns) > 1 and tpot_ns(outcome) is None for outcome in whole)


def share_of(outcomes: Sequence[Outcome], part: str, of: str) -> float | None:
    """Returns one field's share of another over all requests that tell both."""
    pairs = [(getattr(o, part), getattr(o, of)) for o in outcomes]
    known = [(p, t) for p, t in pairs if p is not None and t]
    return sum(p for p, _ in known) / sum(t for _, t in known) if known else None
