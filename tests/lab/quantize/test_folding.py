"""Folding scales into what comes before changes no result: the layer as it becomes, not rounded, computes the same."""

import pytest
import torch
from tiny import BIASED, EXPERTS, QWEN3, make_model, make_text

from splittime.lab.quantize import treat
from splittime.lab.quantize.forward import Sequences, begin_states
from splittime.lab.quantize.layer_map import QuantizeSource
from splittime.lab.quantize.settings import QuantizeSettings
from splittime.lab.quantize.treat import Treatment

SCHEMES = [QuantizeSettings(scheme="awq", group_size=32), QuantizeSettings(scheme="w8a8", smooth=0.7)]


class Unrounded(Treatment):
    """Folds and rounds nothing."""

    def _rounded(self, name, weight, moments):
        return weight


def treated(folder, settings):
    """The layer before and after, and the output of both."""
    settings, source, windows = settings.resolved(), QuantizeSource(folder), make_text().windows
    sequences = Sequences(source.config, windows.shape[1])
    states = begin_states(windows, source.embedding(), source.config.embedding_factor, folder / "hidden", 1 << 30)

    def gather(weights, widths):
        found = sequences.gather(0, weights, states, widths)
        return {tap: gatherer.moments() for tap, gatherer in found.items()}

    original = source.layer(0)
    grid = treat.grid_of(settings, torch.float32)
    with torch.inference_mode():
        treatment = Unrounded(settings, grid, source.config, 0, original, source.dtypes, gather, lambda text: None)
        treatment.run()
        outputs = []
        for weights in (original, treatment.weights):
            outputs.append(torch.empty_like(states))
            sequences.run(0, weights, states, outputs[-1])
    return original, treatment, outputs


@pytest.mark.parametrize("settings", SCHEMES, ids=["awq", "w8a8"])
@pytest.mark.parametrize(
    "changes",
    [{}, BIASED, QWEN3, EXPERTS, {"torch_dtype": "bfloat16"}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}],
    ids=["llama", "biases", "qk-norm", "experts", "bfloat16", "own-heads", "shared-head"],
)
def test_the_folded_layer_computes_the_same(settings, changes, tmp_path):
    original, treatment, outputs = treated(make_model(tmp_path / "model", **changes), settings)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=2e-4, atol=2e-4)
    assert not torch.equal(treatment.weights["input_layernorm.weight"], original["input_layernorm.weight"])
    changed = {name for name, weight in treatment.weights.items() if not torch.equal(weight, original[name])}
    assert "self_attn.q_proj.weight" in changed
    assert ("self_attn.o_proj.weight" in changed) is (settings.scheme == "awq")
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        kept = treatment.tensors()[f"model.layers.0.{name}"]
        assert torch.equal(kept.float(), treatment.weights[name])  # what is stored is what was divided by


def test_a_norm_of_zeros_is_left_alone(tmp_path):
    folder = make_model(tmp_path / "model")
    source = QuantizeSource(folder)
    settings = SCHEMES[0].resolved()
    weights = source.layer(0)
    weights["input_layernorm.weight"][:4] = 0
    treatment = Treatment(
        settings,
        treat.grid_of(settings, torch.float32),
        source.config,
        0,
        weights,
        source.dtypes,
        None,
        lambda text: None,
    )
    scales = treatment._fold_norm("input_layernorm", torch.full((64,), 2.0))
    assert scales.tolist() == [1.0] * 4 + [2.0] * 60
    assert treatment.weights["input_layernorm.weight"][:4].tolist() == [0] * 4
