"""How many kernels a layer's decode step is: what a small model's time on a card is made of. The guide tells them."""

import gc
from collections import Counter
from weakref import ref

import pytest

pytest.importorskip("triton")

import torch
from launches import launches

from splittime.kernels.api import KvShape, LayerKv, NotFused, WeightScheme
from splittime.kernels.compose import ComposedLayer
from splittime.kernels.layer import (
    AttentionSpec,
    AttentionWeights,
    LayerSpec,
    LayerWeights,
    MixtureSpec,
    MixtureWeights,
    MlpSpec,
    MlpWeights,
    NormSpec,
    RopeSpec,
    RouterSpec,
)
from splittime.kernels.triton import attention, integers
from splittime.kernels.triton.device import device, is_interpreted
from splittime.kernels.triton.ops import TritonOps
from splittime.kernels.triton.tiles import Tiles

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="counted in the interpreter")
WIDTH, HEADS, KV_HEADS, DIM, INNER, ROWS = 64, 4, 2, 16, 32, 3
SHAPE = KvShape(4, 16, KV_HEADS, DIM)


packed_alone: list[ref[object]] = []  # the experts of the latest mixture, each as it was packed


def layer_of(ops: TritonOps, scheme: WeightScheme, num_experts: int = 0):
    def linear(out: int, columns: int):
        return ops.pack_linear([torch.randn(out, columns)], None, scheme)

    def mlp() -> MlpWeights:
        return MlpWeights(MlpSpec(INNER), linear(2 * INNER, WIDTH), linear(WIDTH, INNER))

    norm = ops.pack_norm(torch.ones(WIDTH), 1e-6)
    heads = ops.pack_norm(torch.ones(HEADS + KV_HEADS, DIM), 1e-6)
    qkv, output = linear((HEADS + 2 * KV_HEADS) * DIM, WIDTH), linear(WIDTH, HEADS * DIM)
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, RopeSpec("default", 1e4), head_norm=NormSpec(1e-6))
    mixer = AttentionWeights(spec, qkv, output, heads)
    if not num_experts:
        weights = LayerWeights(LayerSpec(NormSpec(1e-6), spec, MlpSpec(INNER)), norm, mixer, norm, mlp())
        unfused = ops.fuse(weights)
        assert isinstance(unfused, NotFused)
        return ComposedLayer(ops, weights, unfused.reason)
    router = ops.pack_linear([torch.randn(num_experts, WIDTH)], None, WeightScheme("float32"))
    chosen = RouterSpec(num_experts, 2, normalises=True)
    experts = tuple(mlp() for _ in range(num_experts))
    packed_alone[:] = [ref(one.down) for one in experts]
    mixture = MixtureWeights(chosen, router, experts)
    whole = LayerSpec(NormSpec(1e-6), spec, MixtureSpec(chosen, MlpSpec(INNER)))
    return ops.fuse(LayerWeights(whole, norm, mixer, norm, mixture))


def counted(scheme: WeightScheme, num_experts: int = 0) -> Counter[str]:
    """Of a decode step of three rows in a layer."""
    ops = TritonOps(torch.float32)
    layer, there = layer_of(ops, scheme, num_experts), device()
    numbers = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=there)
    plan = attention.PagedPlan(
        SHAPE, None, numbers, numbers[1:], numbers[:3, None], numbers[:3], numbers[:3], ROWS, max_context_tokens=16
    )
    store = LayerKv(torch.zeros(5, 2, KV_HEADS, 16 * DIM, device=there), None)
    turns = torch.ones(ROWS, DIM // 2, dtype=torch.complex64, device=there)
    hidden = torch.randn(ROWS, WIDTH, device=there)
    with launches() as found:
        layer(hidden, turns, store, plan)
    return found


def test_a_dense_layer():
    """Norm, qkv, rotary with its write, attention, output, norm, gate and up, SwiGLU, down."""
    found = counted(WeightScheme("float32"))
    assert found.total() == 9, found


def test_a_layer_of_four_bits():
    found = counted(WeightScheme("int4", 32))
    assert found.total() == 9, found


def test_shared_sums_of_the_output_are_added_by_the_norm(monkeypatch):
    """Four bits of a wide model: programs share all four products, and three need a kernel to add up what they have."""
    monkeypatch.setattr(integers, "choose", lambda num_tokens, weight, dtype: Tiles(16, 32, splits=2, num_warps=4))
    found = counted(WeightScheme("int4", 32))
    assert found["_add_parts"] == 3, found
    assert found.total() == 12, found


def test_a_mixture():
    """After the second norm: router, choice, two tables of routes, gate and up, down, sum."""
    found = counted(WeightScheme("float32"), num_experts=4)
    assert found.total() == 13, found


def test_experts_that_are_in_one_product_are_nowhere_else():
    """A mixture's weights would take twice their memory."""
    layer = layer_of(TritonOps(torch.float32), WeightScheme("int8"), 4)
    gc.collect()
    assert layer.experts.num_experts == len(packed_alone) == 4
    assert [one() for one in packed_alone] == [None] * 4
