"""Quantise, load with our engine, and compare with the same numbers as an ordinary float32 checkpoint."""

import json
import shutil

import pytest
import torch
from native_or_not import has_native_kernels
from safetensors.torch import load_file, save_file
from tiny import BIASED, EXPERTS, make_model, make_text

from splittime import LLM, SamplingParams
from splittime.lab.quality.local import LocalModel
from splittime.lab.quality.margins import EIGHT_BITS, standard
from splittime.lab.quantize import layer_map, treat
from splittime.lab.quantize.job import quantize
from splittime.lab.quantize.rounding import LAYOUTS, SUFFIXES, unpack
from splittime.lab.quantize.settings import QuantizeSettings
from splittime.models.config import parse_config
from splittime.runner.config import RunnerConfig

EVERY = {
    "int8": QuantizeSettings(scheme="int8"),
    "fp8": QuantizeSettings(scheme="fp8"),
    "w8a8": QuantizeSettings(scheme="w8a8"),
    "w4a16": QuantizeSettings(scheme="w4a16", group_size=32),
    "w4a16-rows": QuantizeSettings(scheme="w4a16", group_size=-1),
    "awq": QuantizeSettings(scheme="awq", group_size=32),
    "gptq": QuantizeSettings(scheme="gptq", group_size=32),
    "gptq-order": QuantizeSettings(scheme="gptq", group_size=32, act_order=True),
    "gptq-static": QuantizeSettings(scheme="gptq", group_size=32, act_order=True, static_groups=True),
    "gptq-8": QuantizeSettings(scheme="gptq", group_size=-1, bits=8),
}
PROMPT = [int(token) for token in make_text(1, 40, seed=9).windows[0]]


def dequantized(folder, out, settings):
    """An ordinary checkpoint of what the tensors of a quantised one stand for."""
    values = json.loads((folder / "config.json").read_text())
    del values["quantization_config"]
    config, settings = parse_config(values), settings.resolved()
    tensors = load_file(folder / "model.safetensors")
    layout, grid = LAYOUTS[settings.scheme], treat.grid_of(settings, torch.float32)
    for index in range(config.num_layers):
        for name in layer_map.linear_shapes(config, index):
            full = layer_map.layer_prefix(index) + name
            parts = {suffix: tensors.pop(f"{full}.{suffix}") for suffix in SUFFIXES[layout]}
            tensors[f"{full}.weight"] = unpack(layout, parts, grid).values()
    out.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(values))
    (out / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    return out


def logprobs(folder, kernels):
    """Of each token of the prompt after the first."""
    settings = {"kernels": kernels, "dtype": "float32", "max_num_seqs": 2, "packed_cache": "off", "num_threads": 1}
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    (output,) = LLM(folder, **settings).generate([PROMPT], sampling)
    assert output.error is None
    return torch.tensor([one.logprob for one in output.prompt_logprobs])


def exact_logprobs(folder, name):
    """Returns what the checkpoint's numbers alone give: these kernels leave activations as they are beside them."""
    if name == "fp8":
        return logprobs(folder, "torch")
    copy = shutil.copytree(folder, folder.parent / "exact")
    config = json.loads((copy / "config.json").read_text())
    for group in config["quantization_config"].get("config_groups", {}).values():
        group["input_activations"] = None
    (copy / "config.json").write_text(json.dumps(config))
    return logprobs(copy, "reference")


@pytest.mark.parametrize("name", EVERY)
def test_the_engine_computes_what_the_integers_stand_for(name, tmp_path):
    model = make_model(tmp_path / "model", **(BIASED if name in ("awq", "w8a8") else {}))
    quantize(model, tmp_path / "out", EVERY[name], make_text())
    plain = dequantized(tmp_path / "out", tmp_path / "plain", EVERY[name])
    wanted = logprobs(plain, "torch")
    torch.testing.assert_close(exact_logprobs(tmp_path / "out", name), wanted, rtol=1e-3, atol=1e-3)
    assert (logprobs(model, "torch") - wanted).abs().max() > 1e-3  # it is not the unquantised model that was read
    for kernels in ("torch", "native") if has_native_kernels() else ("torch",):
        # They may round the activations as well, and this model's are hard to round.
        found = torch.stack((logprobs(tmp_path / "out", kernels), wanted))
        assert torch.corrcoef(found)[0, 1] > 0.97


def test_experts_come_back(tmp_path):
    model = make_model(tmp_path / "model", **EXPERTS)
    quantize(model, tmp_path / "out", EVERY["awq"], make_text())
    plain = dequantized(tmp_path / "out", tmp_path / "plain", EVERY["awq"])
    torch.testing.assert_close(logprobs(tmp_path / "out", "torch"), logprobs(plain, "torch"), rtol=1e-3, atol=1e-3)


def test_a_pruned_checkpoint_is_served_like_any_other(tmp_path):
    model = make_model(tmp_path / "model")
    quantize(model, tmp_path / "out", QuantizeSettings(prune="2:4"))
    assert logprobs(tmp_path / "out", "torch").isfinite().all()


def test_little_is_lost_at_8_bits_and_more_at_4(tmp_path):
    model = make_model(tmp_path / "model")
    wanted, lost = logprobs(model, "torch"), {}
    for name in ("int8", "fp8", "w4a16"):
        quantize(model, tmp_path / name, EVERY[name])
        lost[name] = float((logprobs(tmp_path / name, "torch") - wanted).abs().mean())
    assert lost["int8"] < 0.5 * lost["fp8"] < 0.5 * lost["w4a16"]


def test_the_quality_gate_holds_fp8_to_what_it_claims(tmp_path):
    """Kernels that keep it so must read e4m3; those that widen it claim nothing."""
    quantize(make_model(tmp_path / "model"), tmp_path / "out", EVERY["fp8"])
    settings = {"dtype": "float32", "max_num_seqs": 2, "packed_cache": "off", "num_threads": 1}
    claims = {"torch": ("weights.fp8",)} | ({"native": ()} if has_native_kernels() else {})
    for kernels, claimed in claims.items():
        config = RunnerConfig(model_path=str(tmp_path / "out"), kernels=kernels, **settings)
        model = LocalModel.load("fp8", config)
        assert model.reads.claims == claimed
        assert standard(claimed, model.stored.bits) == EIGHT_BITS
