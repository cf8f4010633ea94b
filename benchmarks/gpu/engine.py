"""Whole steps of the engine on the card: decoding at several batches, prompts, and what of it was not the device.

    python -m benchmarks.gpu.engine --shape llama-3.1-8b                     bfloat16
    python -m benchmarks.gpu.engine --shape llama-3.1-70b --quantization int4 --streams 1 16
    python -m benchmarks.gpu.engine --shape qwen3-0.6b --streams 1 --arms ahead --json

Random weights of the shape, loaded once. Arms: captured steps planned ahead, captured steps one after the other,
kernels launched one by one. Of each batch the prompts are computed once; the steps that follow are cut into windows,
whose median counts. A step's floor is `floors.floor_s`, with both ceilings measured in the same run.

Of the wall time, "idle" is the share that the device's marks do not cover with a step's own work (forward pass and
sampling), "gap" what they say lay between two steps; "profiled" is what torch's profiler saw of some further steps.
"""

import argparse
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.gpu import floors
from benchmarks.gpu.card import Found, ceilings, forget, parse, parser, telling
from benchmarks.gpu.profiled import profiled
from benchmarks.gpu.shapes import SHAPES, write
from benchmarks.scenarios.streams import Decoded, Streams
from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted, Row, StepPlan
from splittime.drive.host_time import freeze_heap


@dataclass(frozen=True)
class Arm:
    is_ahead: bool
    is_captured: bool


ARMS = {"ahead": Arm(True, True), "captured": Arm(False, True), "one-by-one": Arm(False, False)}
PROFILED_STEPS = 20
TINY = {"shape": "tiny", "streams": [1, 2], "context": 8, "prompts": [12], "max_model_len": 64, "steps": 1}


def decoding(streams: Streams, count: int, options: argparse.Namespace, ceiling: dict[str, float]) -> Found:
    """Medians over the windows; of the host's own work, over all steps."""
    whole = streams.decode(count, options.steps * options.repeats)
    runs = [window_figures(streams, window, count, ceiling) for window in whole.windows(options.repeats)]
    found: Found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    found |= {"lowest_share": min(run["share_of_floor"] for run in runs), "host": host_figures(whole)}
    profile: Found = {}
    if torch.cuda.is_available():
        streams.decode(count, PROFILED_STEPS, profiled(profile))
    return found | {"profiled": profile}


def window_figures(streams: Streams, decoded: Decoded, count: int, ceiling: dict[str, float]) -> Found:
    steps = len(decoded.records)
    cost = streams.runner.cost
    step_s = decoded.wall_s / steps
    context = statistics.mean(record.kv_tokens_read for record in decoded.records)
    num_bytes = floors.decode_bytes(cost, decoded.weight_bytes / steps, context)
    floor_s = floors.floor_s(num_bytes, floors.decode_operations(cost, count, context), ceiling)
    device_s = sum(record.device_ns + record.sample_ns for record in decoded.records) / 1e9
    return {
        "tokens_per_s": decoded.tokens_per_s,
        "step_ms": step_s * 1e3,
        "device_ms": device_s / steps * 1e3,
        "sample_ms": sum(record.sample_ns for record in decoded.records) / steps / 1e6,
        "floor_ms": floor_s * 1e3,
        "bytes_a_step": num_bytes,
        "share_of_floor": floor_s / step_s,
        "share_of_bandwidth": num_bytes / step_s / ceiling["bytes_per_s"],
        "idle": 1 - device_s / decoded.wall_s,
        "gap": sum(record.gap_ns for record in decoded.records) / 1e9 / decoded.wall_s,
    }


def host_figures(decoded: Decoded) -> Found:
    """plan+commit of each step where they are in its record; what was hidden behind the device where they are not."""
    both = [(record.plan_ns + record.commit_ns) / 1e3 for record in decoded.records]
    hidden = [record.hidden_ns / 1e3 for record in decoded.records]
    return {
        "plan_commit_us": {"p50": floors.percentile(both, 0.5), "p99": floors.percentile(both, 0.99)},
        "hidden_us": {"p50": floors.percentile(hidden, 0.5), "p99": floors.percentile(hidden, 0.99)},
        "executions": dict(Counter(record.execution for record in decoded.records)),
    }


def prompt(streams: Streams, tokens: int, repeats: int, ceiling: dict[str, float]) -> Found:
    """One prompt of so many tokens in one step."""
    runner, resolved = streams.runner, streams.resolved
    blocks = tuple(range(-(-tokens // resolved.block_size)))
    ids = (tuple(range(5, 95)) * (tokens // 90 + 1))[:tokens]
    times_ns = []
    for number in range(repeats + 1):
        name = f"prompt-{tokens}-{number}"
        admitted = (Admitted(name, ids, 0, SamplingParams(temperature=0.0, seed=0), ()),)
        result = runner.run(StepPlan(number, (Row(name, 0, ids, blocks, 1),), admitted))
        runner.run(StepPlan(number, (), released=(name,)))
        times_ns.append(result.device_ns)
    seconds = statistics.median(times_ns[1:]) / 1e9  # the first compiled
    rate = floors.prefill_operations(runner.cost, tokens) / seconds
    return {"ms": seconds * 1e3, "tokens_per_s": tokens / seconds,
            "share_of_matrix_rate": rate / ceiling["operations_per_s"]}  # fmt: skip


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Of the runner: on the card, and in the interpreter where there is none."""
    return {
        "kernels": "triton",
        "load_format": "dummy",
        "packed_cache": "off",
        "quantization": options.quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "kv_cache_memory_bytes": None if torch.cuda.is_available() else 1 << 20,
        "max_model_len": options.max_model_len,
    }


def measure(model: Path, options: argparse.Namespace, found: Found) -> None:
    ceiling = found["ceilings"] = ceilings()
    step_tokens = max(*options.prompts, 16)
    streams = Streams(str(model), settings(options), max(options.streams), options.context, step_tokens)
    freeze_heap()  # as a server does
    runner: Any = streams.runner
    if not torch.cuda.is_available():
        runner.capture(options.streams)
    found["resolved"] = {name: getattr(streams.resolved, name) for name in ("weights", "weights_bytes", "graph_sizes")}
    found["prompts"] = {}
    graphs = runner.execution.graphs
    for number, name in enumerate(options.arms):
        arm = ARMS[name]
        runner.execution.graphs = graphs if arm.is_captured else None
        streams.begin_anew(arm.is_ahead)
        by_count = found.setdefault("arms", {})[name] = {}
        for count in options.streams:
            by_count[str(count)] = decoding(streams, count, options, ceiling)
        if number == 0:  # prompts are the same in all arms, and come before the arms that matter less
            for tokens in options.prompts:
                found["prompts"][str(tokens)] = prompt(streams, tokens, options.repeats, ceiling)
    del streams, runner, graphs
    forget()


def table_of(found: Found) -> Table:
    shown = Table(
        "arm", "streams", "tokens/s", "step, ms", "floor, ms", "share of floor", "idle", "gap", "host p99, us"
    )
    for arm, by_count in found.get("arms", {}).items():
        for count, one in by_count.items():
            cells = (f"{one['tokens_per_s']:.0f}", f"{one['step_ms']:.3f}", f"{one['floor_ms']:.3f}")
            host = one["host"]["hidden_us" if ARMS[arm].is_ahead else "plan_commit_us"]["p99"]
            shares = (f"{one['share_of_floor']:.0%}", f"{one['idle']:.1%}", f"{one['gap']:.1%}", f"{host:.0f}")
            shown.add_row(arm, count, *cells, *shares)
    for tokens, one in found.get("prompts", {}).items():
        rate = f"{one['share_of_matrix_rate']:.0%} of the matrix rate"
        shown.add_row("", f"prompt of {tokens}", f"{one['tokens_per_s']:.0f}", f"{one['ms']:.1f}", "", rate, "", "", "")
    return shown


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    made.add_argument("--quantization", choices=("int8", "int4", "fp8"))
    made.add_argument("--kv-cache-dtype", default="auto")
    made.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    made.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    made.add_argument("--context", type=int, default=1024, help="tokens of each stream's prompt")
    made.add_argument("--prompts", type=int, nargs="+", default=[2048, 8192])
    made.add_argument("--max-model-len", type=int, default=16384)
    made.add_argument("--steps", type=int, default=30, help="of a window")
    made.add_argument("--repeats", type=int, default=5, help="windows, and prompts of each length")
    options = parse(made, argv, **TINY, repeats=2)
    with telling(options, table_of) as found, tempfile.TemporaryDirectory() as folder:
        measure(write(options.shape, Path(folder)), options, found)


if __name__ == "__main__":
    main()
