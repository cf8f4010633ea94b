"""What a token costs, against the weights of the model counted one by one."""

import pytest

from splittime.kernels.cpu.ops import CpuOps
from splittime.kernels.reference.ops import ReferenceOps
from splittime.models.config import parse_config
from splittime.models.quant.plan import choose
from splittime.runner.config_sizes import cost

torch = pytest.importorskip("torch")
DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LAYER = 32 * (4 * 8) + 2 * 32 * (2 * 8) + (4 * 8) * 32 + 3 * 32 * 48


def test_a_dense_model():
    found = cost(parse_config(DENSE), choose(None, "float32"), CpuOps(torch.float32), 12_345, 77)
    assert found.weight_bytes == 12_345
    assert found.kv_bytes_per_token == 77
    assert found.operations_per_token == 2 * 3 * LAYER
    assert found.operations_per_sample == 2 * 100 * 32
    assert found.head_bytes == 100 * 32 * 4
    assert found.operations_per_context_token == 4 * 3 * 4 * 8  # a score and its share of a value, each of 8 numbers
    assert (found.window_tokens, found.windowed_share) == (None, 0.0)


def test_quantised_weights_are_counted_as_they_lie():
    found = cost(parse_config(DENSE), choose("int8", "float32"), ReferenceOps(torch.float32), 1, 1)
    assert found.head_bytes == 100 * (32 + 4)


def test_of_experts_those_that_one_token_chooses():
    experts = DENSE | {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
    }
    found = cost(parse_config(experts), choose(None, "float32"), CpuOps(torch.float32), 10_000_000, 1)
    assert (found.num_experts, found.chosen_experts) == (8, 2)
    expert = 3 * 32 * 48
    layer = LAYER - expert + 2 * expert + 32 * 8
    assert found.operations_per_token == 2 * 3 * layer
    assert found.weight_bytes == 10_000_000 - 3 * 6 * expert * 4
    assert (found.window_tokens, found.windowed_share) == (16, 1.0)
