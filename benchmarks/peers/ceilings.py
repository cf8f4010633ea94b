"""What the machine could do at most, measured beside the contenders, and what that means for a model's step.

The prober (`machine.cpp`, compiled here with g++) stays resident. It runs hand loops of the fastest instructions that
the processor has, tiles included, and no kernel of anybody's. Without a compiler, numpy measures the read and the
float32 product instead, both lower than the machine's limits, and the other rates are unknown.

    bandwidth bound    tokens / (bytes / read rate)
    arithmetic bound   tokens / (operations / rate of the class's arithmetic)
    roofline           the lower of the two, in tokens/s
    held               as the arithmetic bound, at the rate that all threads keep up for a third of a second; the clock
                       falls, and neighbours come and go, so a prompt of as long is better compared with this

bytes: the weights once, and the KV cache of all streams in 16 bits. The arithmetic of `float32` is the float32
multiply-add, of `bf16` the faster of that and bfloat16 products, of `int8` and `int4` 8-bit products. A step of prefill
computes the head for its last token only.

The read is of `CACHES` times the cache that the machine reports, so that no cache holds it, and of 1 GiB at the least;
where memory is short, of a third of what is free.
"""

import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.contenders import HERE, ROOT, Contender, Ended

BYTES_A_WEIGHT = {"float32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}
BYTES_A_WEIGHT |= {"q8_0": 1.0625, "q6_k": 0.8203, "q4_k_m": 0.6, "q4_0": 0.5625}  # q4_k_m: its mixture, about
ARITHMETIC = {
    "float32": ("fma_gflop_per_s",),
    "bf16": ("bf16_gflop_per_s", "fma_gflop_per_s"),
    "int8": ("int8_gop_per_s",),
    **dict.fromkeys(("int4", "q8_0", "q6_k", "q4_k_m", "q4_0"), ("int8_gop_per_s",)),
}
CACHES = 4
LEAST_BYTES = 1 << 30
LOOPS = ROOT / "src" / "splittime" / "kernels" / "native" / "csrc"
Limits = dict[str, Any]  # rates by name; "by": the loop behind each


class Prober:
    """`probe` takes about a second of all threads, the start some seconds."""

    def __init__(self, threads: int, folder: Path, num_bytes: int | None = None) -> None:
        self._native: Contender | None = None
        self._threads = threads
        target, sources = folder / "machine", [HERE / "machine.cpp", LOOPS / "peaks.cpp", LOOPS / "amx.cpp"]
        options = ["-O2", "-std=gnu++17", "-pthread", f"-I{LOOPS}"]
        try:
            subprocess.run(["g++", *options, *map(str, sources), "-o", str(target)], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return
        command = [str(target), str(threads), str(num_bytes or memory_bytes())]
        self._native = Contender("machine", command, folder / "machine.log")

    def __enter__(self) -> "Prober":
        return self

    def probe(self, threads: int | None = None) -> Limits:
        """Empty if the prober is no more: a race goes on without it."""
        if self._native is None:
            return _by_numpy()
        try:
            return self._native.ask({"threads": threads or self._threads})
        except Ended:
            return {}

    def by_threads(self) -> dict[str, Limits]:
        """With 1 thread, 2, 4, ... and all."""
        counts = [1 << power for power in range(self._threads.bit_length()) if 1 << power < self._threads]
        return {str(count): self.probe(count) for count in [*counts, self._threads]}

    def __exit__(self, *_: object) -> None:
        if self._native is not None:
            self._native.stop()


def memory_bytes() -> int:
    """How much to read."""
    cache = os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names else 0
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    return min(max(LEAST_BYTES, CACHES * cache), free // 3)


def _by_numpy() -> Limits:
    import numpy

    block, square = numpy.ones(1 << 27), numpy.ones((1024, 1024), numpy.float32)
    read_s = min(_timed(block.sum) for _ in range(3))
    product_s = min(_timed(lambda: square @ square) for _ in range(5))
    return {"read_gb_per_s": block.nbytes / read_s / 1e9, "fma_gflop_per_s": 2 * 1024**3 / product_s / 1e9}


def _timed(call: Any) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@dataclass(frozen=True)
class Shape:
    """What a step of a model reads and multiplies."""

    layer_weights: int
    head_weights: int
    kv_numbers_a_token: int

    @staticmethod
    def of(config: dict[str, Any]) -> "Shape":
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
        layer = hidden * (2 * q + 2 * kv) + 3 * hidden * inner
        layers = config["num_hidden_layers"]
        return Shape(layers * layer, hidden * config["vocab_size"], 2 * layers * kv)


def bounds(shape: Shape, cell: dict[str, Any], precision: str, limits: Limits) -> dict[str, float]:
    """Returns tokens per second by "bandwidth", "arithmetic" and "held"; what was not measured is missing."""
    if cell["cell"] == "prefill":
        tokens, context = cell["tokens"], cell["tokens"]
        operations = 2 * (tokens * shape.layer_weights + shape.head_weights)
    else:
        tokens, context = cell["batch"], cell["batch"] * (cell["prompt_tokens"] + cell["new_tokens"] // 2)
        operations = 2 * tokens * (shape.layer_weights + shape.head_weights)
    weights = (shape.layer_weights + shape.head_weights) * BYTES_A_WEIGHT[precision]
    total_bytes = weights + 2 * context * shape.kv_numbers_a_token
    rates = {
        "arithmetic": [limits[name] for name in ARITHMETIC[precision] if name in limits],
        "held": [limits[held_name(name)] for name in ARITHMETIC[precision] if held_name(name) in limits],
    }
    read = limits.get("read_gb_per_s")
    found = {"bandwidth": tokens / total_bytes * read * 1e9} if read is not None else {}
    return found | {bound: tokens / operations * max(each) * 1e9 for bound, each in rates.items() if each}


def held_name(name: str) -> str:
    """Returns the name of a rate of products where it was kept up for longer."""
    return name.replace("_g", "_held_g")


def scratch() -> tempfile.TemporaryDirectory:
    """For the compiled prober and the contenders' logs."""
    return tempfile.TemporaryDirectory(prefix="peers-")
