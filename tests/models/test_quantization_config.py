"""`quantization_config` of a config.json: what is served; all else is refused with name, value and a way out."""

import json

import pytest
from stored_layouts import CONFIG
from test_stored_formats import ASYMMETRIC, AWQ, GPTQ, PACKED, TOKENS, W8A8, compressed

from splittime.core.errors import ConfigError
from splittime.models.config import load_config
from splittime.models.fields import Fields
from splittime.models.weights.formats.read import parse
from splittime.models.weights.formats.recipe import Recipe, patterns


def recipe(**settings):
    return parse({"quantization_config": settings})


def test_none_is_none():
    assert parse({}) is None
    assert parse({"quantization_config": None}) is None


def test_what_is_read():
    assert recipe(**AWQ) == Recipe(method="awq", layout="gemm", bits=4, group_size=32, symmetric=False)
    old = {"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "zero_point": True, "version": "GEMM"}
    assert recipe(**old) == Recipe(method="awq", layout="gemm", bits=4, group_size=0, symmetric=False)
    assert recipe(**AWQ, modules_to_not_convert=["lm_head"]).exceptions == ("lm_head",)
    older = Recipe(method="gptq", layout="gptq", bits=4, group_size=32, symmetric=False, zero_shift=1)
    assert recipe(**GPTQ) == older
    assert recipe(**GPTQ, checkpoint_format="gptq_v2").zero_shift == 0
    assert recipe(**GPTQ, meta={"quantizer": ["gptqmodel:4.0"]}).carries
    assert not recipe(**GPTQ, meta={"quantizer": ["optimum:1.2", "auto_gptq:0.7"]}).carries
    assert not recipe(**GPTQ, checkpoint_format="gptq_v2", meta={"quantizer": ["gptqmodel:4.0"]}).carries
    assert recipe(**GPTQ | {"desc_act": True}).act_order
    assert recipe(**PACKED).group_size == 32
    assert recipe(**W8A8) == Recipe(
        method="compressed-tensors",
        layout="int-quantized",
        bits=8,
        group_size=0,
        symmetric=True,
        exceptions=("lm_head",),
        rounds_activations=True,
    )
    assert not recipe(**ASYMMETRIC).symmetric


def test_how_checkpoints_were_made_is_passed_over():
    made = {"damp_percent": 0.01, "dataset": "c4", "true_sequential": True, "model_file_base_name": "model"}
    assert recipe(**GPTQ, **made) == recipe(**GPTQ)
    assert recipe(**AWQ, backend="autoawq", do_fuse=False) == recipe(**AWQ)
    assert recipe(**PACKED, global_compression_ratio=1.5, version="0.9") == recipe(**PACKED)


def test_compression_config_is_the_older_name():
    values = {key: value for key, value in PACKED.items() if key != "quant_method"}
    assert parse({"compression_config": values}) == recipe(**PACKED)


@pytest.mark.parametrize(("name", "settings"), [("quantize_config.json", GPTQ), ("quant_config.json", AWQ)])
def test_it_may_be_in_a_file_of_its_own(tmp_path, name, settings):
    side = {key: value for key, value in settings.items() if key != "quant_method"}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert load_config(tmp_path).quantization is None
    (tmp_path / name).write_text(json.dumps(side))
    assert load_config(tmp_path).quantization == recipe(**settings)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": W8A8}))
    assert load_config(tmp_path).quantization == recipe(**W8A8)


def group_of(settings, **changes):
    (group,) = settings["config_groups"].values()
    return {**settings, "config_groups": {"group_0": {**group, **changes}}}


def weights_of(**changes):
    (group,) = PACKED["config_groups"].values()
    return group_of(PACKED, weights={**group["weights"], **changes})


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        ({"quant_method": "fbgemm_fp8"}, "quant_method", "'fbgemm_fp8'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method", "'bitsandbytes'"),
        ({"quant_method": "hqq"}, "quant_method", "'hqq'"),
        ({"quant_method": "marlin"}, "quant_method", "'marlin'"),
        ({"quant_method": "auto-round", "bits": 4}, "quant_method", "'auto-round'"),
        ({"bits": 4}, "quant_method", "None"),
        ({**AWQ, "bits": 3}, "bits", "3"),
        ({**AWQ, "bits": 8}, "bits", "8"),
        ({**AWQ, "version": "gemv"}, "version", "'gemv'"),
        ({**AWQ, "format": "marlin"}, "format", "'marlin'"),
        ({**AWQ, "group_size": 48}, "group_size", "48"),
        ({**AWQ, "group_size": 0}, "group_size", "0"),
        ({**AWQ, "group_size": True}, "group_size", "True"),
        ({**AWQ, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert", "'lm_head'"),
        ({**GPTQ, "bits": 3}, "bits", "3"),
        ({**GPTQ, "bits": 2}, "bits", "2"),
        ({**GPTQ, "bits": "4"}, "bits", "'4'"),
        ({**GPTQ, "group_size": 16}, "group_size", "16"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format", "'marlin'"),
        ({**GPTQ, "checkpoint_format": "gptq", "format": "gptq_v2"}, "format", "'gptq_v2'"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format", "True"),
        ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype", "'int16'"),
        ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic", "down"),
        (compressed("float-quantized", 8), "weights.type", "'int'"),
        (compressed("nvfp4-pack-quantized", 4), "format", "'nvfp4-pack-quantized'"),
        (compressed("marlin-24", 4), "format", "'marlin-24'"),
        (compressed("pack-quantized", 3), "num_bits", "3"),
        (compressed("int-quantized", 4), "num_bits", "4"),
        ({**PACKED, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme", "num_bits"),
        ({**PACKED, "quantization_status": "frozen"}, "quantization_status", "'frozen'"),
        ({**PACKED, "sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config", "sparse-bitmask"),
        ({**PACKED, "config_groups": {"a": {}, "b": {}}}, "config_groups", "['a', 'b']"),
        ({**PACKED, "config_groups": None}, "config_groups", "None"),
        ({**PACKED, "ignore": [1]}, "ignore", "[1]"),
        (group_of(PACKED, targets=["re:.*mlp.*"]), "targets", "re:.*mlp.*"),
        (group_of(PACKED, output_activations=TOKENS), "output_activations", "token"),
        (group_of(PACKED, format="naive-quantized"), "format", "'naive-quantized'"),
        (group_of(W8A8, input_activations={**TOKENS, "dynamic": False}), "input_activations.dynamic", "False"),
        (group_of(W8A8, input_activations={**TOKENS, "strategy": "tensor"}), "input_activations.strategy", "'tensor'"),
        (group_of(W8A8, input_activations={**TOKENS, "symmetric": False}), "input_activations.symmetric", "False"),
        (group_of(W8A8, input_activations={**TOKENS, "type": "float"}), "input_activations.type", "'float'"),
        (weights_of(strategy="tensor"), "strategy", "'tensor'"),
        (weights_of(strategy="block", block_structure=[128, 128]), "block_structure", "[128, 128]"),
        (weights_of(type="float"), "type", "'float'"),
        (weights_of(dynamic=True), "dynamic", "True"),
        (weights_of(group_size=40), "group_size", "40"),
    ],
    ids=str,
)
def test_refusals_name_the_key_the_value_and_the_way_out(settings, key, value):
    with pytest.raises(ConfigError) as caught:
        recipe(**settings)
    assert key in str(caught.value)
    assert value in str(caught.value)
    assert "--quantization" in str(caught.value.info.hint) or "must be" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"quant_method": "gptq"}, "quantization_config.bits is missing"),
        ({**AWQ, "zero_point": "yes"}, "quantization_config.zero_point is 'yes', must be true or false"),
        ({**GPTQ, "sym": 1}, "quantization_config.sym is 1, must be true or false"),
        ({**GPTQ, "desc_act": "no"}, "quantization_config.desc_act is 'no'"),
    ],
)
def test_values_of_another_kind(settings, told):
    with pytest.raises(ConfigError, match=told):
        recipe(**settings)


@pytest.mark.parametrize("value", ["gptq", 4, ["awq"]])
def test_no_object(value):
    with pytest.raises(ConfigError, match="quant_method"):
        parse({"quantization_config": value})


@pytest.mark.parametrize("pattern", ["re:(", "re:(([a-z._0-9])+)+!", "re:(a*)*b", "re:" + "a" * 600])
def test_patterns_that_are_none_or_take_for_ever_are_refused(pattern):
    fields = Fields({"ignore": ["lm_head", pattern]}, "quantization_config.")
    with pytest.raises(ConfigError, match=r"quantization_config\.ignore"):
        patterns(fields, "ignore")


def test_patterns_that_people_use_are_taken():
    used = (
        "re:.*lm_head",
        "re:vision_tower.*",
        r"re:.*\.mlp\.gate$",
        r"re:model\.layers\.(1|2)\..*",
        "re:[a-z]+[0-9]{1,3}",
    )
    assert patterns(Fields({"ignore": list(used)}, ""), "ignore") == used
