"""config.json into `ModelConfig`: both generations of keys, defaults by architecture, and refusals by name."""

import json
from pathlib import Path

import pytest

from splittime.core.errors import ConfigError
from splittime.kernels.layer import (
    AttentionSpec,
    DeltaSpec,
    LayerSpec,
    MixtureSpec,
    MlpSpec,
    NormSpec,
    RopeSpec,
    RouterSpec,
    kv_groups,
)
from splittime.models.adapters import projections
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


def test_mellum_without_rope_settings_has_those_of_transformers():
    own = {"num_local_experts": 8, "moe_intermediate_size": 24}
    types = ["sliding_attention", "full_attention"] * 2
    layers = parse(architectures=["MellumForCausalLM"], layer_types=types, **own).layers
    assert [layer.mixer.position for layer in layers] == [
        RopeSpec("default", 10_000.0),
        RopeSpec("default", 500_000.0),
    ] * 2


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
        ({"architectures": ["FalconForCausalLM"]}, ["FalconForCausalLM", *ARCHITECTURES]),
        ({"architectures": None}, ["architectures"]),
        ({"quantization_config": {"quant_method": "hqq"}}, ["quantization_config", "hqq", "awq, gptq"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 4.0}}, ["spiral", "linear", "llama3"]),
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
        method = values.get("quantization_config", {}).get("quant_method")
        if name in ARCHITECTURES and method in (None, "mxfp4"):
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


def test_rope_settings_are_read_by_kind_of_layer():
    want = parse(rope_theta=5e5, rope_scaling=LLAMA3).layers[0].mixer.position
    assert parse(rope_parameters={"full_attention": NESTED["full_attention"]}).layers[0].mixer.position == want
    assert parse(**MIXED, rope_parameters=NESTED).layers[0].mixer.position == want
    other = {**NESTED, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert parse(rope_parameters=other).layers[0].mixer.position == want  # a Llama has no sliding layers
    local, whole, *_ = (layer.mixer.position for layer in parse(**MIXED, rope_parameters=other).layers)
    assert (local, whole) == (RopeSpec("default", 1e4), want)


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"sliding_attention": LLAMA3}, "rope_parameters is .* an object for each of full_attention"),
        ({"full_attention": LLAMA3, "other": LLAMA3}, "rope_parameters is"),
        ({"full_attention": LLAMA3, "rope_theta": 1e4}, "rope_parameters is"),
        ({"full_attention": {"rope_type": "mrope", "factor": 2.0}}, r"full_attention\.rope_type is 'mrope'"),
        (
            {"rope_type": "dynamic", "factor": 2.0},
            "rope_type is 'dynamic', must be another type: it follows the length",
        ),
        ({"rope_type": "yarn", "factor": 2.0, "short_factor": [1.0]}, r"rope_parameters\.short_factor is \[1\.0\]"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}, "short_factor is .* list of 8"),
        (
            {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0},
            r"rope_parameters\.rope_theta is 1\.0, must be above 1",
        ),
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


@pytest.mark.parametrize("name", ["GptOssForCausalLM", "Ministral3ForCausalLM", "MellumForCausalLM"])
def test_a_null_of_rope_parameters_is_as_if_they_were_absent(name):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4}
    absent = parse(architectures=[name], **experts)
    assert parse(architectures=[name], **experts, rope_parameters=None).layers == absent.layers
    assert absent.layers[-1].mixer.position != parse().layers[0].mixer.position


@pytest.mark.parametrize(("name", "theta"), [("Olmo3ForCausalLM", 500_000.0), ("Gemma3ForCausalLM", 10_000.0)])
def test_a_kind_that_is_left_out_has_the_plain_embedding_where_kinds_differ(name, theta):
    """As transformers has it, which gives what is flat to no layer."""
    own = {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0}
    kinds = {**MIXED, "architectures": [name]}
    local, whole, *_ = (one.mixer.position for one in parse(**kinds, rope_parameters={"full_attention": own}).layers)
    assert (local.rope_type, local.theta, whole.rope_type, whole.theta) == ("default", theta, "linear", 300.0)
    local, whole, *_ = (one.mixer.position for one in parse(**kinds, rope_parameters={"sliding_attention": own}).layers)
    assert (local.rope_type, local.theta, whole.rope_type) == ("linear", 300.0, "default")
    nulled = {"sliding_attention": own, "full_attention": None}
    assert (
        parse(**kinds, rope_parameters=nulled).layers
        == parse(**kinds, rope_parameters={"sliding_attention": own}).layers
    )
    for empty in ({}, {"full_attention": None, "sliding_attention": None}):
        assert parse(**kinds, rope_parameters=empty).layers == parse(**kinds).layers
    for wrong in ([], False, 0):
        with pytest.raises(ConfigError, match=r"rope_parameters is .*, must be an object"):
            parse(**kinds, rope_parameters=wrong)
    with pytest.raises(ConfigError, match=r"rope_parameters is .*, must be an object for each of full_attention"):
        parse(**kinds, rope_parameters=own)
    assert parse(**kinds, rope_scaling=own).layers[0].mixer.position.rope_type == "default"


STARCODER2 = {**LLAMA, "architectures": ["Starcoder2ForCausalLM"]}
GEMMA = {**LLAMA, "architectures": ["GemmaForCausalLM"], "head_dim": 16, "num_key_value_heads": 1}


def test_a_wrapper_says_whether_there_is_a_head():
    """transformers ties the head of the whole model, whatever its text part says."""
    text = {**LLAMA, "model_type": "mistral", "tie_word_embeddings": False}
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    assert not parse_config(whole).tie_word_embeddings
    assert parse_config({**whole, "tie_word_embeddings": True}).tie_word_embeddings


def test_no_token_attends_to_those_behind_it():
    for name in ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"):
        with pytest.raises(ConfigError, match="use_bidirectional_attention is True"):
            parse_config({**GEMMA, "architectures": [name], "use_bidirectional_attention": True})
        parse_config({**GEMMA, "architectures": [name], "use_bidirectional_attention": False})


def test_gemmas_first_configs_name_another_gelu_than_they_mean():
    assert parse_config({**GEMMA, "hidden_act": "gelu"}).layers[0].feed_forward.activation == "gelu_tanh"
    with pytest.raises(ConfigError, match="hidden_activation is 'gelu'"):
        parse_config({**GEMMA, "hidden_activation": "gelu"})
    for others in (LLAMA, STARCODER2):
        with pytest.raises(ConfigError, match="hidden_act is 'gelu'"):
            parse_config({**others, "hidden_act": "gelu"})


def test_hunyuans_lists_say_the_same_of_each_layer():
    """As its 80B-A13B has them: sizes and numbers of experts, one for each layer."""
    lists = {"moe_topk": [2] * 4, "moe_intermediate_size": [96] * 4, "num_shared_expert": [1] * 4}
    config = {**LLAMA, "architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 8, **lists}
    router = RouterSpec(8, 2, normalises=True)
    assert parse_config(config).layers[3].feed_forward == MixtureSpec(router, MlpSpec(96), MlpSpec(128))
    with pytest.raises(ConfigError, match=r"moe_topk is \[2, 2, 2, 3\], must be an integer"):
        parse_config({**config, "moe_topk": [2, 2, 2, 3]})


def test_starcoder2_has_no_gate_and_two_heads_of_keys_where_its_config_names_none():
    config = parse_config(STARCODER2)
    mlp = MlpSpec(128, has_bias=True, activation="gelu_tanh", is_gated=False)
    assert config.layers[0].feed_forward == mlp
    assert mlp.num_weights(64) == 2 * 64 * 128
    assert config.layers[0].mixer.num_kv_heads == 2
    assert config.tie_word_embeddings
    adapted = projections(config, 0)
    assert [adapted[name].begin for name in ("mlp.c_fc", "mlp.c_proj")] == [0, 0]
    assert len(adapted) == 6


def test_only_gemma_2_caps_its_scores():
    caps = {"attn_logit_softcapping": 30.0, "final_logit_softcapping": 20.0}
    for name, cap in {"Gemma2ForCausalLM": 30.0, "Gemma3ForCausalLM": 0.0}.items():
        config = parse_config({**GEMMA, "architectures": [name], **caps})
        assert (config.layers[0].mixer.score_cap, config.logits_cap) == (cap, 20.0)


GEMMA_4 = {**GEMMA, "architectures": ["Gemma4ForCausalLM"], "hidden_size_per_layer_input": 0, "num_hidden_layers": 7}
BY_LAYER = {"per_layer_config": {"5": {"head_dim": 32}, "6": {"head_dim": 64, "num_key_value_heads": 2}}}


def test_layers_of_gemma_4_have_heads_of_their_own():
    """As its older configs say it, and as newer ones do; keys are values only where a layer sees all."""
    said = {"global_head_dim": 24, "num_global_key_value_heads": 2}
    for given, sizes in (
        (said, [(24, 1), (24, 1)]),
        ({**said, "attention_k_eq_v": True}, [(24, 2), (24, 2)]),
        ({}, [(512, 1), (512, 1)]),
        ({**said, **BY_LAYER}, [(32, 1), (64, 2)]),
    ):
        mixers = [layer.mixer for layer in parse_config({**GEMMA_4, "num_key_value_heads": 1, **given}).layers]
        assert [(one.head_dim, one.num_kv_heads) for one in mixers] == [(16, 1)] * 5 + sizes
        shares = given.get("attention_k_eq_v", False)
        assert [one.keys_are_values for one in mixers] == [False] * 5 + [shares] * 2
        assert [one.window_tokens for one in mixers] == [512] * 5 + [None] * 2
    assert mixers[-1].position == RopeSpec("proportional", 1e6, share=0.25)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_kv_shared_layers", 7),
        ("num_kv_shared_layers", 2),
        ("layer_types", ["sliding_attention"] * 7),
        ("per_layer_config", [{}]),
        ("per_layer_config.5.head_dim", []),
        ("per_layer_config.5.head_dim", None),
        ("top_k_experts", 5),
        ("is_causal", "vision"),
        ("per_layer_config", {"7": {"head_dim": 32}}),
        ("per_layer_config", {"0": {"sliding_window": 32}}),
        ("use_bidirectional_attention", "all"),
    ],
)
def test_what_of_gemma_4_is_not_served_is_refused_by_name(key, value):
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    given = {"per_layer_config": {"5": {"head_dim": value}}} if "." in key else {key: value}
    with pytest.raises(ConfigError) as refused:
        parse_config({**GEMMA_4, **experts, **given})
    assert refused.value.info.param == key


def test_the_last_layers_of_gemma_4_may_attend_to_the_keys_of_earlier_ones():
    said = {
        "num_kv_shared_layers": 3,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "num_hidden_layers": 8,
    }
    sizes = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": GEMMA_4["vocab_size"]}
    config = parse_config({**GEMMA_4, **said, **sizes, "use_double_wide_mlp": True})
    assert [layer.mixer.keys_of for layer in config.layers] == [None] * 5 + [3, 4, 3]
    assert len({layer.feed_forward.inner for layer in config.layers[:5]}) == 1
    assert {layer.feed_forward.inner for layer in config.layers[5:]} == {2 * config.layers[0].feed_forward.inner}
    assert [group.layers for group in kv_groups(config.layers)] == [(0, 2, 4), (1, 3)]
    assert config.layer_input_size == 16
    with pytest.raises(ConfigError, match="vocab_size_per_layer_input is 7"):
        parse_config({**GEMMA_4, **sizes, "vocab_size_per_layer_input": 7})


def test_only_gemma_4_may_say_that_tokens_of_images_see_each_other():
    with pytest.raises(ConfigError, match="use_bidirectional_attention is 'vision'"):
        parse_config({**GEMMA, "architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": "vision"})


def test_gemma_4_has_as_many_experts_chosen_as_it_says_under_its_own_name():
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    router = parse_config({**GEMMA_4, **experts, "num_experts_per_tok": 1}).layers[0].feed_forward.router
    assert (router.num_experts, router.num_chosen) == (4, 2)


def test_a_share_of_a_proportional_rope_may_stand_outside_of_it():
    """As that of any other."""
    ropes = {"full_attention": {"rope_type": "proportional", "rope_theta": 100.0}, "sliding_attention": {}}
    ropes["sliding_attention"] = {"rope_type": "default", "partial_rotary_factor": 1.0, "rope_theta": 10.0}
    layers = parse_config({**GEMMA_4, "partial_rotary_factor": 0.5, "rope_parameters": ropes}).layers
    assert layers[-1].mixer.position == RopeSpec("proportional", 100.0, share=0.5)
    rope = {"rope_type": "proportional", "rope_theta": 100.0}
    glm = parse(architectures=["GlmForCausalLM"], rope_parameters=rope).layers[0].mixer.position
    assert glm == RopeSpec("proportional", 100.0, share=0.5)


def test_only_hunyuans_dynamic_rope_has_an_alpha():
    rope = {"rope_type": "dynamic", "alpha": 4.0, "factor": 1.0}
    config = parse(architectures=["HunYuanDenseV1ForCausalLM"], rope_parameters=rope)
    assert config.layers[0].mixer.position.theta == pytest.approx(10_000.0 * 4 ** (16 / 14))
    with pytest.raises(ConfigError, match="rope_type is 'dynamic'"):
        parse(rope_parameters=rope)
    with pytest.raises(ConfigError, match="head_dim is 2, must be above 2"):
        parse(architectures=["HunYuanDenseV1ForCausalLM"], rope_parameters=rope, head_dim=2)


def test_layers_of_smollm3_have_the_windows_that_they_are_said_to_have():
    changes = {"architectures": ["SmolLM3ForCausalLM"], "sliding_window": 8, "use_sliding_window": False}
    types = ["full_attention", "sliding_attention"] * 2
    said = parse(**changes, layer_types=types)
    assert [layer.mixer.window_tokens for layer in said.layers] == [None, 8] * 2
    assert {layer.mixer.window_tokens for layer in parse(**changes).layers} == {None}


def test_where_the_original_length_stands():
    """Outside of flat settings it goes before theirs; of settings by kind each has its own. Phi-3's has a default."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    outer = {"original_max_position_embeddings": 128}

    def original(**changes):
        return parse(**changes).layers[-1].mixer.position.original_max_position_embeddings

    assert original(rope_parameters=yarn) == 64
    assert original(rope_parameters=yarn, **outer) == 128
    by_kind = dict.fromkeys(["full_attention", "sliding_attention"], yarn)
    assert original(architectures=["Olmo3ForCausalLM"], rope_parameters=by_kind, **outer) == 64
    long = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    phi = {"architectures": ["Phi3ForCausalLM"], "max_position_embeddings": 8192}
    assert original(**phi, rope_scaling={**long, "original_max_position_embeddings": 64}) == 4096


def test_settings_in_the_old_form_go_before_an_architectures_own():
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "architectures": ["GptOssForCausalLM"]}
    assert parse(**experts, rope_scaling=rope).layers[0].mixer.position.factor == 8.0
    assert parse(**experts).layers[0].mixer.position.factor == 32.0


def test_a_pattern_in_letters_beside_the_layers_kinds():
    types = ["sliding_attention"] * 3 + ["full_attention"]
    changes = {"architectures": ["Exaone4ForCausalLM"], "sliding_window": 8, "sliding_window_pattern": "LLLG"}
    assert [layer.mixer.window_tokens for layer in parse(**changes, layer_types=types).layers] == [8, 8, 8, None]


def test_kinds_of_layers_by_their_old_name():
    changes = {"architectures": ["GraniteMoeHybridForCausalLM"], "num_local_experts": 0}
    config = parse(**changes, layers_block_type=["attention"] * 4, shared_intermediate_size=96)
    assert config.layers[0].feed_forward.inner == 96
    with pytest.raises(ConfigError, match="Mamba"):
        parse(**changes, layers_block_type=["mamba"] * 4, shared_intermediate_size=96)


def test_a_name_with_a_number_that_is_none_is_nowhere_in_a_stack():
    names = ARCHITECTURES["GptOssForCausalLM"].names
    assert names.place_of("model.layers.0.mlp.experts.3.gate_proj").number == 3
    for number in ("9" * 5000, "\u0663", "", "-1"):
        assert names.place_of(f"model.layers.0.mlp.experts.{number}.gate_proj") is None


QWEN_3_5 = {
    **{"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 8, "num_key_value_heads": 2, "head_dim": None},
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 12, "linear_key_head_dim": 24, "linear_value_head_dim": 40},
}


def test_gated_delta_nets_of_qwen3_5():
    config = parse(**QWEN_3_5, linear_conv_kernel_dim=3, rms_norm_eps=1e-4)
    delta = DeltaSpec(4, 12, 24, 40, conv_width=3, norm=NormSpec(1e-4))
    assert [layer.mixer == delta for layer in config.layers] == [True, True, True, False] * 2
    attention = config.layers[3].attention
    assert attention == config.attention[1]
    assert (attention.is_gated, attention.head_norm, attention.head_dim) == (True, NormSpec(1e-4), 256)
    assert attention.position.turned_dims(256) == 64
    assert config.deltas == [delta] * 6
    (group,) = kv_groups(config.layers)
    assert group.layers == (3, 7)
    assert config.layers[0].widest == max(delta.channels + 12 * 40 + 24, config.layers[0].feed_forward.inner)


def test_defaults_of_qwen3_5_are_those_of_transformers():
    sizes = {name: None for name in QWEN_3_5 if name.startswith("linear_")}
    assert parse(**QWEN_3_5 | sizes).deltas[0] == DeltaSpec(16, 32, 128, 128, conv_width=4, norm=NormSpec(1e-6))


def test_layers_of_a_hybrid_are_as_its_config_says():
    config = parse(**QWEN_3_5, layer_types=["full_attention", *["linear_attention"] * 7])
    assert [isinstance(layer.mixer, DeltaSpec) for layer in config.layers] == [False] + [True] * 7
    config = parse(**QWEN_3_5, full_attention_interval=3)
    assert [isinstance(layer.mixer, DeltaSpec) for layer in config.layers] == [True, True, False] * 2 + [True, True]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["linear_attention"] * 8}, "layer_types is .* with the second among them"),
        ({"layer_types": ["full_attention"] * 7}, "layer_types is .* a list of 8 names"),
        ({"layer_types": ["full_attention"] * 7 + ["sliding_attention"]}, "layer_types"),
        ({"layer_types": [["full_attention"]] * 8}, "layer_types"),
        ({"linear_num_value_heads": 10}, "linear_num_value_heads is 10, must be a multiple of linear_num_key_heads, 4"),
        ({"attn_output_gate": False}, "attn_output_gate is False, must be true"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "default", "mrope": 3}}, "rope_parameters.mrope is 3"),
    ],
)
def test_hybrids_that_are_not_carried_out_are_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        parse(**QWEN_3_5 | changes)


def test_text_is_turned_by_one_position_whatever_images_are_turned_by():
    axes = {"mrope_section": [11, 11, 10], "mrope_interleaved": True, "rope_theta": 1e7, "partial_rotary_factor": 0.5}
    for key in ("rope_parameters", "rope_scaling"):
        position = parse(**QWEN_3_5, **{key: {"rope_type": "default", **axes}}).attention[0].position
        assert position == RopeSpec("default", 1e7, share=0.5)


def test_of_a_hybrid_what_other_models_have_is_adapted():
    """Neither what leads into a state, nor queries, whose module holds gates too."""
    config = parse(**QWEN_3_5)
    mlp = ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]
    assert sorted(projections(config, 0)) == mlp
    assert sorted(projections(config, 3)) == mlp + [f"self_attn.{name}_proj" for name in "kov"]


def test_defaults_of_mixtures_with_gated_delta_nets_are_those_of_transformers():
    sizes = {key: value for key, value in LLAMA.items() if key != "intermediate_size"}
    for name, num_experts, chosen in (("Qwen3_5Moe", 256, 8), ("Qwen3Next", 512, 10)):
        mixture = parse_config({**sizes, "architectures": [f"{name}ForCausalLM"]}).layers[0].feed_forward
        router = RouterSpec(num_experts, chosen, normalises=True)
        assert mixture == MixtureSpec(router, MlpSpec(512), MlpSpec(512), gates_shared=True)
    (plain, *others) = parse_config({**sizes, "architectures": ["Qwen3NextForCausalLM"], "mlp_only_layers": [0]}).layers
    assert plain.feed_forward == MlpSpec(5632)
    assert not any(isinstance(layer.feed_forward, MlpSpec) for layer in others)
