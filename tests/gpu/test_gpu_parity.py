"""On a card: small models compute there what they do on the CPU. Without one, `test_benchmarks_run` runs the same
comparison over a smaller model in the interpreter."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu import parity

MODELS = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "models"
FOLDERS = [parity.PACKAGED, *sorted(path.parent for path in MODELS.glob("*/model.safetensors"))]
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_tokens_are_the_cpus_and_bfloat16_is_near(folder):
    found = parity.of_model(folder, parity.FULL)
    assert parity.passed(found), found
