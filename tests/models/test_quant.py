"""Rounded weights: the rules in torch are the native ones to the last bit; products stay within the stated bounds."""

import ctypes

import product_bounds as bounds
import pytest
import torch
from native_or_not import has_native_kernels

from splittime.kernels.api import WeightScheme
from splittime.kernels.choose import make_backend
from splittime.kernels.native import library as native
from splittime.kernels.native import memory
from splittime.kernels.reference import rounding
from splittime.models.quant import plan

INT8, INT4 = WeightScheme("int8"), WeightScheme("int4", 64)
SCHEMES = [INT8, INT4, WeightScheme("int4", 32)]
SHAPES = [(48, 256), (61, 100), (17, 63), (5, 3)]
needs_native = pytest.mark.skipif(not has_native_kernels(), reason="no native kernels")


def weight_of(out_features, in_features, dtype=torch.float32):
    """Random rows of different sizes; one of zeros, one of the same magnitudes in both signs, one tiny, one outlier."""
    source = torch.Generator().manual_seed(out_features)
    weight = torch.randn(out_features, in_features, generator=source) * torch.rand(out_features, 1, generator=source)
    weight[0] = 0
    weight[1] = torch.arange(in_features) % 17 - 8
    weight[2] *= 1e-7
    weight[3, in_features // 2] = 100
    return weight.to(dtype)


def inputs_of(in_features):
    return torch.randn(7, in_features, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_stay_in_range_and_the_weight_within_its_error(scheme, shape):
    weight = weight_of(*shape)
    values, scales = rounding.quantize(weight, scheme)
    low, high = (-127, 127) if scheme.name == "int8" else (0, 15)
    assert low <= values.min()
    assert values.max() <= high
    rebuilt = rounding.dequantize(values, scales, scheme)
    assert ((rebuilt - weight).abs() <= bounds.weight_error(weight, scheme)).all()
    assert not rebuilt[0].any()


def test_int4_by_hand():
    """The largest magnitude is met exactly; what it has on the other side loses one step; halves go to even."""
    weight = torch.tensor([[-8.0, 8.0, 2.5, 3.5, 0.0, 7.4]])
    values, scales = rounding.quantize(weight, INT4)
    assert (values - 8).tolist() == [[-8, 7, 2, 4, 0, 7]]
    assert scales.tolist() == [[1.0]]
    assert rounding.quantize(-weight, INT4)[1].tolist() == [[-1.0]]


def test_the_errors_bound_is_reached():
    """Half a step and one step do happen: the bounds are not loose by more than rounding's own rounding."""
    int8 = torch.tensor([[127.0, 0.5]])
    assert bounds.weight_error(int8, INT8)[0, 1] == pytest.approx(0.5, rel=1e-4)
    int4 = torch.tensor([[-8.0, 8.0]])
    error = (rounding.dequantize(*rounding.quantize(int4, INT4), INT4) - int4).abs()
    assert error[0, 1] == 1.0
    assert bounds.weight_error(int4, INT4)[0, 1] == pytest.approx(1.0, rel=0.01)


@needs_native
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_native_packing_rounds_alike_to_the_last_bit(scheme, shape, dtype):
    weight = weight_of(*shape, dtype)
    ops = make_backend("native", torch.float32)
    packed = ops.pack_linear([weight], None, scheme)
    unpacked = torch.empty(shape)
    native.library().st_unpack(ctypes.byref(packed.struct), unpacked.data_ptr())
    values, scales = rounding.quantize(weight, scheme)
    assert torch.equal(unpacked, rounding.dequantize(values, scales, scheme))
    values, scales, blob = values.contiguous(), scales.contiguous(), memory.allocate(len(packed.blob))
    kind = native.INT8 if scheme.name == "int8" else native.INT4
    native.library().st_pack_quantized(
        kind, *shape, scheme.group, values.data_ptr(), scales.data_ptr(), None, blob.data_ptr()
    )
    assert torch.equal(blob, packed.blob)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernels", ["native", "torch", "reference"])
def test_products_stay_within_the_bound(scheme, shape, kernels):
    """On every backend, with a bias and a residual; and torch's equals the reference's, which rounds nothing else."""
    if kernels == "native" and not has_native_kernels():
        pytest.skip("no native kernels")
    weight, x = weight_of(*shape), inputs_of(shape[1])
    bias, residual = inputs_of(shape[0])[0], inputs_of(shape[0])
    ops = make_backend(kernels, torch.float32)
    parts = [weight[:16], weight[16:]] if shape[0] > 16 else [weight]
    y = ops.linear(x, ops.pack_linear(parts, bias, scheme), residual.clone())
    true = x.double() @ weight.double().T + bias + residual
    bound = bounds.product_error(x, weight, scheme, rounds_activations=kernels == "native")
    assert ((y - true).abs() <= bound + 1e-6 * true.abs() + 1e-6).all()
    exact = x @ rounding.dequantize(*rounding.quantize(weight, scheme), scheme).T + bias + residual
    if kernels != "native":
        torch.testing.assert_close(y, exact, rtol=1e-5, atol=1e-4)


def test_the_torch_weight_stays_integers(monkeypatch):
    """Chunks of few rows give the same product, and what is kept is what `kept_bytes` says."""
    weight, x = weight_of(61, 100), inputs_of(100)
    for scheme in SCHEMES:
        whole = rounding.product(x, rounding.pack([weight], None, scheme))
        monkeypatch.setattr(rounding, "CHUNK_ELEMENTS", 700)
        packed = rounding.pack([weight], None, scheme)
        torch.testing.assert_close(rounding.product(x, packed), whole)
        assert packed.values.nbytes + packed.scales.nbytes == plan.kept_bytes(61, 100, scheme)
        monkeypatch.undo()


def test_which_weight_is_kept_in_which_scheme():
    assert plan.choose(None, "bfloat16").describe(True) == "bfloat16"
    assert plan.choose("int8", "float32").describe(True) == "int8, router float32"
    assert plan.choose("int8", "float32").describe(False) == "int8"
    four = plan.choose("int4", "bfloat16")
    assert (four.layers, four.head, four.router) == (INT4, INT8, WeightScheme("bfloat16"))
    assert four.describe(True) == "int4 in groups of 64, head int8, router bfloat16"
