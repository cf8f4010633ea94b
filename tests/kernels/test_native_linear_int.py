"""Products with int8 and int4 weights of the native kernels, against float64 products of the same integers."""

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from splittime.kernels.native import library as native
from splittime.kernels.reference import rounding

pytestmark = pytest.mark.sample(30)

try:
    LIB = native.library()
except native.LibraryMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

INT8, INT4 = native.INT8, native.INT4
TURNED = native.TURNED
SCHEMES = [
    (INT8, 0, 0),
    (INT8, 0, TURNED),
    (INT8, 16, 0),
    (INT8, 32, 0),
    (INT4, 32, TURNED),
    (INT4, 64, 0),
    (INT4, 128, 0),
]
SHAPES = [(1, 4), (17, 64), (172, 172), (259, 1100), (40, 8192)]
BEST = native.selected_isa()


@pytest.fixture(autouse=True)
def restore():
    yield
    native.select_isa(BEST)
    LIB.st_set_threads(1)


def aligned(num_bytes: int) -> np.ndarray:
    memory = np.zeros(num_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes]


def address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


@dataclass
class Weight:
    linear: native.StLinear
    blob: np.ndarray
    bias: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.linear.out_features, self.linear.in_features


def packed(scheme: int, weight: np.ndarray, group: int, dtype: int = native.FLOAT32, extras: int = 0) -> Weight:
    out, columns = weight.shape
    blob = aligned(LIB.st_packed_bytes(scheme, out, columns, group, extras))
    LIB.st_pack(scheme, out, columns, group, extras, address(weight), dtype, 0, out, address(blob))
    return Weight(native.StLinear(scheme, out, columns, group, extras, address(blob), None), blob)


def packed_integers(
    scheme: int,
    values: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    group: int,
    bias: np.ndarray | None = None,
) -> Weight:
    out, columns = values.shape
    blob = aligned(LIB.st_packed_bytes(scheme, out, columns, group, zeros is not None))
    LIB.st_pack_quantized(scheme, out, columns, group, address(values), address(scales), address(zeros), address(blob))
    linear = native.StLinear(scheme, out, columns, group, zeros is not None, address(blob), address(bias))
    return Weight(linear, blob, bias)


def unpacked(weight: Weight) -> np.ndarray:
    dense = np.full(weight.shape, np.nan, np.float32)
    LIB.st_unpack(ctypes.byref(weight.linear), address(dense))
    return dense


def product(
    weight: Weight, x: np.ndarray, y: np.ndarray | None = None, residual: np.ndarray | None = None
) -> np.ndarray:
    """x and y may be parts of wider arrays."""
    if y is None:
        y = np.full((len(x), weight.shape[0]), 7, np.float32)
    LIB.st_linear(
        ctypes.byref(weight.linear),
        len(x),
        address(x),
        x.strides[0] // 4,
        address(residual),
        address(y),
        y.strides[0] // 4,
    )
    return y


def rounded(x: np.ndarray, group: int) -> np.ndarray:
    """Activations as the kernel rounds them, one scale per `group` columns, as float64."""
    found = np.zeros(x.shape)
    for begin in range(0, x.shape[1], group):
        part = x[:, begin : begin + group]
        largest = np.abs(part).max(axis=1, keepdims=True)
        with np.errstate(divide="ignore"):
            inverse = np.where(largest < 1e-30, np.float32(0), np.float32(127) / largest)
        scale = (largest / np.float32(127)).astype(np.float64)
        found[:, begin : begin + group] = np.rint(part * inverse) * scale
    return found


def activation_group(scheme: int, group: int, columns: int) -> int:
    return group or columns


def turned(x: np.ndarray) -> np.ndarray:
    return rounding.turned(torch.from_numpy(x)).numpy()


def activations(rng: np.random.Generator, tokens: int, columns: int) -> np.ndarray:
    """With differences of size between tokens and columns, as models have them."""
    x = rng.normal(size=(tokens, columns)) * np.exp(rng.normal(size=(tokens, 1)) * 3) * np.exp(rng.normal(size=columns))
    return x.astype(np.float32)


def assert_is_product(
    y: np.ndarray, x: np.ndarray, dense: np.ndarray, scheme: int, group: int, extras: int = 0
) -> None:
    """Of integers it is exact: what is left is the rounding of float32. And it is near the product of what x was."""
    if extras & TURNED:
        x, dense = turned(x), turned(dense)
    dense = dense.astype(np.float64)
    ints = rounded(x, activation_group(scheme, group, x.shape[1]))
    size = np.abs(ints) @ np.abs(dense).T + 1e-30
    assert (np.abs(y - ints @ dense.T) / size).max() < 2e-6
    half_steps = np.abs(x - ints) @ np.abs(dense).T
    assert (np.abs(y - x @ dense.T) <= half_steps + 2e-6 * size).all()


@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize(("scheme", "group", "extras"), SCHEMES)
@pytest.mark.sample(15)
def test_products_of_every_shape(isa: str, scheme: int, group: int, extras: int) -> None:
    native.select_isa(isa)
    rng = np.random.default_rng(0)
    for out, columns in SHAPES:
        weight = packed(scheme, rng.normal(size=(out, columns)).astype(np.float32), group, extras=extras)
        for tokens in (1, 2, 3, 4, 7, 8, 14, 37):
            x = activations(rng, tokens, columns)
            assert_is_product(product(weight, x), x, unpacked(weight), scheme, group, extras)


@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize("group", [32, 64, 96, 128])
def test_zero_points(isa: str, group: int) -> None:
    native.select_isa(isa)
    rng = np.random.default_rng(1)
    for out, columns in ((48, 384), (33, 172)):
        groups = -(-columns // group)
        values = rng.integers(0, 16, (out, columns)).astype(np.int8)
        scales = rng.uniform(0.5, 2, (out, groups)).astype(np.float16).astype(np.float32)
        zeros = rng.integers(0, 16, (out, groups)).astype(np.uint8)
        weight = packed_integers(INT4, values, scales, zeros, group)
        of_column = np.arange(columns) // group
        dense = (values - zeros[:, of_column].astype(np.float32)) * scales[:, of_column]
        assert (unpacked(weight) == dense).all()
        for tokens in (1, 3, 20):
            x = activations(rng, tokens, columns)
            assert_is_product(product(weight, x), x, dense, INT4, group)


def bfloat16_bits(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("dtype", [native.FLOAT32, native.BFLOAT16, native.FLOAT16])
def test_packing_rounds_to_nearest(dtype: int) -> None:
    rng = np.random.default_rng(2)
    given = exact = rng.normal(size=(35, 200)).astype(np.float32)
    exact[3] = 0
    exact[4, 64:128] = 0
    exact[5, [10, 40]] = 9, -9  # of equal magnitudes the first counts
    exact[6, [10, 40]] = -9, 9
    exact[7, :64] = -abs(exact[7, :64])
    if dtype == native.BFLOAT16:
        given, exact = bfloat16_bits(exact)
    elif dtype == native.FLOAT16:
        given = exact.astype(np.float16)
        exact = given.astype(np.float32)

    scale = np.abs(exact).max(axis=1, keepdims=True) / np.float32(127)
    integers = np.rint(np.divide(exact, scale, where=scale > 0, out=np.zeros_like(exact)))
    assert (unpacked(packed(INT8, given, 0, dtype)) == integers * scale).all()

    expected = np.zeros_like(exact)
    for begin in range(0, 200, 64):
        part = exact[:, begin : begin + 64]
        extreme = np.take_along_axis(part, np.abs(part).argmax(axis=1)[:, None], axis=1)
        scale = (extreme / np.float32(-8)).astype(np.float16).astype(np.float32)
        integers = np.rint(np.divide(part, scale, where=scale != 0, out=np.zeros_like(part))) + 8
        expected[:, begin : begin + 64] = (np.clip(integers, 0, 15) - 8) * scale
    assert (unpacked(packed(INT4, given, 64, dtype)) == expected).all()


@pytest.mark.parametrize(("scheme", "group", "extras"), SCHEMES)
def test_parts_fill_one_blob(scheme: int, group: int, extras: int) -> None:
    rng = np.random.default_rng(3)
    dense = rng.normal(size=(75, 96)).astype(np.float32)
    whole = packed(scheme, dense, group, extras=extras)
    parts = aligned(len(whole.blob))
    for begin, end in ((32, 48), (0, 32), (48, 75)):
        LIB.st_pack(
            scheme, 75, 96, group, extras, address(dense[begin:end]), native.FLOAT32, begin, end, address(parts)
        )
    assert (parts == whole.blob).all()


def test_packed_integers_come_back() -> None:
    rng = np.random.default_rng(4)
    values = rng.integers(-127, 128, (21, 70)).astype(np.int8)
    scales = rng.uniform(0.5, 2, 21).astype(np.float32)
    assert (unpacked(packed_integers(INT8, values, scales, None, 0)) == values * scales[:, None]).all()
    for scale in (1.0, 6e-8, 1e-5, 6.1e-5, 65504.0):  # float16's subnormals and its largest
        scales = np.full((21, 2), scale, np.float32)
        nibbles = (values & 15).astype(np.int8)
        expected = (nibbles - 8).astype(np.float32) * np.float32(np.float16(scale))
        assert (unpacked(packed_integers(INT4, nibbles, scales, None, 64)) == expected).all()


@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize(("scheme", "group", "extras"), SCHEMES)
@pytest.mark.sample(15)
def test_a_token_depends_on_itself_alone(isa: str, scheme: int, group: int, extras: int) -> None:
    """Same bits among any number of tokens, at any place, on any number of threads."""
    native.select_isa(isa)
    rng = np.random.default_rng(5)
    weight = packed(scheme, rng.normal(size=(100, 1088)).astype(np.float32), group, extras=extras)
    x = activations(rng, 140, 1088)
    bias, residual = rng.normal(size=100).astype(np.float32), rng.normal(size=(140, 100)).astype(np.float32)
    weight.linear.bias = address(bias)
    alone = np.concatenate([product(weight, x[i : i + 1], residual=residual[i : i + 1]) for i in range(len(x))])
    for threads in (1, 2, 3):
        LIB.st_set_threads(threads)
        for tokens in (1, 2, 3, 4, 5, 6, 9, 12, 13, 16, 31, 64, 129, 140):
            begin = int(rng.integers(0, len(x) - tokens + 1))
            some = slice(begin, begin + tokens)
            assert (product(weight, x[some], residual=residual[some]) == alone[some]).all()


@pytest.mark.parametrize(("scheme", "group", "extras"), SCHEMES)
def test_more_tokens_than_are_rounded_at_a_time(scheme: int, group: int, extras: int) -> None:
    rng = np.random.default_rng(6)
    weight = packed(scheme, rng.normal(size=(32, 128)).astype(np.float32), group, extras=extras)
    x = activations(rng, 1100, 128)
    LIB.st_set_threads(2)
    y = product(weight, x)
    assert_is_product(y, x, unpacked(weight), scheme, group, extras)
    assert all((product(weight, x[i : i + 1]) == y[i]).all() for i in (0, 511, 512, 1099))


@pytest.mark.parametrize(("scheme", "group", "extras"), SCHEMES)
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_bias_residual_and_strides(scheme: int, group: int, extras: int, tokens: int) -> None:
    rng = np.random.default_rng(7)
    out, columns = 37, 172
    weight = packed(scheme, rng.normal(size=(out, columns)).astype(np.float32), group, extras=extras)
    x = activations(rng, tokens, columns)
    plain = product(weight, x)

    bias = rng.normal(size=out).astype(np.float32)
    weight.linear.bias = address(bias)
    residual = rng.normal(size=(tokens, out)).astype(np.float32)
    expected = plain + bias + residual
    tolerance = 1e-6 * (np.abs(plain) + np.abs(bias) + np.abs(residual))
    assert (np.abs(product(weight, x, residual=residual) - expected) <= tolerance).all()
    assert (np.abs(product(weight, x, y=residual, residual=residual) - expected) <= tolerance).all()

    weight.linear.bias = None
    wide_x = np.full((tokens, columns + 9), np.nan, np.float32)
    wide_x[:, :columns] = x
    wide_y = np.full((tokens, out + 5), 3, np.float32)
    product(weight, wide_x[:, :columns], y=wide_y[:, :out])
    assert (wide_y[:, :out] == plain).all()
    assert (wide_y[:, out:] == 3).all()


@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize("tokens", [1, 6, 20])
def test_largest_integers_do_not_overflow(isa: str, tokens: int) -> None:
    native.select_isa(isa)
    columns = 8192
    x = np.ones((tokens, columns), np.float32)
    x[tokens // 2 :] = -1
    eights = np.full((16, columns), 127, np.int8)
    eights[::2] = -127
    y = product(packed_integers(INT8, eights, np.ones(16, np.float32), None, 0), x)
    assert (y == x[:, :1] * eights[:, 0] * columns).all()
    for group in (32, 64, 128):
        fours = np.zeros((16, columns), np.int8)
        fours[::2] = 15
        for zero in (None, 0, 15):
            groups = columns // group
            zeros = None if zero is None else np.full((16, groups), zero, np.uint8)
            y = product(packed_integers(INT4, fours, np.ones((16, groups), np.float32), zeros, group), x)
            expected = x[:, :1] * (fours[:, 0].astype(np.float32) - (8 if zero is None else zero)) * columns
            np.testing.assert_allclose(y, expected, rtol=1e-6)


@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize(("scheme", "group", "extras"), SCHEMES)
def test_extreme_activations(isa: str, scheme: int, group: int, extras: int) -> None:
    native.select_isa(isa)
    rng = np.random.default_rng(8)
    weight = packed(scheme, rng.normal(size=(40, 300)).astype(np.float32), group, extras=extras)
    x = activations(rng, 9, 300)
    x[1] = 0
    x[2, 5] = 1e30
    x[3] *= 1e-30
    x[4] = 1e-42
    good = product(weight, x)
    assert (good[1] == 0).all()
    assert np.isfinite(good).all()
    assert_is_product(good[:3], x[:3], unpacked(weight), scheme, group, extras)
    for token, bad in ((0, np.nan), (5, np.inf), (8, -np.inf)):
        x[token, 299] = bad
        for columns in (slice(299, 300), slice(0, 300)):
            x[token, columns] = bad
            y = product(weight, x)
            assert not np.isfinite(y[token]).any()
        x[token] = 0
        good[token] = 0
        assert (product(weight, x) == good).all()


@pytest.mark.parametrize(("scheme", "group", "extras"), SCHEMES)
def test_every_instruction_set_agrees(scheme: int, group: int, extras: int) -> None:
    rng = np.random.default_rng(9)
    weight = packed(scheme, rng.normal(size=(100, 600)).astype(np.float32), group, extras=extras)
    for tokens in (1, 4, 30):
        x = activations(rng, tokens, 600)
        size = np.abs(x) @ np.abs(unpacked(weight)).T
        found = []
        for isa in native.isa_names():
            native.select_isa(isa)
            found.append(product(weight, x))
        for y in found:
            assert (np.abs(y - found[-1]) <= 1e-6 * size).all()
