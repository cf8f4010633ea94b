"""The reversals that the literature reports, on the card: each with its figures and, from the ledger, its cause.

    python -m benchmarks.gpu.reversals                                       all, Llama-3.1-8B
    python -m benchmarks.gpu.reversals weights cache --json                  some
    python -m benchmarks.gpu.reversals --shape qwen3-0.6b

weights      4 bits against bfloat16 as more streams decode: where they cross, and why (bytes, operations a second)
cache        fp8 keys and values against bfloat16, with memory for all requests and with memory for a quarter
chunking     prompts whole or cut: the longest stall of a chat against tokens a second
prefix_cache off and on with 0, 50 and 90 % of each prompt shared
batching     static against continuous for mixed output lengths
reservation  the longest context reserved for each request against blocks as they are needed, in the same memory

The loads and comparisons are those of `benchmarks.scenarios` (`reversals`, `mechanisms`), in a card's sizes. With
--tiny they run on the CPU's kernels with an int8 cache in the place of fp8.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.gpu.card import Found, forget, parse, parser, telling
from benchmarks.gpu.shapes import SHAPES, write
from benchmarks.scenarios import mechanisms
from benchmarks.scenarios import reversals as scenarios
from benchmarks.scenarios.engine_driver import load_runner
from benchmarks.scenarios.workloads import CARD, TINY

MECHANISMS = ("batching", "reservation", "chunking", "prefix_cache")
WHAT = ("weights", "cache", *MECHANISMS)
COUNTS = (1, 4, 16, 64, 128, 256)
BITS: dict[str, dict[str, Any]] = {"16 bits": {}, "int4": {"quantization": "int4"}}
GIB = 1 << 30
CACHE_LOAD = scenarios.CacheLoad(requests=64, prompt_tokens=1024, output_tokens=128, short=16, kind="fp8", budget=8192)
CACHE_LOAD_TINY = scenarios.CacheLoad(requests=4, prompt_tokens=8, output_tokens=6, short=2, kind="int8", budget=16)
# What tells a reversal's size, and what tells its cause, by comparison.
TOLD = {
    "batching": ("tokens_per_s", ("queued_s", "rows_a_step", "steps")),
    "reservation": ("held_share", ("running_mean", "waited_for_a_slot_s", "waited_for_blocks_s", "preemptions")),
    "chunking": ("max_stall_ms", ("computed_tokens_per_s", "most_prompt_tokens_a_step", "that_step_ms")),
    "prefix_cache": ("ttft_p50_ms", ("hit_share", "prefill_tokens", "queued_s")),
    "cache": ("tokens_per_s", ("running_mean", "waited_for_blocks_s", "waited_behind_another_s", "preemptions")),
    "weights": ("tokens_per_s", ("weights_gb_per_s", "products_gop_per_s", "device_ms_a_step")),
}


def settings(options: argparse.Namespace, kv_bytes: int, max_model_len: int) -> dict[str, Any]:
    """Of a runner: planned ahead on the card's kernels, or for --tiny the CPU's."""
    found = {"load_format": "dummy", "packed_cache": "off", "max_model_len": max_model_len}
    if options.tiny:
        return found | {"kernels": "native", "kv_cache_memory_bytes": 1 << 20}
    return found | {"kernels": "triton", "kv_cache_memory_bytes": kv_bytes, "async_scheduling": True}


def weights(model: str, options: argparse.Namespace) -> Found:
    counts = COUNTS[:2] if options.tiny else COUNTS
    steps, repeats = (2, 1) if options.tiny else (options.steps, options.repeats)
    found = scenarios.weights(model, repeats, steps, counts, BITS, **settings(options, 8 * GIB, 256))
    return {"arms": found, "crossover": scenarios.crossover(found, "int4", "16 bits")}


def cache(model: str, options: argparse.Namespace) -> Found:
    load = CACHE_LOAD_TINY if options.tiny else CACHE_LOAD
    own = settings(options, 12 * GIB, 2 * (load.prompt_tokens + load.output_tokens))
    load = scenarios.CacheLoad(**{**vars(load), "settings": own})
    return {"arms": scenarios.cache(model, 1 if options.tiny else options.repeats, load)}


def of_mechanisms(model: str, options: argparse.Namespace) -> Iterator[tuple[str, Found]]:
    sizes = TINY if options.tiny else CARD
    scheduler = mechanisms.scheduler_of(sizes)
    runner, asked = load_runner(model, scheduler, **settings(options, 30 * GIB, sizes.max_model_len))
    what = [name for name in MECHANISMS if name in options.what]
    yield from mechanisms.comparisons(runner, asked, sizes, what, 1 if options.tiny else options.repeats)


def measure(model: Path, options: argparse.Namespace, found: Found) -> None:
    results = found["reversals"] = {}
    for name, run in (("weights", weights), ("cache", cache)):
        if name in options.what:
            results[name] = run(str(model), options)
            forget()
    if set(options.what) & set(MECHANISMS):
        for name, one in of_mechanisms(str(model), options):
            results[name] = one
        forget()


def lines(results: Found) -> Iterator[tuple[str, str, str, str]]:
    """Of the table: comparison, arm, its figure, its causes."""
    for name, one in results.items():
        metric, causes = TOLD[name.split("_0")[0].split("_5")[0].split("_9")[0]]
        for arm, figures in one["arms"].items() if "arms" in one else mechanisms.arms_of(one).items():
            parts = {arm: figures} if metric in figures else {f"{arm}, {n}": by for n, by in figures.items()}
            for part, values in parts.items():
                if metric in values:
                    told = ", ".join(f"{cause} {values[cause]['median']:.4g}" for cause in causes)
                    yield name, part, f"{metric} {values[metric]['median']:.4g}", told
        if "crossover" in one:
            yield name, "crossover", str(one["crossover"]), "streams at which 16 bits are faster"


def table_of(found: Found) -> Table:
    table = Table("reversal", "arm", "figure", "cause")
    for cells in lines(found.get("reversals", {})):
        table.add_row(*cells)
    return table


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("what", nargs="*", help=", ".join(WHAT))
    made.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--steps", type=int, default=20, help="of weights, each time")
    options = parse(made, argv, shape="tiny")
    options.what = options.what or list(WHAT)
    unknown = set(options.what) - set(WHAT)
    if unknown:
        made.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(WHAT)}")
    with telling(options, table_of) as found, tempfile.TemporaryDirectory() as folder:
        measure(write(options.shape, Path(folder)), options, found)


if __name__ == "__main__":
    main()
