"""Norm, SwiGLU, rotary embedding with the write into the store, and the finite check, beside ReferenceOps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.kernels import api
from splittime.kernels.reference import rounding
from splittime.kernels.reference.ops import ReferenceNorm, ReferenceOps, ReferencePlan

pytest.importorskip("triton")

from splittime.kernels.triton import elementwise, rotary
from splittime.kernels.triton.device import device
from splittime.kernels.triton.tiles import add_parts

pytestmark = pytest.mark.sample(5)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ULPS = {torch.float32: 4e-7, torch.float16: 2**-10, torch.bfloat16: 2**-7}  # of each dtype: one, relative
DEVICE = device()


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got, want, ulps=2, of=1 / 8):
    """Within so many units in the last place, of the value or of `of` where that is more."""
    torch.testing.assert_close(got.cpu(), want, rtol=ulps * ULPS[want.dtype], atol=ulps * ULPS[want.dtype] * of)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (3, 7), (9, 64), (2, 1000), (1, 4097)], ids=str)
def test_rms_norm(sizes, dtype):
    x, weight = randn(*sizes, dtype=dtype) * 3, randn(sizes[1], seed=1, dtype=dtype)
    for eps in (1e-6, 0.5):
        want = ReferenceOps(dtype).rms_norm(x, ReferenceNorm(weight, eps))
        packed = elementwise.pack(weight.to(DEVICE), eps)
        got = elementwise.rms_norm(x.to(DEVICE), packed)
        assert_close(got, want)
        assert torch.equal(elementwise.rms_norm(x[-1:].to(DEVICE), packed)[0], got[-1])


def test_rms_norm_of_zeros_and_of_no_lines():
    packed = elementwise.pack(torch.ones(40, device=DEVICE), 1e-6)
    assert not elementwise.rms_norm(torch.zeros(3, 40, device=DEVICE), packed).any()
    assert elementwise.rms_norm(torch.zeros(0, 40, device=DEVICE), packed).shape == (0, 40)


def test_each_head_has_its_own_scale_and_a_view_is_read_as_it_lies():
    x, weight = randn(4, 9, 5, 80)[:, 2:8].transpose(1, 2), randn(6, 80, seed=2)
    got = elementwise.rms_norm(x.to(DEVICE), elementwise.pack(weight.to(DEVICE), 1e-5))
    assert_close(got, ReferenceOps(torch.float32).rms_norm(x, ReferenceNorm(weight, 1e-5)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_shared_sums_are_added_and_normed_as_one_after_the_other(dtype, has_bias):
    parts = randn(3, 5, 200).to(DEVICE)
    residual, bias = randn(5, 200, seed=1, dtype=dtype).to(DEVICE), randn(200, seed=2, dtype=dtype).to(DEVICE)
    packed = elementwise.pack(randn(200, seed=3, dtype=dtype).to(DEVICE), 1e-6)
    want, total = torch.empty_like(residual), torch.empty_like(residual)
    add_parts(parts, bias if has_bias else None, residual, want)
    got = elementwise.add_parts_rms_norm(parts, bias if has_bias else None, residual, packed, total)
    assert torch.equal(total, want)
    assert torch.equal(got, elementwise.rms_norm(want, packed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (3, 7), (2, 1025), (5, 64)], ids=str)
def test_silu_mul(sizes, dtype):
    gate_up = randn(sizes[0], 2 * sizes[1], dtype=dtype) * 4
    assert_close(elementwise.silu_mul(gate_up.to(DEVICE)), ReferenceOps(dtype).silu_mul(gate_up), ulps=4)


def test_silu_over_its_whole_range():
    gate = torch.tensor([-3e38, -200.0, -88.5, -87.0, -1e-30, 0.0, 1e-30, 88.0, 3e38, float("inf"), float("nan")])
    got = elementwise.silu_mul(torch.cat((gate, torch.ones_like(gate)))[None].to(DEVICE))[0].cpu()
    want = (gate.double() * torch.sigmoid(gate.double())).float()
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-36, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_finite(dtype):
    x = randn(7, 2500, dtype=dtype)
    x[1, 0], x[2, 2499], x[4, 1300] = float("nan"), float("inf"), -float("inf")
    x[5] = torch.finfo(dtype).max  # whose sum is not finite, but which is
    want = [True, False, False, True, False, True, True]
    assert elementwise.finite(x.to(DEVICE)).tolist() == want
    assert elementwise.finite(x.to(DEVICE)[:, :2499])[2]
    assert elementwise.finite(x[:0].to(DEVICE)).tolist() == []


def a_write(tokens, dim, block_size, dtype, heads=3, kv_heads=2):
    """-> shape, plan of ReferenceOps, qkv, table of turns, positions, places of the tokens."""
    shape = api.KvShape(4, block_size, kv_heads, dim)
    slots = torch.randperm(4 * block_size, generator=torch.Generator().manual_seed(3))[:tokens]
    places = slots // block_size, slots % block_size
    batch = api.AttentionBatch([0, tokens], [tokens], torch.zeros(1, 1), *places, 0)
    angles = randn(50, dim // 2, seed=2) * 3
    positions = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(4))
    table = torch.polar(torch.ones_like(angles), angles)
    plan = ReferencePlan(batch, shape, None)
    return shape, plan, randn(tokens, heads + 2 * kv_heads, dim, dtype=dtype), table, positions, places


def new_store(shape, dtype):
    tiles = (shape.num_blocks + 1, 2, shape.num_kv_heads)
    has_scales = dtype in (torch.int8, torch.float8_e4m3fn)
    scales = torch.zeros(*tiles, shape.block_size, device=DEVICE) if has_scales else None
    data = torch.zeros(*tiles, shape.block_size * shape.head_dim, dtype=dtype, device=DEVICE)
    return api.LayerKv(data, scales)


def run_rope_write(shape, qkv, packed, table, positions, places, store, is_gathered=False):
    got = qkv.to(DEVICE).clone()
    turns, chosen = (table[positions], None) if is_gathered else (table, positions.to(DEVICE))
    blocks, offsets = (place.to(DEVICE) for place in places)
    rotary.rope_write(got, packed, turns.to(DEVICE), store, shape, blocks, offsets, chosen)
    return got.cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "qk_norm"])
@pytest.mark.parametrize("dim", [16, 80, 96, 256])
def test_rope_write(dim, has_norm, dtype):
    shape, plan, qkv, table, positions, places = a_write(3, dim, 6, dtype)
    weight, reference = randn(5, dim, seed=4, dtype=dtype), ReferenceOps(dtype)
    want, store = qkv.clone(), new_store(shape, dtype)
    reference.rope_write(
        want, ReferenceNorm(weight, 1e-3) if has_norm else None, table[positions], store_on_cpu(store), plan
    )
    packed = elementwise.pack(weight.to(DEVICE), 1e-3) if has_norm else None
    got = run_rope_write(shape, qkv, packed, table, positions, places, store)
    assert_close(got, want, ulps=2, of=4)  # a turned element is a difference of two that may be as large as 4
    assert_written(store, got, shape, places)
    again = run_rope_write(shape, qkv, packed, table, positions, places, new_store(shape, dtype), is_gathered=True)
    assert torch.equal(again, got)


def store_on_cpu(store):
    return api.LayerKv(torch.zeros_like(store.data, device="cpu"), None)


def assert_written(store, qkv, shape, places):
    """The store holds the keys and values of qkv at their places, to the bit, and zeros elsewhere."""
    rows = qkv[:, -2 * shape.num_kv_heads :].unflatten(1, (2, shape.num_kv_heads))
    tiles = store.data.cpu().unflatten(-1, (shape.block_size, shape.head_dim)).clone()
    at = (places[0], slice(None), slice(None), places[1])
    assert torch.equal(tiles[at], rows.to(tiles.dtype))
    tiles[at] = 0
    assert not tiles.any()


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [80, 128])
def test_rope_write_rounds_what_it_keeps(dim, kv_dtype):
    shape, _, qkv, table, positions, places = a_write(5, dim, 6, torch.float32)
    store = new_store(shape, kv_dtype)
    got = run_rope_write(shape, qkv, None, table, positions, places, store)
    rows = got[:, -4:].unflatten(1, (2, 2))
    tiles = store.data.cpu().unflatten(-1, (shape.block_size, dim))[places[0], :, :, places[1]]
    if kv_dtype == torch.int8:
        values, scales = rounding.quantize_kv(rows)
        assert torch.equal(tiles, values)
        assert torch.equal(store.scales.cpu()[places[0], :, :, places[1]], scales)
    elif store.scales is not None:
        scales = store.scales.cpu()[places[0], :, :, places[1]][..., None]
        torch.testing.assert_close(scales[..., 0], rows.abs().amax(-1) / 448, rtol=1e-6, atol=0)
        assert torch.equal(tiles.float(), (rows / scales).to(kv_dtype).float())
    else:
        torch.testing.assert_close(tiles.float(), rows, rtol=2**-7, atol=1e-30)


def test_a_token_whose_block_is_negative_is_written_nowhere():
    shape, _, qkv, table, positions, (blocks, offsets) = a_write(3, 64, 4, torch.float32)
    blocks[1] = -1
    store = new_store(shape, torch.float32)
    got = run_rope_write(shape, qkv, None, table, positions, (blocks, offsets), store)
    kept = torch.tensor([0, 2])
    assert_written(store, got[kept], shape, (blocks[kept], offsets[kept]))


@settings(max_examples=4)
@given(st.integers(1, 8), st.integers(1, 40), st.sampled_from([16, 40, 80]))
def test_turning_keeps_lengths_and_a_token_does_not_see_its_batch(tokens, lines, dim):
    kv_heads = max(1, lines // 4)
    shape, _, qkv, table, positions, places = a_write(tokens, dim, 3, torch.float32, heads=lines, kv_heads=kv_heads)
    got = run_rope_write(shape, qkv, None, table, positions, places, new_store(shape, torch.float32))
    torch.testing.assert_close(got.norm(dim=-1), qkv.norm(dim=-1), rtol=1e-5, atol=1e-6)
    alone = (qkv[-1:], None, table, positions[-1:], (places[0][-1:], places[1][-1:]))
    assert torch.equal(run_rope_write(shape, *alone, new_store(shape, torch.float32))[0], got[-1])
