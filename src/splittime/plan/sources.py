"""Where a plan's server comes from: a ledger, a file that describes one, runs of `bench`, or a data sheet.

replica_in("today.sqlite")              the ledger of a server, ours or a vLLM with our books
replica_in("one.json")                  what `splittime calibrate` wrote
replica_in("light.json,heavy.json")     runs of `bench` against any server

A replica of any server from runs of `splittime bench` against it: vLLM, llama.cpp, whatever streams tokens.

    replica = replica_of_runs([load_run(path) for path in paths])

`plan.seen_steps` reads from the arrivals of tokens what steps there were. Their times, host and device together, are
the same non-negative regression as a ledger's (`simulate.fit`), with one more column: what lies around the engine of a
request that comes to an idle server. The scheduler's settings are guesses, given or made:

    max_num_seqs             the most answers that were on their way together
    max_num_batched_tokens   that of `BUDGETS` whose steps the regression explains best, or the next above the most seen
    max_model_len            as the server says, else the longest request
    num_blocks               `REACH` times what was held at once, and a block that is not full yet for each request:
                             nobody sees from outside when a cache is full

`plan.seen_steps` checks the replica: the runs themselves are simulated, and compared with what was measured.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from splittime.attach.simulators import simulator_of
from splittime.bench.book.records import Run, load_run
from splittime.bench.book.requests import output_tokens
from splittime.core.errors import ConfigError, NotFound
from splittime.core.facts import Machine, TokenCost
from splittime.core.files import SQLITE
from splittime.plan import seen_steps
from splittime.simulate.change import MAX_BLOCKS
from splittime.simulate.cost import HOST_PARTS, LIMITED, REACH, CostModel, Errors, bucket_of
from splittime.simulate.data_sheet import Device, device_named, replica_of_data_sheet
from splittime.simulate.fit import buckets_of, persistence_of
from splittime.simulate.recorded import Mix, is_ledger, latest_run, read_ledger
from splittime.simulate.regression import Array, Line, clusters_of, line_of
from splittime.simulate.replica import AnyReplica, Approach, Replica, load_replica, replica_with

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
    unknown = sorted(set(settings) - set(Guesses._fields))
    if unknown:
        hint = f"Of a server that is seen from outside one can say: {', '.join(Guesses._fields)}."
        raise ConfigError(f"{unknown[0]} cannot be changed in runs of bench", param=unknown[0], hint=hint)
    return replica_of_runs(runs, **settings)


BUDGETS = (8192, 4096, 2048, 1024, 512, 256, 128)
MIN_SEEN = 50
MIN_PROMPTS = 10
MOST_BEYOND = 0.02  # of the steps, may have had more than the budget
BETTER = 0.95  # of the error that a larger budget leaves, for a smaller one to be believed
BLOCK_TOKENS = 16
MERGED, WANTED = 8, 100  # at most so many steps a sum, if there are so many sums
LATE, TINY = -0.2, 1e-9
CLIPPED = 3.0  # of the usual time: pauses of the machine decide nothing


class Guesses(NamedTuple):
    """The scheduler's settings as somebody knows them; None: they are guessed."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    num_blocks: int | None = None


class Explained(NamedTuple):
    """What a budget makes of the runs: single steps, and sums of some, of which the line is made. error, prompt_error:
    relative ones of the line on clusters that it was not made of: the median, and that where there were prompts, which
    alone depend on the budget."""

    budget: int
    seen: list[seen_steps.Seen]
    sums: list[seen_steps.Seen]
    line: Line
    error: float
    prompt_error: float


def replica_of_runs(runs: Sequence[Run], arm: int = 0, **guesses: Any) -> Replica:
    """Returns the server of these runs. guesses: fields of `Guesses`. Raises ConfigError for runs that say too little,
    with what is missing."""
    known = Guesses(**guesses)
    explained = _explained(runs, arm, known.max_num_batched_tokens)
    settings = _settings(runs, arm, explained, known)
    around = Approach(to_admission_ns=round(explained.line.coefficients[-1]))
    source = f"bench runs of {runs[0].label or runs[0].arms[arm].url}, from outside"
    replica = replica_with(settings, _costs(explained), around, source)
    replica = msgspec.structs.replace(replica, mix=_mix(runs, arm))
    return seen_steps.checked_by_runs(replica, runs, arm, max(explained.error, explained.prompt_error))


def _explained(runs: Sequence[Run], arm: int, budget: int | None) -> Explained:
    """Returns the runs as the likeliest budget explains them."""
    best: Explained | None = None
    for one in (budget,) if budget else BUDGETS:
        readings = [seen_steps.read_steps(run, one, arm) for run in runs]
        seen = [each for reading in readings for each in reading.seen]
        _require_enough(seen)
        if best is not None and _is_beyond(readings):
            break  # smaller ones are too
        sums = seen_steps.merged(seen, max(1, min(MERGED, len(seen) // WANTED)))
        error, prompt_error = _held_out(sums)
        if best is None or prompt_error < BETTER * best.prompt_error:
            best = Explained(one, seen, sums, line_of(_columns(sums), _taken(sums)), error, prompt_error)
    assert best is not None
    return best


def _steady(explained: Explained) -> list[seen_steps.Seen]:
    """Returns the steps that tell how they vary: the single ones, or the sums, if what one took longer the next took
    less: then it was not the steps that varied but the tokens' way to the client."""
    late = _lateness(_ratios(explained.seen, explained.line))
    return explained.sums if late < LATE else explained.seen


def _lateness(ratios: Array) -> float:
    """Returns the correlation of neighbours, beyond that of a machine's slow hours: -0.5 if all that varies is when
    tokens come, since each step then begins as much later as the one before ended; 0 if steps vary."""
    kept = np.clip(ratios, 0.0, CLIPPED) - np.clip(ratios, 0.0, CLIPPED).mean()
    own, next_one, apart = (float((kept[lag:] * kept[: len(kept) - lag]).mean()) for lag in (0, 1, 3))
    return (next_one - apart) / (own - apart) if own - apart > TINY else 0.0


def _ratios(seen: Sequence[seen_steps.Seen], line: Line) -> Array:
    """Returns what they took, over what the line says."""
    return _taken(seen) / np.maximum(_columns(seen) @ line.coefficients, 1.0)


def _is_beyond(readings: Sequence[seen_steps.StepsRead]) -> bool:
    beyond, linked = (sum(getattr(each, name) for each in readings) for name in ("num_beyond", "num_linked"))
    return beyond > MOST_BEYOND * linked


def _require_enough(seen: Sequence[seen_steps.Seen]) -> None:
    """Raises ConfigError with what is missing."""
    rows = sorted(one.shape.decode_rows for one in seen if one.decode_rows)
    prompts = sum(one.with_prompts > 0 for one in seen)
    missing = None
    if len(seen) < MIN_SEEN:
        missing = f"{len(seen)} steps could be told from the arrivals of tokens, fewer than {MIN_SEEN}"
    elif prompts < MIN_PROMPTS:
        missing = f"{prompts} steps with prompts could be told, fewer than {MIN_PROMPTS}"
    elif not rows or rows[-1] < 2 * rows[len(rows) // 10]:
        most = rows[-1] if rows else 0
        missing = f"all steps have much the same number of requests ({rows[0] if rows else 0} to {most})"
    if missing is not None:
        hint = (
            "Measure at two loads or more, one with at least twice the requests in flight: splittime bench run --out."
        )
        raise ConfigError(f"the runs say too little of the server: {missing}", param="runs", hint=hint)


def _columns(seen: Sequence[seen_steps.Seen]) -> Array:
    """Returns `FEATURES` summed over the steps, and the arrivals."""
    return np.array(
        [
            (s.num_steps, s.with_prompts, s.decode_rows, s.prompt_tokens, s.kv_tokens, s.prompt_pairs, s.arrivals)
            for s in seen
        ],
        float,
    )


def _taken(seen: Sequence[seen_steps.Seen]) -> Array:
    return np.array([one.taken_ns for one in seen], float)


def _held_out(seen: Sequence[seen_steps.Seen]) -> tuple[float, float]:
    """Returns the errors of `Explained`."""
    clusters = clusters_of(len(seen))
    learned, unseen = np.concatenate(clusters[::2]), np.concatenate(clusters[1::2])
    columns, taken = _columns(seen), _taken(seen)
    predicted = columns[unseen] @ line_of(columns[learned], taken[learned]).coefficients
    errors, with_prompts = np.abs(predicted / np.maximum(taken[unseen], 1.0) - 1), columns[unseen, 1] > 0
    return float(np.median(errors)), float(np.median(errors[with_prompts])) if with_prompts.any() else 0.0


def _costs(explained: Explained) -> CostModel:
    """Returns the model of steps. All time is in the device's line: from outside nobody sees the host's part."""
    seen, line = _steady(explained), explained.line
    ratios = _ratios(seen, line)
    shapes = [one.shape for one in seen if not one.arrivals]
    known = ratios[[not one.arrivals for one in seen]]
    buckets = buckets_of(shapes, known)
    return CostModel(
        device=tuple(line.coefficients[:-1].tolist()),
        covariance=tuple(map(tuple, line.covariance[:-1, :-1].tolist())),
        host=((0.0, 0.0, 0.0),) * len(HOST_PARTS),
        move_ns=0.0,
        buckets=buckets,
        most=tuple(max(getattr(one.shape, name) for one in explained.seen) for name in LIMITED),
        persistence=persistence_of(known / [buckets[bucket_of(shape)].factor for shape in shapes]),
        errors=Errors(explained.error, 0.0, _drift(ratios)),
        num_steps=sum(one.num_steps for one in seen),
    )


def _drift(ratios: Array) -> float:
    return float(np.std([np.log(max(np.median(ratios[some]), 0.01)) for some in clusters_of(len(ratios))]))


def _settings(runs: Sequence[Run], arm: int, explained: Explained, known: Guesses) -> dict[str, int]:
    told = [run.arms[arm].max_model_len for run in runs]
    longest = max(
        seen_steps.prompt_tokens_of(o) + (output_tokens(o) or 1) for run in runs for o in seen_steps.answered(run, arm)
    )
    context = known.max_model_len or next((length for length in told if length), longest)
    held = max(one.shape.kv_tokens for one in explained.seen)
    slots = known.max_num_seqs or max(seen_steps.most_at_once(run, arm) for run in runs)
    return {
        "max_num_seqs": slots,
        "max_num_batched_tokens": known.max_num_batched_tokens or _likely_budget(explained),
        "max_model_len": context,
        "block_size": BLOCK_TOKENS,
        "num_blocks": known.num_blocks or -(-max(context, int(REACH * held)) // BLOCK_TOKENS) + slots,
    }


def _mix(runs: Sequence[Run], arm: int) -> Mix:
    served = [outcome for run in runs for outcome in seen_steps.answered(run, arm)]
    rows = tuple((seen_steps.prompt_tokens_of(one), output_tokens(one) or len(one.chunk_ns)) for one in served)
    return Mix(rows, sum(one.cached_tokens or 0 for one in served) / sum(prompt for prompt, _ in rows))


def _likely_budget(explained: Explained) -> int:
    """Returns the budget that explains the steps best, or a smaller one that holds all that was seen."""
    most = max((one.shape.tokens for one in explained.seen), default=explained.budget)
    return min(explained.budget, *(budget for budget in BUDGETS if budget >= most), explained.budget)
