"""What is multiplied with what: told as it is, alike on every instruction set, and refused where it cannot be had."""

import pytest
import tiny_checkpoint
import torch

from splittime.core.errors import ConfigError
from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted, Row, StepPlan
from splittime.kernels.native import library
from splittime.runner import machine
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig

PROMPT = tuple(range(1, 20))
INTEL = "GenuineIntel"


@pytest.fixture
def load(tmp_path):
    tiny_checkpoint.write(tmp_path)

    def load(**settings):
        fixed = {"model_path": str(tmp_path), "num_threads": 1, "packed_cache": "off"}
        return load_torch_runner(RunnerConfig(**fixed | settings))

    return load


def logits(runner):
    """Of each position of the prompt."""
    states = []
    runner.on_hidden = lambda batch, hidden: states.append(hidden.clone())
    admitted = Admitted("r", PROMPT, 0, SamplingParams(temperature=0.0, seed=0), ())
    runner.run(StepPlan(0, (Row("r", 0, PROMPT, (0, 1), 0),), (admitted,)))
    with torch.inference_mode():
        return runner.decoder.logits(states[0].contiguous())


@pytest.mark.parametrize(
    ("settings", "products"),
    [
        ({}, "layers float32 x float32, head float32 x float32"),
        (
            {"dtype": "bfloat16", "activation_dtype": "float32"},
            "layers bfloat16 x float32, head bfloat16 x float32",
        ),
        (
            {"dtype": "bfloat16", "activation_dtype": "bfloat16"},
            "layers bfloat16 x bfloat16, head bfloat16 x bfloat16",
        ),
        ({"quantization": "int8"}, "layers int8 x int8, head int8 x int8"),
        ({"quantization": "int4"}, "layers int4 x int8, values and down int8 x int8, head int8 x int8"),
        ({"kernels": "torch", "quantization": "int8"}, "layers int8 x int8, head int8 x int8"),
        ({"kernels": "reference", "dtype": "bfloat16"}, "layers bfloat16 x bfloat16, head bfloat16 x bfloat16"),
    ],
)
def test_products_are_told_as_they_are(load, settings, products):
    assert load(**{"kernels": "native"} | settings).resolved.products == f"weights x activations: {products}"


@pytest.mark.parametrize(
    ("isa", "vendor", "settings", "products", "reason"),
    [
        ("amx", INTEL, {}, "bfloat16 x bfloat16", "much faster, multiply bfloat16 by bfloat16 alone"),
        ("avx512bf16", INTEL, {}, "bfloat16 x float32", "not known to be faster"),
        ("avx512bf16", "AuthenticAMD", {}, "bfloat16 x bfloat16", "at twice the rate of float32"),
        ("avx512", "AuthenticAMD", {}, "bfloat16 x float32", "not known to be faster"),
        ("avx512bf16", "AuthenticAMD", {"activation_dtype": "float32"}, "bfloat16 x float32", "as asked"),
        ("amx", INTEL, {"activation_dtype": "float32"}, "bfloat16 x float32", "as asked"),
        ("amx", INTEL, {"quantization": "int8"}, "int8 x int8", "as the scheme of each weight has it"),
        ("amx", INTEL, {"kernels": "reference"}, "bfloat16 x bfloat16", "reference kernels compute in their own dtype"),
    ],
)
def test_auto_rounds_activations_where_that_is_much_faster(load, monkeypatch, isa, vendor, settings, products, reason):
    """Nothing is measured: a noisy start must not answer with other numbers."""
    monkeypatch.setattr(machine, "choose_isa", lambda: (isa, "as the test has it"))
    monkeypatch.setattr(machine, "of_processor", {"vendor_id": vendor, "model name": "made"}.__getitem__)
    resolved = load(**{"kernels": "native", "dtype": "bfloat16"} | settings).resolved
    assert resolved.products == f"weights x activations: layers {products}, head {products}"
    assert resolved.products_reason.endswith(reason)


def test_ranks_do_not_round(monkeypatch):
    monkeypatch.setattr(machine, "choose_isa", lambda: ("amx", "as the test has it"))
    config = RunnerConfig(model_path="", tensor_parallel_size=2)
    assert machine.choose_weights(config, "bfloat16", "native").layers.rounds_activations is False


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"activation_dtype": "bfloat16"}, "layers of float32 by float32"),
        ({"activation_dtype": "bfloat16", "quantization": "int8"}, "layers of int8 by int8"),
        ({"activation_dtype": "float32", "quantization": "int4"}, "layers of int4 by int8"),
        ({"activation_dtype": "bfloat16", "kernels": "torch", "dtype": "float32"}, "layers of float32 by float32"),
    ],
)
def test_activations_that_cannot_be_had_are_refused(load, settings, found):
    with pytest.raises(ConfigError, match=f"multiply {found}"):
        load(**settings)


def test_a_checkpoint_is_computed_the_same_way_by_every_instruction_set(load):
    """bfloat16 weights: float32 activations agree to float32's rounding, rounded ones are as far off everywhere."""
    selected = library.selected_isa()
    try:
        found = {}
        for isa in library.isa_names():
            plain = load(dtype="bfloat16", kv_cache_dtype="float32", activation_dtype="float32")
            rounded = load(dtype="bfloat16", kv_cache_dtype="float32", activation_dtype="bfloat16")
            library.select_isa(isa)
            found[isa] = (logits(plain), logits(rounded))
    finally:
        library.select_isa(selected)
    exact, rounded = found["portable"]
    assert float((rounded - exact).abs().max()) > 1e-3 * float(exact.std())
    for plain, other in found.values():
        torch.testing.assert_close(plain, exact, rtol=1e-4, atol=1e-4 * float(exact.std()))
        assert float((other - rounded).abs().max()) < 0.3 * float((rounded - exact).abs().max())
