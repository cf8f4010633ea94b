"""Whole quantised checkpoints through the loader and the kernels: the model that they stand for, in float32, is the
oracle. Native kernels round activations to 8 bits as well, and every route does where the file says so; the others
round nothing more than the file did."""

import json

import pytest
import stored_layouts as layouts
import torch
from driving import Driver, Sequence
from listening import heard
from native_or_not import has_native_kernels
from safetensors.torch import save_file
from test_stored_formats import AWQ, GPTQ, PACKED, W8A8, compressed

from splittime.core.errors import ConfigError
from splittime.models.weights import keeping
from splittime.models.weights.formats.stored import GroupedWeight
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig

pytestmark = pytest.mark.sample(8)

PROMPT = [5, 17, 3, 42, 8, 8, 61, 20, 33, 1, 50, 12]
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
NATIVE_ERROR = 0.08  # of the logits' spread; about three times what is seen


def maker(store, per_module=False, **how):
    """Weights drawn as `how` says; per_module: each with an order of columns of its own."""

    def make(module, num_out, num_in):
        seeded = {"act_order": module} if per_module else {}
        drawn = layouts.draw(num_out, num_in, seed=module, **{**how, **seeded})
        return drawn, store(drawn)

    return make


def asymmetric(drawn):
    return layouts.compressed_packed(drawn, symmetric=False)


ACT_ORDER = {**GPTQ, "desc_act": True}
# name: (quantization_config, make, changes of the config, modules left as floats, what is told)
MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
MODELS = {
    "awq": (AWQ, maker(layouts.awq), {}, (), "awq: int4 in groups of 32, zero points; head float32"),
    "awq, tied": (AWQ, maker(layouts.awq), {"tie_word_embeddings": True}, (), "awq: int4 in groups of 32, zero points"),
    "awq, qwen3": (AWQ, maker(layouts.awq), QWEN3, (), "awq: int4 in groups of 32, zero points"),
    "awq, some left": (
        {**AWQ, "modules_to_not_convert": ["k_proj", "layers.0.mlp"]},
        maker(layouts.awq),
        {},
        ("k_proj", "layers.0.mlp"),
        "awq: float32 (",
    ),
    "gptq": (GPTQ, maker(layouts.gptq, zeros=(1, 15)), {}, (), "gptq: int4 in groups of 32, zero points"),
    "gptq, the head too": (
        GPTQ,
        maker(layouts.gptq, zeros=(1, 15)),
        {"head_is_quantised": True},
        (),
        "gptq: int4 in groups of 32, zero points",
    ),
    "gptq, zero points of 16": (GPTQ, maker(layouts.gptq, zeros=(1, 16)), {}, (), "gptq: int8 in groups of 32; head"),
    "gptq, act-order": (
        ACT_ORDER,
        maker(layouts.gptq, zeros=(1, 15), act_order=3),
        {},
        (),
        "gptq: int4 in groups of 32, zero points, act-order",
    ),
    "gptq, orders that differ": (
        ACT_ORDER,
        maker(layouts.gptq, zeros=(1, 15), per_module=True),
        QWEN3,
        (),
        "gptq: int4 in groups of 32, zero points, act-order",
    ),
    "gptq, orders that differ, biases": (
        {**ACT_ORDER, "modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj"], ["o_proj"], MLP]},
        maker(layouts.gptq, zeros=(1, 15), per_module=True),
        {"architectures": ["Qwen2ForCausalLM"]},
        ("v_proj",),
        "gptq: int4 in groups of 32, zero points, act-order (",
    ),
    "gptq, 8 bits": (
        {**GPTQ, "bits": 8},
        maker(layouts.gptq, bits=8, zeros=(1, 256)),
        {},
        (),
        "gptq: int8 in groups of 32, minima",
    ),
    "gptq, 8 bits, a row": (
        {**GPTQ, "bits": 8, "group_size": -1},
        maker(layouts.gptq, bits=8, zeros=(90, 160), group=-1),
        {},
        (),
        "gptq: int8 in groups of ",
    ),
    "gptq, experts": (
        {**GPTQ, "sym": True},
        maker(layouts.gptq, symmetric=True),
        MOE,
        (),
        "gptq: int4 in groups of 32; head float32; router float32",
    ),
    "packed": (PACKED, maker(layouts.compressed_packed, symmetric=True), {}, (), "compressed-tensors: int4 in groups"),
    "packed, asymmetric": (
        compressed("pack-quantized", 4, symmetric=False),
        maker(asymmetric, group=-1),
        {},
        (),
        "compressed-tensors: int4 in groups of 64, zero points",
    ),
    "w8a8": (
        W8A8,
        maker(layouts.compressed_int8, bits=8, symmetric=True, group=-1),
        {},
        (),
        "compressed-tensors: int8; head float32",
    ),
}


def needs(kernels):
    if kernels == "native" and not has_native_kernels():
        pytest.skip("no native kernels")


def run(folder, packed_cache="off", **settings):
    """(logits after each token of the prompt [tokens, vocab], greedy tokens, what was resolved)."""
    settings = {"kernels": "torch", "dtype": "float32", **settings}
    config = RunnerConfig(model_path=str(folder), packed_cache=str(packed_cache), max_num_seqs=2, **settings)
    runner = load_torch_runner(config)
    seen = heard(runner)
    tokens = Driver(runner).generate(Sequence("a", PROMPT), 6, chunks=[7])
    keeping.finish()
    return torch.cat(seen)[: len(PROMPT)], tokens, runner.resolved


@pytest.mark.parametrize("kernels", ["torch", "native", "reference"])
@pytest.mark.parametrize("name", MODELS)
def test_a_quantised_model_is_the_model_that_it_stands_for(tmp_path, name, kernels):
    needs(kernels)
    quantization, make, changes, left, told = MODELS[name]
    layouts.write(tmp_path, quantization, make, left, **changes)
    got, tokens, resolved = run(tmp_path, kernels=kernels)
    want, wanted_tokens, plain = run(tmp_path / "plain")
    spread = float(want.std())
    worst = float((got - want).abs().max()) / spread
    if kernels == "native" or name == "w8a8":
        assert 1e-4 < worst < NATIVE_ERROR
    else:
        assert worst < (1e-2 if "8 bits" in name else 1e-4)  # minima are float16
        assert tokens == wanted_tokens
    assert resolved.weights.startswith(told)
    assert resolved.num_parameters == plain.num_parameters
    assert resolved.weights_bytes < plain.weights_bytes


@pytest.mark.parametrize("name", ["awq", "awq, some left", "gptq, orders that differ", "gptq, 8 bits", "w8a8"])
def test_the_second_start_reads_what_the_first_packed(tmp_path, name, monkeypatch):
    needs("native")
    quantization, make, changes, left, _ = MODELS[name]
    layouts.write(tmp_path / "model", quantization, make, left, **changes)
    first, _, wrote = run(tmp_path / "model", tmp_path / "cache", kernels="native")
    monkeypatch.setattr("splittime.kernels.native.ops.NativeOps.pack_rounded", lambda *_: pytest.fail("packed again"))
    second, _, read = run(tmp_path / "model", tmp_path / "cache", kernels="native")
    assert torch.equal(first, second)
    assert wrote.packed_cache.startswith("packed")
    assert read.packed_cache.startswith("mapped")
    assert (wrote.weights, wrote.weights_bytes) == (read.weights, read.weights_bytes)


def test_what_the_config_says_of_the_numbers_is_part_of_the_caches_name(tmp_path):
    """The same safetensors, once with zero points less one, once as they are."""
    needs("native")
    layouts.write(tmp_path / "model", GPTQ, maker(layouts.gptq, zeros=(1, 15)))
    first = run(tmp_path / "model", tmp_path / "cache", kernels="native")[0]
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    second, _, resolved = run(tmp_path / "model", tmp_path / "cache", kernels="native")
    assert resolved.packed_cache.startswith("packed")
    assert not torch.equal(first, second)
    assert sorted(path.name[:5] for path in (tmp_path / "cache").glob("*.packed")) == ["gptq-", "gptq-"]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_to_round_integers_again_is_refused(tmp_path, quantization):
    for name in ("awq", "w8a8"):
        layouts.write(tmp_path / name, *MODELS[name][:2])
        with pytest.raises(ConfigError, match=r"already quantised \((awq, 4|compressed-tensors, 8) bits\)"):
            run(tmp_path / name, quantization=quantization)


def test_the_format_that_was_insisted_on_is_the_one_that_is_read(tmp_path):
    layouts.write(tmp_path, *MODELS["awq"][:2])
    assert run(tmp_path, load_format="safetensors")[2].weights.startswith("awq")
    with pytest.raises(ConfigError, match="load_format is 'gguf'"):
        run(tmp_path, load_format="gguf")


def test_a_tensor_that_is_missing_or_too_much_is_named_and_no_cache_is_left(tmp_path):
    tensors = layouts.write(tmp_path, *MODELS["awq"][:2])
    path, module = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj"
    save_file({name: tensor for name, tensor in tensors.items() if name != f"{module}.scales"}, path)
    with pytest.raises(ConfigError, match=rf"{module}\.scales of shape \[2, 96\] is missing"):
        run(tmp_path, tmp_path / "cache")
    save_file({**tensors, f"{module}.g_idx": torch.zeros(64, dtype=torch.int32)}, path)
    assert run(tmp_path)[2].unused_tensors == (f"{module}.g_idx",)
    save_file({**tensors, f"{module}.scales": tensors[f"{module}.scales"] * float("nan")}, path)
    with pytest.raises(ConfigError, match=f"{module} has scales that are not finite"):
        run(tmp_path, tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*.packed"))


def test_progress_and_pieces(tmp_path, monkeypatch):
    """Rows asked for in many small pieces give the same weights; each layer is told of once."""
    needs("native")
    quantization, make, changes, left, _ = MODELS["gptq, act-order"]
    layouts.write(tmp_path, quantization, make, left, **changes)
    whole = run(tmp_path, kernels="native")[0]
    asked, rows = [], GroupedWeight.rows
    monkeypatch.setattr(GroupedWeight, "rows", lambda self, *span: asked.append(span) or rows(self, *span))
    monkeypatch.setattr("splittime.models.weights.packing.PIECE_BYTES", 1)
    told = []
    config = RunnerConfig(model_path=str(tmp_path), packed_cache="off", kernels="native")
    load_torch_runner(config, on_layer=lambda done, total, num_bytes: told.append((done, total)))
    assert torch.equal(run(tmp_path, kernels="native")[0], whole)
    assert told == [(1, 2), (2, 2)]
    assert max(end - begin for begin, end in asked) == 64


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_floats_where_the_config_promises_integers_are_refused(tmp_path, name):
    tensors, module = layouts.write(tmp_path, *MODELS[name][:2]), "model.layers.1.mlp.up_proj"
    kept = {key: tensor for key, tensor in tensors.items() if not key.startswith(f"{module}.")}
    save_file({**kept, f"{module}.weight": torch.ones(96, 64)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=rf"{module} is floats in the file, quantization_config says that it has 4 bits"
    ):
        run(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    every = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    way = (
        {"modules_to_not_convert": ["layers.1.mlp.up_proj"]}
        if name == "awq"
        else {"modules_in_block_to_quantize": [every]}
    )
    config["quantization_config"] |= way
    (tmp_path / "config.json").write_text(json.dumps(config))
    if name == "awq":
        run(tmp_path)
    else:
        with pytest.raises(ConfigError, match="is quantised in the file, quantization_config says that it is not"):
            run(tmp_path)
