"""Kernels that do not compute what a model does: others are chosen and told, or those asked for by name are refused."""

import logging

import pytest

from splittime.core.errors import ConfigError
from splittime.models.config import parse_config
from splittime.runner.honoured import settle_kernels

SIZES = {
    **{"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "max_position_embeddings": 512},
}
GPT_OSS = parse_config({**SIZES, "architectures": ["GptOssForCausalLM"], "num_local_experts": 4})
GEMMA_2 = parse_config({**SIZES, "architectures": ["Gemma2ForCausalLM"], "num_key_value_heads": 1})
LLAMA = parse_config({**SIZES, "architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize(
    ("model", "chosen", "kernels", "words"),
    [(GPT_OSS, "triton", "native", "gives heads sinks"), (GEMMA_2, "triton", "native", "caps the scores of attention")],
)
def test_others_are_chosen_and_told_once(model, chosen, kernels, words, caplog):
    with caplog.at_level(logging.WARNING, "splittime.runner"):
        for _ in range(2):
            found, reason = settle_kernels("auto", model, chosen, "they are there")
            assert (found, words in reason) == (kernels, True)
    assert [f"computing with the {kernels} kernels" in text for text in caplog.messages] == [True]
    with pytest.raises(ConfigError, match=f"{words}, which the {chosen} kernels do not"):
        settle_kernels(chosen, model, chosen, "as asked")


def test_what_has_all_that_the_model_computes_stays():
    assert settle_kernels("auto", LLAMA, "triton", "a card") == ("triton", "a card")
    assert settle_kernels("auto", GPT_OSS, "native", "built") == ("native", "built")
