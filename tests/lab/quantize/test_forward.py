"""The calibration text sees what the served model computes: the same layers, from weights by name."""

import pytest
import torch
from tiny import BIASED, EXPERTS, QWEN3, make_model, make_text

from splittime import LLM, SamplingParams
from splittime.lab.quantize.forward import Sequences, begin_states
from splittime.lab.quantize.layer_map import QuantizeSource

MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}


SMOLLM = {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0, 1]}
ERNIE = {"architectures": ["Ernie4_5ForCausalLM"], "head_dim": 16, "use_bias": True}
GRANITE = {
    **{"architectures": ["GraniteForCausalLM"], "embedding_multiplier": 3.0, "attention_multiplier": 0.4},
    **{"residual_multiplier": 0.5, "logits_scaling": 2.0},
}
GROWING = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 16}
GROWING |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}
MINISTRAL = {"architectures": ["Ministral3ForCausalLM"], "head_dim": 16, "rope_parameters": GROWING}


@pytest.mark.parametrize(
    "changes",
    [{}, BIASED, QWEN3, EXPERTS, MISTRAL, SMOLLM, ERNIE, GRANITE, MINISTRAL],
    ids=["", "biases", "qk-norm", "moe", "window", "without-rope", "paired", "multipliers", "growing"],
)
def test_layer_by_layer_is_what_the_engine_computes(changes, tmp_path):
    model = make_model(tmp_path / "model", **changes)
    source, windows = QuantizeSource(model), make_text(2, 40).windows
    sequences = Sequences(source.config, 40)
    with torch.inference_mode():
        states = begin_states(windows, source.embedding(), source.config.embedding_factor, tmp_path / "hidden", 0)
        for index in range(source.config.num_layers):
            sequences.run(index, source.layer(index), states, states)
        embedding, norm = (entry.read() for entry in source.outer_entries())
        normed = sequences.ops.rms_norm(states, sequences.ops.pack_norm(norm, source.config.norm.eps))
        found = (normed @ embedding.t() * source.config.logits_factor).log_softmax(-1)
    llm = LLM(model, kernels="torch", dtype="float32", max_num_seqs=2, num_threads=1)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    for ids, output, logprobs in zip(windows, llm.generate(windows.tolist(), sampling), found, strict=True):
        wanted = torch.tensor([one.logprob for one in output.prompt_logprobs])
        torch.testing.assert_close(logprobs[:-1].gather(1, ids[1:, None])[:, 0], wanted, rtol=1e-3, atol=2e-3)


def test_gathered_inputs_are_those_of_the_linear(tmp_path):
    source, windows = QuantizeSource(make_model(tmp_path / "model")), make_text(3, 16).windows
    sequences, weights = Sequences(source.config, 16), source.layer(0)
    states = begin_states(windows, source.embedding(), source.config.embedding_factor, tmp_path / "hidden", 1 << 30)
    with torch.inference_mode():
        found = sequences.gather(0, weights, states, {"self_attn.q_proj": 64})["self_attn.q_proj"].moments()
    flat = states.flatten(0, 1)
    normed = flat / (flat.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights["input_layernorm.weight"]
    assert found.tokens == 48
    torch.testing.assert_close(found.gram, normed.t() @ normed / 48, rtol=1e-4, atol=1e-5)
    assert not sequences.ops.watched
