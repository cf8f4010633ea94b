"""Two reversals that the literature reports of quantisation, looked for on this machine, with the ledger's evidence.

    python -m benchmarks.scenarios.reversals weights --model FOLDER     4 bits against 8 and 16 as more streams decode
    python -m benchmarks.scenarios.reversals cache --model FOLDER       an int8 cache with and without memory to spare

weights: a step of 1 to 128 streams, with 16-bit, int8 and int4 weights. The step's own record gives the time that it
computed, the kernels' counter the bytes of weights that it read: while the product of the two is the memory's bandwidth
fewer bits are faster, and where it falls far below, arithmetic is what takes the time and fewer bits are worth nothing.

cache: the same requests at once, with the cache of 16 bits and of 8, in memory that holds all of them and in memory
that holds a quarter. The accounts say how long requests waited for blocks (the first in the queue) and behind
another that did, and what was computed twice; the steps, how many ran together.

Arms take turns; medians over the repeats with their range.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import file_result
from benchmarks.scenarios.engine_driver import Arrival, Run, crank_over, drive, load_runner
from benchmarks.scenarios.streams import Streams
from splittime.ledger.stages import Cause, Stage
from splittime.runner.compose import gauge_of
from splittime.scheduler.config import SchedulerConfig

STREAMS = (1, 4, 16, 64, 128)
WEIGHTS: dict[str, dict[str, Any]] = {
    "16 bits": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
Figures = dict[str, Any]


@dataclass(frozen=True)
class CacheLoad:
    """requests at once, of so many tokens; the short memory holds `short` of them at 16 bits. kind: of the smaller
    cache. budget: tokens a step. settings: of all arms' runners."""

    requests: int = 16
    prompt_tokens: int = 64
    output_tokens: int = 64
    short: int = 4
    kind: str = "int8"
    budget: int = 256
    settings: Figures = field(default_factory=lambda: {"quantization": "int8"})


# ---- weights


def weights(
    model: str,
    repeats: int,
    steps: int,
    counts: Sequence[int] = STREAMS,
    arms: dict[str, Figures] = WEIGHTS,
    **settings: Any,
) -> Figures:
    """By arm and number of streams. settings: of all arms' runners."""
    made = {name: Streams(model, {**settings, **own}, max(counts), prompt_tokens=2) for name, own in arms.items()}
    found: dict[str, dict[int, list[Figures]]] = {name: {count: [] for count in counts} for name in made}
    for _ in range(repeats):
        for count in counts:
            for name, streams in made.items():
                found[name][count].append(_step_figures(streams, count, steps))
    return {
        name: {"ceilings": _ceilings(made[name]), **{str(n): _medians(runs) for n, runs in by.items()}}
        for name, by in found.items()
    }


def crossover(figures: Figures, fewer: str, plain: str) -> int | None:
    """The fewest streams at which the arm `plain` was as fast as `fewer` bits or faster; None: never."""
    counts = sorted(int(count) for count in figures[plain] if count.isdigit())
    rates = {
        n: (figures[fewer][str(n)]["tokens_per_s"]["median"], figures[plain][str(n)]["tokens_per_s"]["median"])
        for n in counts
    }
    return next((n for n in counts if rates[n][0] <= rates[n][1]), None)


def _step_figures(streams: Streams, count: int, steps: int) -> Figures:
    decoded = streams.decode(count, steps)
    device_s = sum(record.device_ns for record in decoded.records) / 1e9
    operations = count * steps * streams.runner.cost.operations_per_token
    return {
        "tokens_per_s": decoded.tokens_per_s,
        "device_ms_a_step": device_s / steps * 1e3,
        "rest_share": 1 - device_s / decoded.wall_s,
        "weights_read_mb_a_step": decoded.weight_bytes / steps / 1e6,
        "weights_gb_per_s": decoded.weight_bytes / device_s / 1e9,
        "products_gop_per_s": operations / device_s / 1e9,
    }


def _ceilings(streams: Streams) -> Figures:
    """What this machine reads and computes with these weights, by the gauge that the doctor uses."""
    found = list(gauge_of(streams.runner, remembers=False).measure())[-1]
    if found is None:
        return {}
    return {"read_gb_per_s": found.read_bytes_per_s / 1e9, "operations_per_s": found.operations_per_s}


# ---- cache


def cache(model: str, repeats: int, load: CacheLoad | None = None) -> Figures:
    load = load or CacheLoad()
    cranks = _cache_cranks(model, load)
    found: dict[str, list[Figures]] = {name: [] for name in cranks}
    for repeat in range(repeats):
        for name, crank in cranks.items():
            found[name].append(_cache_figures(drive(crank, _requests(repeat, load))))
    return {
        name: {"blocks": cranks[name].engine.scheduler.config.num_blocks, **_medians(runs)}
        for name, runs in found.items()
    }


def _cache_cranks(model: str, load: CacheLoad) -> dict[str, Any]:
    """Two runners; the engines with little memory are over the same ones, and have some of their blocks."""
    scheduler = SchedulerConfig(
        enable_prefix_caching=False, max_num_seqs=load.requests, max_num_batched_tokens=max(load.budget, load.requests)
    )
    length = load.prompt_tokens + load.output_tokens
    settings: Figures = {"max_model_len": 2 * length, **load.settings}
    found = {}
    short_bytes = 0
    for kind in ("auto", load.kind):
        runner, asked = load_runner(model, scheduler, kv_cache_dtype=kind, **settings)
        resolved = runner.resolved
        each = -(-length // resolved.block_size) + 1
        short_bytes = short_bytes or load.short * each * resolved.kv_bytes_per_block
        name = resolved.kv_cache_dtype
        blocks = (load.requests * each, short_bytes // resolved.kv_bytes_per_block)
        found[f"{name}, memory for all"] = crank_over(runner, scheduler, asked, blocks[0])
        kept = f"memory for {load.short} of {load.requests}" if kind == "auto" else "the same memory"
        found[f"{name}, {kept}"] = crank_over(runner, scheduler, asked, blocks[1])
    return found


def _requests(repeat: int, load: CacheLoad) -> list[Arrival]:
    prompts = ([(31 * i + 7 * j + repeat) % 90 + 5 for j in range(load.prompt_tokens)] for i in range(load.requests))
    return [Arrival(0.0, prompt, load.output_tokens) for prompt in prompts]


def _cache_figures(run: Run) -> Figures:
    decoding = [step for step in run.steps if step.decode_tokens and not step.prefill_tokens]
    return {
        "tokens_per_s": run.output_tokens_per_s,
        "e2e_median_s": statistics.median(outcome.e2e_ns for outcome in run.outcomes) / 1e9,
        "waited_for_blocks_s": run.mean_s(Stage.QUEUE, Cause.KV_BLOCKS),
        "waited_behind_another_s": run.mean_s(Stage.QUEUE, Cause.POLICY),
        "preempted_s": run.mean_s(Stage.PREEMPTED),
        "recompute_s": run.mean_s(Stage.RECOMPUTE),
        "preemptions": sum(len(step.victims) for step in run.steps),
        "running_mean": statistics.mean(step.num_running for step in run.steps),
        "decode_device_ms": statistics.median(step.device_ns for step in decoding) / 1e6,
        "steps": len(run.steps),
    }


# ---- both


def _medians(runs: list[Figures]) -> Figures:
    columns = {name: [run[name] for run in runs] for name in runs[0]}
    return {name: {"median": statistics.median(x), "low": min(x), "high": max(x)} for name, x in columns.items()}


def show(figures: Figures) -> str:
    """A line for each arm, or for each part of one."""
    lines = []
    for name, found in figures.items():
        is_whole = any("median" in one for one in found.values() if isinstance(one, dict))
        for part, values in {"": found}.items() if is_whole else found.items():
            lines.append(f"{name} {part}: " + ", ".join(f"{key} {_told(value)}" for key, value in values.items()))
    return "\n".join(lines)


def _told(value: Any) -> str:
    return (
        f"{value['median']:.4g} ({value['low']:.4g}-{value['high']:.4g})" if isinstance(value, dict) else f"{value:.4g}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("weights", "cache"))
    parser.add_argument("--model", required=True, help="a folder; random weights will do")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="of weights, each time")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.what == "weights":
        figures = weights(options.model, options.repeats, options.steps)
    else:
        figures = cache(options.model, options.repeats)
    file_result(f"reversals_{options.what}_{Path(options.model).name}", figures, vars(options), options.json)
    if not options.json:
        print(show(figures))


if __name__ == "__main__":
    main()
