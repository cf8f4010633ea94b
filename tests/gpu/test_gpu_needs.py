"""What must be there beside torch's own needs where a card is lent: the guide names it, and here nothing else is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
NEEDED = ("msgspec", "rich", "safetensors", "tokenizers")
OF_TORCH = ("torch triton numpy filelock fsspec jinja2 markupsafe networkx setuptools sympy mpmath typing_extensions "
            "functorch torchgen packaging")  # fmt: skip
SCRIPT = """
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from importlib import import_module

allowed = set(sys.argv[1].split()) | sys.stdlib_module_names | {"splittime", "benchmarks"}
find_spec = PathFinder.find_spec.__func__

def find(cls, name, path=None, target=None):
    top = name.partition(".")[0]
    return find_spec(cls, name, path, target) if top in allowed or top.startswith("_") else None

PathFinder.find_spec = classmethod(find)
sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]
for name in ("attention", "linear", "grouped", "elementwise", "sampling", "engine", "parity", "variants", "goals"):
    import_module(f"benchmarks.gpu.{name}")
import_module("benchmarks.gpu.reversals").main(["weights", "--tiny"])
"""


@pytest.mark.sweep
def test_the_benchmarks_need_what_the_page_says(tmp_path):
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    allowed = f"{OF_TORCH} {' '.join(NEEDED)}"
    command = [sys.executable, "-c", SCRIPT, allowed]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "crossover" in done.stdout
    page = (ROOT / "docs" / "guides" / "gpu.md").read_text()
    assert all(name in page for name in NEEDED)
