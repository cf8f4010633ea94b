"""Stacks: weights of different schemes and orders of columns, one below the other, taken for one weight."""

import gc
from itertools import pairwise

import pytest
import torch
from integers import inputs, rows_of

from splittime.core.errors import ConfigError
from splittime.kernels.api import AttentionBatch, KvShape, LayerKv, LinearShape, NotFused, WeightScheme
from splittime.kernels.choose import make_backend
from splittime.kernels.compose import ComposedLayer
from splittime.kernels.layer import (
    AttentionSpec,
    AttentionWeights,
    LayerSpec,
    LayerWeights,
    MlpSpec,
    MlpWeights,
    NormSpec,
    RopeSpec,
)

IN = 96
SCHEMES = [
    WeightScheme("int4", 32, has_minima=True),
    WeightScheme("int8", 16),
    WeightScheme("int8"),
    WeightScheme("bfloat16"),
    WeightScheme("int4", 32, has_zeros=True),
]


def weight_of(ops, scheme, rows, columns=IN, order=None, seed=0):
    if scheme.name == "bfloat16":
        return ops.pack_linear([inputs(rows, columns, seed)], torch.ones(rows), scheme)
    given = rows_of(scheme, rows, columns, seed)
    return ops.pack_rounded([given], LinearShape(rows, columns, torch.linspace(-1, 1, rows), scheme, order))


def parts_of(ops):
    """Of rows that are no whole panels, in orders of their own."""
    orders = [torch.randperm(IN, generator=torch.Generator().manual_seed(seed)) for seed in range(len(SCHEMES))]
    sizes = (16, 7, 33, 20, 1)
    return [
        weight_of(ops, scheme, rows, order=order) for scheme, rows, order in zip(SCHEMES, sizes, orders, strict=True)
    ]


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_a_stack_is_its_parts_side_by_side_to_the_last_bit(ops, tokens):
    parts, x = parts_of(ops), inputs(tokens, IN)
    residual = inputs(tokens, 77, 5)
    want = torch.cat([ops.linear(x, part) for part in parts], dim=1)
    assert torch.equal(ops.linear(x, ops.stack_linear(parts)), want)
    begins = [0, 16, 23, 56, 76, 77]
    added = [
        ops.linear(x, part, residual[:, begin:end].clone())
        for part, (begin, end) in zip(parts, pairwise(begins), strict=True)
    ]
    got = ops.linear(x, ops.stack_linear(parts), residual.clone())
    torch.testing.assert_close(got, torch.cat(added, dim=1), rtol=1e-5, atol=1e-4)
    nested = ops.stack_linear([ops.stack_linear(parts[:2]), *parts[2:]])
    assert torch.equal(ops.linear(x, nested), want)


def test_a_stack_keeps_its_parts_alive(ops):
    x = inputs(3, IN)
    want = torch.cat([ops.linear(x, part) for part in parts_of(ops)], dim=1)
    stack = ops.stack_linear(parts_of(ops))
    gc.collect()
    others = [parts_of(ops) for _ in range(3)]  # where freed memory would be used again
    assert torch.equal(ops.linear(x, stack), want)
    del others


def test_parts_of_other_columns_are_refused(native):
    ops = make_backend("native", torch.float32)
    with pytest.raises(ConfigError, match=r"a stack of weights of \[96, 128\] columns"):
        ops.stack_linear([weight_of(ops, SCHEMES[0], 16), weight_of(ops, SCHEMES[0], 16, 128)])


SHAPE = KvShape(num_blocks=4, block_size=16, num_kv_heads=2, head_dim=16)
HEADS, INNER = 4, 160


def layer_of(ops):
    """As llama.cpp's Q4_K_M may be: v in other bits than q and k, down of blocks, all in some order."""
    order = torch.randperm(IN, generator=torch.Generator().manual_seed(7))
    q, k = (weight_of(ops, SCHEMES[0], rows, order=order, seed=rows) for rows in (64, 32))
    qkv = ops.stack_linear([q, k, weight_of(ops, SCHEMES[1], 32, seed=9)])
    gate_up = ops.stack_linear([weight_of(ops, SCHEMES[4], INNER, order=order), weight_of(ops, SCHEMES[2], INNER)])
    down = ops.stack_linear([weight_of(ops, SCHEMES[1], 40, INNER), weight_of(ops, SCHEMES[0], IN - 40, INNER)])
    norm = ops.pack_norm(torch.rand(IN, generator=torch.Generator().manual_seed(8)) + 0.5, 1e-5)
    spec = AttentionSpec(HEADS, SHAPE.num_kv_heads, SHAPE.head_dim, RopeSpec("default", 1e4))
    mixer = AttentionWeights(spec, qkv, weight_of(ops, SCHEMES[1], IN, 64), None)
    mlp = MlpWeights(MlpSpec(INNER), gate_up, down)
    return LayerWeights(LayerSpec(NormSpec(1e-5), spec, mlp.spec), norm, mixer, norm, mlp)


def store():
    return LayerKv(torch.zeros(5, 2, 2, SHAPE.block_size * SHAPE.head_dim), None)


@pytest.mark.parametrize("tokens", [1, 9])
def test_a_layer_of_stacks_is_fused_to_the_last_bit(native, tokens):
    ops = make_backend("native", torch.float32)
    weights = layer_of(ops)
    layer, fused = ComposedLayer(ops, weights, "to compare"), ops.fuse(weights)
    assert not isinstance(fused, NotFused)
    batch = AttentionBatch(
        query_begins=[0, tokens],
        context_lens=[tokens],
        block_tables=torch.tensor([[1]]),
        token_blocks=torch.full((tokens,), 1),
        token_offsets=torch.arange(tokens),
        num_decode_rows=int(tokens == 1),
    )
    plan = ops.plan_attention(batch, SHAPE, None)
    angles = torch.linspace(0, 3, tokens * SHAPE.head_dim // 2).view(tokens, -1)
    turns, hidden = torch.polar(torch.ones_like(angles), angles), inputs(tokens, IN)
    want = layer(hidden.clone(), turns, store(), plan)
    for _ in range(2):
        assert torch.equal(fused(hidden.clone(), turns, store(), plan), want)
    assert not torch.equal(want, hidden)
