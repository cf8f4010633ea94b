"""Models with experts or layer norms, rounded as they are loaded or with a rounded cache: their distributions stay near
the model's.

The bounds are about three times the largest divergence of a token (in nats) that was measured on these random models,
which are a hard case for 4 bits.
"""

import json

import pytest
import torch
from listening import prompt_logits
from random_models import make

PROMPT = [5, 17, 3, 80, 41, 2, 96, 0, 33, 33, 7, 12, 64, 90, 1, 28, 55, 9, 13, 71]
MOST_NATS = {
    '{"quantization": "int8"}': 0.06,
    '{"quantization": "int4"}': 2.0,
    '{"kv_cache_dtype": "int8"}': 0.13,
    '{"dtype": "bfloat16"}': 0.0015,
}


@pytest.mark.parametrize(
    "variant",
    [
        *("gpt-oss-yarn", "glm-moe-groups", "ernie-moe", "granite-moe", "qwen2-moe", "hunyuan-moe-alpha"),
        *("cohere2-kinds", "starcoder2"),
    ],
)
def test_a_rounded_model_is_near_the_model(variant, tmp_path):
    make(variant, tmp_path)
    want = prompt_logits(tmp_path, PROMPT, [7, 4], kernels="reference", dtype="float32")[0].log_softmax(-1)
    for settings, most in MOST_NATS.items():
        got = prompt_logits(tmp_path, PROMPT, [7, 4], **json.loads(settings))[0].log_softmax(-1)
        nats = (want.exp() * (want - got)).sum(-1)
        assert nats.max() < most, settings
        assert not torch.equal(got, want), settings
