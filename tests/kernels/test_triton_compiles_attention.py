"""Attention and the KV write compile for an H200 (sm_90), without a card: `attend` and `write_kv` themselves run, in a
process of its own (this one may have chosen the interpreter), and what they launch is compiled and not run. So it is
the very variants that a card would be asked for: same tiles, same alignments. Nothing may spill, tensor cores must be
used, and keys and values must come by asynchronous copies.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import json, re, subprocess, tempfile
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from splittime.kernels.api import AttentionBatch, KvShape, LayerKv
from splittime.kernels.triton import attention, rotary

class NoCard:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

made, run = [], JITFunction.run
EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)

def compiled(self, *args, grid, warmup, **rest):
    is_rounded = any(getattr(one, "dtype", None) in EIGHT_BITS for one in args)
    made.append((self.__name__, is_rounded, run(self, *args, grid=grid, warmup=True, **rest)))

triton.runtime.driver.set_active(NoCard())
JITFunction.run = compiled
attention.processors_of = lambda device: 132

def used(kernel):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {name.lower(): int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\\d+)", said.stdout)}

def attend(rows, dtype, kv_dtype, head_dim, window):
    kept = kv_dtype or dtype
    sizes = (2, 2, 8, 16)
    store = LayerKv(torch.zeros(*sizes[:3], 16 * head_dim, dtype=kept), torch.zeros(sizes) if kv_dtype else None)
    begins = [0]
    for length, _ in rows:
        begins.append(begins[-1] + length)
    tokens = begins[-1]
    place = torch.zeros(tokens, dtype=torch.int64)
    tables = torch.zeros(len(rows), 512, dtype=torch.int64)
    decode = sum(length == 1 for length, _ in rows)
    batch = AttentionBatch(begins, [context for _, context in rows], tables, place, place, decode)
    plan = attention.plan(batch, KvShape(1, 16, 8, head_dim), window, dtype, torch.device("cpu"))
    qkv = torch.zeros(tokens, 48, head_dim, dtype=dtype)
    rotary.write_kv(qkv[:, 32:], store, plan)
    if kept != torch.int8:  # as float8
        attention.attend(qkv[:, :32], store, plan, 0.1)

bf16, int8, fp8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
attend([(1, 8192)], bf16, None, 128, None)
attend([(2048, 2048)], bf16, None, 128, 4096)
attend([(1, 8192)], bf16, fp8, 128, None)
attend([(1, 8192)], bf16, int8, 80, None)
print(json.dumps([
    {"name": name, "is_rounded": is_rounded, "shared": kernel.metadata.shared, **used(kernel),
     "products": re.findall(r"wgmma|mma\\.sync", kernel.asm["ptx"]), "copies": kernel.asm["ptx"].count("cp.async.cg")}
    for name, is_rounded, kernel in made
]))
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    keys = ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
    environment = {key: value for key, value in os.environ.items() if key not in keys}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.timeout(600)
@pytest.mark.sweep
def test_nothing_spills_and_all_fits(kernels):
    names = [kernel["name"] for kernel in kernels]
    decode = ["_write_kv", "_decode", "_merge"]
    assert names == [*decode, "_write_kv", "_prefill", *decode, "_write_kv"]
    for kernel in kernels:
        assert kernel["local"] == 0, kernel
        assert kernel["stack"] <= (48 if kernel["is_rounded"] else 0), kernel  # 12 registers, beside 128 byte loads
        assert kernel["shared"] <= 227 << 10, kernel


@pytest.mark.timeout(600)
@pytest.mark.sweep
def test_products_are_done_by_tensor_cores(kernels):
    for kernel in kernels:
        if kernel["name"] == "_decode":
            assert set(kernel["products"]) == {"mma.sync"}
            assert kernel["copies"] >= 8
        elif kernel["name"] == "_prefill":
            assert set(kernel["products"]) == {"wgmma"}
            assert kernel["copies"] >= 16


@pytest.mark.timeout(600)
@pytest.mark.sweep
def test_two_decode_programs_fit_on_a_multiprocessor(kernels):
    for kernel in kernels:
        if kernel["name"] == "_decode":
            assert 2 * kernel["shared"] <= 227 << 10
            assert 2 * 128 * kernel["reg"] <= 65536
