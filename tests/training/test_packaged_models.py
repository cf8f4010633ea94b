"""What is in the packaged folders: they load, they are small, they write Python, and their cards tell the truth."""

import json
import re
from functools import cache

import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment

from splittime.lab.distill.llama import Llama
from training.evaluate import RESULTS, complete
from training.export import PACKAGED, load_folder
from training.model import SHAPES
from training.tokenizer import load_tokenizer

LIMITS_BYTES = {"code": 24_000_000, "code-draft": 4_000_000}
NAMES = sorted(LIMITS_BYTES)


@cache
def loaded(name: str) -> Llama:
    return load_folder(PACKAGED / name)


@pytest.mark.parametrize("name", NAMES)
def test_folder_is_complete_and_within_its_limit(name: str) -> None:
    files = {path.name: path.stat().st_size for path in (PACKAGED / name).iterdir()}
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert needed <= files.keys()
    assert sum(files.values()) <= LIMITS_BYTES[name]


@pytest.mark.parametrize("name", NAMES)
def test_shape_is_the_one_that_training_makes(name: str) -> None:
    assert loaded(name).shape == SHAPES[name]
    assert json.loads((PACKAGED / name / "config.json").read_text()) == SHAPES[name].config()


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_finite_and_code_is_likelier_than_noise(name: str) -> None:
    tokenizer, model = load_tokenizer(PACKAGED / name), loaded(name)
    code = torch.tensor([tokenizer.encode("import os\n\n\ndef main():\n    return os.path.join('a', 'b')\n").ids])
    noise = code[:, torch.randperm(code.shape[1], generator=torch.Generator().manual_seed(0))]
    with torch.no_grad():
        assert torch.isfinite(model(code)).all()
        assert model.loss(code[:, :-1], code[:, 1:]) < model.loss(noise[:, :-1], noise[:, 1:]) - 1


def test_the_model_writes_the_obvious() -> None:
    tokenizer = load_tokenizer(PACKAGED / "code")
    text = complete(loaded("code"), tokenizer, "class Point:\n    def __init__(self, x):\n        self.x =", tokens=3)
    assert text.startswith("class Point:\n    def __init__(self, x):\n        self.x = x\n")


@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_chat_template_renders_comments_and_code(name: str, trim: bool) -> None:
    template = json.loads((PACKAGED / name / "tokenizer_config.json").read_text())["chat_template"]
    messages = [{"role": "user", "content": "add\n\ntwo"}, {"role": "assistant", "content": "x = 1 + 1"}]
    render = ImmutableSandboxedEnvironment(trim_blocks=trim, lstrip_blocks=trim).from_string(template).render
    assert render(messages=messages) == "# add\n#\n# two\nx = 1 + 1\n\n"
    assert render(messages=messages[:1], add_generation_prompt=True) == "# add\n#\n# two\n\n"


@pytest.mark.parametrize("name", NAMES)
def test_card_gives_the_measured_bits_per_byte(name: str) -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    card = (PACKAGED / name / "MODEL_CARD.md").read_text(encoding="utf-8")
    for model in NAMES:
        row = re.search(rf"^\| {model} \| ([0-9.]+) \|", card, re.MULTILINE)
        assert row is not None
        assert float(row[1]) == results["models"][model]["heldout"]["bits_per_byte"]


def test_the_main_model_beats_general_compressors() -> None:
    """The draft does not have to: it is judged by how many of its tokens are accepted."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    best = min(min(sizes.values()) for sizes in results["compressors_bits_per_byte"].values())
    assert results["models"]["code"]["heldout"]["bits_per_byte"] < best


def test_the_draft_is_worse_than_its_main_model() -> None:
    models = json.loads(RESULTS.read_text(encoding="utf-8"))["models"]
    assert models["code"]["heldout"]["bits_per_byte"] < models["code-draft"]["heldout"]["bits_per_byte"]
