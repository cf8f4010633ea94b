"""Compiling what a launch would launch, without a card: inside `recording()` a kernel that is called with tensors of
torch's "meta" device (shapes and dtypes, no values) is compiled for an H200 (sm_90) and what came of it is kept."""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "i8", torch.int32: "i32",
    torch.int64: "i64", torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages")
INSTRUCTIONS = ("wgmma.mma_async", "mma.sync", "cp.async.cg", "st.shared", "cvt.")


@contextmanager
def recording() -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    real = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        found.append(_compiled(self, given, options) | {"grid": list(grid)})

    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run = real


def _compiled(fn: JITFunction, given: dict[str, Any], options: dict[str, int]) -> dict[str, Any]:
    signature, constants, attributes = {}, {}, {}
    for at, parameter in enumerate(fn.params):
        value = given[parameter.name]
        is_general = parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and not is_general):
            signature[parameter.name], constants[(at,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[(at,)] = f"*{TYPES[value.dtype]}", [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not is_general:
                attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    counts = {name: made.asm["ptx"].count(name) for name in INSTRUCTIONS}
    return {"kernel": fn.__name__, "shared": made.metadata.shared, **counts, **_resources(made.asm["cubin"]), **options}


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes that it spilled."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told.stdout)}
    return {"registers": found["REG"], "spilled": found["STACK"] + found["LOCAL"]}
