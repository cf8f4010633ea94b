"""Native norm, gated activations, and rotary embedding with the write into the store, on every instruction set."""

import pytest
import torch
from torch import Tensor

from splittime.kernels import api
from splittime.kernels.choose import make_backend
from splittime.kernels.native.library import GELU, SILU
from splittime.kernels.reference import rounding
from splittime.kernels.reference.ops import ReferenceNorm

REFERENCE = make_backend("reference", torch.float32)
TOKENS = [1, 3, 40]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rms_norm(native, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = torch.full((len(x), weight.shape[0]), float("nan"))
    sizes = (len(x), weight.shape[0], x.data_ptr(), x.stride(0), weight.data_ptr(), eps, y.data_ptr())
    native.lib.st_rms_norm(*sizes)
    return y


def gated(native, gate_up: Tensor, activation: int = SILU) -> Tensor:
    y = torch.full((len(gate_up), gate_up.shape[1] // 2), float("nan"))
    native.lib.st_gate(len(gate_up), y.shape[1], activation, gate_up.data_ptr(), y.data_ptr())
    return y


@pytest.mark.parametrize("width", [1, 7, 8, 31, 64, 1000, 4096])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.sample(30)
def test_rms_norm(isa, tokens, width):
    x, weight = randn(tokens, width + 5)[:, :width] * 3, randn(width, seed=1)
    for eps in (1e-6, 0.5):
        got = rms_norm(isa, x, weight, eps)
        torch.testing.assert_close(got, REFERENCE.rms_norm(x, ReferenceNorm(weight, eps)), atol=1e-6, rtol=2e-6)
        assert torch.equal(rms_norm(isa, x[:1], weight, eps)[0], got[0])
    assert not rms_norm(isa, torch.zeros(1, width), weight, 1e-6).any()


@pytest.mark.parametrize("inner", [1, 7, 8, 16, 33, 5000])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.sample(30)
def test_gated_activations(isa, tokens, inner):
    gate_up = randn(tokens, 2 * inner) * 4
    for activation, wanted in ((SILU, REFERENCE.silu_mul), (GELU, REFERENCE.gelu_mul)):
        got = gated(isa, gate_up, activation)
        torch.testing.assert_close(got, wanted(gate_up), atol=2e-6, rtol=1e-6)
        assert torch.equal(gated(isa, gate_up[:1], activation)[0], got[0])


def test_gelu_is_good_where_its_tanh_is_nearly_one(isa):
    x = torch.linspace(-9, 9, 100_001)
    got = gated(isa, torch.stack((x, torch.ones_like(x))).view(1, -1), GELU)[0].double()
    wide = x.double()
    want = wide * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))
    assert ((got - want).abs() <= 2e-5 * want.abs() + 1e-37).all()


def test_the_exponential_is_good_over_its_whole_range(isa):
    """silu(x) = x / (1 + e^-x), with 1 for the other factor: below -17 that is x e^x, so the exponential shows."""
    x = torch.cat((torch.linspace(-87, 87, 100_001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 300.0, 3e38])))
    got = gated(isa, torch.stack((x, torch.ones_like(x))).view(1, -1))[0].double()
    want = x.double() * torch.sigmoid(x.double())
    assert ((got - want).abs() <= 1e-6 * want.abs()).all()


@pytest.mark.parametrize("activation", [SILU, GELU])
def test_what_is_not_finite_goes_through_and_touches_nothing_else(isa, activation):
    gate = torch.tensor([float("nan"), float("inf"), 1.0, -200.0, -3e38, 2.0, 0.5, 1.0, 3.0])
    got = gated(isa, torch.stack((gate, torch.ones_like(gate))).view(1, -1), activation)[0]
    assert got[0].isnan()
    assert got[1] == float("inf")
    assert not got[3:5].any()
    assert got[2:].isfinite().all()
    x = torch.ones(3, 40)
    x[1, 3] = float("nan")
    normed = rms_norm(isa, x, torch.ones(40), 1e-6)
    assert normed[1].isnan().all()
    assert normed[[0, 2]].isfinite().all()


def a_write(tokens, dim, block_size, heads=3, kv_heads=2):
    """-> batch of one row at the start of its context, shape, qkv, turns. Its blocks are not in order."""
    used = -(-tokens // block_size)
    shape = api.KvShape(used + 2, block_size, kv_heads, dim)
    table = torch.randperm(used + 2, generator=torch.Generator().manual_seed(3))[:used]
    positions = torch.arange(tokens)
    places = (table[positions // block_size], positions % block_size)
    batch = api.AttentionBatch([0, tokens], [tokens], table[None], *places, 1 if tokens == 1 else 0)
    angles = randn(tokens, dim // 2, seed=2) * 3
    return batch, shape, randn(tokens, heads + 2 * kv_heads, dim), torch.polar(torch.ones_like(angles), angles)


@pytest.mark.parametrize("sizes", [(8, 16), (64, 16), (80, 5), (128, 32), (10, 1), (64, 8)], ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.sample(40)
def test_rope_write(isa, sizes, tokens, has_norm):
    dim, block_size = sizes
    batch, shape, qkv, turns = a_write(tokens, dim, block_size)
    norm = randn(5, dim, seed=4) if has_norm else None
    want = qkv.clone()
    if has_norm:
        want[:, :5] = REFERENCE.rms_norm(want[:, :5], ReferenceNorm(norm, 1e-3))
    REFERENCE.rotate(want[:, :5], turns)
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        got, store = qkv.clone(), isa.new_store(shape, dtype)
        isa.rope_write(batch, shape, store, got, turns, norm, 1e-3)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        assert_written(isa, batch, shape, store, got[:, 3:], dtype)


def assert_written(native, batch, shape, store, kv, dtype):
    """The store holds kv [T, 2 * Hkv, D] rounded by the rules, bit for bit, and is untouched elsewhere."""
    rows = kv.view(len(kv), 2, shape.num_kv_heads, shape.head_dim)
    if dtype == torch.int8:
        rows = rounding.dequantize_kv(*rounding.quantize_kv(rows))
    plain = native.to_plain(shape, store)
    places = (batch.token_blocks, slice(None), slice(None), batch.token_offsets)
    assert torch.equal(plain[places], rows.to(dtype if dtype == torch.bfloat16 else torch.float32).float())
    plain[places] = 0
    assert not plain.any()


def test_what_is_not_finite_is_still_not_finite_in_any_store(isa):
    batch, shape, qkv, turns = a_write(8, 64, 16)
    qkv[2, 4, 5], qkv[3, 6, 7], qkv[5] = float("nan"), float("inf"), 0
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        store = isa.new_store(shape, dtype)
        isa.rope_write(batch, shape, store, qkv.clone(), turns)
        rows = isa.to_plain(shape, store)[batch.token_blocks, :, :, batch.token_offsets]
        assert not rows[2, 0, 1].isfinite().all()
        assert not rows[3, 1, 1].isfinite().all()
        assert not rows[5].any()
        assert rows[[0, 1, 4, 6, 7]].isfinite().all()
