"""A fused layer with adapters: what they add is the parts' arithmetic to the last bit, for each form of weights and
each instruction set, and rows without an adapter are those of a step without adapters."""

import pytest
import torch
from test_native_ops import HEADS, HIDDEN, INNER, SHAPE, a_store, layer_of, turns_of, weights

from splittime.kernels.api import AttentionBatch, WeightScheme
from splittime.kernels.choose import make_backend
from splittime.kernels.compose import ComposedLayer
from splittime.kernels.low_rank import LayerAdapter, LowRank, LowRankPart
from splittime.kernels.plain import PlainOps

FLOATS = [WeightScheme("float32"), WeightScheme("bfloat16"), WeightScheme("bfloat16", rounds_activations=True)]
FORMS = [*FLOATS, WeightScheme("int8"), WeightScheme("int8", 16), WeightScheme("int4", 32)]
QKV, QUERY, KV = (HEADS + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim, HEADS * SHAPE.head_dim, 2 * SHAPE.head_dim
# Tokens 0 and 1 are decodes, of token 1's request nobody knows an adapter; then prompts of 20, 3 and 4 tokens.
BEGINS = [0, 1, 2, 22, 25, 29]
TOKENS = [range(BEGINS[row], BEGINS[row + 1]) for row in range(5)]
FREE = [*TOKENS[1], *TOKENS[3]]


@pytest.fixture
def ops(native):
    return make_backend("native", torch.float32)


@pytest.fixture
def parts(ops):
    """The same operations, of which what adapters add is spelled out in torch."""
    made = make_backend("native", torch.float32)
    made.add_low_rank = lambda y, x, uses: PlainOps.add_low_rank(ops, y, x, uses)
    return made


def low_rank(ops, scheme, columns, seed, *parts):
    """parts: (begin, end, rank) each."""
    made = [
        LowRankPart(*one, ops.pack_linear([weights(one[1] - one[0], one[2], seed + at)], None, scheme))
        for at, one in enumerate(parts)
    ]
    down = weights(sum(one.rank for one in made), columns, seed + 9)
    return LowRank(ops.pack_linear([down], None, scheme), tuple(made))


def whole(ops, scheme, rank, seed):
    """An adapter of all seven projections."""
    ends = (0, QUERY, rank), (QUERY, QUERY + KV, rank), (QUERY + KV, QKV, rank)
    return LayerAdapter(
        qkv=low_rank(ops, scheme, HIDDEN, seed, *ends),
        output=low_rank(ops, scheme, QUERY, seed + 100, (0, HIDDEN, rank)),
        gate_up=low_rank(ops, scheme, HIDDEN, seed + 200, (0, INNER, rank), (INNER, 2 * INNER, rank)),
        down=low_rank(ops, scheme, INNER, seed + 300, (0, HIDDEN, rank)),
    )


def some(ops, scheme, rank, seed):
    """One of values and of up alone."""
    qkv = low_rank(ops, scheme, HIDDEN, seed, (QUERY + KV, QKV, rank))
    return LayerAdapter(qkv=qkv, gate_up=low_rank(ops, scheme, HIDDEN, seed + 200, (INNER, 2 * INNER, rank)))


def a_step():
    tables = torch.tensor([[3, 4], [7, 12], [0, 1], [2, 12], [5, 12]])
    places = [(4, 4), (7, 9), *((position // 16, position % 16) for position in range(20))]
    places += [*((2, at) for at in range(3)), *((5, at) for at in range(4))]
    blocks, offsets = (torch.tensor(mine) for mine in zip(*places, strict=True))
    return AttentionBatch(BEGINS, [21, 10, 20, 3, 4], tables, blocks, offsets, num_decode_rows=2)


def run(layer, ops, uses):
    hidden, store = weights(29, HIDDEN, 7), a_store()
    plan = ops.plan_attention(a_step(), SHAPE, None)
    return layer(hidden, turns_of(29), store, plan, uses), store


def of_rows(adapter, *rows):
    tokens = [token for row in rows for token in TOKENS[row]]
    return adapter, torch.tensor(tokens, dtype=torch.int32)


def sets_of(ops, scheme):
    """Steps of one adapter and of several, of which some cover some projections, or none; ranks of 1 to 64."""
    yield [of_rows(whole(ops, scheme, 16, 1), 0, 2)]
    yield [of_rows(some(ops, scheme, 1, 2), 0, 2)]
    yield [of_rows(whole(ops, scheme, 3, 3), 0), of_rows(some(ops, scheme, 64, 4), 2), of_rows(LayerAdapter(), 4)]
    yield [of_rows(whole(ops, scheme, 64, 5), 2), of_rows(whole(ops, scheme, 17, 6), 0, 4)]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_fused_layer_adds_what_its_parts_do(ops, parts, isa, form):
    layer = layer_of(ops, form, with_norm=False, with_bias=True)
    fused, composed = ops.fuse(layer), ComposedLayer(parts, layer, "to compare")
    free, _ = run(fused, ops, ())
    for uses in sets_of(ops, FLOATS[FORMS.index(form) % 2]):
        wanted, stores = run(composed, parts, uses)
        for _ in range(2):  # the second finds the scratch memory dirty
            found, store = run(fused, ops, uses)
            assert torch.equal(found, wanted)
        assert torch.equal(store.data, stores.data)
        assert torch.equal(found[FREE], free[FREE])
        touched = [token for one, tokens in uses if one.qkv for token in tokens.tolist()]
        assert all(not torch.equal(found[token], free[token]) for token in touched)


@pytest.mark.parametrize("scheme", FLOATS[:2], ids=str)
def test_wide_outputs_and_many_tokens_are_cut_into_items_of_the_same_bits(ops, scheme):
    """Outputs beyond an item's, in panels that are not full; adapters of more tokens than an item's."""
    wide = 1500
    made = [
        low_rank(ops, scheme, 600, seed, (0, 1037, rank), (1040, wide, rank))
        for seed, rank in ((1, 8), (2, 33), (3, 5))
    ]
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1)).int()
    uses = list(zip(made, order.split([40, 13, 17]), strict=True))
    x, y = weights(70, 600, 4), weights(70, wide, 5)
    wanted, found = y.clone(), y.clone()
    PlainOps.add_low_rank(ops, wanted, x, uses)
    ops.add_low_rank(found, x, uses)
    assert torch.equal(found, wanted)
    for low, tokens in uses:
        for token in tokens[::9].view(-1, 1):
            alone = y.clone()
            ops.add_low_rank(alone, x, [(low, token)])
            assert torch.equal(alone[token], found[token])


def test_a_rank_beyond_a_block_of_columns(ops, isa):
    """Each block is added by itself, in its order: other bits, the same number."""
    low = low_rank(ops, FLOATS[0], HIDDEN, 1, (0, 40, 300), (40, 56, 257))
    x, y = weights(7, HIDDEN, 2), weights(7, 56, 3)
    wanted, found, alone = y.clone(), y.clone(), y.clone()
    PlainOps.add_low_rank(ops, wanted, x, [(low, torch.arange(7))])
    ops.add_low_rank(found, x, [(low, torch.arange(7, dtype=torch.int32))])
    assert torch.allclose(found, wanted, atol=1e-5)
    assert (found - y).abs().min() > 1e-6
    ops.add_low_rank(alone, x, [(low, torch.tensor([5], dtype=torch.int32))])
    assert torch.equal(alone[5], found[5])


def test_an_adapters_weights_are_counted_once_a_product(ops):
    low = low_rank(ops, FLOATS[0], 600, 1, (0, 1037, 8), (1040, 1500, 8))
    before = ops.bytes_read()["weights.float32"]
    ops.add_low_rank(weights(70, 1500, 2), weights(70, 600, 3), [(low, torch.arange(70, dtype=torch.int32))])
    read = ops.bytes_read()["weights.float32"] - before
    assert read == low.down.blob.numel() + sum(part.up.blob.numel() for part in low.parts)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_many_tokens_take_no_copy_of_their_inputs(ops):
    """32 MiB of inputs, of which a thread keeps a few rows."""
    x, y = torch.ones(2048, 4096), torch.zeros(2048, 16)
    low = low_rank(ops, FLOATS[0], 4096, 1, (0, 16, 4))
    before = resident_bytes()
    ops.add_low_rank(y, x, [(low, torch.arange(2048, dtype=torch.int32))])
    assert y.abs().min() > 0
    assert resident_bytes() - before < 8 << 20
