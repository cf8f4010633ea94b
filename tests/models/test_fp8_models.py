"""Whole checkpoints in e4m3: the model that they stand for, in float32, is the oracle, here and in transformers.

The torch kernels and the native ones round nothing beyond the file. The reference and Triton's round activations to
e4m3 as well, as the files mean it: `equivalence/test_triton_models.py` has those against each other."""

import json

import fp8_layouts as fp8
import pytest
import stored_layouts as layouts
import torch
from safetensors.torch import save_file
from test_stored_models import MOE, PROMPT, QWEN3, needs, run

from splittime.core.errors import ConfigError

pytestmark = pytest.mark.sample(4)

ROUNDED_ERROR = 0.4  # of the logits' spread, of e4m3 activations in two layers; a lost scale makes it far more


def write(folder, name, **changes):
    quantization, make, _ = fp8.MODELS[name]
    return layouts.write(folder, quantization, make, **{**fp8.SHAPE, **changes})


@pytest.mark.parametrize("kernels", ["torch", "native", "reference"])
@pytest.mark.parametrize("name", fp8.MODELS)
def test_a_model_in_fp8_is_the_model_that_it_stands_for(tmp_path, name, kernels, caplog):
    needs(kernels)
    write(tmp_path, name)
    got, tokens, resolved = run(tmp_path, kernels=kernels)
    assert caplog.text.count("kept as float32") == (kernels == "native")
    want, wanted_tokens, plain = run(tmp_path / "plain")
    worst = float((got - want).abs().max() / want.std())
    if kernels == "reference":
        assert 1e-3 < worst < ROUNDED_ERROR
    else:
        assert worst < 1e-4
        assert tokens == wanted_tokens
    told = fp8.MODELS[name][2]
    assert resolved.weights == (told.split(":")[0] + ": float32" if kernels == "native" else told)
    assert resolved.num_parameters == plain.num_parameters
    if kernels != "native":
        assert resolved.weights_bytes < 0.5 * plain.weights_bytes


@pytest.mark.parametrize("changes", [QWEN3, MOE, {"tie_word_embeddings": True}], ids=["qwen3", "experts", "tied"])
def test_other_architectures(tmp_path, changes):
    write(tmp_path, "blocks", **changes)
    got, tokens, _ = run(tmp_path)
    want, wanted_tokens, _ = run(tmp_path / "plain")
    assert float((got - want).abs().max() / want.std()) < 1e-4
    assert tokens == wanted_tokens


@pytest.mark.parametrize("name", ["blocks", "dynamic"])
def test_transformers_says_the_same_of_the_model_it_stands_for(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    write(tmp_path, name)
    got, tokens, _ = run(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    with torch.no_grad():
        want = model(torch.tensor([PROMPT])).logits[0]
        greedy = list(PROMPT)
        for _ in tokens:
            greedy.append(int(model(torch.tensor([greedy])).logits[0, -1].argmax()))
    assert float((got - want).abs().max() / want.std()) < 1e-3
    assert tokens == greedy[len(PROMPT) :]


@pytest.mark.parametrize("suffixes", [("k_scale", "v_scale"), ("k_proj.output_scale", "v_proj.output_scale")])
def test_scales_of_keys_and_values_are_passed_over_and_that_is_said(tmp_path, suffixes, caplog):
    quantization, make, _ = fp8.MODELS["dynamic"]
    kept = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    tensors = layouts.write(tmp_path, {**quantization, "kv_cache_scheme": kept}, make, **fp8.SHAPE)
    places = [f"model.layers.{layer}.self_attn.{suffix}" for layer in range(2) for suffix in suffixes]
    save_file({**tensors, **{place: torch.tensor([0.02]) for place in places}}, tmp_path / "model.safetensors")
    with caplog.at_level("INFO", "splittime.weights"):
        run(tmp_path)
    assert "4 stored scales of keys and values" in caplog.text
    save_file({**tensors, "model.layers.0.self_attn.q_scale": torch.ones(1)}, tmp_path / "model.safetensors")
    run(tmp_path)
    assert "1 tensors of the checkpoint are unknown to this architecture and not used: " in caplog.text
    assert "self_attn.q_scale" in caplog.text


def test_measured_scales_of_activations_are_passed_over_and_that_is_said(tmp_path, caplog):
    write(tmp_path, "static")
    with caplog.at_level("INFO", "splittime.weights"):
        run(tmp_path)
    assert "stored scales of activations (input_scale) are not used" in caplog.text


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_to_round_them_again_is_refused(tmp_path, quantization):
    write(tmp_path, "blocks")
    with pytest.raises(ConfigError, match=r"already quantised \(fp8, 8 bits\)"):
        run(tmp_path, quantization=quantization, kernels="reference")


def test_what_the_config_excepts_is_not_in_fp8(tmp_path):
    write(tmp_path, "blocks")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.1.mlp.up_proj"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj is quantised in the file"):
        run(tmp_path)
