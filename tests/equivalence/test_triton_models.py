"""Whole models on the Triton backend compute what the reference does: prompts in chunks and decodes in one batch."""

import pytest
import torch
from random_models import VARIANTS, make
from test_parallel_models import follow, runner_of

pytest.importorskip("triton")

FEW_STEPS = 1
CHOSEN = ("llama", "mistral-window", "qwen3", "qwen3-moe")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """The interpreter is slow."""
    monkeypatch.setattr("test_parallel_models.NEW_TOKENS", FEW_STEPS)


def compare(folder, rtol=1e-4, atol=1e-4, **settings):
    want, outputs = follow(runner_of(folder, kernels="reference", **settings))
    got, _ = follow(runner_of(folder, kernels="triton", **settings), outputs)
    torch.testing.assert_close(got.cpu(), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("variant", CHOSEN)
def test_logits_are_the_references(variant, tmp_path):
    assert variant in VARIANTS
    make(variant, tmp_path)
    compare(tmp_path)


@pytest.mark.parametrize("settings", [{"kv_cache_dtype": "int8", "quantization": "int4"}, {"quantization": "int8"}])
def test_rounded_models(settings, tmp_path):
    make("llama", tmp_path)
    compare(tmp_path, atol=0.03, **settings)
