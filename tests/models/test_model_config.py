"""config.json into `ModelConfig`: both generations of keys, defaults by architecture, and refusals by name."""

import json
from pathlib import Path

import pytest

from splittime.core.errors import ConfigError
from splittime.kernels.layer import AttentionSpec, LayerSpec, MixtureSpec, MlpSpec, NormSpec, RopeSpec, RouterSpec
from splittime.models.architectures import ARCHITECTURES
from splittime.models.config import load_config, parse_config

CONFIGS = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "models" / "configs"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(**changes):
    return parse_config({**LLAMA, **changes})


def test_defaults_of_llama():
    config = parse()
    mixer = AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=16, position=RopeSpec("default", 10_000.0))
    assert config.layers == (LayerSpec(NormSpec(1e-6), mixer, MlpSpec(128)),) * 4
    assert not (config.tie_word_embeddings)
    assert (config.norm, config.checkpoint_dtype) == (NormSpec(1e-6), "float32")


def test_both_generations_of_rope_settings():
    old = parse(rope_theta=500_000.0, rope_scaling=LLAMA3, torch_dtype="bfloat16")
    new = parse(rope_parameters={**LLAMA3, "rope_theta": 500_000.0}, dtype="bfloat16")
    assert old == new
    assert old.layers[0].mixer.position.theta == 500_000.0
    assert parse(rope_scaling={"type": "linear", "factor": 2.0}).layers[0].mixer.position.factor == 2.0


def test_sliding_windows():
    def windows(name, **changes):
        return tuple(layer.mixer.window_tokens for layer in parse(architectures=[name], **changes).layers)

    assert windows("LlamaForCausalLM", sliding_window=8) == (None,) * 4
    assert windows("MistralForCausalLM", sliding_window=8) == (8,) * 4
    assert windows("MistralForCausalLM") == (4096,) * 4
    assert windows("MistralForCausalLM", sliding_window=None) == (None,) * 4
    qwen = {"sliding_window": 8, "max_window_layers": 3}
    assert windows("Qwen2ForCausalLM", **qwen) == (None,) * 4
    assert windows("Qwen2ForCausalLM", use_sliding_window=True, **qwen) == (None, None, None, 8)
    types = ["sliding_attention", "full_attention"] * 2
    assert windows("Qwen3ForCausalLM", use_sliding_window=True, layer_types=types, **qwen) == (8, None, 8, None)


def test_mixtures_of_experts():
    layers = parse(
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
    ).layers
    plain, experts = MlpSpec(128), MixtureSpec(RouterSpec(8, 2, normalises=False), MlpSpec(24))
    assert [layer.feed_forward for layer in layers] == [plain, experts, plain, plain]
    mixtral = parse(architectures=["MixtralForCausalLM"], num_local_experts=4).layers[0].feed_forward
    assert mixtral == MixtureSpec(RouterSpec(4, 2, normalises=True), MlpSpec(128))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, ["GemmaForCausalLM", *ARCHITECTURES]),
        ({"architectures": None}, ["architectures"]),
        ({"quantization_config": {"quant_method": "mxfp4"}}, ["quantization_config", "mxfp4", "awq, gptq"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["yarn", "linear", "llama3"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, ["dynamic"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor"]),
        ({"rope_scaling": 3}, ["rope_scaling", "3"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"vocab_size": "many"}, ["vocab_size", "many"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
        ({"num_attention_heads": 5}, ["hidden_size", "64"]),
        ({"head_dim": 7}, ["head_dim", "7"]),
        ({"attention_bias": "yes"}, ["attention_bias", "yes"]),
        ({"rms_norm_eps": -1.0}, ["rms_norm_eps", "-1.0"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps", "a number from"]),
        ({"rope_theta": float("inf")}, ["rope_theta", "inf"]),
        ({"torch_dtype": "float8"}, ["torch_dtype", "float8"]),
        ({"eos_token_id": "end"}, ["eos_token_id", "end"]),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["chunked"] * 4}, ["layer_types", "chunked"]),
        (  # though no layer has the window
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "sliding_window": "far"},
            ["sliding_window", "far"],
        ),
    ],
    ids=lambda case: str(case)[:40],
)
def test_refusals_name_the_key_and_the_value(changes, named):
    with pytest.raises(ConfigError) as caught:
        parse(**changes)
    for word in named:
        assert word in str(caught.value)


def test_end_of_sequence_ids_come_from_both_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2}))
    assert load_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert load_config(tmp_path).eos_token_ids == (7, 2, 9)


def test_unreadable_configs(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="JSON object"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path)


@pytest.mark.skipif(not CONFIGS.exists(), reason="no configs beside the repository")
def test_published_configs():
    for path in sorted(CONFIGS.glob("*.json")):
        values = json.loads(path.read_text())
        name = values["architectures"][0]
        if name in ARCHITECTURES and "quantization_config" not in values:
            config = parse_config(values)
            assert config.layers[0].mixer.head_dim == values.get(
                "head_dim", values["hidden_size"] // values["num_attention_heads"]
            )
        else:
            with pytest.raises(ConfigError, match=f"{name}|quant"):
                parse_config(values)


NESTED = {"full_attention": {**LLAMA3, "rope_theta": 5e5}, "sliding_attention": {**LLAMA3, "rope_theta": 5e5}}
QWEN = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}
MIXED = {**QWEN, "layer_types": ["sliding_attention", "full_attention"] * 2}


def test_rope_settings_by_kind_of_layer_are_read_where_the_layers_agree():
    want = parse(rope_theta=5e5, rope_scaling=LLAMA3).layers[0].mixer.position
    assert parse(rope_parameters={"full_attention": NESTED["full_attention"]}).layers[0].mixer.position == want
    assert parse(**MIXED, rope_parameters=NESTED).layers[0].mixer.position == want
    other = {**NESTED, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert parse(rope_parameters=other).layers[0].mixer.position == want  # a Llama has no sliding layers
    with pytest.raises(ConfigError, match=r"rope_parameters\.full_attention is llama3 .*sliding_attention is default"):
        parse(**MIXED, rope_parameters=other)


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"sliding_attention": LLAMA3}, "rope_parameters is .* an object for each of full_attention"),
        ({"full_attention": LLAMA3, "other": LLAMA3}, "rope_parameters is"),
        ({"full_attention": LLAMA3, "rope_theta": 1e4}, "rope_parameters is"),
        ({"full_attention": {"rope_type": "yarn", "factor": 2.0}}, r"full_attention\.rope_type is 'yarn'"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, r"rope_parameters\.mrope_section is \[1, 2\]"),
        ({"rope_type": "linear", "factor": 2.0, "attention_factor": 0.5}, "attention_factor is 0.5"),
        ({"full_attention": {"inner": {}}}, r"full_attention\.inner is"),
    ],
)
def test_rope_settings_that_are_not_carried_out_are_refused(rope, named):
    with pytest.raises(ConfigError, match=named):
        parse(rope_parameters=rope)


def test_two_forms_of_rope_settings_may_not_contradict_each_other():
    both = {
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    }
    assert parse(**both).layers[0].mixer.position.factor == 2.0
    with pytest.raises(ConfigError, match=r"rope_parameters is default .* rope_scaling is linear"):
        parse(**{**both, "rope_parameters": {"rope_type": "default"}})
