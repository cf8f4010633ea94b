"""Whole steps of the engine on the card: decoding at several batches, prompts, and what of it was not the device.

    python -m benchmarks.gpu.engine --shape llama-3.1-8b                     bfloat16
    python -m benchmarks.gpu.engine --shape llama-3.1-70b --quantization int4 --streams 1 16
    python -m benchmarks.gpu.engine --shape qwen3-0.6b --streams 1 --json

Random weights of the shape. Arms: kernels launched one by one, captured steps, captured steps planned ahead. A step's
floor is max(bytes / copy bandwidth, operations / matrix rate), both measured in the same run; bytes are the weights'
and the cache's that the kernels count. "idle" is the share of the wall time in which the device did not compute, by
the step records: host gaps, planning and launches that were not hidden.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.card import copy_bytes_per_s, median_us, print_results, require_card
from benchmarks.gpu.shapes import SHAPES, write
from benchmarks.scenarios.streams import Decoded, Streams
from splittime.core.plan import Admitted, Row, StepPlan
from splittime.core.sampling import SamplingParams

ARMS: dict[str, dict[str, Any]] = {
    "one by one": {"enforce_eager": True},
    "captured": {},
    "captured, ahead": {"async_scheduling": True},
}
MATRIX = 8192
Found = dict[str, Any]


def ceilings() -> dict[str, float]:
    """Bytes a second of a copy on the device, operations a second of cuBLAS in bfloat16."""
    a, b = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return {"bytes_per_s": copy_bytes_per_s(), "operations_per_s": 2 * MATRIX**3 / (median_us(lambda: a @ b) * 1e-6)}


def decoding(streams: Streams, count: int, steps: int, repeats: int, ceiling: dict[str, float]) -> Found:
    """Medians of `repeats`."""
    runs = [_decoded(streams, streams.decode(count, steps), count, ceiling) for _ in range(repeats)]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _decoded(streams: Streams, decoded: Decoded, count: int, ceiling: dict[str, float]) -> Found:
    steps = len(decoded.records)
    device_s = sum(record.device_ns + record.sample_ns for record in decoded.records) / 1e9
    seen = statistics.mean(record.kv_tokens_read for record in decoded.records)
    resolved = streams.resolved
    num_bytes = decoded.weight_bytes / steps + seen * resolved.kv_bytes_per_block / resolved.block_size
    floor_s = max(num_bytes / ceiling["bytes_per_s"], 2 * resolved.num_parameters * count / ceiling["operations_per_s"])
    return {
        "tokens_per_s": decoded.tokens_per_s,
        "step_ms": decoded.wall_s / steps * 1e3,
        "device_ms": device_s / steps * 1e3,
        "floor_ms": floor_s * 1e3,
        "share_of_floor": floor_s / (decoded.wall_s / steps),
        "idle": 1 - device_s / decoded.wall_s,
    }


def prompt(streams: Streams, tokens: int, repeats: int, ceiling: dict[str, float]) -> Found:
    """One prompt of so many tokens in one step."""
    runner: Any = streams.engine._runner
    resolved = streams.resolved
    blocks = tuple(range(-(-tokens // resolved.block_size)))
    ids = tuple(range(5, 95)) * (tokens // 90 + 1)
    times_ns = []
    for number in range(repeats + 1):
        name = f"prompt-{number}"
        admitted = (Admitted(name, ids[:tokens], 0, SamplingParams(temperature=0.0, seed=0), ()),)
        result = runner.run(StepPlan(number, (Row(name, 0, ids[:tokens], blocks, True),), admitted))
        runner.run(StepPlan(number, (), released=(name,)))
        times_ns.append(result.device_ns)
    seconds = statistics.median(times_ns[1:]) / 1e9
    operations = 2 * resolved.num_parameters * tokens  # attention's own, some per cent at these lengths, not counted
    return {"ms": seconds * 1e3, "tokens_per_s": tokens / seconds,
            "share_of_matrix_rate": operations / seconds / ceiling["operations_per_s"]}  # fmt: skip


def measure(model: Path, options: argparse.Namespace, ceiling: dict[str, float]) -> Found:
    found: Found = {"ceilings": ceiling}
    for name, settings in ARMS.items():
        more = {
            "kernels": "triton",
            "load_format": "dummy",
            "quantization": options.quantization,
            "kv_cache_dtype": options.kv_cache_dtype,
            "kv_cache_memory_bytes": None,
            "max_model_len": options.max_model_len,
        }
        most = max(options.streams)
        streams = Streams(str(model), {**more, **settings}, most, options.context, max(options.prompts))
        found[name] = {
            "resolved": {"weights": streams.resolved.weights, "graph_sizes": streams.resolved.graph_sizes},
            "decoding": {n: decoding(streams, n, options.steps, options.repeats, ceiling) for n in options.streams},
            "prompts": {n: prompt(streams, n, options.repeats, ceiling) for n in options.prompts},
        }
        del streams
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


def table(found: Found) -> Table:
    shown = Table("arm", "streams", "tokens/s", "step, ms", "floor, ms", "share of floor", "idle")
    for arm in ARMS:
        for count, one in found[arm]["decoding"].items():
            cells = (f"{one['tokens_per_s']:.0f}", f"{one['step_ms']:.3f}", f"{one['floor_ms']:.3f}")
            shown.add_row(arm, str(count), *cells, f"{one['share_of_floor']:.0%}", f"{one['idle']:.1%}")
        for tokens, one in found[arm]["prompts"].items():
            rate = f"{one['share_of_matrix_rate']:.0%} of the matrix rate"
            shown.add_row(arm, f"prompt of {tokens}", f"{one['tokens_per_s']:.0f}", f"{one['ms']:.1f}", "", rate, "")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--quantization", choices=("int8", "int4", "fp8"))
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each stream's prompt")
    parser.add_argument("--prompts", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    require_card()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(write(options.shape, Path(folder)), options, ceilings())
    print_results({"settings": vars(options), **found}, table(found), options.json, Console())


if __name__ == "__main__":
    main()
