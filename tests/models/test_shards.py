"""How weights are cut for ranks: every part is the slice that it says it is, for floats and for stored integers; what
cannot be cut is refused by name."""

import dataclasses

import pytest
import stored_layouts as layouts
import torch

from splittime.core.errors import ConfigError
from splittime.kernels import rounded
from splittime.kernels.api import LinearShape, RoundedRows, WeightScheme
from splittime.models.config import load_config, parse_config
from splittime.models.quant.plan import choose
from splittime.models.weights import keeping
from splittime.models.weights.cache import open_cache
from splittime.models.weights.checkpoint import Checkpoint
from splittime.models.weights.shards import CUTS, ColumnsOf, CutSource, bounds, check, own_config, widest


@dataclasses.dataclass
class Rank:
    """Of these a source needs no more than the numbers."""

    index: int
    count: int


MODEL = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
}


@pytest.mark.parametrize(("total", "count"), [(97, 2), (10, 4), (3, 3), (128256, 8)])
def test_parts_are_one_after_another_and_nearly_equal(total, count):
    parts = [bounds(total, index, count) for index in range(count)]
    assert [place for part in parts for place in range(*part)] == list(range(total))
    sizes = {end - begin for begin, end in parts}
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == widest(total, count)


@pytest.mark.parametrize(
    ("changes", "count", "name"),
    [
        ({}, 3, "num_attention_heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96}, 6, "num_key_value_heads"),
        ({"intermediate_size": 98}, 4, "experts' intermediate_size"),
        ({"architectures": ["LlamaForCausalLM"], "intermediate_size": 98}, 4, "intermediate_size"),
        ({"vocab_size": 1}, 2, "vocab_size"),
    ],
)
def test_a_number_that_does_not_divide_is_refused_by_name(changes, count, name):
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is {count}, but the model's {name}") as caught:
        check(parse_config({**MODEL, **changes}), count)
    assert caught.value.info.param == "tensor_parallel_size"


def test_layers_that_keep_states_are_not_shared():
    changes = {"architectures": ["Qwen3_5ForCausalLM"], "full_attention_interval": 2, "num_hidden_layers": 2}
    with pytest.raises(ConfigError, match="but the model's layers keep states, which ranks do not share"):
        check(parse_config({**MODEL, **changes}), 2)


@pytest.mark.parametrize(("count", "kv_heads"), [(2, 2), (4, 1), (8, 1)])
def test_a_rank_is_told_of_its_part(count, kv_heads):
    own = own_config(parse_config(MODEL), Rank(0, count))
    mixer, experts = own.layers[0].mixer, own.layers[0].feed_forward
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (8 // count, kv_heads, 8)
    assert experts.expert.inner == 96 // count
    assert (own.vocab_size, own.hidden_size) == (100, 64)


def test_every_linear_module_has_a_cut():
    names = {f"{kind}_proj" for kind in ("q", "k", "v", "o", "gate", "up", "down", "c")}
    names |= {"w1", "w2", "w3", "c_fc", "output_linear", "lm_head", "embed_tokens", "sinks"}
    assert names == set(CUTS)


# ---- parts of a stored checkpoint


class Stepped:
    """Two rows of 512 columns as GGUF's Q6_K has them; the second 256 have other steps."""

    out_features, in_features, columns, scheme = 2, 512, None, WeightScheme("int8", 16, bits=6)

    def rows(self, begin, end):
        steps = torch.tensor([[[1.0, 2.0]]] * 2)[begin:end]
        scales = steps[:, 0].repeat_interleave(16, 1)
        return RoundedRows(torch.ones(end - begin, 512, dtype=torch.int8), scales, steps=steps)


@pytest.mark.parametrize(("part", "bits", "steps"), [((0, 256), 6, [1]), ((256, 512), 6, [2]), ((128, 512), 0, None)])
def test_a_part_has_the_steps_of_its_columns(part, bits, steps):
    cut = ColumnsOf("down_proj", Stepped(), *part)
    found = cut.rows(0, 2)
    assert cut.scheme.bits == bits
    assert (None if found.steps is None else found.steps[1, 0].tolist()) == steps
    assert list(rounded.checked([found], LinearShape(2, part[1] - part[0], None, cut.scheme)))


HEADS = 4
FORMATS = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, layouts.awq),
    "whole-rows": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": False, "desc_act": False},
        layouts.gptq,
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}, layouts.gptq),
}
SHAPES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": HEADS, "num_key_value_heads": 2}


@pytest.fixture(scope="module", params=["plain", *FORMATS])
def stored(request, tmp_path_factory):
    """(folder, the floats that it stands for by name)."""
    folder = tmp_path_factory.mktemp(request.param)
    recipe, write = FORMATS.get(request.param, FORMATS["awq"])

    def make(module, num_out, num_in):
        zeros = (100, 140) if recipe["bits"] == 8 else (1, 15)
        drawn = layouts.draw(num_out, num_in, recipe["bits"], recipe["group_size"], zeros=zeros, seed=module)
        return drawn, write(drawn)

    layouts.write(folder, recipe, make, num_hidden_layers=1, **SHAPES)
    exact = folder / "plain"
    values = {name: Checkpoint(exact).take(name, *shape) for name, shape in _shapes(exact).items()}
    return (exact if request.param == "plain" else folder), values


def _shapes(folder):
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def source_of(folder, index, count):
    config = load_config(folder)
    return CutSource(Checkpoint(folder, config.quantization), config, Rank(index, count))


def floats(weight):
    """What a weight stands for, read in two pieces."""
    if isinstance(weight, torch.Tensor):
        return weight
    half = weight.out_features // 2
    pieces = [weight.rows(0, half), weight.rows(half, weight.out_features)]
    return torch.cat([_values(piece, weight) for piece in pieces])


def _values(piece, weight):
    wide = weight.scheme.group or weight.in_features

    def spread(one):
        return one.repeat_interleave(wide, 1)[:, : weight.in_features]

    less = 0 if piece.zeros is None else spread(piece.zeros.short())
    values = spread(piece.scales) * (piece.integers - less)
    return values if piece.minima is None else values - spread(piece.minima)


LAYER = "model.layers.0."
ROWS = {"self_attn.q_proj": 128, "self_attn.v_proj": 64, "mlp.gate_proj": 192}
COLUMNS = {"self_attn.o_proj": 128, "mlp.down_proj": 192}


@pytest.mark.parametrize("index", [0, 1])
def test_parts_are_slices(stored, index):
    folder, values = stored
    source = source_of(folder, index, 2)
    for name, rows in ROWS.items():
        whole = values[f"{LAYER}{name}.weight"]
        got = source.take_linear(LAYER + name, rows // 2, 128)
        torch.testing.assert_close(floats(got), whole[rows // 2 * index : rows // 2 * (index + 1)])
        source.release(got)
    for name, columns in COLUMNS.items():
        whole = values[f"{LAYER}{name}.weight"]
        got = source.take_linear(LAYER + name, 128, columns // 2)
        torch.testing.assert_close(floats(got), whole[:, columns // 2 * index : columns // 2 * (index + 1)])
        source.release(got)
    begin, end = bounds(64, index, 2)
    assert torch.equal(source.take_linear("lm_head", 64, 128), values["lm_head.weight"][begin:end])


def test_keys_are_held_by_several_ranks(stored):
    """Of two KV heads and four ranks."""
    folder, values = stored
    whole = values[f"{LAYER}self_attn.k_proj.weight"]
    for index in range(4):
        got = source_of(folder, index, 4).take_linear(f"{LAYER}self_attn.k_proj", 32, 128)
        begin = 32 * (index // 2)
        torch.testing.assert_close(floats(got), whole[begin : begin + 32])


def made(folder, recipe, write, **changes):
    def make(module, num_out, num_in):
        drawn = layouts.draw(num_out, num_in, 4, recipe["group_size"], zeros=(1, 15), act_order=recipe.get("desc_act"))
        return drawn, write(drawn)

    layouts.write(folder, recipe, make, num_hidden_layers=1, **{**SHAPES, **changes})
    return source_of(folder, 0, 2)


def test_a_group_is_not_cut_through(tmp_path):
    source = made(tmp_path, {**FORMATS["awq"][0], "group_size": 64}, layouts.awq)
    source.take_linear(f"{LAYER}self_attn.o_proj", 128, 64)
    with pytest.raises(ConfigError, match=r"mlp.down_proj has groups of 64 columns; a rank's part \[0, 96\) cuts"):
        source.take_linear(f"{LAYER}mlp.down_proj", 128, 96)


def test_act_order_is_cut_by_rows_and_not_by_columns(tmp_path):
    source = made(tmp_path, {**FORMATS["gptq"][0], "desc_act": True}, layouts.gptq)
    assert source.take_linear(f"{LAYER}mlp.up_proj", 96, 128).columns is not None
    with pytest.raises(ConfigError, match="down_proj are in act-order"):
        source.take_linear(f"{LAYER}mlp.down_proj", 128, 96)


class Spy:
    """A source of one tensor."""

    recipe, num_parameters = "", 0

    def __init__(self, tensor):
        self.tensor, self.released = tensor, []

    def take(self, name, *shape):
        assert shape == tuple(self.tensor.shape)
        return self.tensor

    take_linear = take

    def release(self, read):
        self.released.append(read)


def spied(tensor, index=1):
    spy = Spy(tensor)
    return spy, CutSource(spy, parse_config(MODEL), Rank(index, 2))


def test_whole_rows_are_let_go_of():
    whole = torch.arange(60.0).view(6, 10)[1:]
    spy, source = spied(whole)
    part = source.take_linear("x.o_proj", 5, 5)
    source.release(part[1:3])
    assert torch.equal(spy.released[0], whole[1:3])
    assert spy.released[0].data_ptr() == whole[1:3].data_ptr()


def test_a_bias_after_a_sum_is_the_first_rank_s():
    whole = torch.arange(6.0)
    assert torch.equal(spied(whole, 0)[1].take("x.o_proj.bias", 6), whole)
    assert torch.equal(spied(whole, 1)[1].take("x.o_proj.bias", 6), torch.zeros(6))
    assert torch.equal(spied(whole, 1)[1].take("x.q_proj.bias", 3), whole[3:])
    assert torch.equal(spied(whole, 1)[1].take("x.input_layernorm.weight", 6), whole)


def test_packed_weights_of_one_rank_are_no_other_s(stored, tmp_path):
    folder, _ = stored
    config = load_config(folder)
    plan = choose("int8", "float32")
    for source in (source_of(folder, 0, 2), source_of(folder, 1, 2), Checkpoint(folder, config.quantization)):
        cache = open_cache(tmp_path / "packed", source, config, plan)
        assert cache is not None
        cache.close()
        keeping.finish()
    assert len(list((tmp_path / "packed").glob("*.packed"))) == 3
