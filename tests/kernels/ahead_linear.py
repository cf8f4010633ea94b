"""Prints, as JSON, what the weight products compile to for an H200; run by `test_triton_compiles_linear`.

`python ahead_linear.py all` adds the variants that differ in dtype and scheme only, one line each."""

import json
import sys
from dataclasses import replace

import torch
from ahead import recording

from splittime.kernels.api import WeightScheme
from splittime.kernels.triton import grouped, integers, linear, w8a8
from splittime.kernels.triton.mixture import choose_experts

META = torch.device("meta")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def x_of(tokens: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tokens, columns, dtype=dtype, device=META)


def weight(scheme: WeightScheme, out: int, columns: int):
    if scheme.name == "fp8" or scheme.rounds_activations:
        dtype = torch.int8 if scheme.name == "int8" else torch.float8_e4m3fn
        made = w8a8.empty(out, columns, dtype, META, scheme.group > 0)
        return replace(made, scales=made.scales[:, :: scheme.group], unit=scheme.group) if scheme.group else made
    return integers.empty(out, columns, scheme, META)


def product(tokens: int, scheme: WeightScheme, dtype: torch.dtype = BF16, out: int = 4096, columns: int = 4096):
    return linear.linear(x_of(tokens, columns, dtype), weight(scheme, out, columns))


def mixture(tokens: int, scheme: WeightScheme, dtype: torch.dtype = BF16):
    width, inner, experts, chosen = 2048, 768, 128, 8
    packed = []
    for out, columns in ((2 * inner, width), (width, inner)):
        one = (
            linear.DenseWeight(x_of(out, columns, dtype))
            if scheme.name in ("bfloat16", "float32")
            else weight(scheme, out, columns)
        )
        packed.append([one] * experts)
    mixed = grouped.stack_experts(*packed)
    x = x_of(tokens, width, dtype)
    blocks = torch.empty(tokens, dtype=torch.int32, device=META)
    picked, shares = choose_experts(x_of(tokens, experts, dtype), chosen, True, dtype, blocks)
    return grouped.grouped(x, picked, shares, mixed, x)


INT4, INT8, FP8 = WeightScheme("int4", 128), WeightScheme("int8"), WeightScheme("fp8")
BLOCKS = WeightScheme("fp8", 128)
W8A8, DENSE = WeightScheme("int8", rounds_activations=True), WeightScheme("bfloat16")
CASES = {
    "int4 1": lambda: product(1, INT4),
    "int4 f16 1": lambda: product(1, INT4, F16),
    "int4 64": lambda: product(64, INT4),
    "int4 256": lambda: product(256, INT4),
    "int4 2048": lambda: product(2048, INT4),
    "int8 1": lambda: product(1, INT8),
    "int8 f16 1": lambda: product(1, INT8, F16),
    "w8a8 2048": lambda: product(2048, W8A8),
    "fp8 1": lambda: product(1, FP8),
    "fp8 2048": lambda: product(2048, FP8),
    "fp8 blocks 1": lambda: product(1, BLOCKS),
    "fp8 blocks 2048": lambda: product(2048, BLOCKS),
    "experts 1": lambda: mixture(1, DENSE),
    "experts int4 64": lambda: mixture(64, INT4),
    "experts fp8 blocks 64": lambda: mixture(64, BLOCKS),
}
MORE = {
    "int4 3 of 200": lambda: product(3, INT4, columns=200, out=40),
    "int8 3 of 100": lambda: product(3, INT8, columns=100, out=40),
    "w8a8 3 of 100": lambda: product(3, W8A8, columns=100, out=40),
    "fp8 3 of 100": lambda: product(3, FP8, columns=100, out=40),
    "int8 32 f32 1": lambda: product(1, WeightScheme("int8", 32), F32),
    "experts f32 3": lambda: mixture(3, WeightScheme("float32"), F32),
    "experts f32 4096": lambda: mixture(4096, WeightScheme("float32"), F32),
    "experts fp8 blocks 1": lambda: mixture(1, BLOCKS),
    "experts fp8 blocks 4096": lambda: mixture(4096, BLOCKS),
    "experts fp8 64": lambda: mixture(64, FP8),
    "experts int8 64": lambda: mixture(64, INT8),
    "int4 f32 1": lambda: product(1, INT4, F32),
    "int4 f32 2048": lambda: product(2048, INT4, F32),
    "int4 32 minima 1": lambda: product(1, WeightScheme("int4", 32, has_minima=True)),
    "int4 32 2048": lambda: product(2048, WeightScheme("int4", 32)),
    "int4 gate_up 1": lambda: product(1, INT4, out=28672),
    "int8 64": lambda: product(64, INT8),
    "int8 2048": lambda: product(2048, INT8),
    "int8 f32 2048": lambda: product(2048, INT8, F32),
    "int8 16 minima 1": lambda: product(1, WeightScheme("int8", 16, has_minima=True)),
    "int8 32 2048": lambda: product(2048, WeightScheme("int8", 32)),
    "w8a8 1": lambda: product(1, W8A8),
    "w8a8 64": lambda: product(64, W8A8),
    "fp8 64": lambda: product(64, FP8),
    "fp8 blocks 64": lambda: product(64, BLOCKS),
    "fp8 blocks 3 of 100": lambda: product(3, BLOCKS, columns=100, out=40),
    "fp8 blocks f16 1": lambda: product(1, BLOCKS, F16),
    "experts 64": lambda: mixture(64, DENSE),
    "experts 512": lambda: mixture(512, DENSE),
    "experts 4096": lambda: mixture(4096, DENSE),
    "experts int8 1": lambda: mixture(1, INT8),
    "experts int4 1": lambda: mixture(1, INT4),
    "experts int4 4096": lambda: mixture(4096, INT4),
    "experts int8 4096": lambda: mixture(4096, INT8),
}

if __name__ == "__main__":
    shows_all = "all" in sys.argv
    results = {}
    for name, case in (CASES | MORE if shows_all else CASES).items():
        with recording() as found:
            case()
        results[name] = found
        if shows_all:
            for kernel in found:
                print(name, kernel, flush=True)
    if not shows_all:
        print(json.dumps(results))
