"""Which experts tokens go to: the reference's choice to the number, and its shares to rounding."""

import pytest

pytest.importorskip("triton")

import torch

from splittime.kernels.reference import products
from splittime.kernels.triton.device import device
from splittime.kernels.triton.mixture import choose_experts

EPSILONS = {torch.float32: 2.0**-20, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def logits_of(tokens: int, experts: int, dtype=torch.float32) -> torch.Tensor:
    """All different in a row, so that one choice is right."""
    source = torch.Generator().manual_seed(experts)
    places = torch.stack([torch.randperm(experts, generator=source) for _ in range(tokens)])
    return ((places - experts / 2) / 16).to(dtype)


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(1, 128, 8), (3, 5, 3), (4, 1, 1), (2, 300, 6), (5, 8, 8)])
def test_the_references_choice(tokens, experts, chosen, normalises):
    logits = logits_of(tokens, experts)
    check(logits, chosen, normalises, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype):
    check(logits_of(3, 60, dtype), 4, True, dtype)


def check(logits, chosen, normalises, dtype):
    want, shares = products.choose_experts(logits, chosen, normalises)
    got, parts = choose_experts(logits.to(device()), chosen, normalises, dtype)
    assert parts.dtype == dtype
    assert got.tolist() == want.tolist()
    torch.testing.assert_close(parts.cpu().float(), shares, rtol=EPSILONS[dtype], atol=1e-7)


def test_equal_scores_go_to_the_first():
    got, shares = choose_experts(torch.zeros(1, 10, device=device()), 3, True, torch.float32)
    assert got.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(shares.cpu(), torch.full((1, 3), 1 / 3))


def test_tokens_that_are_not_there_have_no_expert():
    logits = logits_of(4, 12)
    blocks = torch.tensor([7, -1, 0, -1], dtype=torch.int32)
    want, shares = products.choose_experts(logits, 2, True, blocks >= 0)
    got, parts = choose_experts(logits.to(device()), 2, True, torch.float32, blocks.to(device()))
    assert got.tolist() == want.tolist()
    assert got.tolist()[1] == [-1, -1]
    torch.testing.assert_close(parts.cpu(), shares)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy's, in the interpreter
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_not_a_number_is_found_out_and_chooses_experts_that_exist(odd):
    logits = logits_of(2, 12)
    logits[1, 5] = odd
    got, shares = choose_experts(logits.to(device()), 4, True, torch.float32)
    assert shares.cpu().isfinite().all(1).tolist() == [True, False]
    assert all(sorted(set(row)) == sorted(row) and min(row) >= 0 and max(row) < 12 for row in got.tolist())


def test_rows_of_a_wider_matrix_and_none_at_all():
    wide = logits_of(3, 40).to(device())
    check(wide[:, :16].cpu(), 2, True, torch.float32)
    got, _ = choose_experts(wide[:, :16], 2, True, torch.float32)
    assert got.tolist() == choose_experts(wide[:, :16].contiguous(), 2, True, torch.float32)[0].tolist()
    assert choose_experts(wide[:0], 2, True, torch.float32)[0].shape == (0, 2)
