"""Fits a cost model on recorded steps.

Device time and the host's parts are non-negative linear regressions (`simulate.regression`). A ledger with steps that a
device ran captured and others that it ran kernel by kernel has a constant for the latter. A mixture of experts has a
term for the experts that a step's tokens choose beside those of one token.

`host_parts` is what the host took to plan, launch, sample, commit, and until it planned again.
Where steps are planned ahead, the host plans one while another runs, and the step's own record has nothing of that. It
follows from the record before, whose turn planned it:

    planned and told     from begin_ns + ahead_ns of the step before until the host had nothing left to do but wait
    launch               what is left of the step once the host waits, if the device has not worked then

What was hidden behind the device is in no sum; how long a step takes is the longer of the two (`simulate.costed`).
"""

import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.linalg import block_diag

from splittime.core.errors import ConfigError
from splittime.ledger.facts import ServerFacts
from splittime.ledger.steps import StepRecord
from splittime.simulate import cost
from splittime.simulate.recorded import require_sound_steps
from splittime.simulate.regression import Array, Line, clusters_of, line_of
from splittime.simulate.shape import StepShape, StepTime, shape_of_record

MIN_STEPS = 50
PACE_STEPS = {"decode": 60, "prompts": 15}  # recorded ones that say how fast the machine was meanwhile
UNSURE = 0.2  # of the mean step: a standard deviation
SHRINK = 20.0  # steps that a bucket needs for half of its factor to be believed
QUANTILES = 200
PAUSE = 3.0
RARE = 0.99  # of the steps: what is longer than these and `PAUSE` times the median has no part in the next step
MOST_OFF = 1.0  # the median error of held-out steps: beyond it, "it takes no time" is as good a model


def host_parts(records: Sequence[StepRecord]) -> list[list[float]]:
    """Returns for each step a value for each of `cost.HOST_PARTS`; the gap is that behind the step, NaN where nobody
    knows it."""
    return [
        [_plan_ns(before, record), _launch_ns(record), record.sample_ns, record.commit_ns, _gap_ns(record, after)]
        for before, record, after in zip([None, *records[:-1]], records, [*records[1:], None], strict=True)
    ]


def taken_ns(records: Sequence[StepRecord]) -> list[int]:
    """Returns what each step took, host and device, without moves of blocks and without gaps."""
    own = zip([None, *records[:-1]], records, strict=True)
    return [
        _plan_ns(before, record) + _launch_ns(record) + record.device_ns + record.sample_ns + record.commit_ns
        for before, record in own
    ]


def is_queued(before: StepRecord | None, record: StepRecord) -> bool:
    """Whether it was planned while the one before ran."""
    if before is None or before.ahead_ns is None or record.step_id != before.step_id + 1:
        return False
    return before.end_ns == record.begin_ns and not record.plan_ns


def _plan_ns(before: StepRecord | None, record: StepRecord) -> int:
    if before is None or not is_queued(before, record):
        return record.plan_ns
    return max(0, before.plan_ns + before.hidden_ns - (before.ahead_ns or 0))


def _launch_ns(record: StepRecord) -> int:
    if record.ahead_ns is None:
        return record.launch_ns
    waited_ns = record.end_ns - record.begin_ns - record.plan_ns - record.hidden_ns
    return max(0, min(record.launch_ns, waited_ns))


def _gap_ns(record: StepRecord, after: StepRecord | None) -> float:
    if after is None or after.step_id != record.step_id + 1 or after.idle_ns:
        return math.nan
    return (after.ahead_ns or 0) if is_queued(record, after) else after.host_gap_ns


class Fit(NamedTuple):
    """A model, and how fast the machine was when the steps ran that it was fitted on."""

    model: cost.CostModel
    pace: cost.Pace


class StepTable(NamedTuple):
    """Recorded steps as arrays. parts: what the host took, one column for each of `HOST_PARTS`; the gap is that behind
    the step, NaN where nobody knows it. total_ns: the whole step, without the gap and without moves; ahead, with what
    the host took to plan it while another ran."""

    begins_ns: list[int]
    shapes: list[StepShape]
    basis: cost.Basis
    device_ns: Array
    parts_ns: Array
    total_ns: Array
    move_ns: float  # of a block


def fit(records: Sequence[StepRecord], facts: ServerFacts | None = None) -> Fit:
    """Returns the model of these steps. Raises ConfigError for too few, for some that cannot be, and for some that no
    model explains."""
    if len(records) < MIN_STEPS:
        hint = "Record more: some minutes of traffic."
        raise ConfigError(f"{len(records)} steps are too few to go by", param="ledger", limit=MIN_STEPS, hint=hint)
    require_sound_steps(records, None if facts is None else facts.max_model_len)
    steps = _steps(records, facts)
    model, pace = _fit(steps, facts)
    errors = _held_out(steps, facts, model)
    if not errors.median_relative <= MOST_OFF:
        words = f"the model is off by {errors.median_relative:.0%} at the median, on steps that it was not fitted on"
        hint = "That is no model, and 100% the limit. Record more, on a quiet machine."
        raise ConfigError(words, param="ledger", value=errors.median_relative, limit=MOST_OFF, hint=hint)
    return Fit(msgspec.structs.replace(model, errors=errors), pace)


def pace_of(model: cost.CostModel, records: Sequence[StepRecord]) -> float | None:
    """Returns how many times as long as the model says these steps took, in the middle; None where the model knows too
    few of them."""
    ratios = []
    for record, took_ns in zip(records, taken_ns(records), strict=True):
        with suppress(cost.OutOfRange):
            ratios.append(took_ns / max(1, _without_moves(model.step_time(shape_of_record(record)))))
    return float(np.median(ratios)) if len(ratios) >= MIN_STEPS else None


def _steps(records: Sequence[StepRecord], facts: ServerFacts | None) -> StepTable:
    shapes = [shape_of_record(record) for record in records]
    return StepTable(
        [record.begin_ns for record in records],
        shapes,
        cost.basis_of(records, None if facts is None else facts.cost),
        np.array([record.device_ns for record in records], float),
        np.array(host_parts(records), float),
        np.array(taken_ns(records), float),
        sum(record.moves_ns for record in records) / max(1, sum(shape.moved_blocks for shape in shapes)),
    )


def _fit(steps: StepTable, facts: ServerFacts | None) -> Fit:
    basis = steps.basis
    columns = np.array([basis.features(shape) for shape in steps.shapes])
    line = line_of(columns, steps.device_ns)
    host_columns = np.array([basis.host_features(shape) for shape in steps.shapes])
    *host, gaps = (_host_line(host_columns, part) for part in steps.parts_ns.T)
    gaps, gap_noise = _gaps(host_columns, steps.parts_ns.T[-1], gaps)
    compute = _compute_line(facts, basis, columns, steps.device_ns)
    plain = cost.CostModel(
        device=tuple(line.coefficients.tolist()),
        compute=tuple(compute.coefficients.tolist()),
        covariance=tuple(map(tuple, block_diag(line.covariance, compute.covariance).tolist())),
        basis=basis,
        unsure=_unsure(basis, columns, line),
        host=(*host, gaps),
        gap_noise=gap_noise,
        move_ns=steps.move_ns,
        buckets={},
        most=tuple(max(getattr(shape, name) for shape in steps.shapes) for name in cost.LIMITED),
        persistence=0.0,
        errors=cost.Errors(0.0, 0.0, 0.0),
        num_steps=len(steps.shapes),
        about={} if facts is None else {"model": facts.model, "version": facts.version},
    )
    ratios = steps.total_ns / np.maximum(_totals(plain, steps.shapes), 1.0)  # taken, over what the lines say
    buckets = buckets_of(steps.shapes, ratios)
    pace = _pace(steps, ratios / [buckets[cost.bucket_of(shape)].factor for shape in steps.shapes])
    ratios /= [pace.at(begin_ns, shape) for begin_ns, shape in zip(steps.begins_ns, steps.shapes, strict=True)]
    model = msgspec.structs.replace(plain, buckets=buckets_of(steps.shapes, ratios), persistence=persistence_of(ratios))
    return Fit(model, pace)


def _compute_line(facts: ServerFacts | None, basis: cost.Basis, columns: Array, device_ns: Array) -> Line:
    """Returns what the arithmetic takes at the best rate that was measured or recorded: larger steps than the recorded
    ones may be bound by it, where these were by memory. Of prompts it is drawn around the middle between that rate and
    what they usually attained, at the size that attained most: larger ones may attain no more, and no recorded size is
    said to take longer than it did. Empty where no rate is known."""
    empty = Line(np.empty(0), np.empty((0, 0)))
    if facts is None or facts.cost is None or facts.machine is None or not facts.machine.operations_per_s:
        return empty
    operations = cost.operations_of(facts.cost)
    if len(operations) != columns.shape[1] or facts.cost.windowed_share:  # captured steps; what no window sees
        return empty
    done, prompts = columns @ operations, columns[:, 1] > 0
    rates = done / np.maximum(device_ns, 1.0)
    recorded = (float(np.quantile(some, RARE)) for some in (rates, rates[prompts]) if len(some))
    best = max(facts.machine.operations_per_s / 1e9, *recorded)
    sizes = np.log2(np.maximum(done[prompts], 1.0)).astype(int)
    usual = max((float(np.median(rates[prompts][sizes == one])) for one in np.unique(sizes)), default=best)
    longer = np.array(["prompt" in name for name in basis.names]) * (best / (usual or best) - 1)
    spread = operations / best * longer / math.sqrt(12)  # as if drawn evenly
    return Line(operations / best * (1 + longer / 2), np.outer(spread, spread))


def _pace(steps: StepTable, ratios: Array) -> cost.Pace:
    decodes = np.array([shape.tokens == shape.decode_rows for shape in steps.shapes])
    begins_ns = np.array(steps.begins_ns)
    kinds = (("decode", decodes), ("prompts", ~decodes))
    return cost.Pace(*(_pace_of(begins_ns[some], ratios[some], PACE_STEPS[name]) for name, some in kinds))


def _pace_of(begins_ns: NDArray[np.int64], ratios: Array, num_steps: int) -> cost.PaceOf:
    """Returns the pace of these steps, from one stretch of so many to the next."""
    if not len(ratios):
        return cost.PaceOf()
    stretches = np.array_split(np.arange(len(ratios)), max(1, len(ratios) // num_steps))
    factors = tuple(_steady_mean(ratios[some]) for some in stretches)
    return cost.PaceOf(tuple(int(begins_ns[some[0]]) for some in stretches), factors)


def _unsure(basis: cost.Basis, columns: Array, line: Line) -> tuple[str, ...]:
    """Returns the quantities whose own part of a step is not known."""
    share = np.sqrt(np.diag(line.covariance)) * columns.mean(axis=0) / max((columns @ line.coefficients).mean(), 1.0)
    return tuple(name for name, one in zip(basis.names, share.tolist(), strict=True) if one > UNSURE)


def _host_line(columns: Array, values: Array) -> tuple[float, ...]:
    known = ~np.isnan(values)
    if not known.any() or not values[known].any():
        return (0.0,) * columns.shape[1]
    return tuple(line_of(columns[known], values[known]).coefficients.tolist())


def _totals(model: cost.CostModel, shapes: Sequence[StepShape]) -> Array:
    return np.array([_without_moves(model.step_time(shape)) for shape in shapes], float)


def _without_moves(time: StepTime) -> int:
    return time.step_ns - time.moves_ns


def buckets_of(shapes: Sequence[StepShape], ratios: Array) -> dict[str, cost.ShapeBucket]:
    members: dict[str, list[float]] = defaultdict(list)
    for shape, ratio in zip(shapes, ratios.tolist(), strict=True):
        members[cost.bucket_of(shape)].append(ratio)
    return {name: _bucket(np.array(values), ratios) for name, values in members.items()}


def _bucket(values: Array, all_ratios: Array) -> cost.ShapeBucket:
    """A bucket of few steps takes its noise from all."""
    trust = len(values) / (len(values) + SHRINK)
    factor = math.exp(trust * math.log(max(_steady_mean(values), 1e-3)))
    source = values if len(values) >= SHRINK else all_ratios
    mean, longest = _steady_mean(source), max(PAUSE * float(np.median(source)), float(np.quantile(source, RARE)))
    pauses = _quantiles(np.maximum(source - longest, 0.0)) / mean
    noise = tuple((_quantiles(np.minimum(source, longest)) / mean).tolist())
    return cost.ShapeBucket(len(values), factor, noise, tuple(pauses.tolist()) if pauses.any() else ())


def _quantiles(values: Array) -> Array:
    """Returns the mean of each two-hundredth of the values in order: their own mean is that of all, so that a pause of
    a long one among thousands is in it."""
    sums = np.concatenate([[0.0], np.cumsum(np.sort(values))])
    edges = np.linspace(0.0, len(values), QUANTILES + 1)
    return np.diff(np.interp(edges, np.arange(len(sums)), sums)) * QUANTILES / len(values)


def _gaps(columns: Array, gaps_ns: Array, line: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the line of the gaps' mean, and their noise. A robust line goes through most of them; on a busy machine
    some are many times as long, and half of the time is in those."""
    known = ~np.isnan(gaps_ns)
    predicted = columns[known] @ np.array(line)
    if not predicted.size or predicted.min() <= 0:
        return line, ()
    mean = float(gaps_ns[known].sum() / predicted.sum())
    noise = _quantiles(gaps_ns[known] / predicted)
    return tuple(one * mean for one in line), tuple(np.minimum(noise / noise.mean(), cost.MOST_TIMES).tolist())


def _steady_mean(values: Array) -> float:
    """The mean, with what is over `PAUSE` times the median brought in: the machine's pauses are noise, no bucket's."""
    middle = float(np.median(values))
    return float(np.clip(values, middle / PAUSE, middle * PAUSE).mean())


def persistence_of(ratios: Array) -> float:
    """How alike neighbours are: the correlation of their ranks."""
    ranks = np.argsort(np.argsort(ratios)).astype(float)
    correlation = float(np.corrcoef(ranks[:-1], ranks[1:])[0, 1])
    return min(max(correlation, 0.0), 0.99)


def _held_out(steps: StepTable, facts: ServerFacts | None, model: cost.CostModel) -> cost.Errors:
    clusters = clusters_of(len(steps.shapes))
    seen, unseen = np.concatenate(clusters[::2]), np.concatenate(clusters[1::2])
    half = msgspec.structs.replace(_fit(_some(steps, seen), facts).model, most=(sys.maxsize,) * len(cost.LIMITED))
    taken, by_half, by_all = steps.total_ns, _totals(half, steps.shapes)[unseen], _totals(model, steps.shapes)
    paces = [float(taken[some].sum() / max(by_all[some].sum(), 1.0)) for some in clusters]
    return cost.Errors(
        median_relative=float(np.median(np.abs(by_half / taken[unseen] - 1))),
        mean_relative=float(by_half.sum() / taken[unseen].sum() - 1),
        drift=float(np.std(np.log(paces))),
    )


def _some(steps: StepTable, indices: Array) -> StepTable:
    return StepTable(
        [steps.begins_ns[index] for index in indices],
        [steps.shapes[index] for index in indices],
        steps.basis,
        steps.device_ns[indices],
        steps.parts_ns[indices],
        steps.total_ns[indices],
        steps.move_ns,
    )
