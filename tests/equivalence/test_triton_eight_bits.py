"""Whole models whose products are of eight bits with eight bits, through the engine's runner on the Triton backend:
checkpoints in fp8 and int8, and weights rounded at loading. The reference multiplies the same rounded numbers. A sum
that differs in its last bit may round an activation the other way, so the two are near, not equal: a step of e4m3 is a
sixteenth of a number, of int8 a 127th of a token's largest."""

import pytest

pytest.importorskip("triton")

import fp8_layouts as fp8
import stored_layouts as layouts
import torch
from driving import Driver, Sequence
from listening import heard
from random_models import make
from test_parallel_models import runner_of
from test_stored_formats import W8A8
from test_stored_models import maker, needs

from splittime.core.errors import ConfigError
from splittime.kernels.reference import rounding
from splittime.kernels.triton.mixture import MixtureLayer
from splittime.kernels.triton.w8a8 import EightBitWeight

pytestmark = [pytest.mark.sample(1), pytest.mark.timeout(600)]  # the interpreter is slow
SIZES = {**fp8.SHAPE, "vocab_size": 97, "torch_dtype": "float32"}
SMALL = {"vocab_size": 97, "torch_dtype": "float32"}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
INT8 = maker(layouts.compressed_int8, bits=8, symmetric=True, group=-1)


def follow(runner, outputs=None):
    """Logits of a prompt of six and of one token after it, [7, vocab], and the tokens; outputs: to go on with."""
    seen, sequence = heard(runner), Sequence("a", [5, 17, 3, 42, 8, 61])
    driver = Driver(runner)
    for work in (6, 1):
        driver.step({sequence: work})
        if outputs:
            sequence.tokens[6:] = outputs[: len(sequence.outputs)]
    return torch.cat(seen), sequence.outputs


def layer_of(runner):
    return runner.decoder.layers[0]


def error(got, want):
    return float((got.cpu() - want).square().mean().sqrt() / want.std())


def near_the_reference(folder, limit, plain=None, **settings):
    """And farther from what rounds no activations. Returns the runner."""
    want, outputs = follow(runner_of(folder, kernels="reference", **settings))
    runner = runner_of(folder, kernels="triton", **settings)
    got, _ = follow(runner, outputs)
    unrounded, _ = follow(runner_of(plain or folder, kernels="torch"), outputs)
    assert error(got, want) < limit < 0.7 * error(got, unrounded)
    return runner


@pytest.mark.parametrize("name", ["blocks", "dynamic", "static"])
def test_checkpoints_in_fp8(tmp_path, name):
    quantization, make, _ = fp8.MODELS[name]
    layouts.write(tmp_path, quantization, make, **SIZES)
    runner = near_the_reference(tmp_path, 0.01)
    read = runner.decoder.ops.bytes_read()
    assert read["weights.fp8"] > 0
    assert runner.resolved.weights.startswith(fp8.MODELS[name][2].split(";")[0])
    packed = layer_of(runner).weights.mixer.qkv
    assert (packed.unit > 0) == (name == "blocks")


def test_a_checkpoint_in_int8_meets_int8(tmp_path):
    layouts.write(tmp_path, W8A8, INT8, **SIZES)
    runner = near_the_reference(tmp_path, 0.003, tmp_path / "plain")
    assert isinstance(layer_of(runner).weights.feed_forward.down, EightBitWeight)
    assert runner.decoder.ops.bytes_read()["weights.int8"] > 0


@pytest.mark.parametrize("name", ["int8", "blocks", "dynamic"])
def test_experts_are_one_product_with_activations_as_they_are(tmp_path, name):
    quantization, make, _ = fp8.MODELS.get(name, (W8A8, INT8, ""))
    layouts.write(tmp_path, quantization, make, **(SMALL if name == "int8" else SIZES), **EXPERTS)
    runner = runner_of(tmp_path, kernels="triton")
    assert isinstance(layer_of(runner).weights.mixer.qkv, EightBitWeight)
    assert isinstance(layer_of(runner), MixtureLayer)
    assert runner.resolved.layers == "fused"
    want, outputs = follow(runner_of(tmp_path, kernels="reference"))
    got, _ = follow(runner, outputs)
    assert error(got, want) < 0.003
    if name != "int8":
        assert runner.decoder.ops.bytes_read()["weights.fp8"] > 0


@pytest.mark.parametrize(("quantization", "limit"), [("w8a8", 0.003), ("fp8", 0.01)])
def test_rounded_at_loading(tmp_path, monkeypatch, quantization, limit):
    monkeypatch.setattr(rounding, "TURNED", 1)  # a card's integers are not turned
    make("llama", tmp_path)
    runner = near_the_reference(tmp_path, limit, quantization=quantization)
    assert runner.resolved.weights == {"w8a8": "int8 x int8, head int8", "fp8": "fp8 x fp8, head float32"}[quantization]
    assert isinstance(layer_of(runner).weights.feed_forward.gate_up, EightBitWeight)


def test_native_integers_meet_rounded_activations_anyway(tmp_path):
    """So w8a8 is int8 there, to the bit."""
    needs("native")
    make("llama", tmp_path)
    got, outputs = follow(runner_of(tmp_path, kernels="native", quantization="w8a8"))
    want, _ = follow(runner_of(tmp_path, kernels="native", quantization="int8"), outputs)
    assert torch.equal(got, want)


@pytest.mark.parametrize(("kernels", "quantization"), [("torch", "w8a8"), ("torch", "fp8"), ("native", "fp8")])
def test_kernels_that_have_no_such_product_refuse(tmp_path, kernels, quantization):
    needs(kernels)
    make("llama", tmp_path)
    with pytest.raises(ConfigError, match=f"quantization is '{quantization}', which the {kernels} kernels"):
        runner_of(tmp_path, kernels=kernels, quantization=quantization)
