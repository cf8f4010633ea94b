"""Weights that come as integers (`Ops.pack_rounded`) on every backend: what they are kept as, and their products."""

import ctypes
from dataclasses import replace
from itertools import pairwise

import product_bounds as bounds
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integers import SCHEMES, dense_of, inputs, name_of, rounded_inputs, rows_of, sizes_of

from splittime.core.errors import ConfigError
from splittime.kernels import rounded
from splittime.kernels.api import LinearShape, RoundedRows, WeightScheme
from splittime.kernels.choose import make_backend
from splittime.kernels.native import library as native
from splittime.kernels.reference import rounding

SHAPES = [(1, 16), (17, 64), (53, 200), (100, 1088)]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture
def native_ops(native):
    return make_backend("native", torch.float32)


def packed(ops, rows, scheme, bias=None, columns=None):
    """Of parts that begin anywhere."""
    count = len(rows.integers)
    cuts = [0, min(7, count), min(40, count), count]
    parts = (rounded.rows_of(rows, begin, end) for begin, end in pairwise(cuts))
    return ops.pack_rounded(parts, LinearShape(count, rows.integers.shape[1], bias, scheme, columns))


def unpacked(weight):
    """What a native blob stands for."""
    dense = torch.empty(weight.out_features, weight.in_features)
    native.library().st_unpack(ctypes.byref(weight.struct), dense.data_ptr())
    return dense


def rounds(ops, scheme):
    """Whether these kernels round activations beside such weights."""
    return ops.name == "native" or (ops.name == "torch" and ops.product_dtype(scheme) == "int8")


@every_scheme
@every_shape
@pytest.mark.sample(45)
def test_products_stay_within_the_bound(ops, scheme, shape):
    """Of every backend, with a bias, a residual, and columns in another order."""
    out, columns = shape
    rows, bias = rows_of(scheme, out, columns), inputs(1, out, 2)[0]
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(3))
    weight = packed(ops, rows, scheme, bias, order)
    for tokens in (1, 2, 3, 7, 40):
        x, residual = inputs(tokens, columns), inputs(tokens, out, 4)
        y = ops.linear(x, weight, residual.clone())
        true = x[:, order].double() @ dense_of(rows, scheme).T + bias + residual
        bound = bounds.rounded_product_error(x[:, order], rows, scheme, rounds_activations=rounds(ops, scheme))
        assert ((y - true).abs() <= bound + 1e-6 * true.abs() + 1e-6).all()


@every_scheme
@pytest.mark.parametrize("shape", [*SHAPES, (40, 4096)], ids=str)
@pytest.mark.sample(40)
def test_native_products_are_exact_but_for_float32(native_ops, isa, scheme, shape):
    """Against float64, of the weight as it is kept and of x as it is rounded."""
    out, columns = shape
    rows = rows_of(scheme, out, columns)
    weight = packed(native_ops, rows, scheme)
    dense, sizes = unpacked(weight).double(), sizes_of(rounded.as_packed(rows, scheme), scheme)
    for tokens in (1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 27, 40):
        x = inputs(tokens, columns, tokens)
        rounded_x = rounded_inputs(x, scheme)
        y = native_ops.linear(x, weight)
        assert ((y - rounded_x @ dense.T).abs() <= 2e-6 * (rounded_x.abs() @ sizes.T) + 1e-30).all()


@every_scheme
def test_what_is_kept_is_the_same_in_torch_to_the_last_bit(native_ops, scheme):
    rows = rows_of(scheme, 53, 200)
    twin = rounding.pack_rounded([rows], LinearShape(53, 200, None, scheme))
    found = unpacked(packed(native_ops, rows, scheme))
    if scheme.bits:  # nothing is lost, where torch keeps float16
        assert (found - dense_of(rows, scheme)).abs().max() <= 2**-22
    elif scheme.has_minima:  # compilers may contract the last product and difference
        assert (found - twin.rows(0, 53)).abs().max() <= 2**-22
    else:
        assert torch.equal(found, twin.rows(0, 53))
    assert ((found - dense_of(rows, scheme)).abs() <= bounds.kept_error(rows, scheme) + 1e-7).all()


@every_scheme
@pytest.mark.parametrize("has_order", [False, True])
@pytest.mark.sample(30)
def test_a_token_depends_on_itself_alone(native_ops, isa, scheme, has_order):
    """Same bits among any number of tokens, at any place, on any number of threads."""
    order = torch.randperm(1088, generator=torch.Generator().manual_seed(3)) if has_order else None
    weight = packed(native_ops, rows_of(scheme, 70, 1088), scheme, columns=order)
    x = inputs(140, 1088)
    alone = torch.cat([native_ops.linear(one, weight) for one in x.split(1)])
    for threads in (1, 2):
        native.library().st_set_threads(threads)
        for tokens in (*range(2, 16), 31, 33, 40, 129, 140):
            begin = (17 * tokens) % (141 - tokens)
            assert torch.equal(native_ops.linear(x[begin : begin + tokens], weight), alone[begin : begin + tokens])


@every_scheme
def test_a_blob_comes_back(native_ops, scheme):
    """With scheme and columns it is all there is to a packed weight, as the cache needs."""
    rows, order, bias = rows_of(scheme, 53, 200), torch.arange(199, -1, -1), inputs(1, 53)[0]
    weight, x = packed(native_ops, rows, scheme, bias, order), inputs(3, 200)
    assert weight.blob.numel() == native_ops.packed_bytes(53, 200, scheme)
    again = native_ops.linear_from_blob(weight.blob.clone(), LinearShape(53, 200, bias, scheme, order))
    assert torch.equal(native_ops.linear(x, again), native_ops.linear(x, weight))
    without = native_ops.linear_from_blob(weight.blob, LinearShape(53, 200, bias, scheme))
    assert torch.equal(native_ops.linear(x[:, order], without), native_ops.linear(x, weight))


@settings(max_examples=30, deadline=None)
@given(scheme=st.sampled_from(SCHEMES), cuts=st.lists(st.integers(0, 61), max_size=6), columns=st.integers(1, 150))
def test_how_rows_are_cut_does_not_show(native_library, scheme, cuts, columns):
    ops, rows = make_backend("native", torch.float32), rows_of(scheme, 61, columns)
    places = [0, *sorted(cuts), 61]
    parts = [rounded.rows_of(rows, begin, end) for begin, end in pairwise(places)]
    whole = ops.pack_rounded([rows], LinearShape(61, columns, None, scheme))
    assert torch.equal(ops.pack_rounded(parts, LinearShape(61, columns, None, scheme)).blob, whole.blob)


@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_largest_integers_do_not_overflow(native_ops, isa, group):
    scheme, columns = WeightScheme("int8", group), 8192
    integers = torch.full((16, columns), 127, dtype=torch.int8)
    integers[::2] = -128
    weight = native_ops.pack_rounded(
        [RoundedRows(integers, torch.ones(16, columns // group))], LinearShape(16, columns, None, scheme)
    )
    for tokens in (1, 6, 20):
        x = torch.ones(tokens, columns)
        x[tokens // 2 :] = -1
        torch.testing.assert_close(native_ops.linear(x, weight), x[:, :1] * integers[:, 0] * columns, rtol=1e-6, atol=0)


@every_scheme
def test_what_is_not_finite_shows(ops, scheme):
    rows = rows_of(scheme, 40, 320)
    rows.scales[3, -1] = float("nan")
    if rows.minima is not None:
        rows.minima[7, 0] = float("inf")
    bad = {3, 7} if scheme.has_minima else {3}
    y = ops.linear(inputs(2, 320), packed(ops, rows, scheme))
    assert {row for row in range(40) if not y[:, row].isfinite().any()} == bad
    assert {row for row in range(40) if not y[:, row].isfinite().all()} == bad


INT4, INT8, INT6 = WeightScheme("int4", 32), WeightScheme("int8", 32), WeightScheme("int8", 16, bits=6)


@pytest.mark.parametrize(
    ("scheme", "what"),
    [
        (WeightScheme("bfloat16"), "cannot be kept as bfloat16"),
        (WeightScheme("int4", 48), "int4 in groups of 48 columns; possible: multiples of 32"),
        (WeightScheme("int4"), "int4 in groups of 0"),
        (WeightScheme("int8", 24), "int8 in groups of 24 columns; possible: multiples of 16"),
        (WeightScheme("int8", 32, has_zeros=True), "int8 with zero points"),
        (WeightScheme("int8", 0, has_minima=True), "int8 with minima but no groups"),
        (WeightScheme("int8", 32, bits=6), "scales in steps"),
    ],
)
def test_schemes_that_there_are_not(ops, scheme, what):
    rows = rows_of(INT4, 16, 64)
    with pytest.raises(ConfigError, match=what):
        ops.pack_rounded([rows], LinearShape(16, 64, None, scheme))


@pytest.mark.parametrize(
    ("scheme", "change", "what"),
    [
        (INT4, {"integers": torch.full((16, 64), 16, dtype=torch.int8)}, "integers of int4 rows are in 16 to 16"),
        (INT4, {"integers": torch.zeros(16, 64)}, r"integers of rounded rows are torch.float32 \[16, 64\]"),
        (INT4, {"scales": torch.ones(16, 3)}, r"possible: torch.float32 \[16, 2\]"),
        (INT4, {"zeros": torch.zeros(16, 2, dtype=torch.uint8)}, "zeros of rounded rows are not in the scheme"),
        (replace(INT8, has_minima=True), {}, "minima of rounded rows are missing"),
        (INT6, {"steps": None}, "steps of rounded rows are missing"),
        (INT6, {"integers": torch.full((16, 64), 32, dtype=torch.int8)}, "integers of int8 rows are in 32 to 32"),
        (INT8, {"scales": torch.full((16, 2), 1e5)}, "scales of groups reach 100000; possible: 65504"),
    ],
)
def test_rows_that_do_not_fit(ops, scheme, change, what):
    rows = replace(rows_of(replace(scheme, has_minima=False), 16, 64), **change)
    with pytest.raises(ConfigError, match=what):
        ops.pack_rounded([rows], LinearShape(16, 64, None, scheme))


@pytest.mark.parametrize("rows", [15, 17, 40])
def test_another_number_of_rows(ops, rows):
    with pytest.raises(ConfigError, match=f"a weight of 16 rows came with {rows}"):
        ops.pack_rounded([rows_of(INT4, rows, 64)], LinearShape(16, 64, None, INT4))


@pytest.mark.parametrize(
    "columns", [torch.arange(63), torch.arange(1, 65), torch.arange(-1, 63), torch.arange(64).float()]
)
def test_columns_that_are_not_there(ops, columns):
    with pytest.raises(ConfigError, match="the order of columns"):
        ops.pack_rounded([rows_of(INT4, 16, 64)], LinearShape(16, 64, None, INT4, columns))


def test_floats_are_not_rounded_to_what_only_integers_come_with(ops):
    for scheme in (WeightScheme("int4", 32, has_zeros=True), WeightScheme("int8", 32, has_minima=True), INT6):
        with pytest.raises(ValueError, match="weights that come as integers"):
            ops.pack_linear([torch.ones(16, 64)], None, scheme)
