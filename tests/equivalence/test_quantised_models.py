"""The packaged model in int8 and int4 on every backend: how far its next-token distributions move from float32's.

The bounds of int8 are about three times what was measured over some lines of Python (mean KL divergence in nats):
0.0003 in the reference, 0.0008 with torch and native kernels, which round activations too. int4 has 0.016 everywhere,
and would have 0.025 with values and down in 4 bits.
"""

from pathlib import Path

import pytest
import torch
from listening import prompt_logits

import splittime
from splittime.kernels.native.library import LibraryMissing, library
from splittime.runner.torch_runner import TorchRunner
from splittime.text.tokenizer import Tokenizer

FOLDER = Path(splittime.__file__).parent / "packaged" / "code"
TEXT = Path(__file__).with_name("driving.py").read_text()[:600]
MEAN_KL_NATS = {"int8": 0.0025, "int4": 0.02}
MOST_BYTES = {"int8": 0.51, "int4": 0.38}  # of bfloat16's


def distributions(**settings) -> tuple[torch.Tensor, TorchRunner]:
    """Log probabilities after each token of the text, [tokens, vocab]."""
    logits, runner = prompt_logits(FOLDER, Tokenizer.load(FOLDER).encode(TEXT), **settings)
    return logits.log_softmax(-1), runner


@pytest.fixture(scope="module")
def exact():
    return distributions(kernels="torch", dtype="float32")[0]


@pytest.mark.parametrize("kernels", ["native", "torch", "reference"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantised_model_predicts_nearly_the_same(exact, kernels, quantization):
    if kernels == "native":
        try:
            library()
        except LibraryMissing as missing:
            pytest.skip(str(missing))
    got, runner = distributions(kernels=kernels, quantization=quantization)
    divergence = (exact.exp() * (exact - got)).sum(-1)
    assert divergence.mean() < MEAN_KL_NATS[quantization]
    resolved = runner.resolved
    assert resolved.weights.startswith(quantization)
    assert resolved.weights.endswith("values and down int8, head int8" if quantization == "int4" else "int8")
    assert resolved.weights_bytes < MOST_BYTES[quantization] * 2 * resolved.num_parameters
