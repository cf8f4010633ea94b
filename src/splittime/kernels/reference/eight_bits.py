"""Products in which activations are rounded to 8 bits as well, as their definition says: what `w8a8` does on a card.

    int8              y[t, n] = s[n] r[t] sum_k q[n, k] p[t, k]                 one scale an output, one a token
    fp8               the same, q and p in e4m3
    fp8 in groups     y[t, n] = sum_g s[n, g] r[t, g] sum_{k in g} q[n, k] p[t, k]      of 128 columns (DeepSeek-V3,
                      arXiv:2412.19437, 3.3.1: activations in tiles of 1 x 128, weights in blocks of 128 x 128)

`products` says how a token, or a group of one, is rounded. Sums are float64.
"""

import torch
from torch import Tensor

from splittime.kernels.api import RoundedRows, WeightScheme
from splittime.kernels.reference import products


def fp8_rows(weight: Tensor) -> RoundedRows:
    """weight [out, in] of any float dtype, rounded to e4m3 with one scale an output."""
    values, scales = products.quantize_fp8(weight)
    return RoundedRows(values, scales.unsqueeze(1))


def product(x: Tensor, rows: RoundedRows, scheme: WeightScheme) -> Tensor:
    """x [T, in] -> [T, out], rounded once, to the dtype of x."""
    width = scheme.group or x.shape[1]
    total = torch.zeros(len(x), len(rows.integers), dtype=torch.float64)
    for group, begin in enumerate(range(0, x.shape[1], width)):
        here = slice(begin, begin + width)
        total += products.rounded_product(x[:, here], rows.integers[:, here], rows.scales[:, group])
    return total.to(x.dtype)
