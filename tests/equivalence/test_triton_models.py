"""Whole models on the Triton backend compute what the reference does: prompts in chunks and decodes in one batch."""

import pytest
import torch
from driving import Driver, Sequence
from random_models import VARIANTS, make
from test_parallel_models import follow, prompt, runner_of

pytest.importorskip("triton")


from splittime.core.errors import ConfigError
from splittime.core.step import StepPlan
from splittime.kernels.reference import rounding
from splittime.runner import machine
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig

FEW_STEPS = 1
pytestmark = pytest.mark.timeout(600)  # the interpreter is slow
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
@pytest.mark.sample(1)
def test_logits_are_the_references(variant, tmp_path):
    assert variant in VARIANTS
    make(variant, tmp_path)
    compare(tmp_path)


@pytest.mark.parametrize("settings", [{"kv_cache_dtype": "int8", "quantization": "int4"}, {"quantization": "int8"}])
@pytest.mark.sample(1)
def test_rounded_models(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(rounding, "TURNED", 1)  # a card's integers are not turned
    chosen = machine.choose  # and its int4 leaves nothing finer
    monkeypatch.setattr(machine, "choose", lambda *given, has_finer: chosen(*given, has_finer=False))
    make("llama", tmp_path)
    compare(tmp_path, atol=0.03, **settings)


@pytest.mark.sweep
def test_fp8_is_near_the_model_and_bytes_are_read(tmp_path):
    """e4m3 has 3 bits of mantissa: a root mean square error of 3 % in each factor of each product, one upon the other
    over the layers of a model whose weights are large; a lost scale would make it far more than 1."""
    make("llama", tmp_path)
    want, outputs = follow(runner_of(tmp_path, kernels="reference"))
    runner = runner_of(tmp_path, kernels="triton", quantization="fp8", kv_cache_dtype="fp8")
    got, _ = follow(runner, outputs)
    error = (got.cpu() - want).square().mean().sqrt() / want.std()
    assert 0.005 < error < 0.4
    read = runner.decoder.ops.bytes_read()
    assert read["weights.fp8"] > 0
    assert read["kv.float8_e4m3fn"] > 0


def test_fp8_needs_the_card(tmp_path):
    make("llama", tmp_path)
    with pytest.raises(ConfigError, match="fp8"):
        runner_of(tmp_path, kernels="torch", quantization="fp8")


def decode(runner):
    """The tokens of two sequences after their prompts, and what a step read to decode them."""
    driver = Driver(runner)
    sequences = [Sequence(name, prompt(length)) for name, length in (("a", 3), ("b", 2))]
    driver.step({one: one.prompt_len for one in sequences})
    before = runner.decoder.ops.bytes_read()
    driver.step(dict.fromkeys(sequences, 1))
    read = {kind: count - before[kind] for kind, count in runner.decoder.ops.bytes_read().items()}
    runner.run(StepPlan(9, (), released=tuple(one.name for one in sequences)))
    return [one.outputs for one in sequences], read


@pytest.mark.sweep
def test_a_mixture_is_captured_and_rows_of_padding_choose_no_expert(tmp_path):
    """Two rows in a capture of five: as many bytes of experts are read as by the two alone."""
    make("qwen3-moe", tmp_path)
    want, _ = decode(runner_of(tmp_path, kernels="reference"))
    settings = {"max_num_seqs": 4, "num_threads": 1, "packed_cache": "off"}
    runner = load_torch_runner(RunnerConfig(model_path=str(tmp_path), kernels="triton", **settings))
    assert runner.resolved.execution_reason == "on its stream, decode steps captured and replayed"
    eager, read = decode(runner)
    runner.capture((5,))
    captured, read_then = decode(runner)
    assert eager == captured == want
    assert read == read_then
