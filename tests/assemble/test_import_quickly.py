"""What an engine process leaves out of torch is left out, and is there for who asks for it later."""

import subprocess
import sys

SCRIPT = """
import gc, sys
from splittime.assemble.worker import META_OPERATORS, import_quickly
timeline = []
import_quickly(timeline)
import torch
assert META_OPERATORS not in sys.modules and "torch._decomp" not in sys.modules, "the meta operators were imported"
assert [name for name, _, _ in timeline] == ["import torch"]
assert gc.isenabled() and gc.get_freeze_count() > 10_000
assert torch.nn.functional.silu(torch.ones(2) @ torch.ones(2, 2)).shape == (2,)
drawn = torch.empty(3).normal_(generator=torch.Generator().manual_seed(1))
assert torch.equal(drawn, torch.randn(3, generator=torch.Generator("cpu").manual_seed(1)))
assert "torch._decomp" not in sys.modules, "generators took what is left out with them"
from torch import _meta_registrations
assert torch.Generator().manual_seed(2).initial_seed() == 2
assert hasattr(_meta_registrations, "register_meta")
"""


def test_meta_operators_are_left_out_and_can_be_had_afterwards() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
