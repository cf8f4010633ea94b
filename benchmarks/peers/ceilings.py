"""What the machine could do at most, measured beside the contenders, and what that means for a model's step.

The prober (`machine.c`, compiled here with gcc) stays resident. Without gcc, numpy measures the read and the float32
product instead, both lower than the machine's limits, and the 8-bit rate is unknown.

    roofline tokens/s = tokens / max(bytes / read rate, operations / rate of the class's arithmetic)

bytes: the weights once, and the KV cache of all streams in 16 bits. The arithmetic of `float32` and `bf16` is the
float32 multiply-add (no bfloat16 instructions are assumed), that of `int8` and `int4` is 8-bit products. A step of
prefill computes the head for its last token only.
"""

import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.contenders import HERE, Contender

BYTES_A_WEIGHT = {"float32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}
INTEGER = ("int8", "int4")
Limits = dict[str, float]


class Prober:
    """`probe` takes about half a second of all threads."""

    def __init__(self, threads: int, folder: Path) -> None:
        self._native: Contender | None = None
        target = folder / "machine"
        options = ["-O3", "-march=native", "-pthread"]
        try:
            subprocess.run(["gcc", *options, str(HERE / "machine.c"), "-o", str(target)], check=True)
        except (OSError, subprocess.CalledProcessError):
            return
        self._native = Contender("machine", [str(target), str(threads)], folder / "machine.log")
        self.probe()  # the first touch of its memory

    def __enter__(self) -> "Prober":
        return self

    def probe(self) -> Limits:
        return self._native.ask({}) if self._native is not None else _by_numpy()

    def __exit__(self, *_: object) -> None:
        if self._native is not None:
            self._native.stop()


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


def roofline(shape: Shape, cell: dict[str, Any], precision: str, limits: Limits) -> float | None:
    """Tokens per second; None where the class's arithmetic was not measured."""
    rate = limits.get("int8_gop_per_s" if precision in INTEGER else "fma_gflop_per_s")
    if rate is None:
        return None
    if cell["cell"] == "prefill":
        tokens, context = cell["tokens"], cell["tokens"]
        operations = 2 * (tokens * shape.layer_weights + shape.head_weights)
    else:
        tokens, context = cell["batch"], cell["batch"] * (cell["prompt_tokens"] + cell["new_tokens"] // 2)
        operations = 2 * tokens * (shape.layer_weights + shape.head_weights)
    weights = (shape.layer_weights + shape.head_weights) * BYTES_A_WEIGHT[precision]
    total_bytes = weights + 2 * context * shape.kv_numbers_a_token
    return tokens / max(total_bytes / limits["read_gb_per_s"], operations / rate) * 1e9


def scratch() -> tempfile.TemporaryDirectory:
    """For the compiled prober and the contenders' logs."""
    return tempfile.TemporaryDirectory(prefix="peers-")
