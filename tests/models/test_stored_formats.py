"""Every layout of quantised safetensors: what is read is exactly what the file says, and broken files are refused."""

import json

import pytest
import stored_layouts as layouts
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from splittime.core.errors import ConfigError
from splittime.models.weights.checkpoint import Checkpoint
from splittime.models.weights.formats.read import parse

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed(layout, bits, group=None, symmetric=True, activations=None, **others):
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False, **strategy, **others}
    group_0 = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group_0},
        "ignore": ["lm_head"],
    }


PACKED, W8A8 = compressed("pack-quantized", 4, 32), compressed("int-quantized", 8, activations=TOKENS)
ASYMMETRIC = compressed("pack-quantized", 4, 32, symmetric=False)

# name: (quantization_config, how to draw, how to store, out, in)
CASES = {
    "awq": (AWQ, {}, layouts.awq, 40, 64),
    "awq one group a row": ({**AWQ, "group_size": -1}, {"group": -1}, layouts.awq, 16, 96),
    "awq no zero points": ({**AWQ, "zero_point": False}, {"symmetric": True}, layouts.awq, 16, 64),
    "gptq": (GPTQ, {"zeros": (1, 16)}, layouts.gptq, 40, 64),
    "gptq symmetric": ({**GPTQ, "sym": True}, {"symmetric": True}, layouts.gptq, 40, 64),
    "gptq v2": (
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        {},
        lambda drawn: layouts.gptq(drawn, "gptq_v2"),
        40,
        64,
    ),
    "gptq one group a row": ({**GPTQ, "group_size": -1}, {"group": -1, "zeros": (1, 16)}, layouts.gptq, 24, 72),
    "gptq act-order": ({**GPTQ, "desc_act": True}, {"act_order": 7, "zeros": (1, 16)}, layouts.gptq, 24, 96),
    "gptq last group short": ({**GPTQ, "group_size": 64}, {"group": 64, "zeros": (1, 16)}, layouts.gptq, 24, 96),
    "gptq rows that fill no word": (GPTQ, {"zeros": (1, 16)}, layouts.gptq, 19, 64),
    "gptq 8 bits": ({**GPTQ, "bits": 8}, {"bits": 8, "zeros": (1, 256)}, layouts.gptq, 20, 64),
    "gptq 8 bits symmetric": (
        {**GPTQ, "bits": 8, "sym": True, "group_size": -1},
        {"bits": 8, "symmetric": True, "group": -1},
        layouts.gptq,
        20,
        64,
    ),
    "gptq 8 bits act-order": (
        {**GPTQ, "bits": 8, "desc_act": True, "sym": True},
        {"bits": 8, "act_order": 3, "symmetric": True},
        layouts.gptq,
        20,
        96,
    ),
    "packed": (PACKED, {"symmetric": True}, layouts.compressed_packed, 24, 64),
    "packed channel": (
        compressed("pack-quantized", 4),
        {"symmetric": True, "group": -1},
        layouts.compressed_packed,
        24,
        68,
    ),
    "packed 8 bits": (
        compressed("pack-quantized", 8, 32),
        {"bits": 8, "symmetric": True},
        layouts.compressed_packed,
        24,
        64,
    ),
    "packed asymmetric": (ASYMMETRIC, {}, lambda drawn: layouts.compressed_packed(drawn, False), 21, 64),
    "packed asymmetric, as it was": (
        ASYMMETRIC,
        {},
        lambda drawn: layouts.compressed_packed(drawn, False, packs_zeros=False),
        24,
        64,
    ),
    "packed act-order": (
        compressed("pack-quantized", 4, 32, actorder="group"),
        {"symmetric": True, "act_order": 5},
        lambda drawn: layouts.compressed_packed(drawn, with_index=True),
        24,
        64,
    ),
    "w8a8": (W8A8, {"bits": 8, "symmetric": True, "group": -1}, layouts.compressed_int8, 24, 50),
    "w8a8 asymmetric": (
        compressed("int-quantized", 8, symmetric=False, activations=TOKENS),
        {"bits": 8, "group": -1},
        lambda drawn: layouts.compressed_int8(drawn, False),
        24,
        50,
    ),
}


def recipe_of(quantization):
    return parse({"quantization_config": quantization})


def store(folder, quantization, tensors):
    """A checkpoint of one module, "m"."""
    named = {f"m.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    return Checkpoint(folder, recipe_of(quantization))


def meaning(stored, step):
    """float64 [out, in] by the definition of `RoundedRows`, asked for `step` rows at a time, columns put back."""
    rows = []
    for begin in range(0, stored.out_features, step):
        got = stored.rows(begin, min(begin + step, stored.out_features))
        assert got.integers.dtype == torch.int8
        assert got.scales.dtype == torch.float32
        assert (got.zeros is not None) == stored.scheme.has_zeros
        assert (got.minima is not None) == stored.scheme.has_minima
        width = stored.scheme.group or stored.in_features
        group_of = torch.arange(stored.in_features) // width
        zero = 8 if stored.scheme.name == "int4" else 0
        zeros = torch.full(got.scales.shape, zero) if got.zeros is None else got.zeros
        minima = torch.zeros(got.scales.shape) if got.minima is None else got.minima
        steps = got.integers.double() - zeros.double()[:, group_of]
        rows.append(got.scales.double()[:, group_of] * steps - minima.double()[:, group_of])
    values = torch.cat(rows)
    if stored.columns is None:
        return values
    restored = torch.empty_like(values)
    restored[:, stored.columns] = values
    return restored


@pytest.mark.parametrize("step", [100, 16, 5])
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_exactly_those_of_the_file(tmp_path, name, step):
    quantization, how, make, num_out, num_in = CASES[name]
    drawn = layouts.draw(num_out, num_in, **how)
    checkpoint = store(tmp_path, quantization, make(drawn))
    stored = checkpoint.take_linear("m", num_out, num_in)
    assert torch.equal(meaning(stored, step), drawn.values())
    assert ("act-order" in name) == (stored.columns is not None)
    assert checkpoint.num_parameters == num_out * num_in
    assert checkpoint.not_taken() == []
    checkpoint.release(stored)
    assert torch.equal(meaning(stored, step), drawn.values())


@given(
    num_out=st.integers(1, 40),
    blocks=st.integers(1, 5),
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([-1, 32, 64]),
    act_order=st.integers(0, 3),
    layout=st.sampled_from(["gptq", "gptq_v2"]),
)
@settings(max_examples=25, deadline=None)
def test_gptq_of_any_shape(tmp_path_factory, num_out, blocks, bits, group, act_order, layout):
    quantization = {**GPTQ, "bits": bits, "group_size": group, "desc_act": act_order > 0, "checkpoint_format": layout}
    shift = layout == "gptq"
    top = (1 << bits) - 1
    drawn = layouts.draw(num_out, 32 * blocks, bits, group, zeros=(shift, top + shift), act_order=act_order)
    checkpoint = store(tmp_path_factory.mktemp("gptq"), quantization, layouts.gptq(drawn, layout))
    assert torch.equal(meaning(checkpoint.take_linear("m", num_out, 32 * blocks), 13), drawn.values())


def test_zero_points_that_borrowed_from_their_neighbour(tmp_path):
    """GPTQModel subtracts 0x11111111 from whole words: a zero point of 0 then takes one from the next field."""
    quantization = {**GPTQ, "meta": {"quantizer": ["gptqmodel:2.2.0"]}}
    drawn = layouts.draw(32, 64)
    tensors = layouts.gptq(drawn, "gptq_v2")
    words = tensors["qzeros"].long() & 0xFFFFFFFF
    tensors["qzeros"] = ((words - 0x11111111) & 0xFFFFFFFF).numpy().astype("uint32").view("int32")
    tensors["qzeros"] = torch.from_numpy(tensors["qzeros"])
    assert any(0 in row for row in drawn.z)
    assert torch.equal(meaning(store(tmp_path, quantization, tensors).take_linear("m", 32, 64), 9), drawn.values())


def test_a_module_that_stayed_as_it_was_comes_as_a_tensor(tmp_path):
    weight = torch.ones(3, 5)
    ways = ({"modules_to_not_convert": ["m"]}, {"modules_in_block_to_quantize": ["q_proj"]}, *[{"ignore": ["m"]}] * 2)
    for number, (quantization, way) in enumerate(zip((AWQ, GPTQ, PACKED, W8A8), ways, strict=True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(ConfigError, match="m is floats in the file, quantization_config says that it has"):
            store(folder, quantization, {"weight": weight}).take_linear("m", 3, 5)
        checkpoint = store(folder, {**quantization, **way}, {"weight": weight})
        assert torch.equal(checkpoint.take_linear("m", 3, 5), weight)
        assert checkpoint.num_parameters == 15


def test_biases_of_zeros_that_gptq_exports_carry_are_left_alone(tmp_path):
    tensors = layouts.gptq(layouts.draw(8, 32, zeros=(1, 16)))
    checkpoint = store(tmp_path, GPTQ, {**tensors, "bias": torch.zeros(8).half()})
    checkpoint.take_linear("m", 8, 32)
    assert checkpoint.not_taken() == []
    checkpoint = store(tmp_path, GPTQ, {**tensors, "bias": torch.ones(8).half()})
    checkpoint.take_linear("m", 8, 32)
    assert checkpoint.not_taken() == ["m.bias"]


def spoil(change):
    """(quantization_config, tensors) with something broken."""
    quantization, how, make, num_out, num_in = CASES[change.pop("case")]
    tensors = make(layouts.draw(num_out, num_in, **how))
    for suffix, to in change.items():
        if to is None:
            del tensors[suffix]
        else:
            tensors[suffix] = to(tensors[suffix]) if callable(to) else to
    return quantization, tensors, num_out, num_in


def set_first(value):
    def change(tensor):
        changed = tensor.clone()
        changed.view(-1)[0] = value
        return changed

    return change


NAN, INFINITY = set_first(float("nan")), set_first(float("inf"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"case": "awq", "scales": None}, r"m\.scales of shape \[2, 40\] is missing"),
        ({"case": "awq", "qzeros": None}, r"m\.qzeros .*missing"),
        ({"case": "awq", "scales": NAN}, "m has scales that are not finite"),
        ({"case": "awq", "qweight": lambda words: words[:, :4]}, r"m\.qweight has shape \[64, 4\].*\[64, 5\]"),
        ({"case": "awq", "qweight": lambda words: words.float()}, r"m\.qweight is torch\.float32"),
        (
            {"case": "awq", "scales": lambda scales: scales[:1]},
            r"m\.scales has shape \[1, 40\].*4 bits in groups of 32",
        ),
        ({"case": "awq no zero points", "qzeros": set_first(0)}, "m has zero points other than 8"),
        ({"case": "gptq", "scales": None}, r"m\.scales .*missing"),
        ({"case": "gptq", "qzeros": None}, r"m\.qzeros .*missing"),
        ({"case": "gptq", "scales": INFINITY}, "m has scales that are not finite"),
        ({"case": "gptq", "qweight": lambda words: words.repeat(2, 1)}, r"m\.qweight has shape \[16, 40\].*\[8, 40\]"),
        ({"case": "gptq symmetric", "qzeros": set_first(0)}, "m has zero points other than 8.*symmetric"),
        ({"case": "gptq act-order", "g_idx": None}, r"m\.g_idx .*missing"),
        ({"case": "gptq act-order", "g_idx": set_first(3)}, r"m\.g_idx has group 3, there are 3"),
        ({"case": "gptq act-order", "g_idx": set_first(-1)}, r"m\.g_idx has group -1"),
        ({"case": "gptq act-order", "g_idx": lambda index: index * 0}, r"m\.g_idx puts 96 columns in group 0.*has 32"),
        ({"case": "gptq 8 bits", "qweight": lambda words: words[::2]}, r"m\.qweight has shape \[8, 20\].*8 bits"),
        ({"case": "packed", "weight_scale": None}, r"m\.weight_scale .*missing"),
        ({"case": "packed", "weight_shape": None}, r"m\.weight_shape .*missing"),
        ({"case": "packed", "weight_shape": torch.tensor([24, 72])}, r"m\.weight_shape is \[24, 72\]"),
        ({"case": "packed", "weight_packed": None}, r"m\.weight_packed .*missing"),
        ({"case": "packed", "weight_scale": NAN}, "not finite"),
        ({"case": "packed asymmetric", "weight_zero_point": None}, r"m\.weight_zero_point .*missing"),
        ({"case": "packed act-order", "weight_g_idx": set_first(9)}, r"m\.weight_g_idx has group 9"),
        ({"case": "w8a8", "weight_scale": None}, r"m\.weight_scale .*missing"),
        ({"case": "w8a8", "weight": None}, r"m\.weight .*missing"),
        ({"case": "w8a8", "weight": lambda weight: weight.float()}, r"m\.weight is torch\.float32"),
        ({"case": "w8a8 asymmetric", "weight_zero_point": None}, r"m\.weight_zero_point .*missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join([value["case"], *list(value)[1:]]),
)
def test_a_broken_checkpoint_is_refused_with_the_tensors_name(tmp_path, change, told):
    quantization, tensors, num_out, num_in = spoil(dict(change))
    checkpoint = store(tmp_path, quantization, tensors)
    with pytest.raises(ConfigError, match=told):
        checkpoint.take_linear("m", num_out, num_in).rows(0, num_out)


def test_a_module_that_the_config_excepts_must_not_be_quantised(tmp_path):
    for number, (name, key) in enumerate({"awq": "modules_to_not_convert", "packed": "ignore"}.items()):
        quantization, how, make, num_out, num_in = CASES[name]
        (tmp_path / str(number)).mkdir()
        tensors = make(layouts.draw(num_out, num_in, **how))
        checkpoint = store(tmp_path / str(number), {**quantization, key: ["m"]}, tensors)
        with pytest.raises(ConfigError, match="m is quantised in the file"):
            checkpoint.take_linear("m", num_out, num_in)


@pytest.mark.parametrize(("name", "is_excepted"), [("gate", False), ("mlp", True), ("0.mlp.gate_proj", True)])
def test_exceptions_of_awq_are_whole_parts_of_a_name(tmp_path, name, is_excepted):
    module = "model.layers.0.mlp.gate_proj"
    tensors = {f"{module}.{key}": tensor for key, tensor in layouts.awq(layouts.draw(8, 32)).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, recipe_of({**AWQ, "modules_to_not_convert": [name]}))
    if not is_excepted:
        assert checkpoint.take_linear(module, 8, 32).in_features == 32
        return
    with pytest.raises(ConfigError, match="gate_proj is quantised in the file"):
        checkpoint.take_linear(module, 8, 32)


@pytest.mark.parametrize("names", [["re:.*mlp.*"], ["re:model\\.layers\\.0\\.", "lm_head"], ["model.layers.0.mlp.up"]])
def test_exceptions_may_be_regular_expressions(tmp_path, names):
    tensors = layouts.compressed_packed(layouts.draw(8, 32, symmetric=True))
    named = {f"model.layers.0.mlp.up.{suffix}": tensor for suffix, tensor in tensors.items()}
    save_file(named, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, recipe_of({**PACKED, "ignore": names}))
    with pytest.raises(ConfigError, match=r"mlp\.up is quantised in the file"):
        checkpoint.take_linear("model.layers.0.mlp.up", 8, 32)


def test_the_recipe_is_json_and_tells_layouts_apart(tmp_path):
    recipes = set()
    for number, (quantization, how, make, num_out, num_in) in enumerate(CASES.values()):
        (tmp_path / str(number)).mkdir()
        checkpoint = store(tmp_path / str(number), quantization, make(layouts.draw(num_out, num_in, **how)))
        assert json.loads(checkpoint.recipe)["method"] == checkpoint.format
        recipes.add(checkpoint.recipe)
    assert len(recipes) == len({json.dumps(case[0], sort_keys=True) for case in CASES.values()})
