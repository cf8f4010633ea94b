"""What a calibration has found, from the books of its stairs. `plan.kept` keeps it."""

import statistics
import sys
from collections.abc import Sequence

import msgspec

from splittime.bench.book.records import Arm
from splittime.core.errors import ConfigError
from splittime.ledger.steps import StepRecord
from splittime.simulate.cost import LIMITED, CostModel, bucket_of
from splittime.simulate.fit import fit, taken_ns
from splittime.simulate.recorded import Recorded
from splittime.simulate.regression import clusters_of
from splittime.simulate.replica import Replica, replica_of
from splittime.simulate.shape import StepShape, shape_of_record


class KindOfSteps(msgspec.Struct, frozen=True):
    """Steps of one kind. taken_ns: the median of their times. median_relative: the median of |predicted / taken - 1|.
    mean_relative: the sum predicted over the sum taken, minus 1. machine_relative: the median error that would be left
    if the prediction of each kind were right in the middle: steps that are alike do not take the same time."""

    kind: str
    num_steps: int
    taken_ns: int
    median_relative: float
    mean_relative: float
    machine_relative: float


def errors_by_kind(records: Sequence[StepRecord]) -> list[KindOfSteps]:
    """Returns the errors of each kind: decodes before prompts, fewest tokens first; the last is of all steps."""
    clusters = clusters_of(len(records))
    learned, unseen = ([records[index] for some in clusters[odd::2] for index in some] for odd in (0, 1))
    model = msgspec.structs.replace(fit(learned).model, most=(sys.maxsize,) * len(LIMITED))
    shapes = [shape_of_record(record) for record in unseen]
    pairs = [(_predicted_ns(model, shape), took_ns) for shape, took_ns in zip(shapes, taken_ns(unseen), strict=True)]
    kinds: dict[str, list[tuple[int, int]]] = {name: [] for name in _names(shapes)}
    for shape, pair in zip(shapes, pairs, strict=True):
        kinds[bucket_of(shape)].append(pair)
    spread = [_off(some) for some in kinds.values()]
    each = [_error(name, some, off) for (name, some), off in zip(kinds.items(), spread, strict=True)]
    return [*each, _error("all", pairs, [one for off in spread for one in off])]


def _off(pairs: Sequence[tuple[int, int]]) -> list[float]:
    """Returns how far steps are from what the middle one of their kind takes more than predicted."""
    ratios = [predicted / max(1, true) for predicted, true in pairs]
    middle = statistics.median(ratios)
    return [abs(ratio / middle - 1) for ratio in ratios]


def _names(shapes: Sequence[StepShape]) -> list[str]:
    """Returns the kinds that there are, in their order."""
    keys = {bucket_of(shape): (shape.tokens > shape.decode_rows, shape.tokens) for shape in shapes}
    return sorted(keys, key=lambda name: keys[name])


def _error(kind: str, pairs: Sequence[tuple[int, int]], off: Sequence[float]) -> KindOfSteps:
    predicted, taken = zip(*pairs, strict=True)
    return KindOfSteps(
        kind,
        len(pairs),
        int(statistics.median(taken)),
        statistics.median(abs(one / max(1, true) - 1) for one, true in pairs),
        sum(predicted) / max(1, sum(taken)) - 1,
        statistics.median(off),
    )


def _predicted_ns(model: CostModel, shape: StepShape) -> int:
    time = model.step_time(shape)
    return time.step_ns - time.moves_ns


class ServerCalibration(msgspec.Struct, frozen=True, kw_only=True):
    """What a calibration has found. errors: by kind of step, on steps that the model was not fitted on. others_share:
    the share of the steps' rows that were of other clients' requests. seconds: from the first step to the last."""

    replica: Replica
    errors: list[KindOfSteps]
    others_share: float
    num_steps: int
    seconds: float


def calibration_of(arms: Sequence[Arm]) -> ServerCalibration:
    """Returns the server as its books of each stair (`bench.stairs.climb`) show it. Raises ConfigError where these say
    too little."""
    facts = arms[-1].facts
    if facts is None:
        raise ConfigError("the server does not say what it is", param="url", value=arms[-1].url)
    accounts = [account for arm in arms for account in arm.accounts]
    steps = [step for arm in arms for step in arm.steps]
    replica = replica_of(Recorded(accounts, steps, facts)).steady()
    ours = {account.request_id for account in accounts}
    rows = [request_id for step in steps for request_id, _, _ in step.rows]
    source = f"a calibration of {len(steps):,} steps"
    return ServerCalibration(
        replica=msgspec.structs.replace(replica, source=source, mix=None),  # its users' requests nobody knows
        errors=errors_by_kind(steps),
        others_share=sum(request_id not in ours for request_id in rows) / len(rows),
        num_steps=len(steps),
        seconds=(steps[-1].end_ns - steps[0].begin_ns) / 1e9,
    )
