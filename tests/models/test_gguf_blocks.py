"""Blocks of integers mean what the `gguf` package says, to the last bit, whatever bits they are made of."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.kernels.api import RoundedRows
from splittime.models.gguf import blocks
from splittime.models.gguf.cursor import SERVED

gguf = pytest.importorskip("gguf")

KINDS = tuple(blocks.SCHEMES)
SCALES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_rows(kind: str, seed: int, shape: tuple[int, int]) -> np.ndarray:
    """Any bits; scales are any finite float16."""
    rng = np.random.default_rng(seed)
    num_bytes = {each.name: each.num_bytes for each in SERVED.values()}[kind]
    raw = rng.integers(0, 256, (shape[0], shape[1], num_bytes), dtype=np.uint8)
    if kind == "MXFP4":  # any power of two that a float32 has, and half of it
        raw[..., 0] = rng.integers(2, 255, shape)
        return raw.reshape(shape[0], -1)
    for place in SCALES.get(kind, (0,)):
        scales = (rng.normal(size=shape) * 10.0 ** rng.integers(-6, 2, shape)).astype(np.float16)
        raw[..., place : place + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(shape[0], -1)


def meant(rows: RoundedRows, scheme) -> torch.Tensor:
    """The formula of `RoundedRows`, in float64."""
    zero = 8 if scheme.name == "int4" else 0
    integers = rows.integers.unflatten(1, (-1, scheme.group)).double() - zero
    weights = integers * rows.scales.double().unsqueeze(-1)
    return (weights if rows.minima is None else weights - rows.minima.double().unsqueeze(-1)).flatten(1)


@given(st.sampled_from(KINDS), st.integers(0, 2**32), st.tuples(st.integers(1, 5), st.integers(1, 4)))
@settings(max_examples=60, deadline=None)
def test_floats_are_those_of_the_gguf_package(kind, seed, shape):
    raw = random_rows(kind, seed, shape)
    want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    mine = blocks.unpack(torch.from_numpy(raw), kind).floats()
    assert torch.equal(mine, torch.from_numpy(want))


@given(st.sampled_from(KINDS), st.integers(0, 2**32), st.tuples(st.integers(1, 5), st.integers(1, 4)))
@settings(max_examples=60, deadline=None)
def test_rounded_rows_mean_the_same(kind, seed, shape):
    raw = torch.from_numpy(random_rows(kind, seed, shape))
    scheme, rows = blocks.SCHEMES[kind], blocks.rounded(raw, kind)
    want = blocks.unpack(raw, kind).floats().double()
    assert rows.integers.dtype == torch.int8
    assert rows.zeros is None
    assert (rows.minima is not None) == scheme.has_minima
    if scheme.name == "int4":
        assert 0 <= rows.integers.min() <= rows.integers.max() <= 15
    if scheme.bits:  # what the native kernels keep: whole multiples of d, in 8 bits
        each = rows.steps[:, 0].repeat_interleave(256 // scheme.group, 1)
        multiples = (rows.scales / each).nan_to_num(0).round()
        assert torch.equal(multiples * each, rows.scales)
        assert multiples.abs().max() <= 128
    steps = rows.scales.abs().double().repeat_interleave(scheme.group, 1)
    room = 1e-6 * (16 * steps + want.abs())  # a minimum is moved by at most 16 steps, in float32
    assert ((meant(rows, scheme) - want).abs() <= room).all()


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0"])
def test_what_the_package_rounds_comes_back(kind):
    weight = np.random.default_rng(1).normal(size=(8, 96)).astype(np.float32)
    raw = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])
    mine = blocks.unpack(torch.from_numpy(raw), kind).floats().numpy()
    steps = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 127}[kind]
    assert np.abs(mine - weight).max() <= np.abs(weight).max() / steps


def test_sizes_are_those_of_the_gguf_package():
    for number, kind in SERVED.items():
        quant = gguf.GGMLQuantizationType(number)
        assert (quant.name, gguf.GGML_QUANT_SIZES[quant]) == (kind.name, (kind.values, kind.num_bytes))
