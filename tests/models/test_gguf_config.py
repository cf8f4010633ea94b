"""A GGUF file's metadata as a config: what is said by keys, what by the tensors there are, and what is refused."""

import math
import struct

import pytest
from gguf_bytes import content, key, tensor, text, u32, u64

from splittime.core.errors import ConfigError
from splittime.kernels.layer import MixtureSpec
from splittime.models.gguf.checkpoint import GgufCheckpoint
from splittime.models.gguf.config import load_gguf_config
from splittime.models.names import LayerNames

WIDTH, ROWS, LAYERS = 64, 40, 2


def f32(value: float) -> bytes:
    return struct.pack("<f", value)


def keys_of(architecture="llama", **changes) -> tuple[bytes, ...]:
    """changes: by the key's name with __ for dots, (type, content); None leaves it out."""
    values = {
        "context_length": (4, u32(512)),
        "embedding_length": (4, u32(WIDTH)),
        "block_count": (4, u32(LAYERS)),
        "feed_forward_length": (4, u32(96)),
        "attention__head_count": (4, u32(4)),
        "attention__head_count_kv": (4, u32(2)),
        "attention__layer_norm_rms_epsilon": (6, f32(0.5)),
    } | changes
    named = {f"{architecture}.{name.replace('__', '.')}": value for name, value in values.items() if value is not None}
    keys = (key(name, kind, raw) for name, (kind, raw) in named.items())
    return key("general.architecture", 8, text(architecture)), *keys


def write(tmp_path, keys, tensors=(("token_embd.weight", (WIDTH, ROWS)),), kind=0):
    """Tensors (name, dimensions) one after the other, all zeros but rope_freqs."""
    entries, data = [], b""
    for name, dims in tensors:
        entries.append(tensor(name, dims, kind, len(data)))
        size = struct.calcsize("f")
        for dim in dims:
            size *= dim
        data += f32(2.0) * (size // 4) if name == "rope_freqs.weight" else bytes(size)
        data += bytes(-len(data) % 32)
    path = tmp_path / "model.gguf"
    path.write_bytes(content(tuple(keys), tuple(entries), data))
    return path


def test_what_is_not_said_has_its_usual_value(tmp_path):
    config = load_gguf_config(write(tmp_path, keys_of()))
    layer, position = config.layers[0], config.layers[0].mixer.position
    assert (config.architecture, config.vocab_size, layer.mixer.head_dim, layer.mixer.num_kv_heads) == (
        "LlamaForCausalLM",
        ROWS,
        WIDTH // 4,
        2,
    )
    assert (layer.norm.eps, position.rope_type, position.theta) == (0.5, "default", 10_000.0)
    assert (config.tie_word_embeddings, layer.mixer.qkv_bias, config.has_routers) == (True, False, False)
    assert (config.eos_token_ids, config.num_layers, config.windows) == ((), 2, [])


@pytest.mark.parametrize(
    ("architecture", "changes", "name"),
    [
        ("qwen2", {}, "Qwen2ForCausalLM"),
        ("qwen3", {}, "Qwen3ForCausalLM"),
        ("llama", {"attention__sliding_window": (4, u32(9))}, "MistralForCausalLM"),
        ("llama", {"expert_count": (4, u32(4)), "expert_used_count": (4, u32(2))}, "MixtralForCausalLM"),
        ("qwen3moe", {"expert_count": (4, u32(4)), "expert_used_count": (4, u32(2))}, "Qwen3MoeForCausalLM"),
    ],
)
def test_architectures(tmp_path, architecture, changes, name):
    assert load_gguf_config(write(tmp_path, keys_of(architecture, **changes))).architecture == name


def test_tensors_say_the_rest(tmp_path):
    tensors = [
        *(("token_embd.weight", (WIDTH, ROWS)), ("output.weight", (WIDTH, ROWS)), ("blk.0.attn_q.bias", (64,))),
        *(("blk.1.ffn_gate_inp.weight", (WIDTH, 4)), ("rope_freqs.weight", (8,))),
    ]
    experts = {"expert_count": (4, u32(4)), "expert_used_count": (4, u32(2))}
    config = load_gguf_config(write(tmp_path, keys_of(**experts), tensors))
    mixer = config.layers[0].mixer
    assert (config.tie_word_embeddings, mixer.qkv_bias, mixer.output_bias) == (False, True, False)
    assert [isinstance(layer.feed_forward, MixtureSpec) for layer in config.layers] == [False, True]
    assert (mixer.position.rope_type, mixer.position.divisors) == ("divided", (2.0,) * 8)


def test_ends_of_a_turn(tmp_path):
    tokens = ["a", "</s>", "<|im_end|>", "<|eot_id|>", "<|endoftext|>"]
    kinds = u32(5) + u64(5) + struct.pack("<5i", 1, 3, 3, 1, 3)
    extra = (
        key("tokenizer.ggml.tokens", 9, u32(8) + u64(5) + b"".join(map(text, tokens))),
        key("tokenizer.ggml.token_type", 9, kinds),
        key("tokenizer.ggml.eos_token_id", 4, u32(1)),
        key("tokenizer.ggml.eot_token_id", 4, u32(4)),
    )
    config = load_gguf_config(write(tmp_path, (*keys_of(), *extra)))
    assert config.eos_token_ids == (1, 4, 2)  # what the file names first; <|eot_id|> is an ordinary token here


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (keys_of("mamba"), r"general\.architecture is 'mamba', which is not served; these are: llama, qwen2"),
        (keys_of(context_length=None), r"llama\.context_length is missing"),
        (keys_of(block_count=(4, u32(0))), r"llama\.block_count is 0, must be an integer from 1 to 4096"),
        (keys_of(embedding_length=(8, text("64"))), r"llama\.embedding_length is '64'"),
        (keys_of(attention__head_count_kv=(4, u32(3))), r"head_count_kv is 3, must be a divisor"),
        (keys_of(attention__head_count_kv=(9, u32(4) + u64(2) + u32(2) + u32(4))), r"the same for all layers"),
        (keys_of(attention__key_length=(4, u32(15))), r"attention\.key_length is 15, must be even"),
        (keys_of(attention__value_length=(4, u32(8))), r"value_length is 8, must be the length of a key, 16"),
        (keys_of(rope__dimension_count=(4, u32(8))), r"rope\.dimension_count is 0\.5\d*, must be 1 \(partial"),
        (keys_of(rope__dimension_count=(4, u32(17))), r"rope\.dimension_count is 17, must be an integer from 1 to 16"),
        (keys_of(rope__scaling__type=(8, text("ntk"))), r"rope\.scaling\.type is 'ntk', must be none, linear or yarn"),
        (keys_of(rope__scaling__type=(8, text("yarn"))), r"llama\.rope\.scaling\.factor is missing"),
        (
            keys_of(attention__layer_norm_rms_epsilon=(6, f32(float("nan")))),
            r"epsilon is nan, must be a number from 1e-20 to 1",
        ),
        (keys_of(logit_scale=(6, f32(0.25))), r"llama\.logit_scale is 0\.25: it may change what the model computes"),
        (keys_of(brand_new=(4, u32(1))), r"llama\.brand_new is 1: it may change"),
        (keys_of(attention__causal=(7, b"\x00")), r"attention\.causal is False: it may change"),
        (
            keys_of("qwen2", attention__sliding_window=(4, u32(5))),
            r"qwen2\.attention\.sliding_window is 5: it may change",
        ),
        (
            keys_of(attention__head_count_kv=(9, u32(7) + u64(2) + b"\1\0")),
            r"llama\.attention\.head_count_kv is .* all",
        ),
        (keys_of(attention__head_count_kv=(9, u32(7) + u64(2) + b"\1\1")), r"llama\.attention\.head_count_kv is True"),
        (
            keys_of(
                "gemma3",
                attention__sliding_window=(4, u32(5)),
                attention__sliding_window_pattern=(9, u32(7) + u64(1) + b"\1"),
            ),
            r"gemma3\.attention\.sliding_window_pattern is .*, must be a list of 2 names",
        ),
        (
            keys_of("glm4", nextn_predict_layers=(4, u32(2))),
            r"glm4\.nextn_predict_layers is 2, must be an integer from 0",
        ),
        (
            keys_of("mistral3", attention__temperature_scale=(6, f32(0.5))),
            r"mistral3\.attention\.temperature_scale is 0\.5, must be left out where rope\.scaling\.type is none",
        ),
        (
            keys_of("mistral3", rope__scaling__yarn_log_multiplier=(6, f32(0.5))),
            r"mistral3\.rope\.scaling\.yarn_log_multiplier is 0\.5, must be left out",
        ),
        (
            keys_of("olmo2", rope__scaling__attn_factor=(6, f32(1.5))),
            r"olmo2\.rope\.scaling\.attn_factor is 1\.5, must be",
        ),
        (
            keys_of(rope__scaling__factor=(9, u32(6) + u64(1) + f32(1.0))),
            r"llama\.rope\.scaling\.factor is .* one value",
        ),
        (keys_of("qwen2", expert_count=(4, u32(5))), r"qwen2\.expert_count is 5: it may change"),
        (keys_of(expert_count=(4, u32(2)), expert_used_count=(4, u32(3))), r"expert_used_count is 3, must be at most"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_key(tmp_path, keys, said):
    with pytest.raises(ConfigError, match=said):
        load_gguf_config(write(tmp_path, keys))


@pytest.mark.parametrize(
    "changes",
    [{"logit_scale": (6, f32(1.0))}, {"attention__causal": (7, b"\x01")}, {"expert_shared_count": (4, u32(0))}],
)
def test_a_value_that_changes_nothing_is_accepted(tmp_path, changes):
    load_gguf_config(write(tmp_path, keys_of(**changes)))


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [
        ({"token_embd": 8, "blk.0.ffn_up": 8}, "bfloat16"),
        ({"token_embd": 8, "blk.0.ffn_up": 1}, "float16"),
        ({"token_embd": 8, "blk.0.ffn_up": 8, "blk.0.ffn_gate_inp": 0}, "bfloat16"),
        ({"token_embd": 8, "blk.0.ffn_up": 8, "blk.0.ffn_gate_inp_shexp": 0}, "bfloat16"),
        ({"token_embd": 30, "blk.0.ffn_up_exps": 39, "blk.0.ffn_up_exps.bias": 0}, "bfloat16"),  # as gpt-oss has them
        ({"token_embd": 30, "blk.0.ffn_up": 30}, "bfloat16"),
        ({"token_embd": 0, "output": 8, "blk.0.ffn_up": 8}, "bfloat16"),
        ({"token_embd": 0, "blk.0.ffn_up": 1}, "float32"),
    ],
)
def test_dtype_is_that_of_the_floats_that_are_multiplied(tmp_path, kinds, dtype):
    entries, place = [], 0
    for name, kind in kinds.items():
        entries.append(tensor(name if name.endswith("bias") else f"{name}.weight", (WIDTH, 32), kind, place))
        place += WIDTH * 32 * 4
    path = tmp_path / "model.gguf"
    path.write_bytes(content(keys_of(), tuple(entries), bytes(place)))
    assert load_gguf_config(path).checkpoint_dtype == dtype


YARN = {
    **{"rope__scaling__type": (8, text("yarn")), "rope__scaling__factor": (6, f32(8.0))},
    "rope__scaling__original_context_length": (4, u32(64)),
}
ATTN, YARN_ATTN = "rope__scaling__attn_factor", "rope__scaling__yarn_attn_factor"
LOG, GROWTH = "rope__scaling__yarn_log_multiplier", "attention__temperature_scale"


def position_of(tmp_path, architecture, tensors=(("token_embd.weight", (WIDTH, ROWS)),), **changes):
    return load_gguf_config(write(tmp_path, keys_of(architecture, **changes), tensors)).layers[0].mixer.position


@pytest.mark.parametrize(
    ("architecture", "changes", "stretch"),
    [
        ("olmo2", {}, 1 + 0.1 * math.log(8)),
        ("olmo2", {ATTN: (6, f32(1.5))}, 1.5),  # its converter once wrote
        ("olmo2", {YARN_ATTN: (6, f32(1.5))}, 1.5),
        ("olmo2", {ATTN: (6, f32(1.5)), YARN_ATTN: (6, f32(1.5))}, 1.5),
        ("olmo2", {ATTN: (6, f32(1.0)), YARN_ATTN: (6, f32(1.5))}, 1.5),
        ("olmo2", {ATTN: (6, f32(1.0)), YARN_ATTN: (6, f32(1.0))}, 1 + 0.1 * math.log(8)),  # each is nothing said
        ("llama", {YARN_ATTN: (6, f32(1.0))}, 1 + 0.1 * math.log(8)),
        ("mistral3", {LOG: (6, f32(1.0))}, 1.0),
        ("mistral3", {LOG: (6, f32(0.0))}, 1 + 0.1 * math.log(8)),
        ("mistral3", {LOG: (6, f32(0.5))}, (1 + 0.1 * math.log(8)) / (1 + 0.05 * math.log(8))),
    ],
)
def test_what_a_stretched_embedding_is_multiplied_by_is_llama_cpp_s(tmp_path, architecture, changes, stretch):
    position = position_of(tmp_path, architecture, **YARN, **changes)
    assert (position.rope_type, position.factor) == ("yarn", 8.0)
    assert position.factor_of_turned == pytest.approx(stretch, rel=1e-6)


FACTORS = [("rope_factors_short.weight", (8,)), ("rope_factors_long.weight", (8,))]


def write_factors(tmp_path, **changes):
    """A Phi-3 whose factors are all 2."""
    tensors = [("token_embd.weight", (WIDTH, ROWS)), *FACTORS]
    path = write(tmp_path, keys_of("phi3", rope__scaling__original_context_length=(4, u32(64)), **changes), tensors)
    raw = path.read_bytes()
    path.write_bytes(raw[:-64] + f32(2.0) * 16)
    return path


def test_factors_of_short_and_long_texts_have_their_own_stretch(tmp_path):
    position = load_gguf_config(write_factors(tmp_path, **{ATTN: (6, f32(1.0))})).layers[0].mixer.position
    assert (position.rope_type, position.divisors, position.factor_of_turned) == ("longrope", (2.0,) * 8, 1.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({**YARN}, r"scaling\.type is 'yarn', must be none, linear"),
        (
            {"rope__scaling__type": (8, text("linear")), "rope__scaling__factor": (6, f32(3.0))},
            r"scaling\.factor is 3\.0, must be 1 beside rope_factors_short",
        ),
        (
            {ATTN: (6, f32(1.25)), YARN_ATTN: (6, f32(1.5))},
            r"attn_factor is 1\.25, must be 1\.5, which rope\.scaling\.yarn",
        ),
    ],
)
def test_what_stands_beside_factors_is_refused(tmp_path, changes, said):
    changes = {name: value for name, value in changes.items() if "original" not in name}
    with pytest.raises(ConfigError, match=said):
        load_gguf_config(write_factors(tmp_path, **changes))


@pytest.mark.parametrize("key", [ATTN, YARN_ATTN])
def test_a_stretch_beyond_its_bounds_is_named_as_the_file_does(tmp_path, key):
    with pytest.raises(ConfigError, match=rf"olmo2\.{key.replace('__', '.')} is 1\.0\d*e\+30, must be a number"):
        position_of(tmp_path, "olmo2", **YARN, **{key: (6, f32(1e30))})


def test_a_layer_for_drafts_is_left_aside(tmp_path):
    """GLM-4.5's files count it among the blocks."""
    experts = {"expert_count": (4, u32(4)), "expert_used_count": (4, u32(2))}
    keys = keys_of("glm4moe", block_count=(4, u32(3)), nextn_predict_layers=(4, u32(1)), **experts)
    names = [
        "blk.1.strange.weight",
        "blk.2.attn_norm.weight",
        "blk.2.nextn.eh_proj.weight",
        "blk.10.nextn.enorm.weight",
    ]
    path = write(tmp_path, keys, [("token_embd.weight", (WIDTH, ROWS)), *((name, (4,)) for name in names)])
    config = load_gguf_config(path)
    assert config.num_layers == 2
    assert GgufCheckpoint(path, LayerNames()).not_taken() == ["blk.1.strange.weight", "token_embd.weight"]


@pytest.mark.parametrize("said", [None, False, True])
def test_weights_of_chosen_experts_are_normed_as_llama_cpp_does(tmp_path, said):
    experts = {"expert_count": (4, u32(4)), "expert_used_count": (4, u32(2)), "expert_group_count": (4, u32(1))}
    norm = {} if said is None else {"expert_weights_norm": (7, bytes([said]))}
    tensors = [("token_embd.weight", (WIDTH, ROWS)), ("blk.1.ffn_gate_inp.weight", (WIDTH, 4))]
    config = load_gguf_config(write(tmp_path, keys_of("glm4moe", **experts, **norm), tensors))
    assert config.layers[1].feed_forward.router.normalises is bool(said)


def bools(*values):
    return 9, u32(7) + u64(len(values)) + bytes(values)


@pytest.mark.parametrize("pattern", [(4, u32(2)), bools(1, 0, 1, 0)])
@pytest.mark.parametrize("architecture", ["gemma3", "olmo2", "exaone4"])
def test_which_layers_have_windows_is_read(tmp_path, architecture, pattern):
    window = {"attention__sliding_window": (4, u32(9)), "attention__sliding_window_pattern": pattern}
    path = write(tmp_path, keys_of(architecture, block_count=(4, u32(4)), **window))
    assert [layer.mixer.window_tokens for layer in load_gguf_config(path).layers] == [9, None, 9, None]


def test_wrong_factors_of_frequencies_are_refused(tmp_path):
    tensors = [("token_embd.weight", (WIDTH, ROWS)), ("rope_freqs.weight", (7,))]
    with pytest.raises(ConfigError, match=r"rope_freqs.weight' is F32 \[7\], must be F32 \[8\]"):
        load_gguf_config(write(tmp_path, keys_of(), tensors))


def test_missing_misshapen_and_left_over_tensors_are_named(tmp_path):
    tensors = [("token_embd.weight", (WIDTH, ROWS)), ("blk.0.ffn_up_exps.weight", (8, 4, 2)), ("strange.weight", (4,))]
    checkpoint = GgufCheckpoint(write(tmp_path, keys_of(), [*tensors, ("rope_freqs.weight", (8,))]), LayerNames())
    with pytest.raises(ConfigError, match=r"tensor output_norm.weight of shape \[64\] is missing"):
        checkpoint.take("model.norm.weight", 64)
    with pytest.raises(ConfigError, match=r"token_embd.weight has shape \[40, 64\], the metadata asks for \[64, 40\]"):
        checkpoint.take_linear("model.embed_tokens", 64, 40)
    with pytest.raises(ConfigError, match=r"has no name in GGUF"):
        checkpoint.take_linear("model.vision.tower", 64, 40)
    with pytest.raises(ConfigError, match=r"has shape \[2, 4, 8\], the metadata asks for at least 3 times \[4, 8\]"):
        checkpoint.take_linear("model.layers.0.mlp.experts.2.up_proj", 4, 8)
    checkpoint.take_linear("model.embed_tokens", ROWS, WIDTH)
    checkpoint.take_linear("model.embed_tokens", ROWS, WIDTH)
    assert checkpoint.num_parameters == ROWS * WIDTH
    checkpoint.take_linear("model.layers.0.mlp.experts.0.up_proj", 4, 8)
    assert checkpoint.not_taken() == ["blk.0.ffn_up_exps.weight", "strange.weight"]
    checkpoint.take_linear("model.layers.0.mlp.experts.1.up_proj", 4, 8)
    assert checkpoint.not_taken() == ["strange.weight"]


@pytest.mark.parametrize(
    ("kind", "pooling", "named_by"),
    [(3, "last", "qwen3.pooling_type"), (1, "mean", "qwen3.pooling_type"), (0, "last", "")],
)
def test_how_it_embeds(tmp_path, kind, pooling, named_by):
    path = write(tmp_path, keys_of("qwen3", pooling_type=(4, u32(kind))))
    said = load_gguf_config(path).pooling
    assert (said.kind, said.named_by, said.size, said.refusal) == (pooling, named_by, WIDTH, "")


def f32_key(name, value):
    return key(f"general.{name}", 6, f32(value))


def named(*keys):
    return *keys_of(), key("general.basename", 8, text("smollm2")), key("general.size_label", 8, text("135M")), *keys


@pytest.mark.parametrize(
    ("keys", "advised"),
    [
        (keys_of(), {}),
        (named(), {"temperature": 0.2, "top_p": 0.9}),  # by the makers' card, where the file says nothing
        (named(f32_key("sampling.temp", 0.5)), {"temperature": 0.5}),  # what it says is all that counts
        (
            (*keys_of(), key("general.sampling.top_k", 5, u32(40)), f32_key("sampling.penalty_repeat", 1.25)),
            {"top_k": 40, "repetition_penalty": 1.25},
        ),
    ],
)
def test_how_the_makers_advise_to_sample_is_read(tmp_path, keys, advised):
    path = write(tmp_path, keys)
    assert load_gguf_config(path).sampling == advised
    assert load_gguf_config(path, "vllm").sampling == {}


def test_advice_that_cannot_be_meant_is_refused_with_the_files_name(tmp_path):
    path = write(tmp_path, (*keys_of(), f32_key("sampling.top_p", 7.0)))
    with pytest.raises(ConfigError, match=r"model\.gguf: .*top_p") as refused:
        load_gguf_config(path)
    assert "--generation-config vllm" in refused.value.info.hint
