"""Models saved in other forms: the text part of a multimodal checkpoint, and decoders without a head."""

import json

import pytest
import torch
from driving import Driver, Sequence
from listening import prompt_logits
from random_models import make
from safetensors.torch import load_file, save_file

from splittime.models.config import load_config
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig

PROMPT = [(7 * n) % 90 + 3 for n in range(50)]
EYES = {"vision_tower.patches.weight": torch.ones(3, 3)}


def renamed(folder, body, head):
    """Gives the tensors of a checkpoint the names that they have in a multimodal one, beside those of its eyes."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    ours = {name: body + name.removeprefix("model.") for name in tensors} | {"lm_head.weight": head}
    save_file({ours[name]: tensor for name, tensor in tensors.items()} | EYES, path)


@pytest.mark.parametrize(
    ("body", "head"),
    [("model.language_model.", "lm_head.weight"), ("language_model.model.", "language_model.lm_head.weight")],
)
@pytest.mark.parametrize(
    ("variant", "name"),
    [("gemma3-linear", "Gemma3"), ("gemma4", "Gemma4"), ("ministral3", "Mistral3"), ("mistral-window", "Mistral3")],
)
def test_the_text_part_of_a_multimodal_model(variant, name, body, head, tmp_path):
    make(variant, tmp_path)
    want, _ = prompt_logits(tmp_path, PROMPT)
    text = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": [f"{name}ForConditionalGeneration"], "vision_config": {"hidden_size": 3}}
    kept = {key: value for key, value in text.items() if key != "architectures"}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": kept}))
    renamed(tmp_path, body, head)
    got, runner = prompt_logits(tmp_path, PROMPT)
    assert torch.equal(got, want)
    assert runner.resolved.unused_tensors == ()


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "qwen3"])
def test_a_decoder_without_a_head_gives_its_last_states(variant, tmp_path):
    model = make(variant, tmp_path / "whole").model
    model.save_pretrained(tmp_path)
    assert load_config(tmp_path).architecture.endswith("Model")
    runner = load_torch_runner(RunnerConfig(model_path=str(tmp_path)))
    seen: list[torch.Tensor] = []
    runner.on_hidden = lambda batch, hidden: seen.append(runner.decoder.normed(hidden))
    Driver(runner).prefill(Sequence("a", PROMPT))
    with torch.no_grad():
        want = model(torch.tensor([PROMPT])).last_hidden_state[0]
    torch.testing.assert_close(torch.cat(seen), want, atol=1e-5, rtol=1e-4)
