"""Choosing the instruction set: the fastest of those that the CPU has and whose results agree with the portable code's.

Kernels that were compiled but never run on such a CPU are not trusted blindly: each start spends some milliseconds on
small cases of every kernel, and leaves out, with a warning, an instruction set whose results disagree. AMX is tried in
a child process before (`csrc/amx.cpp`), since it may end the process. Speed is measured too: an instruction that
multiplies pairs has twice the rate of a plain one on some processors and half of it on others. Whichever is chosen
rounds what the scheme says, and nothing else.

`SPLITTIME_ISA` names one to use whatever its speed, for tests and comparisons.
"""

import ctypes
import functools
import math
import os
import time
import warnings
from collections.abc import Iterator, Sequence

import numpy as np

from splittime.core.errors import ConfigError
from splittime.kernels.draw import DRAW
from splittime.kernels.native import library as native
from splittime.kernels.native.library import (
    BFLOAT16,
    FLOAT32,
    INT4,
    INT8,
    MINIMA,
    ROUNDED_ACTIVATIONS,
    TURNED,
    StBatch,
    StKv,
    StLinear,
    library,
)

ASKED = "SPLITTIME_ISA"
TILES, PAIRS = "amx", "avx512bf16"
EMULATED = "amx_emulated"  # for tests
OUT, IN, GROUP = 48, 704, 64  # columns: a whole chunk of the integer products, and a part of one
PRODUCTS = (  # of the check: scheme, columns of a group, extras
    *((FLOAT32, 0, 0), (BFLOAT16, 0, 0), (BFLOAT16, 0, ROUNDED_ACTIVATIONS)),
    *((INT8, 0, TURNED), (INT8, 16, 0), (INT4, GROUP, TURNED)),
)
RATED = ((BFLOAT16, 0), (BFLOAT16, ROUNDED_ACTIVATIONS), (INT8, 0))  # products that are timed: scheme and extras
RATED_TOKENS, RATED_WIDTH, RATED_ROUNDS = 32, 512, 5
CLEARLY = 0.9  # faster is who takes less than so much of the time
TOKENS = (1, 7, 40)
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 2, 64, 16
ODD, SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)
ATTENTION = ((FLOAT32, 0), (BFLOAT16, 0), (INT8, 0), (FLOAT32, 2))  # of the check: how keys are kept, cap of scores
TOLERANCE = 0.02  # of the largest result; a wrong layout is off by 100 %


@functools.cache
def choose_isa() -> tuple[str, str]:
    """Select an instruction set. Returns its name, and why it is the one.

    Raises `LibraryMissing`; RuntimeError if the portable code computes nothing, or nothing finite; `ConfigError` for a
    `SPLITTIME_ISA` that does not run here.
    """
    asked = os.environ.get(ASKED)
    name, reason = (asked, f"{ASKED}={asked}") if asked else fastest(_right_ones())
    if asked and asked not in native.isa_names():
        usable = ", ".join(native.isa_names())
        raise ConfigError(f"{ASKED}={asked} is none of what runs here: {usable}", param=ASKED, value=asked)
    native.select_isa(name)
    _drawn.cache_clear()
    return name, f"{reason}; {native.amx_refusal()}" if native.amx_refusal() else reason


def insist(isa: str) -> None:
    """Use this instruction set from now on, in the processes that are started too, whichever is the fastest."""
    os.environ[ASKED] = isa
    choose_isa.cache_clear()


def _right_ones() -> list[str]:
    """Returns the instruction sets whose results are right, in the library's order. The first is the portable code,
    which the others are compared with. Raises RuntimeError if that computes nothing, or nothing finite."""
    first, *others = (name for name in native.isa_names() if name != EMULATED)
    native.select_isa(first)
    expected, right = results(), [first]
    if not all(_agree(wanted, wanted) for wanted in expected):
        raise RuntimeError(f"the {first} kernels compute nothing, or nothing finite")
    for name in others:
        native.select_isa(name)
        if all(_agree(found, wanted) for found, wanted in zip(results(), expected, strict=True)):
            right.append(name)
        else:
            warnings.warn(f"the {name} kernels give wrong results on this CPU and are not used", stacklevel=3)
    return right


def fastest(names: Sequence[str]) -> tuple[str, str]:
    """Returns the last name, which has the most instructions, unless another is clearly faster; and why.

    names: in the library's order, the portable code first."""
    if len(names) == 1:
        return names[0], f"{names[0]}: the only one that runs here"
    tried = names[1:]
    taken_s = _product_times(tried)
    means_s = {name: math.prod(taken_s[name]) ** (1 / len(RATED)) for name in tried}
    best = min(tried, key=lambda name: means_s[name])
    chosen = best if means_s[best] < CLEARLY * means_s[tried[-1]] else tried[-1]
    operations = 2 * RATED_TOKENS * RATED_WIDTH**2
    told = (f"{name} {operations / means_s[name] / 1e9:.0f}" for name in tried)
    return chosen, f"{chosen}, by billions of operations a second: {', '.join(told)}"


def _product_times(names: Sequence[str]) -> dict[str, list[float]]:
    """Returns the shortest time of each product by instruction set; they take turns."""
    width, x = RATED_WIDTH, _drawn(0, RATED_TOKENS, RATED_WIDTH)
    taken_s = {name: [math.inf] * len(RATED) for name in names}
    for place, (scheme, extras) in enumerate(RATED):
        raw, linear = _packed(scheme, 0, extras, width, width)
        for name in [*names] * RATED_ROUNDS:
            native.select_isa(name)
            begin_s = time.perf_counter()
            _times(linear, x)
            taken_s[name][place] = min(taken_s[name][place], time.perf_counter() - begin_s)
        del raw
    return taken_s


@functools.cache
def bytes_read() -> np.ndarray:
    """Bytes that the checks themselves have read, by kind: int64 [READ_KINDS]. To be taken off a model's."""
    choose_isa()
    counts = np.zeros(native.READ_KINDS, dtype=np.int64)
    library().st_bytes_read(counts.ctypes.data)
    return counts


def results() -> list[np.ndarray]:
    """Returns what the selected instruction set computes for small cases of every kernel, the same cases each time."""
    products = [_product(*kind, tokens) for kind in PRODUCTS for tokens in TOKENS]
    products += [_product_of_integers(scheme, tokens) for scheme in (INT8, INT4) for tokens in TOKENS]
    return [*products, *_elementwise(), *(_attention(*kind) for kind in ATTENTION), *_delta(), *_choices()]


def _agree(found: np.ndarray, expected: np.ndarray) -> bool:
    largest = np.abs(expected).max()
    return bool(largest > 0 and np.abs(found - expected).max() <= TOLERANCE * largest)


@functools.cache
def _drawn(seed: int, *shape: int) -> np.ndarray:
    """Returns numbers that look drawn between -2 and 2, the same ones each time, which cannot be written to.
    (`numpy.random` takes longer to import than all cases of the check to compute.)"""
    bits = (np.arange(math.prod(shape), dtype=np.uint64) + np.uint64((seed << 32) + 1)) * ODD
    bits = (bits ^ (bits >> SHIFT)) * ODD
    drawn = ((bits >> SHIFT) * (4 / 2**32) - 2).astype(np.float32).reshape(shape)
    drawn.flags.writeable = False
    return drawn


def _aligned(num_bytes: int) -> tuple[np.ndarray, int]:
    """Returns zeros, and the first aligned address within them, from which `num_bytes` are free."""
    raw = np.zeros(num_bytes + native.BLOB_ALIGNMENT, dtype=np.uint8)
    return raw, raw.ctypes.data + -raw.ctypes.data % native.BLOB_ALIGNMENT


def _product(scheme: int, group: int, extras: int, tokens: int) -> np.ndarray:
    """[tokens, OUT]."""
    raw, linear = _packed(scheme, group, extras, OUT, IN)
    y = _times(linear, _drawn(tokens, tokens, IN))
    del raw
    return y


def _packed(scheme: int, group: int, extras: int, rows: int, columns: int) -> tuple[np.ndarray, StLinear]:
    """Returns the memory of a packed random weight, which the caller keeps, and the weight."""
    weight = _drawn(scheme, rows, columns)
    raw, blob = _aligned(library().st_packed_bytes(scheme, rows, columns, group, extras))
    library().st_pack(scheme, rows, columns, group, extras, weight.ctypes.data, FLOAT32, 0, rows, blob)
    return raw, StLinear(scheme, rows, columns, group, extras, blob)


def _product_of_integers(scheme: int, tokens: int) -> np.ndarray:
    """[tokens, OUT], by a weight with minima whose columns lie in another order."""
    lib, x = library(), _drawn(tokens, tokens, IN)
    raw, blob = _aligned(lib.st_packed_bytes(scheme, OUT, IN, GROUP, MINIMA))
    integers = (_drawn(scheme, OUT, IN) * 4 + 8).astype(np.int8)  # 0 to 15
    scales, minima = (_drawn(seed, OUT, IN // GROUP) for seed in (5, 6))
    arrays = (integers.ctypes.data, scales.ctypes.data, None, minima.ctypes.data)
    lib.st_pack_rounded(scheme, OUT, IN, GROUP, MINIMA, *arrays, None, 0, OUT, blob)
    columns = np.argsort(_drawn(scheme, IN)).astype(np.int32)
    y = _times(StLinear(scheme, OUT, IN, GROUP, MINIMA, blob, None, columns.ctypes.data), x)
    del raw
    return y


def _times(linear: StLinear, x: np.ndarray) -> np.ndarray:
    rows, columns = linear.out_features, linear.in_features
    y = np.zeros((len(x), rows), dtype=np.float32)
    library().st_linear(ctypes.byref(linear), len(x), x.ctypes.data, columns, None, y.ctypes.data, rows)
    return y


def _elementwise() -> Iterator[np.ndarray]:
    lib, x, weight = library(), _drawn(1, 5, 2 * IN), _drawn(2, 2 * IN)
    normed = np.zeros_like(x)
    lib.st_rms_norm(5, 2 * IN, x.ctypes.data, 2 * IN, weight.ctypes.data, 1e-5, normed.ctypes.data)
    yield normed
    for activation in (native.SILU, native.GELU):
        gated = np.zeros((5, IN), dtype=np.float32)
        lib.st_gate(5, IN, activation, x.ctypes.data, gated.ctypes.data)
        yield gated


def _attention(kv_type: int, cap: float) -> np.ndarray:
    """[7, HEADS * HEAD_DIM]: a decode row at position 19, whose past a first call computed, and a prompt of six."""
    itemsize = {FLOAT32: 4, BFLOAT16: 2, INT8: 1}[kv_type]
    raw, data = _aligned(4 * 2 * KV_HEADS * BLOCK_SIZE * HEAD_DIM * itemsize)
    scales = np.zeros((4, 2, KV_HEADS, BLOCK_SIZE), dtype=np.float32)
    kv = StKv(kv_type, 3, BLOCK_SIZE, KV_HEADS, HEAD_DIM, data, scales.ctypes.data)
    _attend(kv, [0, 19], [19], [[0, 1]], list(range(19)), 0, cap)
    found = _attend(kv, [0, 1, 7], [20, 6], [[0, 1], [2, 3]], [19, *range(6)], 1, cap)
    del raw
    return found


def _attend(
    kv: StKv,
    begins: list[int],
    contexts: list[int],
    tables: list[list[int]],
    positions: list[int],
    decode_rows: int,
    cap: float,
) -> np.ndarray:
    tokens = begins[-1]
    rows = np.repeat(np.arange(len(contexts)), np.diff(begins))
    blocks = [tables[row][position // BLOCK_SIZE] for row, position in zip(rows, positions, strict=True)]
    offsets = [position % BLOCK_SIZE for position in positions]
    arrays = [np.array(values, dtype=np.int32) for values in (begins, contexts, tables, blocks, offsets)]
    angles = np.outer(positions, np.linspace(1, 0.01, HEAD_DIM // 2))
    turns = np.stack((np.cos(angles), np.sin(angles)), axis=-1).astype(np.float32)
    addresses = [array.ctypes.data for array in arrays]
    batch = StBatch(len(contexts), tokens, decode_rows, 2, *addresses, turns.ctypes.data)
    heads, norm = _drawn(tokens, tokens, HEADS + 2 * KV_HEADS, HEAD_DIM).copy(), _drawn(3, HEADS + KV_HEADS, HEAD_DIM)
    out, stride = np.zeros((tokens, HEADS * HEAD_DIM), dtype=np.float32), heads[0].size
    lib, step, store = library(), ctypes.byref(batch), ctypes.byref(kv)
    lib.st_rope_write(step, store, HEADS, norm.ctypes.data, 1e-5, heads.ctypes.data)
    scores = ctypes.byref(native.StScores(HEAD_DIM**-0.5, cap))
    lib.st_attention(step, store, HEADS, 0, scores, heads.ctypes.data, stride, out.ctypes.data)
    return out


def _delta() -> Iterator[np.ndarray]:
    """Outputs of two rows of a gated delta net, of which one goes on from a state, and the states behind them."""
    key_heads, heads, key_dim, value_dim, width = 2, 4, 24, 40, 4  # a panel of columns, and a narrow one
    inner, rows, tokens = heads * value_dim, 2, 8
    channels = 2 * key_heads * key_dim + inner
    arrays = [_drawn(1, width, channels), -np.abs(_drawn(2, heads)), _drawn(3, heads), _drawn(4, value_dim)]
    sizes = (key_heads, heads, key_dim, value_dim, width, 1e-6, 1e-6)
    net = native.StDelta(*sizes, *(array.ctypes.data for array in arrays))
    places = [np.array(each, dtype=np.int64) for each in ([0, 1, tokens], [0, -1], [0, 1])]
    step = native.StStates(rows, tokens, 0, *(array.ctypes.data for array in places), None)
    products, out = _drawn(5, tokens, channels + inner + 2 * heads), np.zeros((tokens, inner), dtype=np.float32)
    states = _drawn(6, rows, inner * key_dim + channels * (width - 1)).copy()
    addresses = products.ctypes.data, products.shape[1], states.ctypes.data, out.ctypes.data
    library().st_delta(ctypes.byref(net), ctypes.byref(step), *addresses)
    yield out
    yield states


def _choices() -> Iterator[np.ndarray]:
    """Tokens and flags, which must be the same: they are spread so that a difference exceeds the tolerance."""
    lib, logits = library(), _drawn(4, 6, 999) * 3
    logits[5, 500] = np.nan
    draws = np.zeros(5, dtype=DRAW)
    draws["temperature"], draws["uniform"] = 0.9, np.linspace(0, 0.99, 5)
    draws["top_p"], draws["top_k"], draws["min_p"] = (1, 0.9, 1, 1, 0.5), (0, 0, 20, 0, 300), (0, 0, 0, 0.05, 0.01)
    draws["allowed"], bits = (0, 1, 0, 2, 1), np.array([[0x0F0F00FF] * 32, [1 << 31] * 32], dtype=np.uint32)
    tokens, flags = np.zeros(5, dtype=np.int32), np.zeros(6, dtype=np.uint8)
    for call, *arguments in ((lib.st_draw, draws.ctypes.data, bits.ctypes.data), (lib.st_argmax,)):
        call(5, 999, logits.ctypes.data, *arguments, tokens.ctypes.data)
        yield np.eye(999)[tokens]
    lib.st_finite(6, 999, logits.ctypes.data, flags.ctypes.data)
    yield flags.astype(np.float64)
