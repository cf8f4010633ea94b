"""Adapters of models whose layers differ from Llama's: what they add is what merging them into the weights adds."""

import pytest
import torch
from driving import Driver, Sequence
from listening import heard, prompt_logits
from random_models import make
from safetensors.torch import load_file, save_file

import adapter_files
from splittime.core.errors import ConfigError
from splittime.core.sampling import SamplingParams
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig

PROMPT = [(7 * n) % 90 + 3 for n in range(40)]
ATTENTION = tuple(name for name in adapter_files.ALL if name.startswith("self_attn."))
APART = {"glm4": (*ATTENTION, "mlp.down_proj"), "phi3": ("self_attn.o_proj", "mlp.down_proj")}  # what is not joined
APART["starcoder2"] = (*ATTENTION, "mlp.c_fc", "mlp.c_proj")
EXPERTS = ("gpt-oss-yarn", "ernie-moe", "glm-moe", "hunyuan-moe")  # which are not adapted themselves
GREEDY = SamplingParams(temperature=0.0, seed=0)


def adapted(folder):
    return load_torch_runner(RunnerConfig(model_path=str(folder), packed_cache="off", enable_lora=True, max_num_seqs=2))


@pytest.mark.parametrize(
    "variant",
    [
        "cohere",
        "starcoder2",
        "gemma3",
        "gemma4",
        "gemma4-layer-inputs",
        "ernie",
        "olmo3",
        "glm4",
        "phi3",
        "hunyuan",
        "granite",
        *EXPERTS,
    ],
)
def test_an_adapter_is_what_merging_it_is(variant, tmp_path):
    for name in ("base", "merged"):
        make(variant, tmp_path / name)
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    modules = ATTENTION if variant in EXPERTS else APART.get(variant, adapter_files.ALL)
    adapter = adapter_files.write_adapter(tmp_path / "a", tensors, modules=modules, size=0.1)
    save_file(adapter_files.merged(tensors, adapter), tmp_path / "merged" / "model.safetensors")
    runner = adapted(tmp_path / "base")
    runner.slots.adapters.load("a#1", str(tmp_path / "a"))
    seen = heard(runner)
    Driver(runner).prefill(Sequence("r", PROMPT, GREEDY, "a#1"), [9, 1, 17])
    want, _ = prompt_logits(tmp_path / "merged", PROMPT)
    plain, _ = prompt_logits(tmp_path / "base", PROMPT)
    assert (torch.cat(seen) - want).abs().max() < 2e-4
    assert (plain - want).abs().max() > 0.1


@pytest.mark.parametrize(
    ("module", "held"),
    [
        ("self_attn.qkv_proj", "self_attn.qkv_proj"),
        ("self_attn.q_proj", "self_attn.qkv_proj"),
        ("self_attn.v_proj", "self_attn.qkv_proj"),
        ("mlp.up_proj", "mlp.gate_up_proj"),
    ],
)
def test_an_adapter_of_joined_projections_is_refused(module, held, tmp_path):
    """By the name of the module that holds them, and by names that the base model does not have."""
    make("phi3", tmp_path)
    tensors = {name.replace(held, module): one for name, one in load_file(tmp_path / "model.safetensors").items()}
    adapter_files.write_adapter(tmp_path / "a", tensors, modules=(module,))
    adapters = adapted(tmp_path).slots.adapters
    with pytest.raises(
        ConfigError, match=rf"{module}.lora_A.weight is no part of an adapter that can be served"
    ) as told:
        adapters.load("a#1", str(tmp_path / "a"))
    assert told.value.info.limit == ["mlp.down_proj", "self_attn.o_proj"]
    assert "merged into the base model" in told.value.info.hint
