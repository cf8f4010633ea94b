"""The weight products of the Triton backend against float64, at shapes that fill no tile.

The bound of each is its arithmetic's. Let a = sum |x_k| |w_k| over what is added up (for weights in groups with minima
the integers' part and the minima's part each). Sums of K float32 terms err by at most K units of 2^-24 a, twice that on
a card, whose tensor cores cut instead of rounding; scales, bias and residual by a few more; the result is rounded once
to the dtype of x. Weights themselves are exact: what they stand for is what is kept (`linear.unpacked`).
"""

from itertools import pairwise

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integers import SCHEMES, inputs, name_of, rows_of

from splittime.core.errors import ConfigError
from splittime.kernels import plain, rounded
from splittime.kernels.api import LinearShape, RoundedRows, WeightScheme
from splittime.kernels.plain import Stack
from splittime.kernels.reference import products, rounding
from splittime.kernels.reference.ops import ReferenceOps
from splittime.kernels.triton import elementwise, linear, tiles, w8a8
from splittime.kernels.triton import integers as kernels
from splittime.kernels.triton.device import device, is_interpreted
from splittime.kernels.triton.tiles import Tiles

pytestmark = pytest.mark.sample(5)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BFLOAT16 = 2.0**-7 if is_interpreted() else 2.0**-8  # the interpreter cuts where a card rounds
EPSILONS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: BFLOAT16}
EIGHT = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
BOTH_ROUNDED = (WeightScheme("int8", rounds_activations=True), WeightScheme("fp8"))
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)


def pack(rows, scheme, bias=None, columns=None, dtype=torch.float32):
    """In three parts."""
    count, width = rows.integers.shape
    cuts = [0, count // 3, count // 2, count]
    parts = [rounded.rows_of(rows, begin, end) for begin, end in pairwise(cuts)]
    return linear.pack_rounded(parts, LinearShape(count, width, bias, scheme, columns), dtype, device())


def within(y, true, sizes, dtype, columns, extra=0.0):
    """Whether y is as near to float64 `true` [T, out] as the module's docstring says."""
    summed = (columns + 16) * 2.0**-23 * sizes + extra * sizes
    allowed = summed + EPSILONS[dtype] * (true.abs() + summed) * 1.01 + 1e-30
    return bool(((y.double().cpu() - true).abs() <= allowed).all())


def minima_sizes(x, weight):
    """sum |s (q - z) x| + |m x|, float64 [T, out], of a weight in groups."""
    if not isinstance(weight, kernels.IntegerWeight) or not weight.has_minima:
        return 0
    rows = kernels.unpacked(weight)
    group = torch.arange(weight.in_features) // weight.group
    return x.abs() @ rows.minima[:, group].double().abs().cpu().T * 2


def check(x, packed, weight, residual=None, bias=None, extra=0.0):
    """weight: float64 [out, in]; x as the kernel multiplies it."""
    y = linear.linear(x, packed, residual)
    true, wide = x.double().cpu() @ weight.T, x.double().cpu()
    sizes = wide.abs() @ weight.abs().T + minima_sizes(wide, packed)
    for added in (bias, residual):
        true = true if added is None else true + added.double().cpu()
        sizes = sizes if added is None else sizes + added.double().cpu().abs()
    assert y.dtype == x.dtype
    assert within(y, true, sizes, x.dtype, x.shape[1], extra)
    return y


def on_device(x, dtype):
    return x.to(device(), dtype)


@by_scheme
def test_weights_of_integers(scheme):
    """Every scheme that checkpoints come in, at one token and at several."""
    rows = rows_of(scheme, 40, 328)
    packed = pack(rows, scheme)
    weight = linear.unpacked(packed).double().cpu()
    half = scheme.group > 0
    kept = rounded.as_packed(rows, scheme)
    if half:
        halved = None if kept.minima is None else kept.minima.half().float()
        kept = RoundedRows(kept.integers, kept.scales.half().float(), kept.zeros, halved)
    dense = rounding.dequantize(kept.integers, kept.scales, scheme, kept.zeros, kept.minima)
    assert torch.equal(weight, dense.double())
    for count in (1, 17):
        check(on_device(inputs(count, 328), torch.float32), packed, weight)


@by_dtype
@pytest.mark.parametrize("scheme", [WeightScheme("int4", 64, has_zeros=True), WeightScheme("int8")], ids=name_of)
@pytest.mark.parametrize("shape", [(1, 24, 40), (2, 8, 264), (3, 72, 1088), (17, 136, 520), (65, 24, 300)], ids=str)
def test_shapes(scheme, shape, dtype):
    """With a bias and a residual; the deepest is shared out among programs."""
    tokens, out, columns = shape
    bias = inputs(1, out, 2)[0].to(dtype)
    packed = pack(rows_of(scheme, out, columns), scheme, bias, dtype=dtype)
    x, residual = on_device(inputs(tokens, columns), dtype), on_device(inputs(tokens, out, 3), dtype)
    check(x, packed, linear.unpacked(packed).double().cpu(), residual, bias)


@pytest.mark.parametrize("scheme", [WeightScheme("int4", 128), WeightScheme("int8"), WeightScheme("int8", 32)])
@pytest.mark.parametrize("cut", [Tiles(16, 32, 2, 2, 2), Tiles(32, 16, 3, 4, 3), Tiles(64, 64, 8)], ids=str)
def test_every_cut_gives_the_product(scheme, cut):
    """However the tiles lie: more shares than tiles too."""
    packed = pack(rows_of(scheme, 40, 1000), scheme, inputs(1, 40, 5)[0])
    x, residual = on_device(inputs(19, 1000), torch.float16), on_device(inputs(19, 40, 3), torch.float16)
    y = kernels.linear(x, packed, residual, cut)
    true = x.double().cpu() @ linear.unpacked(packed).double().cpu().T
    sizes = x.double().cpu().abs() @ linear.unpacked(packed).double().cpu().abs().T
    for added in (packed.bias, residual):
        true, sizes = true + added.double().cpu(), sizes + added.double().cpu().abs()
    assert within(y, true, sizes, torch.float16, 1000)


@by_dtype
@pytest.mark.parametrize("scheme", BOTH_ROUNDED, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("shape", [(1, 24, 40), (3, 40, 264), (17, 136, 520), (65, 24, 136)], ids=str)
def test_both_rounded(scheme, shape, dtype):
    """x is rounded as its twin says, to the bit; from there on the product errs by float32's rounding alone (on a card
    fp8's tensor cores cut each of 32 products and the sum at 2^-13 of the largest, four times a tile)."""
    tokens, out, columns = shape
    weights, bias = inputs(out, columns, 7), inputs(1, out, 2)[0].to(dtype)
    packed = linear.pack_linear([weights[:9], weights[9:]], bias, scheme, dtype, device())
    x, residual = on_device(inputs(tokens, columns), dtype), on_device(inputs(tokens, out, 3), dtype)
    values, scales = w8a8.round_rows(x, EIGHT[scheme.name])
    twin, twin_scales = products.round_rows(x, EIGHT[scheme.name])
    assert torch.equal(values[:, :columns].view(torch.int8), twin.view(torch.int8))
    assert torch.equal(scales, twin_scales)
    assert not values.view(torch.int8)[:, columns:].any()
    kept, kept_scales = packed.values[:, :columns].cpu(), packed.scales.cpu()
    true = products.rounded_product(x.cpu(), kept, kept_scales)
    sizes = products.rounded_product(x.cpu().abs(), kept.float().abs().to(kept.dtype), kept_scales)
    sizes = sizes + bias.double().abs() + residual.double().cpu().abs()
    extra = 0.0 if is_interpreted() or scheme.name == "int8" else 2.0**-6
    y = linear.linear(x, packed, residual)
    assert within(y, true + bias.double() + residual.double().cpu(), sizes, dtype, columns, extra)


@by_scheme
def test_a_widened_weight_is_what_it_stands_for(scheme):
    packed = pack(rows_of(scheme, 70, 328), scheme, dtype=torch.float16)
    if packed.group % kernels.SLAB_COLUMNS:
        assert not kernels.is_better_wide(10**6, packed, torch.float16)
        return
    assert torch.equal(kernels.widened(packed, torch.float32), linear.unpacked(packed))
    assert torch.equal(kernels.widened(packed, torch.float16), linear.unpacked(packed).half())


def test_many_tokens_are_multiplied_by_a_widened_weight():
    scheme, many = WeightScheme("int4", 64), tiles.WIDE_TOKENS + 1
    packed = pack(rows_of(scheme, 40, 192), scheme, inputs(1, 40, 2)[0], dtype=torch.float16)
    x, residual = on_device(inputs(many, 192), torch.float16), on_device(inputs(many, 40, 3), torch.float16)
    check(x, packed, linear.unpacked(packed).double().cpu(), bias=packed.bias, extra=2.0**-11)
    wide = residual.addmm(x, kernels.widened(packed, torch.float16).T).add_(packed.bias)
    assert torch.equal(linear.linear(x, packed, residual), wide)
    assert not kernels.is_better_wide(tiles.WIDE_TOKENS, packed, torch.float16)


def test_rounded_weights_are_those_of_the_rules():
    weights = inputs(24, 200, 9)
    weights[3] = 0
    for scheme in (WeightScheme("int8"), WeightScheme("int8", 32), WeightScheme("int4", 64)):
        packed = linear.pack_linear([weights], None, scheme, torch.float32, device())
        dense = rounding.dequantize(*rounding.quantize(weights, scheme), scheme)
        assert torch.equal(linear.unpacked(packed).cpu(), dense)
    eight = linear.pack_linear([weights], None, BOTH_ROUNDED[0], torch.float32, device())
    assert torch.equal(eight.values[:, :200].cpu(), rounding.quantize(weights, WeightScheme("int8"))[0])
    fp8 = linear.unpacked(linear.pack_linear([weights], None, WeightScheme("fp8"), torch.float32, device())).cpu()
    largest = weights.abs().amax(1, keepdim=True)
    assert ((fp8 - weights).abs() <= weights.abs() * 2.0**-4 * 1.001 + largest / 448 * 2.0**-10).all()


@by_dtype
def test_dense(dtype):
    weights, bias = inputs(24, 40, 7).to(dtype), inputs(1, 24, 2)[0].to(dtype)
    packed = linear.pack_linear([weights[:5], weights[5:]], bias, WeightScheme(str(dtype)[6:]), dtype, device())
    ops = ReferenceOps(dtype)
    x, residual = inputs(5, 40).to(dtype), inputs(5, 24, 3).to(dtype)
    twin = ops.linear(x, ops.pack_linear([weights], bias, WeightScheme(str(dtype)[6:])), residual)
    y = linear.linear(x.to(device()), packed, residual.to(device())).cpu()
    torch.testing.assert_close(y, twin, rtol=8 * EPSILONS[dtype], atol=64 * EPSILONS[dtype])


@pytest.mark.parametrize("scheme", [WeightScheme("int4", 32, has_minima=True), WeightScheme("int8")], ids=name_of)
def test_the_order_of_columns_and_stacks(scheme):
    rows, order = rows_of(scheme, 40, 72), torch.randperm(72, generator=torch.Generator().manual_seed(3))
    x, residual = on_device(inputs(3, 72), torch.float32), on_device(inputs(3, 80, 3), torch.float32)
    plain, other = pack(rows, scheme), pack(rows, scheme, None, order)
    y = linear.linear(x, Stack((plain, other)), residual) - residual
    assert torch.allclose(y[:, :40], linear.linear(x, plain), atol=1e-5)
    assert torch.allclose(y[:, 40:], linear.linear(x[:, order.to(x.device)], plain), atol=1e-5)
    dense = linear.unpacked(other)
    assert torch.equal(dense[:, order.to(dense.device)], linear.unpacked(plain))


@pytest.mark.parametrize("scheme", [WeightScheme("int4", 64), WeightScheme("int8"), *BOTH_ROUNDED], ids=str)
def test_the_same_again_and_in_any_batch_of_the_line(scheme):
    """To the last bit: a call repeated, and a row alone or among others of one line of the table."""
    packed = linear.pack_linear([inputs(24, 1100, 7)], None, scheme, torch.float16, device())
    x = on_device(inputs(16, 1100), torch.float16)
    y = linear.linear(x, packed)
    assert torch.equal(y, linear.linear(x, packed))
    assert torch.equal(linear.linear(x[13:14], packed)[0], y[13])
    assert torch.equal(linear.linear(x[5:12], packed), y[5:12])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "scheme", [WeightScheme("float16"), WeightScheme("int4", 64), WeightScheme("int8"), *BOTH_ROUNDED], ids=str
)
def test_a_product_and_its_norm_are_what_one_after_the_other_gives(scheme, has_bias):
    """Whoever adds up what programs shared: 1100 columns are shared by two or more."""
    bias = inputs(24, 1, 5)[:, 0] if has_bias else None
    packed = linear.pack_linear([inputs(24, 1100, 7)], bias, scheme, torch.float16, device())
    x, residual = on_device(inputs(3, 1100), torch.float16), on_device(inputs(3, 24, 3), torch.float16)
    scale = elementwise.pack(on_device(inputs(1, 24, 4)[0], torch.float16), 1e-6)
    want = linear.linear(x, packed, residual.clone())
    total, normed = linear.linear_norm(x, packed, residual.clone(), scale)
    assert torch.equal(total, want)
    assert torch.equal(normed, elementwise.rms_norm(want, scale))


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy's, in the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("scheme", [WeightScheme("int4", 64), WeightScheme("int8"), *BOTH_ROUNDED], ids=str)
def test_what_is_not_finite_stays_so_in_its_row(scheme, bad):
    packed = linear.pack_linear([inputs(8, 72, 7)], None, scheme, torch.float32, device())
    x = inputs(3, 72)
    x[1, 5] = bad
    y = linear.linear(on_device(x, torch.float32), packed)
    assert y[[0, 2]].isfinite().all()
    assert not y[1].isfinite().any()


def test_rows_of_a_wider_tensor_and_no_rows():
    scheme = WeightScheme("int4", 32)
    packed = pack(rows_of(scheme, 8, 40), scheme)
    wide = on_device(inputs(4, 100), torch.float32)
    assert torch.equal(linear.linear(wide[:, 30:70], packed), linear.linear(wide[:, 30:70].contiguous(), packed))
    assert torch.equal(linear.linear(wide[:, :80:2], packed), linear.linear(wide[:, :80:2].contiguous(), packed))
    assert linear.linear(wide[:0, :40], packed).shape == (0, 8)


def test_bytes_that_products_read():
    scheme = WeightScheme("int4", 128)
    packed = pack(rows_of(scheme, 8, 512), scheme)
    before = plain.total().get("weights.int4", 0)
    linear.linear(on_device(inputs(2, 512), torch.float32), packed)
    linear.linear(on_device(inputs(0, 512), torch.float32), packed)
    assert plain.total()["weights.int4"] - before == 8 * 512 // 2 + 8 * 4 * 4


@given(st.integers(1, 400), st.integers(1, 900))
@settings(max_examples=50)
def test_shares_of_the_loop(programs, steps):
    """Each has four steps, and none is there where the tiles alone fill the card."""
    splits = tiles.splits_for(programs, steps)
    assert splits in (1, 2, 4, 8)
    assert splits == 1 or steps // splits >= 4
    assert splits == 1 or programs * splits <= 2 * tiles.PROCESSORS


def test_what_is_refused():
    with pytest.raises(ConfigError, match="keeps no weights as int3"):
        linear.pack_linear([inputs(8, 32)], None, WeightScheme("int3"), torch.float32, device())
    scheme = WeightScheme("int4", 32, rounds_activations=True)
    with pytest.raises(ConfigError, match="activations are not rounded beside int4"):
        linear.pack_linear([inputs(8, 32)], None, scheme, torch.float32, device())
