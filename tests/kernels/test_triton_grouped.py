"""A mixture of experts in two grouped products, against one expert and one token at a time in float64.

Bounds are the arithmetic's: h = silu(gate) * up is rounded once to the dtype of x, so is each expert's part, and so is
the sum; sums of K float32 terms err by K units of 2^-24 (twice on a card) of what is added up, and silu's slope is
below 1.1.
"""

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integers import inputs, name_of

from splittime.core.errors import ConfigError
from splittime.kernels.api import WeightScheme
from splittime.kernels.reference import products
from splittime.kernels.triton import grouped_kernels, linear
from splittime.kernels.triton.device import device, is_interpreted
from splittime.kernels.triton.grouped import ALONE_TOKENS, Experts, choose, grouped, lines, stack_experts
from splittime.kernels.triton.tiles import Tiles

pytestmark = pytest.mark.sample(5)

BFLOAT16 = 2.0**-7 if is_interpreted() else 2.0**-8  # the interpreter cuts where a card rounds
EPSILONS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: BFLOAT16}
SCHEMES = [
    WeightScheme("float32"),
    WeightScheme("int8"),
    WeightScheme("int8", 32),
    WeightScheme("int4", 64),
    WeightScheme("int4", 96),
]
WIDTH, INNER, EXPERTS = 72, 40, 4


def make(scheme: WeightScheme, dtype=torch.float32, experts=EXPERTS) -> tuple[Experts, list, list]:
    """And each expert's weights, float64: gate and up, down."""
    scheme = WeightScheme(str(dtype)[6:]) if scheme.name == "float32" else scheme
    packed = [
        [
            linear.pack_linear([inputs(out, columns, 10 * expert + out) / 8], None, scheme, dtype, device())
            for expert in range(experts)
        ]
        for out, columns in ((2 * INNER, WIDTH), (WIDTH, INNER))
    ]
    weights = [[linear.unpacked(one).double().cpu() for one in some] for some in packed]
    return stack_experts(*packed), *weights


def choices(tokens, chosen, experts=EXPERTS, seed=0):
    source = torch.Generator().manual_seed(seed)
    order = torch.rand(tokens, experts, generator=source).argsort(1)[:, :chosen]
    return order, torch.rand(tokens, chosen, generator=source)


def twin(x, chosen, shares, gate_ups, downs, residual, dtype):
    """float64 outputs, and how far off float32 and `dtype` may be."""
    allowed = EPSILONS[dtype] * 1.01
    step, inner_step = (WIDTH + INNER + 32) * 2.0**-23, (WIDTH + 16) * 2.0**-23

    def run(expert, rows):
        gate, up = (rows @ gate_ups[expert].T).chunk(2, 1)
        return torch.nn.functional.silu(gate) * up @ downs[expert].T

    def errors(expert, rows):
        gate, up = (rows @ gate_ups[expert].T).chunk(2, 1)
        gates, ups = (rows.abs() @ gate_ups[expert].abs().T).chunk(2, 1)
        hidden = gate.abs() * up.abs()
        error = inner_step * (1.1 * gates * up.abs() + gate.abs() * ups + hidden) * 1.1 + allowed * hidden
        sizes = (hidden + error) @ downs[expert].abs().T
        return error @ downs[expert].abs().T + step * sizes + allowed * (sizes)

    x, shares = x.double(), shares.double()
    y = products.experts(x, chosen, shares, run, residual)
    error = products.experts(x, chosen, shares, errors)
    return y, error + (allowed + step) * (y.abs() + error + residual.abs())


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_products(scheme):
    check(scheme, 3, torch.float32)


@pytest.mark.parametrize("tokens", [1, ALONE_TOKENS, 37])
def test_numbers_of_tokens(tokens):
    check(SCHEMES[1], tokens, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[3]], ids=name_of)
def test_dtypes(scheme, dtype):
    check(scheme, 3, dtype)


def check(scheme, tokens, dtype):
    experts, gate_ups, downs = make(scheme, dtype)
    x, residual = inputs(tokens, WIDTH).to(dtype), inputs(tokens, WIDTH, 4).to(dtype)
    chosen, shares = choices(tokens, 2)
    y = grouped(*(one.to(device()) for one in (x, chosen, shares)), experts, residual.to(device()))
    true, error = twin(x, chosen, shares, gate_ups, downs, residual.double(), dtype)
    assert y.dtype == dtype
    assert ((y.cpu().double() - true).abs() <= error).all()


@pytest.mark.sweep
def test_the_same_again_and_whatever_the_tiles():
    experts, _, _ = make(SCHEMES[1], torch.float16)
    x = inputs(20, WIDTH).to(device(), torch.float16)
    chosen, shares = (one.to(device()) for one in choices(20, 2))
    y = grouped(x, chosen, shares, experts)
    assert torch.equal(y, grouped(x, chosen, shares, experts))
    cut = Tiles(32, 64, num_warps=4, num_stages=2)
    other = grouped(x, chosen, shares, experts, gate_up_tiles=cut, down_tiles=cut)
    torch.testing.assert_close(y, other, rtol=2**-9, atol=2**-9)
    few = grouped(x[:9], chosen[:9], shares[:9], experts)
    torch.testing.assert_close(y[:9], few, rtol=2**-9, atol=2**-9)


def test_lines_name_every_choice():
    experts, _, _ = make(SCHEMES[0])

    def cut(tokens):
        alone = tokens if tokens <= ALONE_TOKENS else 0
        return alone, *(choose(tokens * 2, EXPERTS, out) for out in (INNER, WIDTH))

    named = [cut(tokens) for tokens in lines(experts, 2)]
    assert len(set(named)) == len(named)
    assert {cut(tokens) for tokens in range(1, 2000)} == set(named)


def test_without_residual_without_tokens_and_all_to_one_expert():
    experts, gate_ups, downs = make(SCHEMES[0])
    x, shares = inputs(20, WIDTH), torch.ones(20, 1)
    chosen = torch.full((20, 1), EXPERTS - 1)
    y = grouped(x.to(device()), chosen.to(device()), shares.to(device()), experts)
    true, error = twin(x, chosen, shares, gate_ups, downs, torch.zeros(20, WIDTH).double(), torch.float32)
    assert ((y.cpu().double() - true).abs() <= error).all()
    none = x[:0].to(device())
    assert grouped(none, chosen[:0].to(device()), shares[:0].to(device()), experts).shape == (0, WIDTH)
    assert grouped(none, chosen[:0].to(device()), shares[:0].to(device()), experts, none).shape == (0, WIDTH)


def test_experts_that_nobody_chose_are_not_read():
    """Their weights are not numbers, and no output shows it."""
    experts, _, _ = make(SCHEMES[0])
    for weights in (experts.gate_up, experts.down):
        weights.weight[1] = float("nan")
    x = inputs(7, WIDTH).to(device())
    for tokens in (1, 2, 7):
        chosen = torch.tensor([[0, 3], [2, 3], [3, 2], [0, 3], [3, 2], [2, 0], [3, 0]])[:tokens].to(device())
        assert grouped(x[:tokens], chosen, torch.ones_like(chosen).float(), experts).isfinite().all()


def test_bytes_of_the_experts_that_ran():
    experts, _, _ = make(SCHEMES[1])
    one = (2 * INNER + WIDTH) * (32 * 4 + 4)  # a tile of words and a scale each
    x = inputs(7, WIDTH).to(device())
    ran = 0
    for chosen in ([[0, 3]], [[1, 2], [2, 1]], [[0, 3], [2, 0], [3, 0]]):
        picked = torch.tensor(chosen).to(device())
        grouped(x[: len(picked)], picked, torch.ones_like(picked).float(), experts)
        ran += len(picked.unique())
        assert experts.bytes_read() == {"weights.int8": ran * one}


@pytest.mark.parametrize("tokens", [ALONE_TOKENS, 7])
def test_tokens_without_experts_have_their_residual_and_nothing_is_read_for_them(tokens):
    """What an expert would have added is not a number, wherever it might come from."""
    experts, _, _ = make(SCHEMES[0])
    for weights in (experts.gate_up, experts.down):
        weights.weight[:3] = float("nan")
    chosen = torch.full((tokens, 2), -1)
    chosen[-1, 0] = EXPERTS - 1
    x, residual = inputs(tokens, WIDTH).to(device()), inputs(tokens, WIDTH, 4).to(device())
    y = grouped(x, chosen.to(device()), torch.ones(tokens, 2, device=device()), experts, residual)
    assert torch.equal(y[:-1], residual[:-1])
    assert y.isfinite().all()
    assert not torch.equal(y[-1], residual[-1])
    assert experts.run.item() == 1


@given(st.data())
@settings(max_examples=15)
def test_routes(data):
    """Every pair is in one tile, of its expert, in order; tiles are full but an expert's last; the rest are marked."""
    num_experts, size = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([16, 32]))
    tokens, chosen = data.draw(st.integers(1, 90)), data.draw(st.integers(1, min(3, num_experts)))
    picked, _ = choices(tokens, chosen, num_experts, data.draw(st.integers(0, 99)))
    run = torch.zeros(1, dtype=torch.int64, device=device())
    routes = grouped_kernels.route(picked.contiguous().to(device()), num_experts, size, run)
    flat, pairs = picked.flatten().tolist(), routes.pairs.tolist()
    assert pairs == sorted(range(len(flat)), key=lambda pair: flat[pair])
    tiles = [tile for tile in routes.tiles.tolist() if tile[0] >= 0]
    assert routes.tiles.tolist()[: len(tiles)] == tiles
    covered = [(expert, pair) for expert, begin, end in tiles for pair in pairs[begin:end]]
    assert covered == [(flat[pair], pair) for pair in pairs]
    ends = {expert: end for expert, _, end in tiles}
    assert all(end - begin == size or ends[expert] == end for expert, begin, end in tiles)
    assert run.item() == len(set(flat))


def test_long_lists_of_choices():
    """More pairs than are read at a time, and more tiles than are marked at a time."""
    picked = torch.arange(2500).remainder(3).unsqueeze(1)
    routes = grouped_kernels.route(picked.to(device()), 4, 16, torch.zeros(1, dtype=torch.int64, device=device()))
    assert routes.pairs.tolist() == sorted(range(2500), key=lambda pair: pair % 3)
    assert [tile[0] for tile in routes.tiles.tolist()] == [0] * 53 + [1] * 53 + [2] * 53 + [-1]


def test_what_is_refused():
    dense = linear.DenseWeight(torch.zeros(4, 4))
    with pytest.raises(ConfigError, match="no grouped product"):
        stack_experts([dense, linear.DenseWeight(torch.zeros(4, 8))], [dense, dense])
    with pytest.raises(ConfigError, match="no grouped product"):
        stack_experts([linear.DenseWeight(torch.zeros(4, 4), torch.zeros(4))], [dense])
