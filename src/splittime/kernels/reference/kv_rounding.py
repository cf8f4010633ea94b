"""How a key or value of one head is kept as int8 or as float8_e4m3fn: one scale, max |x| / 127 or max |x| / 448, so
that the largest becomes the largest that the dtype has, and the nearest of its values, ties to even.

A head that is not finite has a scale that is not, so that it shows when it is read.
"""

import torch
from torch import Tensor

LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}  # of what is kept
LEAST_SCALE = 1e-38  # a head of smaller values is kept as zeros


def quantize(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """x [.., D] -> `dtype` [.., D], float32 [..]."""
    wide = x.float()
    limit = LARGEST[dtype]
    scales = wide.abs().amax(-1) / limit
    is_usable = (scales >= LEAST_SCALE) & scales.isfinite()
    steps = (wide / scales[..., None]).clamp(-limit, limit)
    steps = torch.where(is_usable[..., None], steps, 0.0)
    return (steps.round() if dtype == torch.int8 else steps).to(dtype), scales


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """int8 or float8_e4m3fn [.., D], float32 [..] -> float32 [.., D]."""
    return values.float() * scales[..., None]
