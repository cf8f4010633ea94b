"""The calibrations that are kept on this machine, and which of them holds for a server.

There is one file for each machine, model, version and choice of the settings that change how long a step takes
(`COSTLY`), such as the number of threads. `kept_for` finds the one of a server by what the server says of itself.
`kept_here` finds the one of this machine, where there is one: nobody guesses among several.

What a calibration has found, from the books of its stairs.
"""

import hashlib
import re
import statistics
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from splittime.bench.book.records import Arm
from splittime.core.errors import ConfigError
from splittime.core.facts import Machine
from splittime.core.files import check_writable
from splittime.core.this_process import cache_folder
from splittime.ledger.facts import ServerFacts
from splittime.ledger.steps import StepRecord
from splittime.simulate.change import LIMITS
from splittime.simulate.cost import LIMITED, CostModel, bucket_of
from splittime.simulate.fit import fit, taken_ns
from splittime.simulate.recorded import Recorded
from splittime.simulate.regression import clusters_of
from splittime.simulate.replay import scheduler_config
from splittime.simulate.replica import Replica, load_replica, replica_of, save_replica
from splittime.simulate.shape import StepShape, shape_of_record

FOLDER = "replicas"
COSTLY = (
    *("num_threads", "quantization", "dtype", "kernels", "activation_dtype", "products", "weights"),
    *("linear_backend", "attention_backend", "kv_cache_dtype", "tensor_parallel_size", "block_size"),
    *("enforce_eager", "async_scheduling"),
)
NAME_CHARS = 40
MOST_TOLD = 8
CALIBRATE = "splittime calibrate measures one."
UNITS = ((86_400, "day"), (3_600, "hour"), (60, "minute"))


class KeptCalibration(NamedTuple):
    path: Path
    replica: Replica
    age_s: float

    @property
    def model(self) -> str:
        return str(self.replica.costs.about.get("model"))

    @property
    def version(self) -> str:
        return str(self.replica.costs.about.get("version"))

    def __str__(self) -> str:
        machine = machine_words(self.replica.machine)
        return f"the calibration of {self.model} on {machine}, {age_words(self.age_s)} old: {self.path}"


def check_keepable() -> None:
    """Raises ConfigError where nothing can be kept: before it is measured."""
    folder = _folder()
    if folder is not None:
        check_writable(folder / "any.json", "XDG_CACHE_HOME")


def keep(replica: Replica, facts: ServerFacts, folder: Path | None = None) -> Path | None:
    """Returns where it is kept; None for a user without a home. Raises ConfigError where it cannot be written."""
    folder = folder or _folder()
    if folder is None:
        return None
    path = folder / _name(facts)
    save_replica(replica, path)
    return path


def kept_for(facts: ServerFacts, folder: Path | None = None) -> KeptCalibration | None:
    """Returns what was kept for this machine, model and configuration; None if nothing was. Raises ConfigError for a
    file of another version."""
    folder = folder or _folder()
    path = None if folder is None else folder / _name(facts)
    return _read(path) if path is not None and path.is_file() else None


def require_kept_for(facts: ServerFacts, folder: Path | None = None) -> KeptCalibration:
    """As `kept_for`, with the settings of the scheduler that the server has now. Raises ConfigError, with how the
    nearest that is kept differs, if nothing was kept."""
    found = kept_for(facts, folder)
    if found is not None:
        return found._replace(replica=_scheduled_as(found.replica, facts))
    hint = "Calibrate this server: splittime calibrate --url URL."
    nearest = [_difference(one, facts) for one in _all(folder)[0]]
    others = f"; what is kept differs in {min(nearest, key=len)}" if nearest else ""
    raise ConfigError(f"no calibration of this server is kept here{others}", param="source", hint=hint)


def kept_here(
    machines: Collection[tuple[str, int | None]], version: str, folder: Path | None = None
) -> KeptCalibration:
    """Returns the calibration of this machine. machines: what it is called, with its cores; its cards too. Raises
    ConfigError where there is none of this version, or several."""
    kept, unread = _all(folder)
    if not kept:
        words = f"; {unread} of another version cannot be read" if unread else ""
        hint = f"{CALIBRATE} Or name a ledger (splittime plan: or --device with --model-config)."
        raise ConfigError(f"no calibration is kept here{words}", param="source", hint=hint)
    here = [one for one in kept if _machine_key(one.replica.machine) in machines]
    if not here:
        hint = f"{CALIBRATE} To predict that other machine, name its file."
        here_words = " or ".join(f"{name}, {cores} cores" for name, cores in sorted(machines))
        message = f"what is kept is of another machine than this one ({here_words}): {_list(kept)}"
        raise ConfigError(message, param="source", hint=hint)
    current = [one for one in here if one.version == version]
    if not current:
        message = f"what is kept was measured with another version than {version}: {_list(here)}"
        raise ConfigError(message, param="source", hint="Calibrate again, or name the file.")
    if len(current) > 1:
        hint = "Name one of these files, or the URL of the server that is meant."
        told = _list(current, _differing(current))
        raise ConfigError(f"{len(current)} calibrations of this machine are kept: {told}", param="source", hint=hint)
    return current[0]


def _scheduled_as(replica: Replica, facts: ServerFacts) -> Replica:
    """Returns the server with the scheduler's settings, the size of its cache and the bounds of its queue from these
    facts: no step takes longer for them, so a calibration holds for all."""
    bounds = {name: facts.settings[name] for name in LIMITS if name in facts.settings}
    scheduled = msgspec.structs.replace(replica, config=scheduler_config(facts), settings=facts.settings)
    return scheduled.with_settings(bounds)


def age_words(seconds: float) -> str:
    """`3 days`."""
    for length, unit in UNITS:
        count = int(seconds // length)
        if count:
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return "less than a minute"


def machine_words(machine: Machine | None) -> str:
    return "an unknown machine" if machine is None else f"{machine.cpu}, {machine.cores} cores"


def _all(folder: Path | None) -> tuple[list[KeptCalibration], int]:
    """Returns all that can be read, the latest first, and how many cannot."""
    folder, found, unread = folder or _folder(), [], 0
    for path in [] if folder is None else folder.glob("*.json"):
        try:
            found.append(_read(path))
        except ConfigError:
            unread += 1
    return sorted(found, key=lambda one: one.age_s), unread


def _read(path: Path) -> KeptCalibration:
    return KeptCalibration(path, load_replica(path), max(0.0, time.time() - path.stat().st_mtime))


def _folder() -> Path | None:
    home = cache_folder()
    return None if home is None else home / FOLDER


def _machine_key(machine: Machine | None) -> tuple[str, int | None] | None:
    return None if machine is None else (machine.cpu, machine.cores)


def _differing(kept: Sequence[KeptCalibration]) -> list[str]:
    """Returns the settings in which they differ."""
    return [name for name in COSTLY if len({str(one.replica.settings.get(name)) for one in kept}) > 1]


def _list(kept: Sequence[KeptCalibration], settings: Sequence[str] = ()) -> str:
    told = []
    for one in kept[:MOST_TOLD]:
        chosen = "".join(f", {name} {one.replica.settings.get(name)}" for name in settings)
        told.append(f"{one}{f' ({chosen[2:]})' if chosen else ''}")
    more = len(kept) - len(told)
    return "; ".join(told) + (f"; and {more} more" if more else "")


def _difference(kept: KeptCalibration, facts: ServerFacts) -> str:
    """Returns in what it differs from a server."""
    pairs: list[tuple[str, Any, Any]] = [
        ("the machine", machine_words(kept.replica.machine), machine_words(facts.machine)),
        ("the model", kept.model, facts.model),
        ("the version", kept.version, facts.version),
        *((name, kept.replica.settings.get(name), facts.settings.get(name)) for name in COSTLY),
    ]
    differing = [f"{name} ({there} there, {here} here)" for name, there, here in pairs if there != here]
    return ", ".join(differing) or "the weights' sizes"


def _name(facts: ServerFacts) -> str:
    """Returns the file's name: the model's, for people, and a hash of all that costs."""
    machine = facts.machine
    about = {
        "version": facts.version,
        "model": facts.model,
        "machine": None if machine is None else [machine.cpu, machine.cores, machine.threads],
        "cost": None if facts.cost is None else msgspec.to_builtins(facts.cost),
        "settings": {name: facts.settings.get(name) for name in COSTLY},
    }
    key = hashlib.sha256(msgspec.json.encode(about, order="sorted")).hexdigest()[:24]
    return f"{re.sub('[^A-Za-z0-9.-]+', '-', facts.model)[-NAME_CHARS:]}-{key}.json"


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
