"""The float matrix products of the native kernels, on every instruction set that this machine runs.

Against float64: |error| <= in * 2^-23 * sum |x||w|, the bound for sums in any order (the two roundings of a product and
a sum are below one such unit). A bfloat16 weight that asks for rounded activations gets them on every instruction set,
and so does its reference; any other gets them as they are, whatever the processor could do faster.
"""

import ctypes
import itertools

import numpy as np
import pytest

from splittime.kernels.native import library as native

pytestmark = pytest.mark.sample(40)

try:
    lib = native.library()
except native.LibraryMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

ISAS = native.isa_names()
ROUNDED = (native.BFLOAT16, native.ROUNDED_ACTIVATIONS)
KINDS = ((native.FLOAT32, 0), (native.BFLOAT16, 0), ROUNDED)  # scheme and extras
SCHEMES = (native.FLOAT32, native.BFLOAT16)
CANARY = np.float32(1234.5)


@pytest.fixture(autouse=True, params=ISAS)
def isa(request):
    before = native.selected_isa()
    native.select_isa(request.param)
    lib.st_set_threads(2)
    yield request.param
    native.select_isa(before)
    lib.st_set_threads(1)


def address(array):
    return None if array is None else array.ctypes.data


def round_to_bfloat16(values):
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def to_bfloat16(values):
    """The upper halves, as numpy has no bfloat16."""
    return (round_to_bfloat16(values).view(np.uint32) >> 16).astype(np.uint16)


def source_type(weight):
    return {"float32": native.FLOAT32, "uint16": native.BFLOAT16, "float16": native.FLOAT16}[weight.dtype.name]


def empty_blob(scheme, out_features, in_features):
    size = lib.st_packed_bytes(scheme, out_features, in_features, 0, 0)
    assert size % native.BLOB_ALIGNMENT == 0
    memory = np.full(size + native.BLOB_ALIGNMENT, 0xAB, np.uint8)
    begin = -memory.ctypes.data % native.BLOB_ALIGNMENT
    return memory[begin : begin + size]


def pack(weight, scheme, cuts=()):
    """The blob of `weight`, packed in parts that begin at the rows `cuts`."""
    blob = empty_blob(scheme, *weight.shape)
    edges = [0, *cuts, len(weight)]
    for begin, end in itertools.pairwise(edges):
        part = np.ascontiguousarray(weight[begin:end])
        lib.st_pack(scheme, *weight.shape, 0, 0, address(part), source_type(part), begin, end, address(blob))
    return blob


def unpack(blob, scheme, shape):
    weight = np.empty(shape, np.float32)
    linear = native.StLinear(scheme, *shape, 0, 0, address(blob), None)
    lib.st_unpack(ctypes.byref(linear), address(weight))
    return weight


class Product:
    """A packed weight and what it stands for."""

    def __init__(self, out_features, in_features, kind, seed=0):
        rng = np.random.default_rng(seed)
        weight = rng.standard_normal((out_features, in_features), np.float32)
        (scheme, _), self.kind, self.shape = kind, kind, weight.shape
        self.blob = pack(weight, scheme)
        self.weight = weight if scheme == native.FLOAT32 else round_to_bfloat16(weight)
        self.rng = rng

    def inputs(self, tokens):
        return self.rng.standard_normal((tokens, self.shape[1]), np.float32)

    def __call__(self, x, bias=None, residual=None, y=None, x_stride=None, y_stride=None, tokens=None):
        (scheme, extras), (out_features, in_features) = self.kind, self.shape
        if y is None:
            y = np.full((len(x), out_features), np.nan, np.float32)
        linear = native.StLinear(scheme, *self.shape, 0, extras, address(self.blob), address(bias))
        lib.st_linear(
            ctypes.byref(linear),
            len(x) if tokens is None else tokens,
            address(x),
            x_stride or in_features,
            address(residual),
            address(y),
            y_stride or out_features,
        )
        return y

    def check(self, y, x, extra=0.0):
        if self.kind == ROUNDED:
            x = round_to_bfloat16(x)
        wide, weight = x.astype(np.float64), self.weight.astype(np.float64)
        bound = (self.shape[1] + 2) * 2.0**-23 * (np.abs(wide) @ np.abs(weight).T + np.abs(extra))
        assert (np.abs(y - (wide @ weight.T + extra)) <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("out_features", "in_features"),
    [(1, 1), (17, 3), (172, 172), (259, 257), (16, 8192), (1, 8192), (259, 1), (640, 513), (64, 64)],
)
def test_products_equal_the_reference(kind, out_features, in_features):
    product = Product(out_features, in_features, kind)
    for tokens in (1, 2, 3, 4, 5, 7, 13, 67):
        x = product.inputs(tokens)
        product.check(product(x), x)


@pytest.mark.parametrize("kind", KINDS)
def test_many_tokens_and_threads(kind):
    product = Product(515, 1031, kind)
    x = product.inputs(421)
    product.check(product(x), x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out_features", [48, 37])
def test_bias_residual_and_residual_in_place(kind, out_features):
    product = Product(out_features, 300, kind)
    x, bias = product.inputs(9), product.rng.standard_normal(out_features, np.float32)
    residual = product.rng.standard_normal((9, out_features), np.float32)
    product.check(product(x, bias=bias), x, bias)
    apart = product(x, bias=bias, residual=residual)
    product.check(apart, x, bias.astype(np.float64) + residual)
    np.testing.assert_array_equal(product(x, bias=bias, residual=residual, y=residual), apart)


@pytest.mark.parametrize("kind", KINDS)
def test_strides_leave_what_lies_between_alone(kind):
    product = Product(37, 41, kind)
    x = product.inputs(11)
    wide_x, wide_y = np.full((11, 60), np.nan, np.float32), np.full((11, 50), CANARY)
    wide_x[:, :41] = x
    product(wide_x, y=wide_y, x_stride=60, y_stride=50)
    np.testing.assert_array_equal(wide_y[:, :37], product(x))
    assert (wide_y[:, 37:] == CANARY).all()


def test_no_tokens_is_no_work():
    product = Product(16, 16, KINDS[0])
    y = np.full((1, 16), CANARY)
    product(product.inputs(1), y=y, tokens=0)
    assert (y == CANARY).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("out_features", "in_features"), [(259, 1031), (96, 172), (2048, 640)])
@pytest.mark.sample(16)
def test_a_token_does_not_depend_on_the_others(kind, out_features, in_features):
    product = Product(out_features, in_features, kind)
    x = product.inputs(450)
    y = product(x)
    rng = np.random.default_rng(1)
    for tokens in [*range(1, 15), 193, *rng.integers(15, 400, 6)]:
        lib.st_set_threads(int(rng.integers(1, 4)))
        begin = int(rng.integers(0, len(x) - tokens))
        np.testing.assert_array_equal(product(x[begin : begin + tokens]), y[begin : begin + tokens])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_token_that_is_not_finite_harms_no_other(kind, value):
    product = Product(100, 301, kind)
    for tokens in (2, 6, 20):
        x = product.inputs(tokens)
        y = product(x)
        x[1, 300] = value
        spoilt = product(x)
        assert not np.isfinite(spoilt[1]).any()
        np.testing.assert_array_equal(np.delete(spoilt, 1, 0), np.delete(y, 1, 0))


@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (37, 41), (172, 259), (50, 600)])
def test_unpack_gives_back_what_was_packed(shape):
    weight = np.random.default_rng(0).standard_normal(shape, np.float32)
    halves = weight.astype(np.float16)
    rounded = round_to_bfloat16(weight)
    for source, scheme, expected in (
        (weight, native.FLOAT32, weight),
        (weight, native.BFLOAT16, rounded),
        (to_bfloat16(weight), native.BFLOAT16, rounded),
        (to_bfloat16(weight), native.FLOAT32, rounded),
        (halves, native.FLOAT32, halves.astype(np.float32)),
        (halves, native.BFLOAT16, round_to_bfloat16(halves.astype(np.float32))),
    ):
        np.testing.assert_array_equal(unpack(pack(source, scheme), scheme, shape), expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_parts_make_the_same_blob_as_the_whole(scheme):
    weight = np.random.default_rng(0).standard_normal((131, 77), np.float32)
    whole = pack(weight, scheme)
    for threads in (1, 2):
        lib.st_set_threads(threads)
        np.testing.assert_array_equal(pack(weight, scheme, cuts=(16, 64, 128)), whole)


def test_every_float16_is_read_and_every_tie_rounded():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    read = unpack(pack(halves, native.FLOAT32), native.FLOAT32, halves.shape)
    np.testing.assert_array_equal(read, halves.astype(np.float32))
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    ties = ties[np.isfinite(ties)][: 254 * 256].reshape(254, 256)
    rounded = unpack(pack(ties, native.BFLOAT16), native.BFLOAT16, ties.shape)
    np.testing.assert_array_equal(rounded, round_to_bfloat16(ties))


def test_a_nan_weight_stays_one():
    weight = np.full((16, 2), np.uint32(0x7F800001).view(np.float32))
    assert np.isnan(unpack(pack(weight, native.BFLOAT16), native.BFLOAT16, weight.shape)).all()
