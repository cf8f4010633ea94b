"""The weight products on the card: each scheme beside bfloat16 by cuBLAS, from one token to 2,048.

    python -m benchmarks.gpu.linear                             shapes of Llama-3.1-8B, Qwen3-8B and a 70B in 4 bits
    python -m benchmarks.gpu.linear --tiles                     other tiles beside those that are chosen
    python -m benchmarks.gpu.linear --model llama-3.1-8b --tokens 1 64 --scheme int4 fp8
    python -m benchmarks.gpu.linear --json

The share is of the roofline: max(bytes / copy bandwidth, operations / matrix rate), both measured in the same run, the
rate with 8192 x 8192 x 8192 products of cuBLAS in the type that is multiplied (bfloat16, int8 or float8). Bytes are the
weight as it lies in memory, x and y. Launches go round several weights, so that none is still in the cache, and are
captured in a CUDA graph. "Crossover" is the first number of tokens at which bfloat16 is faster. Each scheme's product
is compared with its own weight in float32 first, on the smallest shape.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.gpu.card import CARD, Found, copy_bytes_per_s, median_us, parse, parser, place, scale, some, telling
from splittime.kernels.api import WeightScheme
from splittime.kernels.triton import integers, linear, w8a8
from splittime.kernels.triton.integers_kernels import words_of
from splittime.kernels.triton.tiles import Tiles

TINY = "tiny"
MODELS: dict[str, dict[str, tuple[int, int]]] = {
    "llama-3.1-8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "qwen3-8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
    "llama-3.1-70b": {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)},
    TINY: {"o": (96, 128)},
}
FOUR_BITS_ONLY = ("llama-3.1-70b",)
TOKENS = (1, 8, 16, 64, 256, 2048)
SCHEMES = {
    "bfloat16": WeightScheme("bfloat16"),
    "int4": WeightScheme("int4", 128, has_zeros=True),
    "int8": WeightScheme("int8"),
    "w8a8": WeightScheme("int8", rounds_activations=True),
    "fp8": WeightScheme("fp8"),
    "fp8-blocks": WeightScheme("fp8", 128),
}
RATES = {"bfloat16": "bfloat16", "int4": "bfloat16", "int8": "bfloat16", "w8a8": "int8"}
RATES |= {"fp8": "float8", "fp8-blocks": "float8"}
MAX_ERROR = 0.02  # of the size of y, whose bfloat16 is off by 0.002


def variants(scheme: str, tokens: int, out_features: int) -> Iterator[Tiles]:
    """Worth trying beside the one that is chosen."""
    if tokens <= 16:
        for outputs, warps in ((32, 2), (64, 4), (128, 4), (128, 8)):
            yield from (Tiles(16, outputs, splits, warps, stages) for splits in (1, 2, 4, 8) for stages in (3, 4, 6))
    elif tokens <= 64:
        for outputs in (64, 128):
            yield from (Tiles(width, outputs, splits, 4, 3) for width in (32, 64) for splits in (1, 2, 4))
    else:
        stages = (2,) if scheme == "int4" else (2, 3, 4)
        for width, outputs, warps in ((64, 128, 4), (64, 128, 8), (128, 64, 4), (128, 128, 8), (256, 128, 8)):
            yield from (Tiles(width, outputs, 1, warps, one) for one in stages)


def random_weight(scheme: WeightScheme, out_features: int, in_features: int) -> Any:
    """Made on the device, of numbers about as large as a model's."""
    device = place()
    if scheme.name == "bfloat16":
        weight = torch.randn(out_features, in_features, dtype=torch.bfloat16, device=device) / in_features**0.5
        return linear.DenseWeight(weight)
    if not scheme.rounds_activations and scheme.name != "fp8":
        kept = integers.empty(out_features, in_features, scheme, device)
        kept.words.random_(-(1 << 31), (1 << 31) - 1)
        if not scheme.group:
            kept.scales.fill_(1 / 64 / in_features**0.5)
            return kept
        scales = (torch.rand(kept.scales.shape, device=device) + 0.5) / 8 / in_features**0.5
        kept.scales.copy_(words_of(scales.half(), torch.randint(4, 12, kept.scales.shape, device=device)))
        return kept
    dtype = torch.int8 if scheme.name == "int8" else torch.float8_e4m3fn
    both = w8a8.empty(out_features, in_features, dtype, device, scheme.group > 0)
    values = torch.randn(both.values.shape, device=device) * (40 if dtype == torch.int8 else 100)
    both.values.copy_(values.clamp_(-127, 127).to(dtype))
    both.scales.fill_(1 / 100 / in_features**0.5)
    return w8a8.with_shared_scales(both)


def matrix_rates() -> dict[str, float]:
    """Operations a second of cuBLAS."""
    a = torch.randn(scale().matrix, scale().matrix, device=place())
    wide, integers, floats = a.bfloat16(), (a * 30).to(torch.int8), a.to(torch.float8_e4m3fn)
    one = torch.ones((), device=place())
    runs: dict[str, Callable[[], Tensor]] = {
        "bfloat16": lambda: wide @ wide.T,
        "int8": lambda: torch._int_mm(integers, integers.T),
        "float8": lambda: torch._scaled_mm(floats, floats.T, one, one, out_dtype=torch.bfloat16),
    }
    return {name: 2 * scale().matrix ** 3 / (median_us(run, launches=5) * 1e-6) for name, run in runs.items()}


def check(name: str) -> float:
    """The largest error of a product, of y's size; ends the run if it is too large for any rounding of x and y."""
    outputs, columns, counts = (1000, 1096, (1, 17, 130)) if scale() is CARD else (72, 136, (1, 3))
    weight = random_weight(SCHEMES[name], outputs, columns)
    dense, worst = linear.unpacked(weight), 0.0
    for tokens in counts:
        x = torch.randn(tokens, columns, dtype=torch.bfloat16, device=place())
        true = x.float() @ dense.T
        error = (linear.linear(x, weight).float() - true).norm() / true.norm()
        worst = max(worst, float(error))
    if not worst < (0.1 if name.startswith("fp8") else MAX_ERROR):
        raise SystemExit(f"{name}: a product is off by {worst:.3f} of its size")
    return worst


def measure(
    name: str, out_features: int, in_features: int, tokens: Sequence[int], ceilings: dict[str, float], has_tiles: bool
) -> Iterator[dict[str, Any]]:
    first = random_weight(SCHEMES[name], out_features, in_features)
    weight_bytes = sum(one.numel() * one.element_size() for one in linear.kept(first)[1])
    weights = [
        first,
        *(
            random_weight(SCHEMES[name], out_features, in_features)
            for _ in range(min(scale().buffers - 1, scale().cold_bytes // weight_bytes))
        ),
    ]
    for count in tokens:
        x = torch.randn(count, in_features, dtype=torch.bfloat16, device=place())
        moved = weight_bytes + count * 2 * (in_features + out_features)
        operations = 2 * count * in_features * out_features
        floor_us = 1e6 * max(moved / ceilings["copy_bytes_per_s"], operations / ceilings[RATES[name]])
        us = _median(lambda weight, x=x: linear.linear(x, weight), weights)
        found = {"tokens": count, "scheme": name, "us": us, "share": floor_us / us, "bytes": moved}
        if has_tiles and name != "bfloat16":
            found["tiles_us"] = dict(_tried(name, x, weights))
        yield found


def _tried(name: str, x: Tensor, weights: list[Any]) -> Iterator[tuple[str, float]]:
    """Fastest first; what does not fit the card is left out."""
    kernels: Any = integers if name in ("int4", "int8") else w8a8
    times = []
    for tiles in some(variants(name, len(x), weights[0].out_features)):
        try:
            us = _median(lambda weight, tiles=tiles: kernels.linear(x, weight, None, tiles), weights)
        except Exception as error:  # Triton has several for too much shared memory or too many registers
            print(f"{name} {tiles}: {type(error).__name__}")
            continue
        label = (
            f"{tiles.tokens}x{tiles.outputs} splits {tiles.splits} warps {tiles.num_warps} stages {tiles.num_stages}"
        )
        times.append((us, label))
    yield from ((label, us) for us, label in sorted(times))


def _median(run: Callable[[Any], Tensor], weights: list[Any]) -> float:
    turn = cycle(weights)
    return median_us(lambda: run(next(turn)))


def crossovers(results: list[dict[str, Any]]) -> dict[str, int | None]:
    """By model, shape and scheme: the fewest tokens at which bfloat16 was faster; None: never."""
    plain = {(one["model"], one["shape"], one["tokens"]): one["us"] for one in results if one["scheme"] == "bfloat16"}
    found: dict[str, int | None] = {}
    for one in results:
        key = (one["model"], one["shape"], one["tokens"])
        name = f"{one['model']} {one['shape']} {one['scheme']}"
        if one["scheme"] != "bfloat16" and key in plain:
            is_slower = one["us"] > plain[key]
            found[name] = found.get(name) or (one["tokens"] if is_slower else None)
    return found


def table_of(found: Found) -> Table:
    told = ", ".join(f"{name} {rate / 1e12:.3g} T/s" for name, rate in found.get("ceilings", {}).items())
    table = Table(title=f"weight products; {told}", caption=str(found.get("crossovers", "")))
    for column in ("model", "shape", "tokens", "scheme", "us", "of roofline", "best other tiles, us"):
        table.add_column(column, justify="left" if column in ("model", "shape", "scheme") else "right")
    for one in found.get("results", ()):
        best = next(iter(one.get("tiles_us", {}).items()), None)
        other = "" if best is None else f"{best[0]}: {best[1]:.1f}"
        row = one["model"], one["shape"], str(one["tokens"]), one["scheme"], f"{one['us']:.1f}", f"{one['share']:.0%}"
        table.add_row(*row, other)
    return table


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--model", nargs="+", default=[name for name in MODELS if name != TINY], choices=MODELS)
    made.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    made.add_argument("--scheme", nargs="+", default=list(SCHEMES), choices=SCHEMES)
    made.add_argument("--tiles", action="store_true", help="time other tiles too")
    options = parse(made, argv, model=[TINY], tokens=[1, 20])
    with telling(options, table_of) as found:
        found["errors"] = {name: check(name) for name in options.scheme}
        ceilings = found["ceilings"] = {"copy_bytes_per_s": copy_bytes_per_s()} | matrix_rates()
        results = found["results"] = []
        for model in options.model:
            schemes = [name for name in options.scheme if name == "int4" or model not in FOUR_BITS_ONLY]
            for shape, sizes in MODELS[model].items():
                for name in schemes:
                    for one in measure(name, *sizes, options.tokens, ceilings, options.tiles):
                        results.append({"model": model, "shape": shape} | one)
        found["crossovers"] = crossovers(results)


if __name__ == "__main__":
    main()
