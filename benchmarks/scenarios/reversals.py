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
from pathlib import Path
from typing import Any

from benchmarks.report import file_result
from benchmarks.scenarios.engine_driver import Arrival, Run, build_engine, drive
from benchmarks.scenarios.streams import Streams
from splittime.engine.engine import Engine
from splittime.ledger.stages import Cause, Stage
from splittime.runner.config import RunnerConfig
from splittime.scheduler.config import SchedulerConfig

STREAMS = (1, 4, 16, 64, 128)
WEIGHTS = {"16 bits": {}, "int8": {"quantization": "int8"}, "int4": {"quantization": "int4"}}
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 64, 64
SHORT = 4  # requests of 16 bits that the short memory holds
Figures = dict[str, Any]


# ---- weights


def weights(model: str, repeats: int, steps: int) -> Figures:
    arms = {name: Streams(model, settings, max(STREAMS), prompt_tokens=2) for name, settings in WEIGHTS.items()}
    found: dict[str, dict[int, list[Figures]]] = {name: {count: [] for count in STREAMS} for name in arms}
    for _ in range(repeats):
        for count in STREAMS:
            for name, streams in arms.items():
                found[name][count].append(_step_figures(streams, count, steps))
    return {
        name: {"ceilings": _ceilings(model, arms[name]), **{str(n): _medians(runs) for n, runs in by.items()}}
        for name, by in found.items()
    }


def _step_figures(streams: Streams, count: int, steps: int) -> Figures:
    decoded = streams.decode(count, steps)
    device_s = sum(record.device_ns for record in decoded.records) / 1e9
    return {
        "tokens_per_s": decoded.tokens_per_s,
        "device_ms_a_step": device_s / steps * 1e3,
        "rest_share": 1 - device_s / decoded.wall_s,
        "weights_read_mb_a_step": decoded.weight_bytes / steps / 1e6,
        "weights_gb_per_s": decoded.weight_bytes / device_s / 1e9,
    }


def _ceilings(model: str, streams: Streams) -> Figures:
    """What this machine reads and computes with these weights, by the gauge that the doctor uses."""
    settings = RunnerConfig(model_path=model, packed_cache="off", **streams.settings)  # type: ignore[arg-type]
    gauge = streams.engine._runner.gauge(settings)  # type: ignore[attr-defined]
    found = list(gauge.measure())[-1]
    return {"read_gb_per_s": found.read_bytes_per_s / 1e9, "operations_per_s": found.operations_per_s}


# ---- cache


def cache(model: str, repeats: int) -> Figures:
    arms = _cache_engines(model)
    found: dict[str, list[Figures]] = {name: [] for name in arms}
    for repeat in range(repeats):
        for name, engine in arms.items():
            found[name].append(_cache_figures(drive(engine, _requests(repeat))))
    return {name: {"blocks": arms[name]._runner.resolved.num_blocks, **_medians(runs)} for name, runs in found.items()}  # type: ignore[attr-defined]


def _cache_engines(model: str) -> dict[str, Engine]:
    plain = _engine(model, "auto", 1 << 30)
    resolved = plain._runner.resolved  # type: ignore[attr-defined]
    blocks = -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // resolved.block_size) + 1  # of a request
    short = SHORT * blocks * resolved.kv_bytes_per_block
    kind = resolved.kv_cache_dtype
    return {
        f"{kind}, memory for all": plain,
        "int8, memory for all": _engine(model, "int8", 1 << 30),
        f"{kind}, memory for {SHORT} of {REQUESTS}": _engine(model, "auto", short),
        "int8, the same memory": _engine(model, "int8", short),
    }


def _engine(model: str, kv_cache_dtype: str, kv_bytes: int) -> Engine:
    scheduler = SchedulerConfig(enable_prefix_caching=False, max_num_seqs=REQUESTS, max_num_batched_tokens=256)
    memory: Figures = {"kv_cache_dtype": kv_cache_dtype, "kv_cache_memory_bytes": kv_bytes, "max_model_len": 256}
    return build_engine(model, scheduler, quantization="int8", **memory)


def _requests(repeat: int) -> list[Arrival]:
    prompts = ([(31 * i + 7 * j + repeat) % 900 + 5 for j in range(PROMPT_TOKENS)] for i in range(REQUESTS))
    return [Arrival(0.0, prompt, OUTPUT_TOKENS) for prompt in prompts]


def _cache_figures(run: Run) -> Figures:
    decoding = [step for step in run.steps if step.decode_tokens and not step.prefill_tokens]
    return {
        "tokens_per_s": run.output_tokens_per_s,
        "e2e_median_s": statistics.median(outcome.e2e_ms for outcome in run.outcomes) / 1e3,
        "waited_for_blocks_s": _mean_s(run, Stage.QUEUE, Cause.KV_BLOCKS),
        "waited_behind_another_s": _mean_s(run, Stage.QUEUE, Cause.POLICY),
        "preempted_s": _mean_s(run, Stage.PREEMPTED, None),
        "recompute_s": _mean_s(run, Stage.RECOMPUTE, None),
        "preemptions": sum(len(step.victims) for step in run.steps),
        "running_mean": statistics.mean(step.num_running for step in run.steps),
        "decode_device_ms": statistics.median(step.device_ns for step in decoding) / 1e6,
        "steps": len(run.steps),
    }


def _mean_s(run: Run, stage: Stage, cause: Cause | None) -> float:
    """A request's, in this stage for this cause; None for any."""
    spent_ns = (
        interval.duration_ns
        for outcome in run.outcomes
        for interval in outcome.account.intervals()
        if interval.stage is stage and cause in (None, interval.cause)
    )
    return sum(spent_ns) / len(run.outcomes) / 1e9


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
