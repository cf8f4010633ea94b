"""Rounded weights: the rules in torch are the native ones to the last bit; products stay within the stated bounds."""

import ctypes
import os
import subprocess
import sys

import product_bounds as bounds
import pytest
import torch
from native_or_not import has_native_kernels

from splittime.kernels.api import LinearShape, RoundedRows, WeightScheme
from splittime.kernels.choose import make_backend
from splittime.kernels.cpu import integers
from splittime.kernels.native import library as native
from splittime.kernels.native import memory
from splittime.kernels.reference import rounding
from splittime.models.quant import plan

INT8, INT4 = WeightScheme("int8"), WeightScheme("int4", 64)
TURNED = WeightScheme("int8", is_turned=True)
SCHEMES = [INT8, TURNED, INT4, WeightScheme("int4", 32, is_turned=True)]
SHAPES = [(48, 256), (61, 100), (17, 63), (5, 3), (19, 1100)]
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


def as_rounded(weight, scheme):
    """In the space in which it is rounded, or back from it."""
    return rounding.turned(weight) if scheme.is_turned else weight


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
    assert ((rebuilt - as_rounded(weight, scheme)).abs() <= bounds.weight_error(weight, scheme)).all()
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
@pytest.mark.sample(30)
def test_native_packing_rounds_alike_to_the_last_bit(scheme, shape, dtype):
    weight = weight_of(*shape, dtype)
    ops = make_backend("native", torch.float32)
    packed = ops.pack_linear([weight], None, scheme)
    unpacked = torch.empty(shape)
    native.library().st_unpack(ctypes.byref(packed.struct), unpacked.data_ptr())
    values, scales = rounding.quantize(weight, scheme)
    assert torch.equal(unpacked, as_rounded(rounding.dequantize(values, scales, scheme), scheme))
    values, scales, blob = values.contiguous(), scales.contiguous(), memory.allocate(len(packed.blob))
    kind = native.INT8 if scheme.name == "int8" else native.INT4
    native.library().st_pack_quantized(
        kind, *shape, scheme.group, values.data_ptr(), scales.data_ptr(), None, blob.data_ptr()
    )
    assert torch.equal(blob, packed.blob)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernels", ["native", "torch", "reference"])
@pytest.mark.sample(24)
def test_products_stay_within_the_bound(scheme, shape, kernels):
    """On every backend, with a bias and a residual; without rounded activations equal to the kept weight's product."""
    if kernels == "native" and not has_native_kernels():
        pytest.skip("no native kernels")
    weight, x = weight_of(*shape), inputs_of(shape[1])
    bias, residual = inputs_of(shape[0])[0], inputs_of(shape[0])
    ops = make_backend(kernels, torch.float32)
    parts = [weight[:16], weight[16:]] if shape[0] > 16 else [weight]
    y = ops.linear(x, ops.pack_linear(parts, bias, scheme), residual.clone())
    true = x.double() @ weight.double().T + bias + residual
    rounds = ops.product_dtype(scheme) == "int8"
    assert rounds == (kernels == "native" or (kernels == "torch" and scheme in (INT8, TURNED)))
    bound = bounds.product_error(x, weight, scheme, rounds_activations=rounds)
    assert ((y - true).abs() <= bound + 1e-6 * true.abs() + 1e-6).all()
    kept = as_rounded(rounding.dequantize(*rounding.quantize(weight, scheme), scheme), scheme)
    exact = x @ kept.T + bias + residual
    if not rounds:
        torch.testing.assert_close(y, exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("width", [576, 1536, 100])
def test_a_turned_row_with_outliers_is_near_the_product_and_an_unturned_one_is_not(kernels, width):
    """As in real models, a few inputs are a hundred times the others. Alone and in company a row is the same."""
    if kernels == "native" and not has_native_kernels():
        pytest.skip("no native kernels")
    source = torch.Generator().manual_seed(3)
    weight, x = torch.randn(40, width, generator=source), torch.randn(9, width, generator=source)
    x[:, 5], x[:, width // 2] = 100, -80
    true = x.double() @ weight.double().T
    ops, bound = make_backend(kernels, torch.float32), 0.01 * x[0].norm()

    def error(scheme):
        found = ops.linear(x, ops.pack_linear([weight], None, scheme))
        alone = torch.cat([ops.linear(row[None], ops.pack_linear([weight], None, scheme)) for row in x])
        assert kernels == "torch" or torch.equal(found, alone)
        return (found - true).square().mean().sqrt()

    assert error(TURNED) < bound < error(INT8)


@pytest.mark.parametrize("has_byte_products", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", [INT8, TURNED], ids=str)
def test_torch_multiplies_int8_as_the_native_kernels_do(scheme, shape, has_byte_products, monkeypatch):
    """By bytes, or with the weight rebuilt: the same integers. A token of zeros or of NaNs stays so."""
    if has_byte_products and not integers.has_byte_products():
        pytest.skip("the processor multiplies no bytes")
    monkeypatch.setattr(integers, "has_byte_products", lambda: has_byte_products)
    weight, x, bias, residual = weight_of(*shape), inputs_of(shape[1]), inputs_of(shape[0])[0], inputs_of(shape[0])
    x[1], x[2, 0] = 0, torch.nan
    ops = make_backend("torch", torch.float32)
    packed = ops.pack_linear([weight], bias, scheme)
    assert isinstance(packed, integers.ByteWeight) == has_byte_products
    y = ops.linear(x, packed, residual.clone())
    assert torch.equal(y[1], bias + residual[1])
    assert y[2].isnan().all()
    x[2] = 0
    x = as_rounded(x, scheme)
    kept = rounding.dequantize(*rounding.quantize(weight, scheme), scheme).double()
    most = x.double().abs().amax(1, keepdim=True)
    steps = (x * torch.where(most == 0, 0.0, 127 / most).float()).round().double()
    expected = (steps * most / 127) @ kept.T + bias + residual
    torch.testing.assert_close(y[[0, 1, 3, 4, 5, 6]].double(), expected[[0, 1, 3, 4, 5, 6]], rtol=1e-5, atol=3e-5)


def test_products_of_bytes_that_saturate_are_not_taken():
    """oneDNN adds up in 16 bits where it may not use VNNI: asked in a process of its own, as it looks only once."""
    asked = "from splittime.kernels.cpu import integers; print(integers.has_byte_products())"
    limited = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    found = subprocess.run([sys.executable, "-c", asked], env=limited, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_sums_that_32_bits_do_not_hold_are_not_made():
    wide = torch.ones(16, integers.MOST_COLUMNS + 1)
    ops = make_backend("torch", torch.float32)
    packed = ops.pack_linear([wide], None, INT8)
    assert not isinstance(packed, integers.ByteWeight)
    torch.testing.assert_close(ops.linear(wide[:1], packed)[0], torch.full((16,), float(wide.shape[1])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_byte_products", [False, True])
def test_the_torch_backend_takes_int8_in_another_order_of_columns(has_byte_products, dtype, monkeypatch):
    if has_byte_products and not integers.has_byte_products():
        pytest.skip("this processor's byte products saturate")
    monkeypatch.setattr(integers, "has_byte_products", lambda: has_byte_products)
    weight, x, order = (
        weight_of(48, 256),
        inputs_of(256).to(dtype),
        torch.randperm(256, generator=torch.Generator().manual_seed(1)),
    )
    ops = make_backend("torch", dtype)
    rows = RoundedRows(*rounding.quantize(weight[:, order], INT8))
    ordered = ops.pack_rounded([rows], LinearShape(48, 256, None, INT8, order))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        ops.linear(x, ordered), ops.linear(x, ops.pack_linear([weight], None, INT8)), rtol=tolerance, atol=tolerance
    )


def test_the_torch_weight_stays_integers(monkeypatch):
    """Chunks of few rows give the same product, and what is kept is what `kept_bytes` says."""
    weight, x = weight_of(61, 100), inputs_of(100)
    for scheme in SCHEMES:
        whole = rounding.product(x, rounding.pack([weight], None, scheme))
        monkeypatch.setattr(rounding, "CHUNK_ELEMENTS", 700)
        packed = rounding.pack([weight], None, scheme)
        torch.testing.assert_close(rounding.product(x, packed), whole, rtol=2e-5, atol=1e-4)  # sums in another order
        assert packed.values.nbytes + packed.scales.nbytes == plan.kept_bytes(61, 100, scheme)
        monkeypatch.undo()


def test_which_weight_is_kept_in_which_scheme():
    assert plan.choose(None, "bfloat16").describe(True) == "bfloat16"
    assert plan.choose("int8", "float32").describe(True) == "int8, router float32"
    assert plan.choose("int8", "float32").describe(False) == "int8"
    four = plan.choose("int4", "bfloat16")
    assert (four.layers, four.finer, four.head, four.router) == (INT4, TURNED, TURNED, WeightScheme("bfloat16"))
    assert four.describe(True) == "int4 in groups of 64, values and down int8, head int8, router bfloat16"
