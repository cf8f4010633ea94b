"""Copies of evicted KV blocks in host memory: how fast they go, and what they save of a returning prompt's time.

    python -m benchmarks.gpu.offload                                         Llama-3.1-8B's blocks, 16 tokens each
    python -m benchmarks.gpu.offload --shape qwen3-0.6b --prompts 1024 8192 --json
    python -m benchmarks.gpu.offload --kv-cache-dtype fp8

Copies: so many blocks at once, to slots that follow each other and to slots here and there, timed by the marks that the
ledger's figures come from. The share is of what one large copy from and to pinned memory takes in the same run.

Returning prompts: the time to the first token of a prompt that is new (recomputed), that comes again at once (on the
device), and that comes again after another has taken its place (in host memory). The cache holds one prompt.
"""

import argparse
import gc
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.table import Table

from benchmarks.gpu.card import Found, median_event_us, parse, parser, place, scale, telling
from benchmarks.gpu.shapes import SHAPES, write
from benchmarks.scenarios.engine_driver import load_runner
from splittime.core.clock import SystemClock
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import StepPlan
from splittime.drive.crank import Crank, EngineParts, InlineDriver
from splittime.engine.engine import Engine
from splittime.kernels.layer import KvGroup
from splittime.ledger.steps import StepRecord
from splittime.runner.compose import overlap_of
from splittime.runner.kv_store import CopyMarks, KvStore, bytes_per_block
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

BLOCK = 16
SPARE_TOKENS = 16  # beside the prompt, in the cache and in a context
KEPT_PROMPTS = 4  # in host memory
TINY = {"shape": "tiny", "prompts": [40], "blocks": [1, 3], "num_blocks": 4, "repeats": 1}
DTYPES = {"auto": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def bus_bytes_per_s() -> dict[str, float]:
    """Of one large copy each way between the device and pinned memory."""
    on_device = torch.empty(scale().copy_bytes, dtype=torch.uint8, device=place())
    in_host = torch.empty(scale().copy_bytes, dtype=torch.uint8, pin_memory=on_device.is_cuda)
    copies: dict[str, Callable[[], object]] = {
        "out": lambda: in_host.copy_(on_device, non_blocking=True),
        "in": lambda: on_device.copy_(in_host, non_blocking=True),
    }
    return {way: scale().copy_bytes / (median_event_us(copy) * 1e-6) for way, copy in copies.items()}


# ---- copies


def groups_of(options: argparse.Namespace) -> list[KvGroup]:
    config = SHAPES[options.shape]
    return [KvGroup(tuple(range(config["num_hidden_layers"])), config["num_key_value_heads"], config["head_dim"], None)]


def copies(options: argparse.Namespace, bus: dict[str, float]) -> list[Found]:
    groups = groups_of(options)
    dtype = DTYPES[options.kv_cache_dtype]
    store = KvStore(groups, options.num_blocks, BLOCK, dtype, place(), options.num_blocks)
    block_bytes = bytes_per_block(groups, BLOCK, dtype)
    found = []
    for count, is_scattered in itertools.product(options.blocks, (False, True)):
        blocks, slots = list(range(count)), list(range(count))
        if is_scattered:
            chosen = random.Random(count)
            blocks, slots = (chosen.sample(range(options.num_blocks), count) for _ in range(2))
        out = StepPlan(0, (), offloads=tuple(zip(blocks, slots, strict=True)))
        back = StepPlan(0, (), restores=tuple(zip(slots, blocks, strict=True)))
        for way, plan in (("out", out), ("in", back)):
            told = figures(store, plan, count * block_bytes, bus[way])
            found.append(
                {"blocks": count, "slots": "here and there" if is_scattered else "in a row", "way": way, **told}
            )
    return found


def figures(store: KvStore, plan: StepPlan, num_bytes: int, ceiling: float) -> Found:
    """By the marks; and what the host takes to tell the device."""
    device_us, host_us = [], []
    for _ in range(scale().rounds + 2):
        begin_ns = time.perf_counter_ns()
        moved = store.move(plan)
        host_us.append((time.perf_counter_ns() - begin_ns) / 1e3)
        assert isinstance(moved, CopyMarks)
        moved.end.wait()
        device_us.append(max(1, moved.end.ns_since(moved.begin)) / 1e3)
    median = statistics.median(device_us[2:])
    rate = num_bytes / (median * 1e-6)
    return {"us": median, "host_us": statistics.median(host_us[2:]), "bytes": num_bytes, "bytes_per_s": rate,
            "share_of_bus": rate / ceiling}  # fmt: skip


# ---- returning prompts


def crank_of(model: Path, options: argparse.Namespace, tokens: int) -> Crank:
    context = tokens + SPARE_TOKENS
    block_bytes = bytes_per_block(groups_of(options), BLOCK, DTYPES[options.kv_cache_dtype])
    cache_bytes = -(-context // BLOCK) * block_bytes
    scheduler = SchedulerConfig(
        max_num_seqs=1, max_num_batched_tokens=options.step_tokens, max_model_len=context, num_blocks=1 << 20
    )
    settings: dict[str, Any] = {
        "kernels": "triton",
        "load_format": "dummy",
        "dtype": "bfloat16",
        "packed_cache": "off",
        "kv_cache_dtype": options.kv_cache_dtype,
        "max_model_len": context,
        "kv_cache_memory_bytes": cache_bytes,
        "kv_offload_memory_bytes": KEPT_PROMPTS * cache_bytes,
    }
    runner, asked = load_runner(str(model), scheduler, **settings)
    resolved = runner.resolved
    config = msgspec.structs.replace(scheduler, num_blocks=resolved.num_blocks, num_host_slots=resolved.num_host_slots)
    ahead = overlap_of(runner) if asked.async_scheduling else None
    return Crank(EngineParts(Engine(Scheduler(config), plans_ahead=ahead is not None), ahead or runner), SystemClock())


class Client:
    """One prompt at a time."""

    def __init__(self, crank: Crank, tokens: int) -> None:
        self._crank, self._tokens, self._count = crank, tokens, 0

    def ask(self, number: int) -> Found:
        """The prompt of this number: its time to the first token, and what was found and copied for it."""
        self._count += 1
        prompt = tuple((number * 7919 + i * (i % 13 + 1)) % 90 + 5 for i in range(self._tokens))
        begin_ns = time.monotonic_ns()
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=0)
        name = f"prompt-{self._count}"
        self._crank.submit(
            Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, submitted_ns=begin_ns), begin_ns
        )
        records: list[StepRecord] = []
        told, ready_ns = {"cached": 0, "in_host": 0}, begin_ns
        for output in InlineDriver(self._crank).outputs():
            records += [output.record] if output.record is not None else []
            for news in output.outputs:
                ready_ns = output.ready_ns
                told = {"cached": news.num_cached_tokens or 0, "in_host": news.num_host_tokens}
        return told | {
            "ttft_ms": (ready_ns - begin_ns) / 1e6,
            "restore_ms": sum(record.restore_ns for record in records) / 1e6,
            "offload_ms": sum(record.offload_ns for record in records) / 1e6,
        }


def returning(model: Path, options: argparse.Namespace, tokens: int) -> dict[str, Found]:
    client = Client(crank_of(model, options, tokens), tokens)
    numbers = itertools.count(1)
    client.ask(next(numbers))  # compiles
    asked: dict[str, list[Found]] = {"recomputed": [], "on the device": [], "in host memory": []}
    for _ in range(options.repeats):
        number = next(numbers)
        asked["recomputed"].append(client.ask(number))
        asked["on the device"].append(client.ask(number))
        client.ask(next(numbers))  # takes its place
        asked["in host memory"].append(client.ask(number))
    return {
        kind: {name: statistics.median(one[name] for one in told) for name in told[0]} for kind, told in asked.items()
    }


def measure(model: Path, options: argparse.Namespace, found: Found) -> None:
    found["bus_bytes_per_s"] = bus_bytes_per_s()
    found["copies"] = copies(options, found["bus_bytes_per_s"])
    for tokens in options.prompts:
        found.setdefault("returning", {})[str(tokens)] = returning(model, options, tokens)
        gc.collect()  # its weights and its cache


def table_of(found: Found) -> Table:
    bus = ", ".join(f"{way} {rate / 1e9:.1f} GB/s" for way, rate in found.get("bus_bytes_per_s", {}).items())
    shown = Table("what", "", "time", "GB/s", "of the bus", "host", title=f"pinned copies: {bus}")
    for one in found.get("copies", []):
        cells = (f"{one['us']:.0f} us", f"{one['bytes_per_s'] / 1e9:.1f}", f"{one['share_of_bus']:.0%}")
        shown.add_row(f"{one['blocks']} blocks {one['way']}", one["slots"], *cells, f"{one['host_us']:.0f} us")
    for tokens, kinds in found.get("returning", {}).items():
        for kind, one in kinds.items():
            copied = f"copies {one['restore_ms']:.1f} ms in, {one['offload_ms']:.1f} ms out"
            shown.add_row(f"prompt of {tokens}", kind, f"TTFT {one['ttft_ms']:.1f} ms", "", "", copied)
    return shown


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    made.add_argument("--kv-cache-dtype", choices=DTYPES, default="auto")
    made.add_argument("--blocks", type=int, nargs="+", default=[1, 4, 16, 64, 512], help="copied at once")
    made.add_argument("--num-blocks", type=int, default=1024, help="of the cache and of host memory, for copies alone")
    made.add_argument("--prompts", type=int, nargs="+", default=[2048, 8192, 32768])
    made.add_argument("--step-tokens", type=int, default=8192)
    made.add_argument("--repeats", type=int, default=5)
    options = parse(made, argv, **TINY)
    with telling(options, table_of) as found, tempfile.TemporaryDirectory() as folder:
        measure(write(options.shape, Path(folder)), options, found)


if __name__ == "__main__":
    main()
