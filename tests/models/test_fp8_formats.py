"""Files in e4m3: what is read is what they mean, every broken one is refused with a sentence, and so is every config
that means something else."""

import math

import fp8_layouts as fp8
import pytest
import torch
from fp8_layouts import AUTO_FP8, BLOCKS, FLOAT_GROUPS, FLOAT_STATIC, FLOAT_TOKENS, TABLE, compressed_fp8
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from splittime.core.errors import ConfigError
from splittime.kernels.reference.rounding import dequantize
from splittime.models.weights.checkpoint import Checkpoint
from splittime.models.weights.formats.read import parse
from splittime.models.weights.shards import ColumnsOf, RowsOf

CASES = {
    "blocks": (BLOCKS, "block", {"name": "weight_scale_inv"}),
    "auto fp8": (AUTO_FP8, "tensor", {"shape": (), "input_scale": 0.5}),
    "auto fp8, dynamic": ({**AUTO_FP8, "activation_scheme": "dynamic"}, "tensor", {"shape": (1,)}),
    "dynamic": (compressed_fp8(), "channel", {}),
    "dynamic, flat": (compressed_fp8(), "channel", {"shape": (-1,)}),
    "static": (compressed_fp8("tensor", FLOAT_STATIC), "tensor", {"shape": (1,), "input_scale": [0.5]}),
    "static by channel": (compressed_fp8("channel", FLOAT_STATIC), "channel", {"input_scale": [0.5]}),
    "compressed blocks": (compressed_fp8("block", FLOAT_GROUPS), "block", {}),
    "naive": ({**compressed_fp8(), "format": "naive-quantized"}, "channel", {}),
}


def store(folder, quantization, tensors):
    named = {f"m.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    return Checkpoint(folder, parse({"quantization_config": quantization}))


def drawn_in(folder, name, shape, dtype=torch.bfloat16):
    quantization, kind, how = CASES[name]
    drawn = fp8.draw_floats(*shape, kind, name, dtype)
    tensors = fp8.stored_floats(drawn, **how)
    return drawn, tensors, store(folder, quantization, tensors)


def meaning(weight, step):
    """Asked for some rows at a time: float32 [out, in]."""
    parts = [
        weight.rows(begin, min(begin + step, weight.out_features)) for begin in range(0, weight.out_features, step)
    ]
    return torch.cat([dequantize(part.integers, part.scales, weight.scheme) for part in parts])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_what_is_read_is_what_the_file_means(tmp_path, name, dtype):
    shape = (300, 200)
    drawn, _, checkpoint = drawn_in(tmp_path, name, shape, dtype)
    weight = checkpoint.take_linear("m", *shape)
    assert torch.equal(meaning(weight, 70), drawn.values().float())
    assert checkpoint.not_taken() == []
    assert checkpoint.num_parameters == 300 * 200
    assert weight.scheme.group == (128 if "block" in name else 0)


def test_every_e4m3_there_is(tmp_path):
    """All bytes but the two that are NaN."""
    q = torch.tensor([[byte for byte in range(256) if byte & 127 != 127]], dtype=torch.uint8)
    drawn = fp8.Floats(q, torch.tensor([[0.375]]))
    checkpoint = store(tmp_path, compressed_fp8(), fp8.stored_floats(drawn))
    assert torch.equal(meaning(checkpoint.take_linear("m", 1, 254), 1), (TABLE[q.long()] * 0.375).float())


@given(st.integers(1, 290), st.integers(1, 290), st.integers(1, 300))
@settings(max_examples=25, deadline=None)
def test_blocks_of_any_shape(tmp_path_factory, rows, columns, step):
    drawn, _, checkpoint = drawn_in(tmp_path_factory.mktemp("blocks"), "blocks", (rows, columns))
    assert torch.equal(meaning(checkpoint.take_linear("m", rows, columns), step), drawn.values().float())


def test_parts_for_several_ranks(tmp_path):
    drawn, _, checkpoint = drawn_in(tmp_path, "blocks", (300, 512))
    whole, values = checkpoint.take_linear("m", 300, 512), drawn.values().float()
    assert torch.equal(meaning(RowsOf(whole, 70, 230), 64), values[70:230])
    assert torch.equal(meaning(ColumnsOf("m", whole, 256, 512), 64), values[:, 256:])
    with pytest.raises(ConfigError, match=r"m has groups of 128 columns; a rank's part \[192, 384\) cuts through one"):
        ColumnsOf("m", whole, 192, 384)


def broken(tensors, name, place, value):
    tensors = {**tensors, name: tensors[name].clone()}
    tensors[name].view(-1)[place] = value
    return tensors


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -0.25, 1e37], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_scale_that_is_none_is_refused(tmp_path, name, value):
    quantization, kind, how = CASES[name]
    tensors = fp8.stored_floats(fp8.draw_floats(300, 200, kind, dtype=torch.float32), **how)
    places = [key for key in tensors if "scale" in key]
    for place in places:
        checkpoint = store(tmp_path, quantization, broken(tensors, place, -1, value))
        with pytest.raises(ConfigError, match=rf"m\.{place} holds .*: a scale is above 0") as caught:
            checkpoint.take_linear("m", 300, 200)
        assert caught.value.info.hint


@pytest.mark.parametrize("byte", [127, 255])
def test_a_weight_that_is_nan_is_refused(tmp_path, byte):
    drawn, tensors, _ = drawn_in(tmp_path, "dynamic", (30, 20))
    drawn.q[17, 3] = byte
    checkpoint = store(tmp_path, compressed_fp8(), {**tensors, "weight": drawn.q.view(torch.float8_e4m3fn)})
    with pytest.raises(ConfigError, match=r"m\.weight holds NaN: the file is damaged"):
        meaning(checkpoint.take_linear("m", 30, 20), 8)


@pytest.mark.parametrize("name", CASES)
def test_a_scale_that_is_missing_or_of_another_shape_or_dtype_is_refused(tmp_path, name):
    quantization, kind, how = CASES[name]
    tensors = fp8.stored_floats(fp8.draw_floats(300, 200, kind), **how)
    for place in [key for key in tensors if "scale" in key]:
        without = {key: tensor for key, tensor in tensors.items() if key != place}
        with pytest.raises(ConfigError, match=rf"m\.{place} of shape .* is missing"):
            store(tmp_path, quantization, without).take_linear("m", 300, 200)
        longer = {**tensors, place: torch.ones(7, 3)}
        with pytest.raises(ConfigError, match=rf"m\.{place} has shape \[7, 3\]"):
            store(tmp_path, quantization, longer).take_linear("m", 300, 200)
        for dtype in (torch.int32, torch.float8_e8m0fnu, torch.uint8):
            other = {**tensors, place: tensors[place].float().to(dtype)}
            with pytest.raises(ConfigError, match=rf"m\.{place} is torch\.\w+, not one of"):
                store(tmp_path, quantization, other).take_linear("m", 300, 200)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int8, torch.uint8], ids=str)
def test_weights_of_another_kind_are_refused(tmp_path, dtype):
    _, tensors, _ = drawn_in(tmp_path, "blocks", (30, 20))
    other = {**tensors, "weight": tensors["weight"].view(torch.uint8).view(dtype)}
    with pytest.raises(ConfigError, match=r"m\.weight is torch\.\w+, not one of torch.float8_e4m3fn"):
        store(tmp_path, BLOCKS, other).take_linear("m", 30, 20)


def test_a_weight_of_another_shape_is_refused(tmp_path):
    _, _, checkpoint = drawn_in(tmp_path, "blocks", (300, 200))
    with pytest.raises(ConfigError, match=r"m\.weight has shape \[300, 200\], .* asks for \[300, 456\]"):
        checkpoint.take_linear("m", 300, 456)


def test_e4m3_without_a_config_is_refused(tmp_path):
    _, tensors, _ = drawn_in(tmp_path, "blocks", (30, 20))
    checkpoint = store(tmp_path, None, tensors)
    with pytest.raises(ConfigError, match=r"m\.weight is torch.float8_e4m3fn, not one of torch.float32"):
        checkpoint.take_linear("m", 30, 20)


def test_modules_left_as_floats_are_those_that_the_config_names(tmp_path):
    weight = torch.randn(20, 30)
    named = ({**BLOCKS, "modules_to_not_convert": ["m"]}, {**compressed_fp8(), "ignore": ["m"]})
    for quantization in named:
        assert torch.equal(store(tmp_path, quantization, {"weight": weight}).take_linear("m", 20, 30), weight)
    for quantization in (BLOCKS, compressed_fp8()):
        with pytest.raises(ConfigError, match="m is floats in the file"):
            store(tmp_path, quantization, {"weight": weight}).take_linear("m", 20, 30)


def activations_of(**changes):
    return compressed_fp8(activations={**FLOAT_TOKENS, **changes})


@pytest.mark.parametrize(
    ("quantization", "key", "value"),
    [
        ({**BLOCKS, "weight_block_size": [64, 64]}, "weight_block_size", "[64, 64]"),
        ({**BLOCKS, "weight_block_size": [1, 128]}, "weight_block_size", "[1, 128]"),
        ({**BLOCKS, "weight_block_size": [0, 128]}, "weight_block_size", "[0, 128]"),
        ({**BLOCKS, "weight_block_size": 128}, "weight_block_size", "128"),
        ({**BLOCKS, "activation_scheme": "static"}, "activation_scheme", "'static'"),
        ({**BLOCKS, "activation_scheme": "per_row"}, "activation_scheme", "'per_row'"),
        ({**AUTO_FP8, "activation_scheme": "none"}, "activation_scheme", "'none'"),
        ({**BLOCKS, "fmt": "e5m2"}, "fmt", "'e5m2'"),
        ({**BLOCKS, "scale_fmt": "ue8m0"}, "scale_fmt", "'ue8m0'"),
        ({**BLOCKS, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert", "'lm_head'"),
        (compressed_fp8("group", FLOAT_GROUPS), "weights.strategy", "'group'"),
        (compressed_fp8("tensor_group", FLOAT_GROUPS), "weights.strategy", "'tensor_group'"),
        (compressed_fp8(num_bits=4), "weights.num_bits", "4"),
        (compressed_fp8(symmetric=False), "symmetric", "False"),
        (compressed_fp8(dynamic=True), "dynamic", "True"),
        (compressed_fp8("block", FLOAT_GROUPS, block_structure=[64, 128]), "block_structure", "[64, 128]"),
        (compressed_fp8("block", {**FLOAT_GROUPS, "group_size": 64}), "input_activations.group_size", "64"),
        (compressed_fp8("block", FLOAT_TOKENS), "input_activations.strategy", "'token'"),
        (compressed_fp8("channel", FLOAT_GROUPS), "input_activations.strategy", "'group'"),
        (compressed_fp8(activations=None), "input_activations", "None"),
        (activations_of(type="int"), "input_activations.type", "'int'"),
        (activations_of(num_bits=4), "input_activations.num_bits", "4"),
        (activations_of(symmetric=False), "input_activations.symmetric", "False"),
        (activations_of(dynamic=False), "input_activations.dynamic", "False"),
        (activations_of(dynamic="local"), "input_activations.dynamic", "'local'"),
        ({**compressed_fp8(), "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "kv_cache_scheme", "4"),
    ],
    ids=str,
)
def test_refusals_name_the_key_the_value_and_the_way_out(quantization, key, value):
    with pytest.raises(ConfigError) as caught:
        parse({"quantization_config": quantization})
    assert key in str(caught.value)
    assert value in str(caught.value)
    assert "--quantization" in str(caught.value.info.hint)
