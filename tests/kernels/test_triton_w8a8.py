"""Products of e4m3 with e4m3 in groups of 128 columns, as fp8 checkpoints in blocks want them, against float64.

The bound is that of `test_triton_linear`, whose docstring says it; on a card the tensor cores cut within a group."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch
from integers import inputs
from test_triton_linear import DTYPES, by_dtype, on_device, within

from splittime.core.errors import ConfigError
from splittime.kernels import plain
from splittime.kernels.api import LinearShape, RoundedRows, WeightScheme
from splittime.kernels.reference import products
from splittime.kernels.reference.ops import ReferenceOps
from splittime.kernels.triton import linear, w8a8
from splittime.kernels.triton.device import device, is_interpreted
from splittime.kernels.triton.grouped import grouped, stack_experts
from splittime.kernels.triton.tiles import Tiles

pytestmark = pytest.mark.sample(5)

BLOCKS = WeightScheme("fp8", 128)
CUT = 0.0 if is_interpreted() else 2.0**-6


def rows_in_blocks(out, columns, rows=128):
    """Random e4m3, and a scale for each block of so many rows and 128 columns, all far apart."""
    source = torch.Generator().manual_seed(out + columns)
    values = (torch.randn(out, columns, generator=source) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    blocks = torch.rand(-(-out // rows), -(-columns // 128), generator=source) * 2 ** torch.arange(
        -(-columns // 128)
    ).remainder(7)
    return RoundedRows(values, (blocks.repeat_interleave(rows, 0)[:out] / 448).contiguous())


def pack(rows, bias=None, dtype=torch.float32, cut=0):
    count, columns = rows.integers.shape
    cuts = [(0, cut), (cut, count)] if cut else [(0, count)]
    parts = [RoundedRows(rows.integers[begin:end], rows.scales[begin:end]) for begin, end in cuts]
    return linear.pack_rounded(parts, LinearShape(count, columns, bias, BLOCKS, None), dtype, device())


def check(x, packed, rows, residual=None, bias=None, tiles=None):
    true = products.eight_bit_product(x.cpu().float(), rows, BLOCKS).double()
    absolute = RoundedRows(rows.integers.float().abs().to(torch.float8_e4m3fn), rows.scales)
    sizes = products.eight_bit_product(x.cpu().float().abs(), absolute, BLOCKS).double()
    for added in (bias, residual):
        true = true if added is None else true + added.double().cpu()
        sizes = sizes if added is None else sizes + added.double().cpu().abs()
    y = linear.linear(x, packed, residual) if tiles is None else w8a8.linear(x, packed, residual, tiles)
    assert within(y, true, sizes, x.dtype, x.shape[1], CUT)


@by_dtype
@pytest.mark.parametrize("shape", [(1, 24, 40), (2, 130, 264), (3, 72, 1160), (17, 136, 520), (65, 24, 300)], ids=str)
def test_shapes(shape, dtype):
    """With a bias and a residual; the deepest is shared out among programs."""
    tokens, out, columns = shape
    rows, bias = rows_in_blocks(out, columns), inputs(1, out, 2)[0].to(dtype)
    packed = pack(rows, bias, dtype, cut=16)
    x, residual = on_device(inputs(tokens, columns), dtype), on_device(inputs(tokens, out, 3), dtype)
    check(x, packed, rows, residual, bias)
    dense = rows.integers.double() * rows.scales.double().repeat_interleave(128, 1)[:, :columns]
    assert torch.equal(linear.unpacked(packed).cpu(), dense.float())


@pytest.mark.parametrize("cut", [Tiles(16, 32, 2, 2, 2), Tiles(32, 16, 3, 4, 3), Tiles(64, 64, 8)], ids=str)
def test_every_cut_gives_the_product(cut):
    rows = rows_in_blocks(40, 1000)
    packed = pack(rows, inputs(1, 40, 5)[0].half())
    x, residual = on_device(inputs(19, 1000), torch.float16), on_device(inputs(19, 40, 3), torch.float16)
    check(x, packed, rows, residual, packed.bias, cut)


@pytest.mark.parametrize(
    ("rows", "out", "unit"), [(128, 400, 128), (64, 200, 64), (128, 96, 128), (32, 96, 32), (8, 40, 1)]
)
def test_outputs_that_share_their_scales_keep_one(rows, out, unit):
    made = rows_in_blocks(out, 300, rows)
    packed = pack(made)
    assert packed.unit == unit
    assert packed.scales.shape == (3, -(-out // unit))
    check(on_device(inputs(2, 300), torch.float32), packed, made)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_of_a_token_are_rounded_as_the_twin_says(dtype):
    x = inputs(5, 330)
    x[1, 128:256] = 0
    x[2] *= 1e-4
    x = on_device(x, dtype)
    values, scales = w8a8.round_row_groups(x)
    for group, begin in enumerate(range(0, 330, 128)):
        here = slice(begin, min(begin + 128, 330))
        twin, twin_scales = products.round_rows(x[:, here], torch.float8_e4m3fn)
        assert torch.equal(values[:, here].view(torch.int8), twin.view(torch.int8))
        assert torch.equal(scales[group], twin_scales)
    assert not values.view(torch.int8)[:, 330:].any()


def test_many_groups():
    """More than a program takes: of 2048 columns."""
    x = on_device(inputs(2, 2500), torch.float32)
    values, scales = w8a8.round_row_groups(x)
    twin = [products.round_rows(part, torch.float8_e4m3fn) for part in x.split(128, 1)]
    assert torch.equal(values[:, :2500].view(torch.int8), torch.cat([part.view(torch.int8) for part, _ in twin], 1))
    assert torch.equal(scales, torch.stack([part for _, part in twin]))


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy's, in the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_in_its_row(bad):
    x = inputs(3, 200)
    x[1, 5] = bad
    y = linear.linear(on_device(x, torch.float32), pack(rows_in_blocks(24, 200)))
    assert y[[0, 2]].isfinite().all()
    assert not y[1].isfinite().any()


def test_the_same_again_and_in_any_batch_of_the_line():
    packed = pack(rows_in_blocks(24, 1100), dtype=torch.float16)
    x = on_device(inputs(16, 1100), torch.float16)
    y = linear.linear(x, packed)
    assert torch.equal(y, linear.linear(x, packed))
    assert torch.equal(linear.linear(x[5:12], packed), y[5:12])


def test_one_scale_an_output():
    """e4m3 that comes so is what rounding here would keep."""
    weights, scheme = inputs(24, 200, 9), WeightScheme("fp8")
    values, scales = products.quantize_fp8(weights)
    stored = RoundedRows(values, scales.unsqueeze(1))
    packed = linear.pack_rounded([stored], LinearShape(24, 200, None, scheme, None), torch.float32, device())
    twin = linear.pack_linear([weights], None, scheme, torch.float32, device())
    assert torch.equal(packed.values.view(torch.int8), twin.values.view(torch.int8))
    assert torch.equal(packed.scales, twin.scales)


def test_the_reference_multiplies_rounded_activations():
    """One token whose groups are far apart: a scale for all of it would lose the small one."""
    rows = rows_in_blocks(24, 256)
    ops = ReferenceOps(torch.float32)
    packed = ops.pack_rounded([rows], LinearShape(24, 256, None, replace(BLOCKS, rounds_activations=True)))
    x = inputs(1, 256)
    x[:, :128] *= 1e-6
    y = ops.linear(x, packed)
    dense = packed.dense().double()
    left = x.double()[:, :128] @ dense[:, :128].T
    small = ops.linear(torch.cat([x[:, :128], torch.zeros(1, 128)], 1), packed)
    assert (small - left).norm() < 0.05 * left.norm()
    assert not torch.equal(y, (x.double() @ dense.T).float())


def test_bytes_that_products_read():
    packed = pack(rows_in_blocks(256, 512))
    before = plain.total().get("weights.fp8", 0)
    linear.linear(on_device(inputs(2, 512), torch.float32), packed)
    assert plain.total()["weights.fp8"] - before == 256 * 512 + 2 * 4 * 4


@pytest.mark.parametrize("scheme", [WeightScheme("fp8", 64), WeightScheme("fp8", 256), WeightScheme("fp8", 128, True)])
def test_what_is_refused(scheme):
    rows = rows_in_blocks(24, 256)
    with pytest.raises(ConfigError, match="fp8"):
        linear.pack_rounded([rows], LinearShape(24, 256, None, scheme, None), torch.float32, device())
    integers = RoundedRows(torch.zeros(24, 256, dtype=torch.int8), rows.scales)
    with pytest.raises(ConfigError, match=r"integers of rounded rows are torch\.int8"):
        linear.pack_rounded([integers], LinearShape(24, 256, None, BLOCKS, None), torch.float32, device())


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("unit", [0, 128, 64, 1])
def test_experts(tokens, unit):
    """Of a width that fills no tile; each with its own weights and scales, x as it is. unit: outputs that share scales,
    0 for one scale an output."""
    width, inner, experts = 136, 96, 3
    scheme = BLOCKS if unit else WeightScheme("fp8")

    def made(out, columns, expert):
        rows = rows_in_blocks(out, columns, unit or 1)
        values = rows.integers.roll(expert, 0)
        scales = (rows.scales if unit else rows.scales[:, :1]) * (1 + expert)
        rows = RoundedRows(values.contiguous(), scales.contiguous())
        return linear.pack_rounded([rows], LinearShape(out, columns, None, scheme, None), torch.float32, device())

    gate_ups = [made(2 * inner, width, expert) for expert in range(experts)]
    downs = [made(width, inner, expert) for expert in range(experts)]
    assert gate_ups[0].unit == unit
    dense = [[linear.unpacked(one).double().cpu() for one in some] for some in (gate_ups, downs)]
    stacked = stack_experts(gate_ups, downs)
    x, residual = inputs(tokens, width) / 30, inputs(tokens, width, 4)
    chosen = torch.tensor([[0, 2], [1, 0], [2, 1]] * 3)[:tokens]
    shares = torch.rand(tokens, 2, generator=torch.Generator().manual_seed(1))

    def run(expert, rows):
        gate, up = (rows @ dense[0][expert].T).chunk(2, 1)
        return torch.nn.functional.silu(gate) * up @ dense[1][expert].T

    want = products.experts(x.double(), chosen, shares.double(), run, residual.double())
    got = grouped(*(one.to(device()) for one in (x, chosen, shares)), stacked, residual.to(device()))
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-4 * float(want.std()))
    assert stacked.bytes_read()["weights.fp8"] > 0


def test_experts_in_int8_for_rounded_activations_have_no_grouped_product():
    scheme = WeightScheme("int8", rounds_activations=True)
    made = [linear.pack_linear([inputs(16, 16, at)], None, scheme, torch.float32, device()) for at in range(2)]
    with pytest.raises(ConfigError, match="have no grouped product"):
        stack_experts(made, made)
