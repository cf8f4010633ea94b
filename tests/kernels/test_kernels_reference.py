"""The torch backend against the reference at odd shapes: both get the same tensors and the same store."""

import pytest
import torch

from splittime.core.errors import ConfigError
from splittime.kernels import api
from splittime.kernels.api import LayerKv
from splittime.kernels.choose import make_backend
from splittime.kernels.cpu import ops as cpu_linear
from splittime.kernels.layer import KvGroup, Weighing
from splittime.kernels.reference import rounding
from splittime.kernels.reference.ops import ReferenceNorm, ReferenceWeight
from splittime.runner.kv_store import KvStore, bytes_per_block

REFERENCE = make_backend("reference", torch.float32)
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got, want, dtype=torch.float32):
    torch.testing.assert_close(got.float(), want.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def backend(dtype):
    return make_backend("torch", dtype)


def plain_scheme(dtype):
    return api.WeightScheme(str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "outs", "ins"), [(1, 5, 7), (2, 33, 48), (17, 64, 3), (40, 1, 19)])
@pytest.mark.parametrize(("has_bias", "has_residual"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("packs", [True, False])
def test_linear(dtype, rows, outs, ins, has_bias, has_residual, packs, monkeypatch):
    if not packs:  # as on a processor for which oneDNN has no packed product
        monkeypatch.setattr(cpu_linear, "can_pack", lambda dtype: False)
    weight, x = randn(outs, ins, dtype=dtype), randn(rows, ins, dtype=dtype, seed=1)
    bias = randn(outs, dtype=dtype, seed=2) if has_bias else None
    residual = randn(rows, outs, dtype=dtype, seed=3) if has_residual else None
    kept = None if residual is None else residual.clone()
    ops = backend(dtype)
    got = ops.linear(x, ops.pack_linear([weight], bias, plain_scheme(dtype)), residual)
    wide = [None if one is None else one.float() for one in (x, weight, bias, residual)]
    close(got / ins**0.5, REFERENCE.linear(wide[0], ReferenceWeight(wide[1], wide[2]), wide[3]) / ins**0.5, dtype)
    assert residual is None or torch.equal(residual, kept)


def test_linear_of_a_large_weight_is_packed_only():
    weight = randn(1025, 2049)
    packed = cpu_linear.lay_out(weight, None)
    assert packed.transposed is None
    x = randn(1, 2049, seed=1)
    torch.testing.assert_close(cpu_linear.product(x, packed), x @ weight.T, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (3, 7), (5, 3, 20)])
def test_rms_norm(dtype, shape):
    x = randn(*shape, dtype=dtype) * 3
    weight = randn(*shape[1:], dtype=dtype, seed=1)
    ops = backend(dtype)
    for eps in (1e-6, 0.5):
        want = REFERENCE.rms_norm(x.float(), ReferenceNorm(weight.float(), eps))
        close(ops.rms_norm(x, ops.pack_norm(weight, eps)), want, dtype)
    zeros = torch.zeros(shape, dtype=dtype)
    assert not ops.rms_norm(zeros, ops.pack_norm(weight, 1e-6)).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotate_a_slice_in_place(dtype):
    whole = randn(5, 6, 10, dtype=dtype)
    want = whole.float().clone()
    angles = randn(5, 5, seed=1)
    turns = torch.polar(torch.ones(5, 5), angles)
    backend(dtype).rotate(whole[:, :4], turns)
    REFERENCE.rotate(want[:, :4], turns)
    close(whole, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul(dtype):
    x = randn(3, 14, dtype=dtype)
    close(backend(dtype).silu_mul(x), REFERENCE.silu_mul(x.float()), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_mul(dtype):
    x = randn(3, 14, dtype=dtype)
    close(backend(dtype).gelu_mul(x), REFERENCE.gelu_mul(x.float()), dtype)


def make_batch(rows, block_size, num_blocks, seed=0):
    """rows: (tokens before the step, query tokens), decode rows first and sorted, as the runner orders them."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    contexts = [start + count for start, count in rows]
    widest = max(-(-context // block_size) for context in contexts)
    tables = torch.full((len(rows), widest), num_blocks, dtype=torch.int64)
    blocks, offsets, begins = [], [], [0]
    for row, (start, count) in enumerate(rows):
        used = -(-contexts[row] // block_size)
        tables[row, :used] = torch.tensor([order.pop() for _ in range(used)])
        positions = torch.arange(start, start + count)
        blocks.append(tables[row, positions // block_size])
        offsets.append(positions % block_size)
        begins.append(begins[-1] + count)
    num_decode = sum(count == 1 for _, count in rows)
    return api.AttentionBatch(begins, contexts, tables, torch.cat(blocks), torch.cat(offsets), num_decode)


ROWS = {
    "one decode": [(16, 1)],
    "decode of a first token": [(0, 1)],
    "decodes of one length": [(20, 1), (20, 1), (20, 1)],
    "decodes in groups": [(0, 1), (3, 1), (9, 1), (47, 1), (48, 1), (200, 1), (201, 1)],
    "prefills": [(0, 5), (0, 16), (0, 33)],
    "chunks": [(7, 2), (16, 16), (31, 40)],
    "a long chunk in pieces": [(21, 530)],
    "mixed": [(4, 1), (33, 1), (0, 21), (13, 3)],
}


def a_store(shape, dtype, fill=None):
    """Random, or all `fill`; the zero block is zero."""
    sizes = (shape.num_blocks + 1, 2, shape.num_kv_heads, shape.block_size)
    plain = randn(*sizes, shape.head_dim) if fill is None else torch.full((*sizes, shape.head_dim), fill)
    plain[-1] = 0
    values, scales = rounding.quantize_kv(plain) if dtype == torch.int8 else (plain.to(dtype), None)
    return LayerKv(values.flatten(-2), scales)


def copy_of(store):
    return LayerKv(store.data.clone(), None if store.scales is None else store.scales.clone())


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.int8)],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 1, 6, 19])
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.sample(36)
def test_paged_attention(name, window, dtype, kv_dtype):
    heads, kv_heads, dim, block_size = 6, 2, 12, 4
    if name == "a long chunk in pieces" and (window == 1 or kv_dtype != torch.float32):
        pytest.skip("the slow reference has seen enough")
    shape = api.KvShape(180, block_size, kv_heads, dim)
    batch = make_batch(ROWS[name], block_size, shape.num_blocks)
    num_tokens = batch.query_begins[-1]
    store = a_store(shape, kv_dtype)
    q, kv = randn(num_tokens, heads, dim, dtype=dtype, seed=1), randn(num_tokens, 2 * kv_heads, dim, seed=2).to(dtype)
    results, lowered, stores, sinks = [], [], [], Weighing(0.3, sinks=randn(heads, seed=3) * 4)
    for ops in (backend(dtype), REFERENCE):
        mine = copy_of(store)
        plan = ops.plan_attention(batch, shape, window)
        ops.write_kv(kv, mine, plan)
        results.append(ops.attention(q, mine, plan, Weighing(0.3)))
        lowered.append(ops.attention(q, mine, plan, sinks))
        stores.append(mine)
    assert torch.equal(stores[0].data, stores[1].data)
    assert kv_dtype != torch.int8 or torch.equal(stores[0].scales, stores[1].scales)
    close(results[0], results[1], dtype)
    close(lowered[0], lowered[1], dtype)


def test_what_padding_reads_cannot_leak_in():
    """Blocks of others may hold anything: a NaN in them must not reach a row that is padded to a longer one."""
    shape = api.KvShape(20, 4, 1, 8)
    batch = make_batch([(2, 1), (30, 1)], 4, 20)
    store = a_store(shape, torch.float32, float("nan"))
    store.data[batch.block_tables[0, 0]] = 1.0
    ops = backend(torch.float32)
    plan = ops.plan_attention(batch, shape, None)
    assert len(plan.groups) == 1
    out = ops.attention(randn(2, 1, 8), store, plan, Weighing(0.3))
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


def test_one_kv_head_and_one_head_each():
    for heads, kv_heads in ((4, 1), (3, 3)):
        shape = api.KvShape(30, 3, kv_heads, 6)
        batch = make_batch([(5, 1), (8, 1), (2, 9)], 3, 30)
        store = a_store(shape, torch.float32)
        q = randn(11, heads, 6, seed=1)
        got, want = (
            ops.attention(q, store, ops.plan_attention(batch, shape, None), Weighing(0.4))
            for ops in (backend(torch.float32), REFERENCE)
        )
        close(got, want)


def test_int8_keeps_half_a_step_of_each_head_and_shows_what_is_not_finite():
    x = randn(3, 5, 16) * torch.tensor([1e-3, 1.0, 1e6])[:, None, None]
    x[0, 0] = 0
    x[1, 1, 3], x[1, 2, 3] = float("nan"), float("inf")
    values, scales = rounding.quantize_kv(x)
    back = rounding.dequantize_kv(values, scales)
    assert back[1, 1].isnan().all()
    assert not back[1, 2].isfinite().any()
    others = torch.ones(3, 5, dtype=torch.bool)
    others[1, 1:3] = False
    step = x[others].abs().amax(-1, keepdim=True) / 127
    assert ((back - x)[others].abs() <= 0.5001 * step).all()
    assert not back[0, 0].any()


def test_a_store_scrubs_what_its_type_has():
    groups = [KvGroup((0, 1), 2, 8, None), KvGroup((2,), 1, 6, 4)]
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        store = KvStore(groups, 3, 4, dtype)
        assert all(layer.data.data_ptr() % 64 == 0 for layer in store.layers)
        held = sum(layer.data.nbytes + (0 if layer.scales is None else layer.scales.nbytes) for layer in store.layers)
        assert held == 4 * bytes_per_block(groups, 4, dtype)
        floats = store.layers[1].data if dtype != torch.int8 else store.layers[1].scales
        floats[1] = 1.0
        floats[0, 0, 0, 2] = floats[1, 0, 0, 2] = float("nan")
        store.scrub([0, 1])
        assert floats[0, 0, 0, 2] == floats[1, 0, 0, 2] == 0
        assert floats[1, 0, 0, 0] == 1
        assert floats.isfinite().all()


def test_unknown_backend_is_refused():
    with pytest.raises(ConfigError, match="vulkan"):
        make_backend("vulkan", torch.float32)
