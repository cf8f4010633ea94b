"""What torch computes of each element by itself: the same bits for a row alone and among others."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from splittime.kernels.compose import choose_experts, clamped_mul
from splittime.kernels.layer import Clamped, RouterSpec
from splittime.kernels.plain import each_alike, gelu, gelu_mul

CLAMPED = Clamped(1.702, 7.0)
FUNCTIONS = {
    "sigmoid": (partial(each_alike, torch.sigmoid), torch.sigmoid),
    "gelu": (partial(gelu, approximate="none"), functional.gelu),
    "gelu by tanh": (partial(gelu, approximate="tanh"), partial(functional.gelu, approximate="tanh")),
}
OF_PAIRS = {"gelu_mul": gelu_mul, "clamped_mul": partial(clamped_mul, clamped=CLAMPED)}
MOST_TOKENS = 300  # of 2880 elements: more than one thread's
ROWS = (2, 5, 29, 128, 299)


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def randn(width: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(MOST_TOKENS, width, generator=torch.Generator().manual_seed(width)) * 3).to(dtype)


def each_alone(function, x: Tensor) -> Tensor:
    return torch.cat([function(row) for row in x.split(1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 22, 2880])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.sample(18)
def test_a_row_alone_has_the_bits_of_the_row_among_others(name, width, dtype):
    (function, plain), x = FUNCTIONS[name], randn(width, dtype)
    alone = each_alone(function, x)
    torch.testing.assert_close(alone, plain(x), atol=1e-6, rtol=2e-6 if dtype == torch.float32 else 0.008)
    for tokens in ROWS:
        assert torch.equal(function(x[:tokens]), alone[:tokens])
        assert torch.equal(function(x[-tokens:]), alone[-tokens:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [1, 22, 1440])
@pytest.mark.parametrize("name", OF_PAIRS)
def test_the_inside_of_an_mlp_does_not_depend_on_the_number_of_tokens(name, inner, dtype):
    x = randn(2 * inner, dtype)
    alone = each_alone(OF_PAIRS[name], x)
    for tokens in ROWS:
        assert torch.equal(OF_PAIRS[name](x[:tokens]), alone[:tokens])


@pytest.mark.parametrize("num_experts", [6, 22, 160])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_experts_and_their_weights_do_not_depend_on_the_number_of_tokens(scoring, num_experts):
    router = RouterSpec(num_experts, 3, normalises=True, scoring=scoring)
    x = randn(num_experts, torch.float32)
    alone = [choose_experts(row, router, None) for row in x.split(1)]
    for tokens in ROWS:
        weights, chosen = choose_experts(x[:tokens], router, None)
        assert torch.equal(weights, torch.cat([one for one, _ in alone[:tokens]]))
        assert torch.equal(chosen, torch.cat([one for _, one in alone[:tokens]]))


def test_nothing_is_made_of_nothing():
    assert gelu(torch.empty(0, 5), "tanh").shape == (0, 5)
