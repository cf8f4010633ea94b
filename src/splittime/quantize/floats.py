"""Round to nearest in e4m3 (Micikevicius et al., arXiv:2209.05433), a scale for each row.

    s = max|w| / 448, in the type it is stored in,    q = e4m3(clamp(w / s, -448, 448)),    w ~ s q,    ties to even

compressed-tensors' FP8 with dynamic activations. As in `grid`, the scale is rounded first, and a row of zeros has the
scale 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from splittime.core.errors import ConfigError

LARGEST = 448.0


@dataclass(frozen=True)
class RoundedFloats:
    """floats: float8_e4m3fn [out, in]; scales: float32 [out, 1]."""

    floats: Tensor
    scales: Tensor

    def values(self) -> Tensor:
        """float32 [out, in]."""
        return self.floats.float().mul_(self.scales)


def round_to_e4m3(weight: Tensor, scale_dtype: torch.dtype) -> RoundedFloats:
    """weight: float32 [out, in]. scale_dtype: of the stored scales."""
    scales = (weight.abs().amax(1, keepdim=True) / LARGEST).to(scale_dtype).float()
    if not bool((scales * LARGEST).isfinite().all()):
        raise ConfigError("a weight is not finite, or too large for float32", limit=torch.finfo(torch.float32).max)
    scales = torch.where(scales == 0, 1.0, scales)
    return RoundedFloats((weight / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales)
