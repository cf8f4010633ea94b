"""A decode step at a long context beside the time in which the memory could be read once: weights and KV together.

    python -m benchmarks.micro.long_context --model FOLDER --quantization int8 --kv-cache-dtype bfloat16
    python -m benchmarks.micro.long_context --model FOLDER --json

The cache is filled with random values instead of being computed: a step's time does not depend on them. Steps at the
long context and at a short one take turns; the limit is the streaming read of the same minute (the sum of 1 GiB on
all cores). Median and quartiles.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import file_result
from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted, Row, StepPlan
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.torch_runner import TorchRunner

SHORT = 64


def read_gb_per_s(cores: int) -> float:
    """The best of three sums over 1 GiB."""
    threads = torch.get_num_threads()
    torch.set_num_threads(cores)
    block = torch.ones(1 << 28)
    taken = []
    for _ in range(4):
        begin = time.perf_counter()
        block.sum()
        taken.append(time.perf_counter() - begin)
    torch.set_num_threads(threads)
    return block.nbytes / min(taken) / 1e9


@torch.inference_mode()
def fill(runner: TorchRunner) -> None:
    for layer in runner.store.layers:
        if layer.scales is None:
            layer.data.normal_(std=0.5)
        else:
            layer.data.random_(-127, 128)
            layer.scales.fill_(0.01)


def admit(runner: TorchRunner, name: str, context: int, first_block: int) -> int:
    """A request that stands at `context` tokens; returns the next free block. One step is run to make it known."""
    blocks = -(-(context + 1) // runner.resolved.block_size)
    table = tuple(range(first_block, first_block + blocks))
    admitted = Admitted(name, (1,) * context, 1, SamplingParams(temperature=0.0, seed=0), ())
    runner.run(StepPlan(0, (Row(name, context - 1, (1,), table, 1),), (admitted,)))
    return first_block + blocks


def step_s(runner: TorchRunner, names: list[str], context: int) -> float:
    rows = tuple(Row(name, context - 1, (1,), (), 1) for name in names)
    begin = time.perf_counter()
    runner.run(StepPlan(0, rows))
    return time.perf_counter() - begin


def measure(runner: TorchRunner, context: int, batch: int, rounds: int) -> dict[str, Any]:
    fill(runner)
    block, names = 0, {}
    for kind, length in (("long", context), ("short", SHORT)):
        names[kind] = [f"{kind}-{number}" for number in range(batch)]
        for name in names[kind]:
            block = admit(runner, name, length, block)
    reads, times = [], {"long": [], "short": []}
    for _ in range(rounds):
        reads.append(read_gb_per_s(runner.resolved.num_threads))
        times["long"].append(step_s(runner, names["long"], context))
        times["short"].append(step_s(runner, names["short"], SHORT))
    kv_bytes = batch * context * runner.resolved.kv_bytes_per_block / runner.resolved.block_size
    num_bytes = {"long": runner.resolved.weights_bytes + kv_bytes, "short": float(runner.resolved.weights_bytes)}
    read = statistics.median(reads)
    found: dict[str, Any] = {"read_gb_per_s": read, "kv_gb": kv_bytes / 1e9}
    for kind, taken in times.items():
        limit = num_bytes[kind] / read / 1e9
        quartiles = statistics.quantiles(taken, n=4)
        found[kind] = {"ms": [q * 1e3 for q in quartiles], "limit_ms": limit * 1e3, "share": limit / quartiles[1]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    config = RunnerConfig(
        model_path=str(arguments.model),
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
        max_model_len=arguments.context,
        max_num_seqs=2 * arguments.batch,
    )
    figures = measure(load_torch_runner(config), arguments.context, arguments.batch, arguments.rounds)
    kind = arguments.quantization or "unquantised"
    name = f"long_context_{arguments.model.resolve().name}_{kind}_{arguments.kv_cache_dtype}"
    file_result(name, figures, vars(arguments), arguments.json)
    if not arguments.json:
        table = Table("step", "p25, ms", "median", "p75", "limit", "share of the limit")
        for one in ("short", "long"):
            table.add_row(
                one,
                *(f"{ms:.1f}" for ms in figures[one]["ms"]),
                f"{figures[one]['limit_ms']:.1f}",
                f"{figures[one]['share']:.0%}",
            )
        Console(stderr=True).print(table)


if __name__ == "__main__":
    main()
