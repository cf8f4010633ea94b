"""Checkpoints made to do harm: each is refused with an error that names the file, and none costs memory or time.

The first list is about safetensors files: most of it the library refuses, which is held here too, the rest we refuse
ourselves. The last tests change good files at random: what comes of it is a `ConfigError` or a model that loads.
"""

import contextlib
import json
import os
import resource
import struct
from copy import deepcopy

import pytest
import torch
from gguf_bytes import content, key, tensor, u32, u64
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_config import CONFIG

from splittime.core.errors import ConfigError
from splittime.models.config import load_config
from splittime.models.fields import MAX_HEADER_BYTES, MAX_METADATA_VALUES
from splittime.models.gguf.file import GgufFile
from splittime.models.weights.checkpoint import Checkpoint
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.text.tokenizer import Tokenizer

MAX_GROWTH_BYTES = 400 << 20  # of this process, over all examples of a property


def safetensors(header, data=bytes(64), claimed=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if claimed is None else claimed) + raw + data


def entry(begin, end, shape=(8,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


ONE = {"a": entry(0, 64, [16])}
TWICE = b'{"a":%s,"a":%s}' % tuple(json.dumps(entry(0, 64, shape)).encode() for shape in ([16], [4, 4]))
EVIL = {
    "overlapping": safetensors({"a": entry(0, 32), "b": entry(16, 48)}, bytes(48)),
    "negative": safetensors({"a": entry(-32, 0), "b": entry(0, 64, [16])}),
    "reversed": safetensors({"a": entry(32, 0), "b": entry(0, 64, [16])}),
    "huge": safetensors({"a": entry(0, 2**62, [2**60])}),
    "huge product": safetensors({"a": entry(0, 64, [2**63, 2**63])}),
    "beyond the file": safetensors({"a": entry(0, 128, [32])}),
    "unknown type": safetensors({"a": entry(0, 64, [16], "F99")}),
    "type of another size": safetensors({"a": entry(0, 64, [16], "F16")}),
    "no numbers": safetensors({"a": entry(0, 64, ["x"])}),
    "fractions": safetensors({"a": {"dtype": "F32", "shape": [16], "data_offsets": [0.0, 64.5]}}),
    "a hole": safetensors({"a": entry(0, 32)}),
    "data without a tensor": safetensors(ONE, bytes(128)),
    "data cut short": safetensors(ONE, bytes(10)),
    "a header that lies, much": safetensors(ONE, claimed=2**63),
    "a header that lies, little": safetensors(ONE, claimed=20),
    "a header that lies, into the data": safetensors(ONE, claimed=100),
    "a header beyond what is read": safetensors(b" " * (MAX_HEADER_BYTES + 1)),
    "a name twice": safetensors(TWICE),
    "no object": safetensors([1, 2]),
    "nothing": b"",
    "seven bytes": b"1234567",
    "no UTF-8": safetensors(b'{"\xff":1}'),
    "deep": safetensors(b"[" * 1_000_000),
    "half a character": safetensors(b'{"\\ud800":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}}'),
}


@pytest.mark.parametrize("name", EVIL)
def test_an_evil_safetensors_file_is_refused(tmp_path, name):
    (tmp_path / "model.safetensors").write_bytes(EVIL[name])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        Checkpoint(tmp_path)


def write_index(folder, **files):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize(
    "name",
    [
        *("../out.safetensors", "/etc/passwd", "sub/../../out.safetensors", "..", ".", "", "sub/a.safetensors"),
        *("a.bin", "a\\..\\b.safetensors", "a\0.safetensors", "//a.safetensors", "./a.safetensors"),
    ],
)
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path, name):
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for path in (tmp_path / "out.safetensors", folder / "a.safetensors", folder / "sub" / "a.safetensors"):
        save_file({"a": torch.ones(2)}, path)
    write_index(folder, a=name)
    with pytest.raises(ConfigError, match="weight_map names the file"):
        Checkpoint(folder)


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_link_out_of_the_folder_is_refused(tmp_path, is_sharded):
    folder, name = tmp_path / "model", "part.safetensors" if is_sharded else "model.safetensors"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "secret.safetensors")
    (folder / name).symlink_to(tmp_path / "secret.safetensors")
    if is_sharded:
        write_index(folder, a=name)
    with pytest.raises(ConfigError, match=r"is a link to .*secret\.safetensors, outside of the model's folder"):
        Checkpoint(folder)


def test_links_within_the_folder_and_of_the_hub_s_cache_are_followed(tmp_path):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert Checkpoint(snapshot).take("a", 2).sum() == 2
    folder = tmp_path / "own"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "real.safetensors")
    (folder / "model.safetensors").symlink_to("real.safetensors")
    assert Checkpoint(folder).take("a", 2).sum() == 2
    (tmp_path / "elsewhere").symlink_to(folder)
    assert Checkpoint(tmp_path / "elsewhere").take("a", 2).sum() == 2


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match="is no regular file"):
        load_config(tmp_path) if name == "config.json" else Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_huge_json_file_is_refused_unread(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with (tmp_path / name).open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="has 1099511627776 bytes, more than"):
        Checkpoint(tmp_path) if "index" in name else load_config(tmp_path)


def test_a_gguf_file_full_of_values_is_refused_before_they_are_made(tmp_path):
    path, many = tmp_path / "m.gguf", MAX_METADATA_VALUES + 1
    for inner in (u32(8), u32(9)):  # texts; lists of lists
        path.write_bytes(content((key("a", 9, inner + u64(many)),)))
        os.truncate(path, 1 << 30)
        with pytest.raises(ConfigError, match=f"'a': count is {many}"):
            GgufFile(path)


def test_a_gguf_file_with_too_much_metadata_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(content((key("a", 9, u32(0) + u64(1 << 33)),)))
    os.truncate(path, 1 << 34)
    with pytest.raises(ConfigError, match="bytes of metadata are read"):
        GgufFile(path)
    path.write_bytes(content((key("a", 8, u64(1 << 33)),)))
    os.truncate(path, 1 << 34)
    with pytest.raises(ConfigError, match="bytes of metadata are read"):
        GgufFile(path)


def test_a_gguf_stack_of_too_many_matrices_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(content((), (tensor("blk.0.ffn_up_exps.weight", (1, 1, 1 << 30), 1),)))
    os.truncate(path, 1 << 32)
    with pytest.raises(ConfigError, match="1073741824 matrices, more than the 8192"):
        GgufFile(path)


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], "byte_fallback": False},
}


def test_a_tokenizer_pads_nothing_and_cuts_nothing(tmp_path):
    padding = {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    changed = {**TOKENIZER, "padding": padding, "truncation": truncation}
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    assert Tokenizer.load(tmp_path).encode("abba") == [2, 1, 0]


def test_a_huge_tokenizer_is_refused_unread(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"tokenizer\.json has 1099511627776 bytes, more than"):
        Tokenizer.load(tmp_path)


# ---- good files, changed at random


def tiny_weights():
    hidden, heads = 32, 8
    layer = {
        "self_attn.q_proj": (4 * heads, hidden),
        "self_attn.k_proj": (2 * heads, hidden),
        "self_attn.v_proj": (2 * heads, hidden),
        "self_attn.o_proj": (hidden, 4 * heads),
        **{"mlp.gate_proj": (48, hidden), "mlp.up_proj": (48, hidden), "mlp.down_proj": (hidden, 48)},
        **{"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)},
    }
    shapes = {f"model.layers.{index}.{name}": shape for index in range(2) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens": (61, hidden), "model.norm": (hidden,)}
    return {f"{name}.weight": torch.ones(shape) * 0.01 for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tiny_weights(), folder / "model.safetensors")
    return folder


def load_or_refuse(folder):
    """Whether the model loaded. Anything but that and a `ConfigError` is an error of ours."""
    config = RunnerConfig(
        model_path=str(folder),
        kernels="torch",
        packed_cache="off",
        max_model_len=8,
        kv_cache_memory_bytes=1 << 24,
        num_threads=1,
    )
    try:
        load_torch_runner(config)
    except ConfigError:
        return False
    return True


def resident_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


numbers = st.sampled_from([0, 1, -1, 2, 3, 7, 61, 127, 4096, 4097, 2**31, 2**40, 2**63, 10**30, 0.5, 1e-30, 1e300])
scalars = st.one_of(numbers, st.booleans(), st.none(), st.sampled_from(["", "x", "silu", "a" * 1000, "\ud800"]))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(list(CONFIG)), inner, max_size=3),
)
KEYS = (
    *CONFIG,
    *("rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps", "head_dim", "sliding_window", "layer_types"),
    *("num_experts", "num_experts_per_tok", "mlp_only_layers", "decoder_sparse_step", "bos_token_id", "hidden_act"),
    *("attention_bias", "mlp_bias", "quantization_config", "dtype", "partial_rotary_factor", "max_window_layers"),
)
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MixtralForCausalLM")
FEW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_the_good_model_loads(good):
    assert load_or_refuse(good)


@FEW
@given(
    st.sampled_from([*ARCHITECTURES, "Qwen3MoeForCausalLM"]),
    st.dictionaries(st.sampled_from(KEYS), values, min_size=1, max_size=3),
)
@example("LlamaForCausalLM", {"num_hidden_layers": 10**9})
@example("LlamaForCausalLM", {"max_position_embeddings": 2**27})
@example("Qwen3MoeForCausalLM", {"num_experts": 8192, "num_hidden_layers": 4096})
@example("LlamaForCausalLM", {"rope_parameters": {"full_attention": {"rope_theta": 1e300}}})
def test_a_changed_config_is_refused_or_loads(good, tmp_path_factory, architecture, changes):
    folder = tmp_path_factory.getbasetemp() / "changed_config"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": [architecture], **changes}))
    (folder / "model.safetensors").write_bytes((good / "model.safetensors").read_bytes())
    before = resident_bytes()
    load_or_refuse(folder)
    assert resident_bytes() - before < MAX_GROWTH_BYTES


@FEW
@given(st.data())
def test_a_changed_header_is_refused_or_loads(good, tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "changed_header"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    raw = (good / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, content_of = deepcopy(json.loads(raw[8 : 8 + length])), raw[8 + length :]
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(header)))
        if name == "__metadata__":
            header[name] = data.draw(values)
        elif data.draw(st.booleans()) and isinstance(header[name], dict):
            header[name][data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))] = data.draw(
                st.one_of(values, st.lists(numbers, max_size=3), st.sampled_from(["F16", "I64", "F64", "BOOL"]))
            )
        else:
            header[data.draw(st.sampled_from([name, "more", name + "x"]))] = header.pop(name)
    cut = data.draw(st.sampled_from([0, 0, 0, 1, 64]))
    claimed = data.draw(st.sampled_from([None, None, None, 0, 7, 2**31, 2**64 - 1]))
    (folder / "model.safetensors").write_bytes(safetensors(header, content_of[: len(content_of) - cut], claimed))
    before = resident_bytes()
    load_or_refuse(folder)
    assert resident_bytes() - before < MAX_GROWTH_BYTES


@FEW
@given(st.dictionaries(st.sampled_from([*tiny_weights(), "more"]), values | st.just("model.safetensors"), max_size=4))
def test_a_changed_index_is_refused_or_loads(good, tmp_path_factory, changes):
    folder = tmp_path_factory.getbasetemp() / "changed_index"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes((good / "model.safetensors").read_bytes())
    write_index(folder, **{**dict.fromkeys(tiny_weights(), "model.safetensors"), **changes})
    load_or_refuse(folder)


@FEW
@given(
    st.sampled_from(["model", "padding", "truncation", "added_tokens", "decoder", "normalizer"]),
    values | st.dictionaries(st.sampled_from(["type", "vocab", "merges", "dropout"]), values, max_size=3),
)
def test_a_changed_tokenizer_is_refused_or_loads(tmp_path_factory, part, value):
    folder = tmp_path_factory.getbasetemp() / "changed_tokenizer"
    folder.mkdir(exist_ok=True)
    changed = deepcopy(TOKENIZER)
    changed[part] = {**changed[part], **value} if part == "model" and isinstance(value, dict) else value
    (folder / "tokenizer.json").write_text(json.dumps(changed))
    before = resident_bytes()
    with contextlib.suppress(ConfigError):
        assert len(Tokenizer.load(folder).encode("abba")) <= 4
    assert resident_bytes() - before < MAX_GROWTH_BYTES
