"""Prints, as JSON, what the small kernels and those of sampling compile to for an H200; run by
`test_triton_compiles_small`.

`python ahead_small.py all` adds variants that differ in dtypes and sizes only, one line each."""

import json
import sys

import torch
from ahead import TYPES, recording

from splittime.kernels.api import KvShape, LayerKv
from splittime.kernels.draw import DRAW
from splittime.kernels.triton import elementwise, rotary, sampling, weights
from splittime.kernels.triton.weights import Draws

META = torch.device("meta")
BF16 = torch.bfloat16
TYPES |= {torch.float64: "fp64", torch.bool: "i1"}


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def norms(width: int) -> None:
    elementwise.rms_norm(empty(16, width), elementwise.pack(empty(width), 1e-5))
    parts = empty(4, 16, width, dtype=torch.float32)
    elementwise.add_parts_rms_norm(
        parts, None, empty(16, width), elementwise.pack(empty(width), 1e-5), empty(16, width)
    )


def rope_write(tokens: int, kv_dtype: torch.dtype, dim: int = 128, heads: int = 32, kv_heads: int = 8) -> None:
    shape = KvShape(9, 16, kv_heads, dim)
    data = empty(10, 2, kv_heads, 16 * dim, dtype=kv_dtype)
    scales = empty(10, 2, kv_heads, 16, dtype=torch.float32) if kv_dtype.itemsize == 1 else None
    qk_norm = elementwise.pack(empty(heads + kv_heads, dim), 1e-6)
    places = (empty(tokens, dtype=torch.int64) for _ in range(3))
    turns = empty(4096, dim // 2, dtype=torch.complex64)
    rotary.rope_write(empty(tokens, heads + 2 * kv_heads, dim), qk_norm, turns, LayerKv(data, scales), shape, *places)


def sample(rows: int, vocab: int = 128256) -> None:
    logits, numbers = empty(rows, vocab, dtype=torch.float32), empty(rows, dtype=torch.int64)
    lines = empty(rows, DRAW.itemsize, dtype=torch.uint8)
    sampling.draw(logits, Draws(lines))
    sampling.draw(logits, Draws(lines, numbers, numbers), filters=False)
    sampling.argmax(logits)


def some() -> None:
    norms(4096)
    elementwise.silu_mul(empty(16, 2 * 14336))
    elementwise.finite(empty(16, 4096))
    weights.uniforms(empty(16, dtype=torch.int64), empty(16, dtype=torch.int64))
    rope_write(16, BF16)
    for kv_dtype in (BF16, torch.int8, torch.float8_e4m3fn):
        rope_write(4096, kv_dtype)
    sample(256)


def more() -> None:
    norms(128)
    norms(8192)
    for dim, heads, kv_heads in ((64, 14, 2), (80, 32, 32), (96, 32, 8), (256, 16, 4)):
        for tokens in (16, 4096):
            rope_write(tokens, BF16, dim, heads, kv_heads)
            rope_write(tokens, torch.int8, dim, heads, kv_heads)
    for rows, vocab in ((1, 128256), (16, 151936), (64, 32003)):
        sample(rows, vocab)


def main() -> None:
    with recording() as found:
        some()
        if sys.argv[1:] == ["all"]:
            more()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
