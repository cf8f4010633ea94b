"""How a key or value of one head is kept as int8: one scale, max |x| / 127, and the nearest integers, ties to even.

A head that is not finite has a scale that is not, so that it shows when it is read.
"""

import torch
from torch import Tensor

LEAST_SCALE = 1e-38  # a head of smaller values is kept as zeros


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [.., D] -> int8 [.., D], float32 [..]."""
    wide = x.float()
    scales = wide.abs().amax(-1) / 127
    is_usable = (scales >= LEAST_SCALE) & scales.isfinite()
    rounded = (wide / scales[..., None]).round().clamp(-127, 127)
    return torch.where(is_usable[..., None], rounded, 0.0).to(torch.int8), scales


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """int8 [.., D], float32 [..] -> float32 [.., D]."""
    return values * scales[..., None]
