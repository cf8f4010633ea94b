"""gpt-oss with experts in MXFP4: what the blocks stand for is what transformers makes of them, and so are logits."""

import json

import pytest
import torch
from listening import prompt_logits
from native_or_not import has_native_kernels
from random_models import VARIANTS, make
from safetensors.torch import load_file, save_file

from splittime.core.errors import ConfigError
from splittime.models.weights.load import open_source, read_config

PROMPT = [5, 17, 3, 80, 41, 2, 96, 0, 33, 33, 7, 12, 64, 90, 1, 28, 55, 9, 13, 71]
SIZES = {"hidden_size": 64, "intermediate_size": 96}
KERNELS = ["torch", "reference", "native"]


def packed(floats: torch.Tensor, source: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """floats [E, in, out] -> blocks and scales of numbers about as large, drawn anew."""
    experts, columns, rows = floats.shape
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=source, dtype=torch.uint8)
    scales = torch.randint(120, 125, (experts, rows, columns // 32), generator=source, dtype=torch.uint8)
    return blocks, scales


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(transformers' model with the numbers that the blocks stand for, the folder of the checkpoint with blocks)."""
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    folder, source = tmp_path_factory.mktemp("mxfp4"), torch.Generator().manual_seed(5)
    name, differences = VARIANTS["gpt-oss"]
    VARIANTS["gpt-oss-mxfp4"] = (name, {**differences, **SIZES})
    try:
        made = make("gpt-oss-mxfp4", folder)
    finally:
        del VARIANTS["gpt-oss-mxfp4"]
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = packed(tensors.pop(key), source)
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        wide = integration.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        made.get_parameter(key).data.copy_(wide)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return made, folder


@pytest.mark.parametrize("linear", ["gate_proj", "up_proj", "down_proj"])
def test_rows_stand_for_what_transformers_makes_of_them(model, linear):
    made, folder = model
    source = open_source(folder, read_config(folder))
    out, columns = (64, 96) if linear == "down_proj" else (96, 64)
    found = source.take_linear(f"model.layers.1.mlp.experts.4.{linear}", out, columns).rows(8, 40)
    got = found.integers * found.scales.repeat_interleave(32, dim=1)
    stack = "down_proj" if linear == "down_proj" else "gate_up_proj"
    want = made.get_parameter(f"model.layers.1.mlp.experts.{stack}")[4].T
    if linear != "down_proj":
        want = want[int(linear == "up_proj") :: 2]
    assert torch.equal(got, want[8:40])


@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_equal_transformers(model, kernels):
    if kernels == "native" and not has_native_kernels():
        pytest.skip("no native kernels")
    made, folder = model
    got, runner = prompt_logits(folder, PROMPT, [7, 4], kernels=kernels, dtype="float32")
    with torch.no_grad():
        want = made(torch.tensor([PROMPT])).logits[0]
    away = (got - want).abs() / want.abs().max()
    if kernels == "native":  # whose products round activations too: a token may go to another expert for it
        assert away.mean() < 0.01
    else:
        assert away.max() < 1e-4
    assert runner.resolved.num_parameters == sum(parameter.numel() for parameter in made.parameters())


def test_a_scale_that_is_no_number_is_refused_by_name(model, tmp_path):
    _, folder = model
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.experts.down_proj_scales"][3, 1, 1] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    source = open_source(tmp_path, read_config(tmp_path))
    with pytest.raises(ConfigError, match=r"layers\.2\.mlp\.experts\.3\.down_proj has a scale that is not a number"):
        source.take_linear("model.layers.2.mlp.experts.3.down_proj", 64, 96).rows(0, 64)
    with pytest.raises(ConfigError, match="has 6 experts, the config asks for more"):
        source.take_linear("model.layers.2.mlp.experts.6.down_proj", 64, 96)


def test_a_stack_that_stayed_floats_is_refused(model, tmp_path):
    made, folder = model
    tensors, key = load_file(folder / "model.safetensors"), "model.layers.1.mlp.experts.down_proj"
    for end in ("blocks", "scales"):
        del tensors[f"{key}_{end}"]
    save_file({**tensors, key: made.get_parameter(key).data.contiguous()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    source = open_source(tmp_path, read_config(tmp_path))
    with pytest.raises(ConfigError, match=r"experts\.4\.down_proj is floats in the file"):
        source.take_linear("model.layers.1.mlp.experts.4.down_proj", 64, 96)
