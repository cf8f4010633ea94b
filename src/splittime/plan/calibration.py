"""What a calibration has found, from the books of its stairs, and where it is kept.

There is one file for each machine, model and choice of the settings that change how long a step takes (`COSTLY`), such
as the number of threads. `load_kept` finds the file of a server by what the server says of itself.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from splittime.bench.book.records import Arm
from splittime.core.cache_folder import cache_folder
from splittime.core.errors import ConfigError
from splittime.ledger.facts import ServerFacts
from splittime.simulate.held_out import KindOfSteps, errors_by_kind
from splittime.simulate.recorded import Recorded
from splittime.simulate.replica import Replica, load_replica, replica_of, save_replica

FOLDER = "replicas"
COSTLY = (
    *("num_threads", "quantization", "dtype", "kernels", "activation_dtype", "products", "weights"),
    *("linear_backend", "attention_backend", "kv_cache_dtype", "tensor_parallel_size", "block_size"),
)
NAME_CHARS = 40


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
        replica=msgspec.structs.replace(replica, source=source),
        errors=errors_by_kind(steps),
        others_share=sum(request_id not in ours for request_id in rows) / len(rows),
        num_steps=len(steps),
        seconds=(steps[-1].end_ns - steps[0].begin_ns) / 1e9,
    )


def keep(replica: Replica, facts: ServerFacts, folder: Path | None = None) -> Path | None:
    """Returns where it is kept; None for a user without a home. Raises ConfigError where it cannot be written."""
    folder = folder or kept_folder()
    if folder is None:
        return None
    path = folder / kept_name(facts)
    save_replica(replica, path)
    return path


def load_kept(facts: ServerFacts, folder: Path | None = None) -> Replica | None:
    """Returns what was kept for this machine, model and configuration; None if nothing was. Raises ConfigError for a
    file of another version."""
    folder = folder or kept_folder()
    path = None if folder is None else folder / kept_name(facts)
    return load_replica(path) if path is not None and path.is_file() else None


def kept_files(folder: Path | None = None) -> Iterator[Path]:
    """Yields the files of all that was kept, the latest first."""
    folder = folder or kept_folder()
    found = [] if folder is None else list(folder.glob("*.json"))
    yield from sorted(found, key=lambda path: -path.stat().st_mtime_ns)


def kept_folder() -> Path | None:
    home = cache_folder()
    return None if home is None else home / FOLDER


def kept_name(facts: ServerFacts) -> str:
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
