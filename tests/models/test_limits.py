"""Every number of a config has bounds, and an error that names the field, the value and the limit."""

import json
import tracemalloc

import numpy as np
import pytest
from gguf_bytes import content, key, tensor, text, u32
from tiny_config import CONFIG

from splittime.core.errors import ConfigError
from splittime.models.config import load_config, parse_config
from splittime.models.fields import LIMITS
from splittime.models.gguf.config import FAMILIES, NAMES, ROPE, load_gguf_config

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4}
GLM = {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 4, "num_experts_per_tok": 2}
ERNIE = {"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
GRANITE = {"architectures": ["GraniteForCausalLM"]}
GEMMA_2 = {"architectures": ["Gemma2ForCausalLM"]}
GEMMA_3 = {"architectures": ["Gemma3ForCausalLM"]}
GEMMA_4 = {
    **{"architectures": ["Gemma4ForCausalLM"], "hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
    **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
}
HUNYUAN = {"architectures": ["HunYuanMoEV1ForCausalLM"]}
QWEN_3_5 = {"architectures": ["Qwen3_5ForCausalLM"], "full_attention_interval": 2}
COHERE = {"architectures": ["CohereForCausalLM"]}
PLACES = {
    **dict.fromkeys(["num_experts", "moe_intermediate_size", "num_experts_per_tok", "decoder_sparse_step"], EXPERTS),
    **dict.fromkeys(["moe_num_experts", "moe_k", "moe_num_shared_experts", "moe_norm_min"], ERNIE),
    **dict.fromkeys(["moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"], ERNIE),
    **dict.fromkeys(["n_routed_experts", "n_shared_experts", "n_group", "topk_group"], GLM),
    **dict.fromkeys(["routed_scaling_factor", "first_k_dense_replace"], GLM),
    **dict.fromkeys(["moe_topk", "num_shared_expert"], HUNYUAN),
    **dict.fromkeys(["swiglu_alpha", "swiglu_limit"], GPT_OSS),
    "shared_expert_intermediate_size": {**EXPERTS, "architectures": ["Qwen2MoeForCausalLM"]},
    "num_local_experts": {"architectures": ["MixtralForCausalLM"]},
    "sliding_window": {"architectures": ["MistralForCausalLM"]},
    "max_window_layers": {"architectures": ["Qwen2ForCausalLM"]},
    "no_rope_layer_interval": {"architectures": ["SmolLM3ForCausalLM"]},
    **dict.fromkeys(["embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"], GRANITE),
    "shared_intermediate_size": {
        **{"architectures": ["GraniteMoeHybridForCausalLM"], "num_local_experts": 0},
        "layer_types": ["attention"] * 2,
    },
    **dict.fromkeys(["sliding_window_pattern", "query_pre_attn_scalar", "rope_local_base_freq"], GEMMA_3),
    **dict.fromkeys(["attn_logit_softcapping", "final_logit_softcapping"], GEMMA_2),
    **dict.fromkeys(["layer_norm_eps", "logit_scale"], COHERE),
    "norm_epsilon": {"architectures": ["Starcoder2ForCausalLM"]},
    **dict.fromkeys(["hidden_size_per_layer_input", "num_kv_shared_layers", "top_k_experts"], GEMMA_4),
    "vocab_size_per_layer_input": {**GEMMA_4, "hidden_size_per_layer_input": 8},
    **dict.fromkeys(["global_head_dim", "num_global_key_value_heads"], GEMMA_4),
    **{name: QWEN_3_5 for name in LIMITS if name.startswith("linear_") or name == "full_attention_interval"},
    "alpha": {"architectures": ["HunYuanDenseV1ForCausalLM"]},
}
"""What else the config needs so that the field is read."""
IN_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
YARN = {"rope_type": "yarn", "factor": 2.0}
OF_YARN = ["attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "llama_4_scaling_beta"]
OF_TYPES = {**dict.fromkeys(OF_YARN, YARN), "alpha": {"rope_type": "dynamic"}}
"""Of rotary embeddings, each with one that reads it."""
OF_FORMATS = ("bits", "num_bits", "group_size")  # whose values are checked one by one, in `formats`


def with_field(name, value):
    if name in IN_ROPE:
        return {**CONFIG, "rope_scaling": {**LLAMA3, name: value}}
    if name in OF_TYPES:
        return {**CONFIG, **PLACES.get(name, {}), "rope_scaling": {**OF_TYPES[name], name: value}}
    return {**CONFIG, **PLACES.get(name, {}), name: value}


@pytest.mark.parametrize("name", [name for name in LIMITS if name not in OF_FORMATS])
def test_a_number_beyond_its_bounds_is_refused_by_name_value_and_limit(name):
    bounds = LIMITS[name]
    for value in (bounds.most + 1, 10**9 if bounds.most < 10**9 else 10**18, bounds.least - 1):
        with pytest.raises(ConfigError) as refused:
            parse_config(with_field(name, value))
        info = refused.value.info
        assert name in info.message
        assert str(value)[:8] in info.message
        assert (info.param.rsplit(".")[-1], info.value, info.limit) == (name, value, list(bounds))


@pytest.mark.parametrize(("name", "value"), [("bits", 10**12), ("bits", 2**70), ("group_size", 32 * 10**12)])
def test_numbers_of_a_quantization_config_are_bounded(name, value):
    with pytest.raises(ConfigError, match=rf"quantization_config\.{name} is {value}"):
        parse_config({**CONFIG, "quantization_config": GPTQ | {name: value}})


@pytest.mark.parametrize(
    ("ignored", "said"),
    [
        (["re:" + ".*x" * 5], "at most 500 characters and 4 repetitions"),
        (["a"] * 20_000, "lists of at most 16384"),
    ],
)
def test_what_a_quantization_config_excepts_is_bounded(ignored, said):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    groups = {"config_groups": {"a": {"targets": ["Linear"], "weights": weights}}}
    given = {"quant_method": "compressed-tensors", "format": "pack-quantized", **groups}
    assert parse_config({**CONFIG, "quantization_config": {**given, "ignore": ["re:.*a.*b(c|d)?.*$"]}})
    with pytest.raises(ConfigError, match=said):
        parse_config({**CONFIG, "quantization_config": {**given, "ignore": ignored}})


def test_a_billion_layers_cost_nothing():
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="num_hidden_layers is 1000000000, must be an integer from 1 to 4096"):
            parse_config({**CONFIG, "num_hidden_layers": 10**9})
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


WRITTEN = {
    float: (12, lambda value: np.float64(value).tobytes()),
    int: (10, lambda value: np.uint64(value).tobytes()),
    str: (8, text),
}
"""By the type of a GGUF value: its number, and how it is written."""


GGUF_NAMES = {key: name for family in FAMILIES.values() for name, key in {**family.reads, **family.in_rope}.items()}
GGUF_NAMES |= {key: name for name, key in {**NAMES, **ROPE}.items() if name != "partial_rotary_factor"}
GGUF_NAMES = {key: name for key, name in GGUF_NAMES.items() if name in LIMITS}


def architecture_of(key):
    """Returns one that reads it."""
    reads = {name: {*family.reads.values(), *family.in_rope.values()} for name, family in FAMILIES.items()}
    return next((name for name, keys in reads.items() if key in keys), "llama")


def gguf(tmp_path, name, value):
    keys = {
        **{"context_length": 128, "embedding_length": 32, "block_count": 2, "feed_forward_length": 48},
        **{"attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5},
    } | {name: value}
    architecture = architecture_of(name)
    if name.startswith(("expert", "leading", "interleave")):
        keys = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16} | keys
    if name.startswith("rope.scaling.") or name == "attention.temperature_scale":
        keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0} | keys
    written = [key("general.architecture", 8, text(architecture))]
    for each, number in keys.items():
        kind, raw = WRITTEN[type(number)]
        written.append(key(f"{architecture}.{each}", kind, raw(number)))
    path = tmp_path / "m.gguf"
    path.write_bytes(content(tuple(written), (tensor("token_embd.weight", (4, 2)),)))
    return path


@pytest.mark.parametrize("key", [key for key in GGUF_NAMES if key != "rope.scaling.attn_factor"])
def test_a_gguf_number_beyond_its_bounds_is_refused_by_name_value_and_limit(tmp_path, key):
    bounds = LIMITS[GGUF_NAMES[key]]
    value = 1e30 if isinstance(bounds.least, float) else int(bounds.most) + 1
    with pytest.raises(ConfigError) as refused:
        load_gguf_config(gguf(tmp_path, key, value))
    info = refused.value.info
    assert f"{architecture_of(key)}.{key} is {value}" in info.message
    assert (info.value, info.limit) == (value, list(bounds))


def test_rules_let_published_sizes_pass():
    """The largest of each that anybody has published by 2025, or more."""
    largest = {
        **{"vocab_size": 256_000, "hidden_size": 16_384, "intermediate_size": 53_248, "num_hidden_layers": 126},
        **{"num_attention_heads": 128, "max_position_embeddings": 10_485_760, "rope_theta": 1e9},
    }
    assert parse_config({**CONFIG, "num_key_value_heads": 8, **largest}).num_layers == 126


@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id"])
@pytest.mark.parametrize("value", [61, [2, 61], -1, 2**63, 1.0, True, "2", [[2]], list(range(60)) * 20])
def test_token_ids_out_of_range_are_refused(key, value):
    with pytest.raises(ConfigError, match=key):
        parse_config({**CONFIG, key: value})


def test_ends_out_of_range_in_the_generation_config_are_refused_with_its_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 61]}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is \[2, 61\], must be .* 0 to 60"):
        load_config(tmp_path)
    assert load_config(tmp_path, "none").eos_token_ids == (2,)


def test_a_gguf_end_out_of_range_is_refused(tmp_path):
    path = gguf(tmp_path, "context_length", 128)
    load_gguf_config(path)
    raw = path.read_bytes()
    keys = raw[24 : raw.index(b"token_embd.weight") - 8]
    ends = key("tokenizer.ggml.eos_token_id", 4, u32(2))
    path.write_bytes(content((keys, ends), (tensor("token_embd.weight", (4, 2)),), num_keys=8))
    with pytest.raises(ConfigError, match=r"eos_token_id is 2, must be an integer from 0 to 1"):
        load_gguf_config(path)
