"""The weight products as an H200 (sm_90) would run them, as far as can be told without one.

They are compiled ahead of time, by the same calls that launch them (`ahead`), in a process of its own, since this one
may have chosen the interpreter. The PTX of our own that unpacks integers, which the interpreter cannot run, is carried
out here instruction by instruction (`run_ptx`)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")

import torch

from splittime.kernels.triton import integers_kernels

SHARED_BYTES = 227 * 1024
SPILLED_BYTES = 32  # of a thread: eight registers
pytestmark = [pytest.mark.sweep, pytest.mark.timeout(600)]  # with nothing compiled before, on a busy machine


@pytest.fixture(scope="module")
def compiled():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("ahead_linear.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_every_kernel_fits(compiled):
    for name, kernels in compiled.items():
        for kernel in kernels:
            assert kernel["spilled"] <= SPILLED_BYTES, (name, kernel)
            assert kernel["shared"] <= SHARED_BYTES, (name, kernel)


def test_products_use_the_matrix_instructions_of_a_warp_group(compiled):
    """And read weights by asynchronous copies of 16 bytes, ahead of their use."""
    for name in (
        "int4 64",
        "int4 256",
        "int8 1",
        "w8a8 2048",
        "fp8 1",
        "fp8 2048",
        "fp8 blocks 1",
        "fp8 blocks 2048",
        "experts int4 64",
        "experts fp8 blocks 64",
    ):
        for kernel in compiled[name]:
            if kernel["kernel"] in ("multiply", "products"):
                assert kernel["wgmma.mma_async"], (name, kernel)
                assert kernel["cp.async.cg"], (name, kernel)


def test_few_tokens_in_four_bits_are_two_warps_work(compiled):
    """Which is half a warp group: they have the matrix instruction of a warp, and were faster so on a card."""
    (kernel,) = [one for one in compiled["int4 1"] if one["kernel"] == "multiply"]
    assert kernel["mma.sync"]
    assert kernel["cp.async.cg"]


def test_many_tokens_in_four_bits_have_no_kernel_of_ours_but_the_widening(compiled):
    assert [one["kernel"] for one in compiled["int4 2048"]] == ["widen"]


def run_ptx(asm: str, **registers: int) -> dict[str, int]:
    """What the few instructions that unpacking uses do to 32-bit registers (PTX ISA 8.5, chapter 9)."""

    def value(name: str) -> int:
        return int(name, 16) if name.startswith("0x") else int(name) if name.isdigit() else registers[name]

    for line in re.sub(r"[{}]", "", asm).split(";"):
        words = line.replace(",", " ").split()
        if not words or words[0] == ".reg":
            continue
        name, out, *operands = words
        a, *rest = (value(one) for one in operands)
        if name == "prmt.b32":
            data = a.to_bytes(4, "little") + rest[0].to_bytes(4, "little")
            made = int.from_bytes(bytes(data[rest[1] >> 4 * at & 7] for at in range(4)), "little")
        elif name == "lop3.b32":
            made = sum(
                (rest[2] >> ((a >> at & 1) << 2 | (rest[0] >> at & 1) << 1 | (rest[1] >> at & 1)) & 1) << at
                for at in range(32)
            )
        elif name.startswith("sub."):
            made = _subtract(a, rest[0], torch.bfloat16 if "bf16" in name else torch.float16)
        else:
            simple = {"shr.u32": int.__rshift__, "and.b32": int.__and__, "xor.b32": int.__xor__}
            made = a if name == "mov.b32" else simple[name](a, rest[0])
        registers[out] = made
    return registers


def _halves(word: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.array([word], np.uint32).view(np.int16)).view(dtype)


def _subtract(a: int, b: int, dtype: torch.dtype) -> int:
    made = _halves(a, dtype) - _halves(b, dtype)
    return int(made.view(torch.int16).numpy().view(np.uint32)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_unpacking_four_bits(dtype):
    """Every integer with every zero point, at every place of a word."""
    is_bfloat16 = dtype == torch.bfloat16
    exponent = 0x4300 if is_bfloat16 else 0x6400
    first = sum(slab << 4 * slab for slab in range(8))  # slab's own number, at each slab
    second = sum((15 - slab) << 4 * slab for slab in range(8))
    for slab in range(8):
        asm = integers_kernels.unpack_asm(4, slab, is_bfloat16)
        for zero in range(16):
            zeros = (exponent | zero) << 16 | (exponent | (15 - zero))
            for shift in range(2):
                words = (first, second) if shift == 0 else (second ^ 0xFFFFFFFF & 0x88888888, first ^ 0x55555555)
                made = run_ptx(asm, **{"$1": words[0], "$2": words[1], "$3": zeros})["$0"]
                wanted = [(words[0] >> 4 * slab & 15) - (15 - zero), (words[1] >> 4 * slab & 15) - zero]
                assert _halves(made, dtype).tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_unpacking_eight_bits(dtype):
    """Every integer, at every place of a word; kept as q + 128."""
    for slab in range(4):
        asm = integers_kernels.unpack_asm(8, slab, dtype == torch.bfloat16)
        for kept in range(256):
            words = [int.from_bytes(bytes((one + 37 * (at - slab)) % 256 for at in range(4)), "little")
                     for one in (kept, 255 - kept)]  # fmt: skip
            made = run_ptx(asm, **{"$1": words[0], "$2": words[1]})["$0"]
            assert _halves(made, dtype).tolist() == [kept - 128, 127 - kept]
