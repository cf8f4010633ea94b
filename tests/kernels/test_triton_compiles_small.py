"""The small kernels and those of sampling compile for an H200 (sm_90) without a card, and spill next to nothing: in a
process of its own, since this one may have chosen the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

KERNELS = {
    "_rms_norm", "_silu_mul", "_finite", "_uniforms", "_rope_write", "scan", "choose_largest", "count_bins",
    "gather_bracket", "find_floors", "sum_chunks", "pick",
}  # fmt: skip
MAX_SPILLED_BYTES = 16  # two registers of the search for thresholds, whose loops are not bound by that
MAX_SHARED_BYTES = 8192
pytestmark = [pytest.mark.sweep, pytest.mark.timeout(600)]  # with nothing compiled before, on a busy machine


def test_every_small_kernel_compiles_for_an_h200():
    script = Path(__file__).with_name("ahead_small.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {kernel["kernel"] for kernel in found} == KERNELS
    for kernel in found:
        assert kernel["spilled"] <= MAX_SPILLED_BYTES, kernel
        assert kernel["shared"] <= MAX_SHARED_BYTES, kernel
