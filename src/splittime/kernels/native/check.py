"""Choosing the instruction set: the best that the CPU has and whose results agree with the portable code's.

An instruction set that was compiled but never run on such a CPU before must not be trusted blindly, so each start
spends a few milliseconds on one small product of each scheme. What disagrees is left for the next one, and said.
"""

import ctypes
import functools
import warnings

import numpy as np

from splittime.kernels.native import library as native
from splittime.kernels.native.library import BFLOAT16, FLOAT32, INT4, INT8, Linear, library

OUT, IN, TOKENS, GROUP = 48, 128, 7, 64
TOLERANCE = 0.02  # of the largest result; bfloat16 instructions round the activations, a wrong layout is off by 100 %


@functools.cache
def choose_isa() -> str:
    """Select an instruction set and return its name. Raises `LibraryMissing`."""
    names = native.isa_names()
    native.select_isa(names[0])
    expected = [_product(scheme) for scheme in (FLOAT32, BFLOAT16, INT8, INT4)]
    for name in reversed(names):
        native.select_isa(name)
        found = [_product(scheme) for scheme in (FLOAT32, BFLOAT16, INT8, INT4)]
        if all(_agree(one, other) for one, other in zip(found, expected, strict=True)):
            return name
        warnings.warn(f"the {name} kernels give wrong results on this CPU and are not used", stacklevel=2)
    raise native.LibraryMissing("the kernels disagree with themselves")


def _agree(found: np.ndarray, expected: np.ndarray) -> bool:
    largest = np.abs(expected).max()
    return bool(largest > 1 and np.abs(found - expected).max() <= TOLERANCE * largest)


def _product(scheme: int) -> np.ndarray:
    """float32 [TOKENS, OUT], the same numbers each time."""
    lib, random = library(), np.random.default_rng(scheme)
    weight = random.standard_normal((OUT, IN), dtype=np.float32)
    x = random.standard_normal((TOKENS, IN), dtype=np.float32)
    size = lib.st_packed_bytes(scheme, OUT, IN, GROUP, 0)
    raw = np.zeros(size + native.BLOB_ALIGNMENT, dtype=np.uint8)
    blob = raw.ctypes.data + -raw.ctypes.data % native.BLOB_ALIGNMENT
    lib.st_pack(scheme, OUT, IN, GROUP, weight.ctypes.data, FLOAT32, 0, OUT, blob)
    y = np.zeros((TOKENS, OUT), dtype=np.float32)
    linear = Linear(scheme, OUT, IN, GROUP, 0, blob, None)
    lib.st_linear(ctypes.byref(linear), TOKENS, x.ctypes.data, IN, None, y.ctypes.data, OUT)
    return y
