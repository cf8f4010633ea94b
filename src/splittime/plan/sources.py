"""Where a plan's server comes from: a ledger, a file that describes one, runs of `bench`, or a data sheet.

replica_in("today.sqlite")              the ledger of a server, ours or a vLLM with our books
replica_in("one.json")                  what `splittime calibrate` wrote
replica_in("light.json,heavy.json")     runs of `bench` against any server
"""

from pathlib import Path
from typing import Any

import msgspec

from splittime.attach.simulators import simulator_of
from splittime.bench.book.records import Run, load_run
from splittime.core.errors import ConfigError, NotFound
from splittime.core.facts import Machine, TokenCost
from splittime.core.whole_file import SQLITE
from splittime.simulate.change import MAX_BLOCKS
from splittime.simulate.data_sheet import Device, device_named, replica_of_data_sheet
from splittime.simulate.recorded import is_ledger, latest_run, read_ledger
from splittime.simulate.replica import AnyReplica, Replica, load_replica

BEGIN_BYTES = 256
TAKEN = (
    "Name a ledger (splittime serve --ledger-file), a calibration (splittime calibrate --out), or runs (splittime "
    "bench run --out)."
)


def replica_in(source: str, settings: dict[str, Any]) -> AnyReplica:
    """Returns the server that files tell of, with these settings instead of its own. Raises NotFound, and ConfigError
    for files that tell too little."""
    paths = [Path(name) for name in source.split(",")]
    missing = next((path for path in paths if not path.is_file()), None)
    if missing is not None:
        raise NotFound(f"there is no file {missing}", param="source", value=str(missing))
    for path in paths:
        _require_known(path)
    if len(paths) > 1 or (not is_ledger(paths[0]) and _is_run(paths[0])):
        return _from_outside([load_run(path) for path in paths], settings)
    return _own(paths[0]).with_settings(settings)


def _require_known(path: Path) -> None:
    """Raises ConfigError for a file that begins as nothing that a plan is made from."""
    try:
        with path.open("rb") as file:
            begin = file.read(BEGIN_BYTES)
    except OSError:
        return  # who reads it whole says why
    if not begin:
        raise ConfigError(f"{path} is empty", param="source", value=str(path), hint=TAKEN)
    if not begin.startswith(SQLITE) and begin.lstrip()[:1] != b"{":
        words = f"{path} is neither a ledger nor a calibration nor a run of bench"
        raise ConfigError(words, param="source", value=str(path), hint=TAKEN)


def replica_of_device(
    name: str | Device,
    cost: TokenCost,
    weights_bytes: int,
    max_model_len: int,
    precision: str,
    settings: dict[str, Any],
    kv_formula: str = "",
) -> Replica:
    """Returns a server that nobody has measured. weights_bytes: what they take of its memory. max_model_len: the
    model's own; the server's is less where the KV cache holds less. kv_formula: how the KV bytes of a token come from
    the model's config, for people. Raises ConfigError for a device that nobody knows, and for a model that it cannot
    hold."""
    device = device_named(name) if isinstance(name, str) else name
    replica = replica_of_data_sheet(device, cost, precision=precision, weights_bytes=weights_bytes)
    num_blocks = min(replica.config.num_blocks, MAX_BLOCKS)  # a small model leaves room for more than is simulated
    held = replica.config.block_size * settings.get("num_blocks", num_blocks)
    config = msgspec.structs.replace(replica.config, max_model_len=min(max_model_len, held), num_blocks=num_blocks)
    costs = msgspec.structs.replace(replica.costs, about=replica.costs.about | {"kv_formula": kv_formula})
    replica = msgspec.structs.replace(replica, config=config, costs=costs).with_settings(settings)
    machine = Machine(cpu=device.name, threads=1, read_bytes_per_s=device.read_bytes_per_s)
    return msgspec.structs.replace(replica, token_cost=cost, machine=machine)


def _own(path: Path) -> AnyReplica:
    if not is_ledger(path):
        return load_replica(path)
    recorded = latest_run(read_ledger(path))
    return simulator_of(recorded.facts).to_replica(recorded)


def _is_run(path: Path) -> bool:
    """Whether `bench` wrote it. Raises ConfigError for a file that cannot be read."""
    try:
        msgspec.json.decode(path.read_bytes(), type=Run)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    except OSError as error:
        hint = "Who may read it? ls -l shows that."
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="source", value=str(path), hint=hint) from None
    return True


def _from_outside(runs: list[Run], settings: dict[str, Any]) -> Replica:
    from splittime.plan.outside import Guesses, replica_of_runs

    unknown = sorted(set(settings) - set(Guesses._fields))
    if unknown:
        hint = f"Of a server that is seen from outside one can say: {', '.join(Guesses._fields)}."
        raise ConfigError(f"{unknown[0]} cannot be changed in runs of bench", param=unknown[0], hint=hint)
    return replica_of_runs(runs, **settings)
