"""Published layouts, read back element by element by code that shares nothing with the writer."""

import pytest
import torch
from tiny import correlated

from splittime.core.errors import ConfigError
from splittime.lab.quantize import rounding
from splittime.lab.quantize.rounding import Grid, pack, round_to_e4m3, round_to_nearest, unpack
from splittime.lab.quantize.settings import QuantizeSettings
from splittime.lab.quantize.treat import grid_of

WIDTH, ROWS = 64, 40


def weight():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(4))


def field(word, index, bits):
    """Field `index` of a signed 32-bit word."""
    return (int(word) % 2**32 >> index * bits) % 2**bits


def product(scale, steps):
    """In float32, as whoever reads a checkpoint multiplies."""
    return float(torch.tensor(float(scale)) * steps)


def compressed_value(tensors, row, column, grid):
    scale = tensors["weight_scale"][row, column // grid.group if grid.group else 0]
    if "weight" in tensors:
        return product(scale, int(tensors["weight"][row, column]))
    per_word = 32 // grid.bits
    stored = field(tensors["weight_packed"][row, column // per_word], column % per_word, grid.bits)
    return product(scale, stored - 2 ** (grid.bits - 1))


def test_e4m3_reads_back():
    """Every bit, and within half a step of what it was: four bits of a number, or of the smallest normal one."""
    rows = weight() * torch.logspace(-6, 3, ROWS).unsqueeze(1)
    rows[5] = 0
    rounded = round_to_e4m3(rows, torch.bfloat16)
    tensors = pack("float-quantized", rounded, Grid(8, 0, True, torch.bfloat16))
    assert {name: (one.dtype, tuple(one.shape)) for name, one in tensors.items()} == {
        "weight": (torch.float8_e4m3fn, (ROWS, WIDTH)),
        "weight_scale": (torch.bfloat16, (ROWS, 1)),
    }
    values = tensors["weight"].float() * tensors["weight_scale"].float()
    assert torch.equal(values, rounded.values())
    assert torch.equal(unpack("float-quantized", tensors, Grid(8, 0, True, torch.bfloat16)).values(), values)
    scale = tensors["weight_scale"].float()
    allowed = torch.maximum(rows.abs() * 2.0**-4, scale * 2.0**-10) * 1.001
    assert ((values - rows).abs() <= allowed).all()
    assert not values[5].any()
    assert float(scale[5]) == 1
    with pytest.raises(ConfigError, match="not finite"):
        round_to_e4m3(torch.full((2, 3), float("inf")), torch.float32)


def test_small_rows_of_a_float16_model_keep_their_values_in_fp8():
    grid = grid_of(QuantizeSettings(scheme="fp8").resolved(), torch.float16)
    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).half().float() * 1e-5
    values = round_to_e4m3(rows, grid.scale_dtype).values()
    assert float((values - rows).norm() / rows.norm()) < 0.04


def gptq_value(tensors, row, column, grid):
    per_word = 32 // grid.bits
    group = int(tensors["g_idx"][column])
    stored = field(tensors["qweight"][column // per_word, row], column % per_word, grid.bits)
    zero = field(tensors["qzeros"][group, row // per_word], row % per_word, grid.bits) + 1
    return product(tensors["scales"][group, row], stored - zero)


def awq_value(tensors, row, column, grid):
    nibble = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}[row % 8]
    group = column // (grid.group or WIDTH)
    stored = field(tensors["qweight"][column, row // 8], nibble, 4)
    zero = field(tensors["qzeros"][group, row // 8], nibble, 4)
    return product(tensors["scales"][group, row], stored - zero)


CASES = [
    ("pack-quantized", Grid(4, 32, True, torch.float32), compressed_value),
    ("pack-quantized", Grid(4, 0, True, torch.bfloat16), compressed_value),
    ("pack-quantized", Grid(8, 0, True, torch.float16), compressed_value),
    ("int-quantized", Grid(8, 0, True, torch.float32), compressed_value),
    ("gptq", Grid(4, 32, True, torch.float16), gptq_value),
    ("gptq", Grid(8, 0, True, torch.float16), gptq_value),
    ("awq", Grid(4, 32, False, torch.float16), awq_value),
    ("awq", Grid(4, 0, False, torch.float16), awq_value),
]


@pytest.mark.parametrize(("layout", "grid", "value_at"), CASES, ids=[f"{c[0]}-{c[1].bits}-{c[1].group}" for c in CASES])
def test_every_element_reads_back(layout, grid, value_at):
    rounded = round_to_nearest(weight(), grid)
    tensors = pack(layout, rounded, grid)
    wanted = rounded.values()
    for row in range(0, ROWS, 3):
        for column in range(WIDTH):
            assert value_at(tensors, row, column, grid) == float(wanted[row, column])
    back = unpack(layout, tensors, grid)
    assert torch.equal(back.values(), wanted)
    assert torch.equal(back.integers, rounded.integers)


def test_groups_in_the_order_of_importance_read_back():
    grid = Grid(4, 32, True, torch.float16)
    gram = (lambda x: x.t() @ x)(correlated(100, WIDTH))
    rounded = rounding.gptq(weight(), gram, grid, True)
    tensors = pack("gptq", rounded, grid)
    assert tensors["g_idx"].tolist() != sorted(tensors["g_idx"].tolist())
    found = [[gptq_value(tensors, row, column, grid) for column in range(WIDTH)] for row in range(ROWS)]
    assert torch.equal(torch.tensor(found), rounded.values())
    assert torch.equal(unpack("gptq", tensors, grid).values(), rounded.values())


def test_types_and_shapes_are_the_published_ones():
    grid = Grid(4, 32, True, torch.float16)
    rounded = round_to_nearest(weight(), grid)
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in pack("gptq", rounded, grid).items()}
    assert shapes == {
        "qweight": (torch.int32, (WIDTH // 8, ROWS)),
        "qzeros": (torch.int32, (2, ROWS // 8)),
        "scales": (torch.float16, (2, ROWS)),
        "g_idx": (torch.int32, (WIDTH,)),
    }
    assert set(pack("gptq", rounded, grid)["qzeros"].flatten().tolist()) == {0x77777777}
    awq = pack("awq", round_to_nearest(weight(), Grid(4, 32, False, torch.float16)), grid)
    assert {name: tuple(tensor.shape) for name, tensor in awq.items()} == {
        "qweight": (WIDTH, ROWS // 8),
        "qzeros": (2, ROWS // 8),
        "scales": (2, ROWS),
    }


def test_a_row_that_ends_within_a_word_is_filled_up():
    grid = Grid(4, 0, True, torch.float32)
    odd = weight()[:, :43]
    rounded = round_to_nearest(odd, grid)
    tensors = pack("pack-quantized", rounded, grid)
    assert tensors["weight_packed"].shape == (ROWS, 6)
    assert tensors["weight_shape"].tolist() == [ROWS, 43]
    assert torch.equal(unpack("pack-quantized", tensors, grid).values(), rounded.values())
