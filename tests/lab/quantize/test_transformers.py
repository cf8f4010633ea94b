"""transformers (with compressed-tensors) loads our checkpoints and computes what our engine does."""

import json
from importlib.util import find_spec

import pytest
import torch
from test_round_trip import EVERY, PROMPT, exact_logprobs, logprobs
from tiny import BIASED, EXPERTS, QWEN3, make_model, make_text

from lazily import transformers
from splittime.lab.quantize.job import quantize
from splittime.lab.quantize.settings import QuantizeSettings

pytestmark = pytest.mark.sample(4)

if find_spec("compressed_tensors") is None:  # three seconds of import, which transformers does where it is needed
    pytest.skip("no compressed-tensors", allow_module_level=True)

COMPRESSED = ("int8", "fp8", "w8a8", "w4a16", "w4a16-rows")


def their_logprobs(folder, round_activations=True):
    """Of each token of the prompt after the first."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for module in model.modules():
        if not round_activations and hasattr(module, "quantization_scheme"):
            module.quantization_scheme.input_activations = None
    with torch.no_grad():
        rows = model(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    return rows[torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])]


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("changes", [{}, BIASED, QWEN3, {"tie_word_embeddings": False}], ids=str)
def test_the_same_log_probabilities(name, changes, tmp_path):
    model = make_model(tmp_path / "model", **changes)
    quantize(model, tmp_path / "out", EVERY[name], make_text())
    wanted = exact_logprobs(tmp_path / "out", name)
    torch.testing.assert_close(their_logprobs(tmp_path / "out", round_activations=False), wanted, rtol=1e-4, atol=1e-4)
    assert (their_logprobs(model) - wanted).abs().max() > 1e-3  # it is not the unquantised model that was read


def test_experts_and_their_router(tmp_path):
    quantize(make_model(tmp_path / "model", **EXPERTS), tmp_path / "out", EVERY["int8"])
    wanted = exact_logprobs(tmp_path / "out", "int8")
    torch.testing.assert_close(their_logprobs(tmp_path / "out"), wanted, rtol=1e-3, atol=1e-3)


def test_activations_are_rounded_where_the_checkpoint_says_so(tmp_path):
    quantize(make_model(tmp_path / "model"), tmp_path / "out", EVERY["w8a8"], make_text())
    rounded, exact = (their_logprobs(tmp_path / "out", round_activations=each) for each in (True, False))
    assert (rounded - exact).abs().mean() > 1e-3
    assert torch.corrcoef(torch.stack((rounded, exact)))[0, 1] > 0.97  # this model's are hard to round


def test_activations_beside_fp8_are_rounded_as_a_card_does(tmp_path):
    """The reference says what a card's kernels compute. A sum's last bit may round one the other way."""
    quantize(make_model(tmp_path / "model"), tmp_path / "out", EVERY["fp8"])
    rounded, exact = (their_logprobs(tmp_path / "out", round_activations=each) for each in (True, False))
    ours = logprobs(tmp_path / "out", "reference")
    assert (ours - rounded).abs().mean() < 0.1 * (rounded - exact).abs().mean()


@pytest.mark.parametrize(("settings", "kind"), [
    (EVERY["gptq-order"], "GPTQConfig"), (EVERY["gptq-static"], "GPTQConfig"), (EVERY["gptq-8"], "GPTQConfig"),
    (EVERY["awq"], "AwqConfig"),
])  # fmt: skip
def test_the_note_is_one_that_transformers_takes(settings: QuantizeSettings, kind, tmp_path):
    quantize(make_model(tmp_path / "model"), tmp_path / "out", settings, make_text())
    note = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    found = getattr(transformers, kind).from_dict(dict(note))
    assert (found.bits, found.group_size) == (settings.resolved().bits, settings.group_size)
    assert getattr(found, "desc_act", False) is (settings.act_order and not settings.static_groups)
