"""The products that only a card has kernels for, as their definitions say, in plain torch: `w8a8` and experts.

    fp8     weights and activations rounded to e4m3, one scale an output, one a token: s = largest magnitude / 448
    int8    the same with integers of -127..127, s = largest / 127, ties to even

    fp8 in groups of 128 columns: the same for each group, with scales of its own (DeepSeek-V3, arXiv:2412.19437, 3.3.1)

Activations are multiplied by 127 (448) / largest, a float32, as the kernels do, so that both round alike to the bit.
Where the largest is below 1e-30 all of a token is 0.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from splittime.kernels.api import RoundedRows, WeightScheme
from splittime.kernels.reference.rounding import divided

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def round_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [T, in] -> (rounded [T, in] of int8 or float8_e4m3fn, float32 scales [T]): x ~ rounded * scale."""
    wide, limit = x.float(), torch.tensor(LARGEST[dtype], device=x.device)
    largest = wide.abs().amax(-1)
    inverse = torch.where(largest < 1e-30, torch.zeros_like(largest), limit / largest)
    steps = wide * inverse.unsqueeze(-1)
    return (steps.round() if dtype == torch.int8 else steps).to(dtype), largest / limit


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] of any float dtype -> float8_e4m3fn [out, in], float32 scales [out]."""
    wide = weight.float()
    scales = divided(wide.abs().amax(-1), LARGEST[torch.float8_e4m3fn])
    safe = torch.where(scales == 0, torch.ones_like(scales), scales)
    return (wide / safe.unsqueeze(-1)).clamp_(-448, 448).to(torch.float8_e4m3fn), scales


def rounded_product(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """x [T, in] rounded as the values [out, in] are, float32 scales [out] -> float64 [T, out]."""
    steps, x_scales = round_rows(x, values.dtype)
    return (steps.double() @ values.double().T) * x_scales.double()[:, None] * scales.double()


def fp8_rows(weight: Tensor) -> RoundedRows:
    """weight [out, in] of any float dtype, rounded to e4m3 with one scale an output."""
    values, scales = quantize_fp8(weight)
    return RoundedRows(values, scales.unsqueeze(1))


def eight_bit_product(x: Tensor, rows: RoundedRows, scheme: WeightScheme) -> Tensor:
    """x [T, in] -> [T, out], rounded once, to the dtype of x."""
    width = scheme.group or x.shape[1]
    total = torch.zeros(len(x), len(rows.integers), dtype=torch.float64)
    for group, begin in enumerate(range(0, x.shape[1], width)):
        here = slice(begin, begin + width)
        total += rounded_product(x[:, here], rows.integers[:, here], rows.scales[:, group])
    return total.to(x.dtype)


def choose_experts(
    logits: Tensor, num_chosen: int, normalises: bool, is_there: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> the best experts int64 [T, k], the best first, and their shares float32 [T, k]; of tokens that
    are not there (bool [T]) experts -1 and shares 0."""
    shares, chosen = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    shares, chosen = shares[:, :num_chosen], chosen[:, :num_chosen]
    if normalises:
        shares = shares / shares.sum(-1, keepdim=True)
    if is_there is not None:
        chosen, shares = chosen.where(is_there[:, None], -1), shares.where(is_there[:, None], 0.0)
    return chosen, shares


def experts(
    x: Tensor, chosen: Tensor, shares: Tensor, run: Callable[[int, Tensor], Tensor], residual: Tensor | None = None
) -> Tensor:
    """x [T, in], chosen int64 [T, k], shares [T, k]; run(expert, x [n, in]) -> [n, out]. Each token's experts' outputs
    times their shares, added in the order in which they were chosen, and the residual: [T, out]."""
    rows = []
    for token, (mine, weights) in enumerate(zip(chosen.tolist(), shares, strict=True)):
        parts = [run(expert, x[token : token + 1])[0] * share for expert, share in zip(mine, weights, strict=True)]
        rows.append(sum(parts[1:], parts[0]) if residual is None else sum(parts, residual[token]))
    return torch.stack(rows)
