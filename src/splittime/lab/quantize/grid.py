"""Round to nearest on a grid of integers, a scale for each row and group of columns; what all schemes end in.

    symmetric    s = 2 max|w| / (2^b - 1),            z = 2^(b-1)
    not          s = (max(w, 0) - min(w, 0)) / (2^b - 1),  z = round(-min(w, 0) / s)
    q = clamp(round(w / s) + z, 0, 2^b - 1),          w ~ s (q - z),   ties to even

These are the formulae of compressed-tensors' min-max observer, GPTQ and AWQ (Lin et al. 2023, equation 1); the range
always holds zero, so that zero stays zero. A scale is rounded to the type it will be stored in *before* integers are
chosen with it, so that what is read back is what was meant. A group of zeros gets the scale 1.

`round_to_e4m3` rounds to 8-bit floats instead (Micikevicius et al., arXiv:2209.05433), as compressed-tensors' FP8 with
dynamic activations has it, a scale for each row, rounded first as well:

    s = max|w| / 448,    q = e4m3(clamp(w / s, -448, 448)),    w ~ s q,    ties to even
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from splittime.core.errors import ConfigError

LARGEST_E4M3 = 448.0


@dataclass(frozen=True)
class Grid:
    """group: columns that share a scale, 0 for whole rows. scale_dtype: of the stored scales."""

    bits: int
    group: int
    symmetric: bool
    scale_dtype: torch.dtype

    @property
    def top(self) -> int:
        """The largest integer."""
        return 2**self.bits - 1

    def width(self, in_features: int) -> int:
        return self.group or in_features


@dataclass(frozen=True)
class Rounded:
    """integers: uint8 [out, in]; scales: float32 [out, groups]; zeros: uint8 [out, groups]; group_of: int64 [in]."""

    integers: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor

    def values(self) -> Tensor:
        """float32 [out, in]."""
        steps = self.integers.float().sub_(self.zeros.float()[:, self.group_of])
        return steps.mul_(self.scales[:, self.group_of])


def fit(values: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """values [..., group] -> scale and zero point of each group, float32 [...]."""
    low, high = values.amin(-1).clamp_(max=0), values.amax(-1).clamp_(min=0)
    if grid.symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / grid.top).to(grid.scale_dtype).float()
    if not bool(scales.isfinite().all()):
        limit = torch.finfo(grid.scale_dtype).max
        raise ConfigError(f"a weight is too large for scales in {grid.scale_dtype}, at most {limit}", limit=limit)
    scales = torch.where(scales == 0, 1.0, scales)
    if grid.symmetric:
        return scales, torch.full_like(scales, 2 ** (grid.bits - 1))
    return scales, (-low / scales).round_().clamp_(0, grid.top)


def integers_of(values: Tensor, scales: Tensor, zeros: Tensor, grid: Grid) -> Tensor:
    """The nearest integers, as float32, of the shape of `values`; scales and zeros broadcast to it."""
    return (values / scales).round_().add_(zeros).clamp_(0, grid.top)


def round_values(values: Tensor, grid: Grid) -> Tensor:
    """Returns what rounding to nearest makes of weight [out, in]: float32, the same shape."""
    grouped = values.unflatten(1, (-1, grid.width(values.shape[1])))
    scales, zeros = (found.unsqueeze(-1) for found in fit(grouped, grid))
    return integers_of(grouped, scales, zeros, grid).sub_(zeros).mul_(scales).flatten(1)


def round_to_nearest(weight: Tensor, grid: Grid) -> Rounded:
    """weight: float32 [out, in], its columns a multiple of the group."""
    width = grid.width(weight.shape[1])
    grouped = weight.unflatten(1, (-1, width))
    scales, zeros = fit(grouped, grid)
    integers = integers_of(grouped, scales.unsqueeze(-1), zeros.unsqueeze(-1), grid).flatten(1)
    group_of = torch.arange(weight.shape[1]) // width
    return Rounded(integers.to(torch.uint8), scales, zeros.to(torch.uint8), group_of)


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
    scales = (weight.abs().amax(1, keepdim=True) / LARGEST_E4M3).to(scale_dtype).float()
    if not bool((scales * LARGEST_E4M3).isfinite().all()):
        raise ConfigError("a weight is not finite, or too large for float32", limit=torch.finfo(torch.float32).max)
    scales = torch.where(scales == 0, 1.0, scales)
    return RoundedFloats((weight / scales).clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn), scales)
