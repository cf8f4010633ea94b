"""Scales of input channels: what the weights' columns are multiplied by before rounding, and the inputs divided by.

AWQ makes the channels that see large activations finer, by scaling them up before rounding and down after.

Lin et al.: "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", 2023, arXiv:2306.00978.
For inputs x and weights W, Q(W diag(s)) diag(s)^-1 x with s = mean|x|^a; a is searched on a grid for the least error of
the outputs (their equations 4 and 5), a = 0 being plain rounding. Then each group's range is cut where that
makes the group's part of the output better (their section on clipping).

The errors are taken from `Moments`: tr(D gram D^T) over all rows, or `MAX_ROWS` of them evenly spaced: all rows share
s, and a sample of them chooses it as well. Clipping takes the group's own block of the gram matrix.

SmoothQuant moves what is hard to round from the activations into the weights, so that an outlier channel no longer sets
the scale of the whole token. Xiao et al.: "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
Language Models", 2022, arXiv:2211.10438, equation 4: s_j = max|x_j|^a / max|W_j|^(1 - a).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from splittime.lab.quantize.grid import Grid, round_values
from splittime.lab.quantize.moments import Moments

STEPS = 20
MAX_ROWS = 1024  # of each weight, in the search for scales
MIN_SCALE = 1e-4
SMALLEST_SHARE, CLIP_STEPS = 0.5, 10
SMALLEST_MAX = 1e-5


def awq_scales(weights: Sequence[Tensor], moments: Moments, typical: Tensor, grid: Grid) -> Tensor:
    """One scale for each input channel of these weights [out_i, in]: float32 [in]. typical: mean|x|, or what several
    channels share where their scales must be equal."""
    sampled = torch.cat([_evenly(weight) for weight in weights])
    best, best_error = torch.ones_like(typical), _error(sampled, torch.ones_like(typical), moments, grid)
    for step in range(1, STEPS + 1):
        scales = _scales(typical, step / STEPS)
        error = _error(sampled, scales, moments, grid)
        if error < best_error:
            best, best_error = scales, error
    return best


def _scales(typical: Tensor, power: float) -> Tensor:
    """typical^power, around 1; channels that are never touched stay as they are."""
    alive = typical > 0
    scales = torch.where(alive, typical, 1.0).pow(power).clamp_(min=MIN_SCALE)
    if not bool(alive.any()):
        return scales
    middle = (scales[alive].max() * scales[alive].min()).sqrt()
    return torch.where(alive, scales / middle, 1.0)


def _error(weight: Tensor, scales: Tensor, moments: Moments, grid: Grid) -> float:
    change = round_values(weight * scales, grid).div_(scales).sub_(weight)
    return float(((change @ moments.gram) * change).sum(dtype=torch.float64))


def _evenly(weight: Tensor) -> Tensor:
    if len(weight) <= MAX_ROWS:
        return weight
    return weight[torch.linspace(0, len(weight) - 1, MAX_ROWS, dtype=torch.float64).long()]


def awq_clip(weight: Tensor, gram: Tensor, grid: Grid) -> Tensor:
    """weight [out, in] with each group's range cut to what is best for its outputs."""
    width = grid.width(weight.shape[1])
    groups = weight.unflatten(1, (-1, width)).transpose(0, 1)  # [groups, out, width]
    blocks = torch.stack([gram[at : at + width, at : at + width] for at in range(0, weight.shape[1], width)])
    limits = groups.abs().amax(-1, keepdim=True)
    best, best_error = limits, _clip_error(groups, limits, blocks, grid)
    for step in range(1, CLIP_STEPS + 1):
        cut = limits * (1 - step / CLIP_STEPS * (1 - SMALLEST_SHARE))
        error = _clip_error(groups, cut, blocks, grid)
        best = torch.where(error < best_error, cut, best)
        best_error = torch.minimum(error, best_error)
    return torch.clamp(groups, -best, best).transpose(0, 1).flatten(1)


def _clip_error(groups: Tensor, limits: Tensor, blocks: Tensor, grid: Grid) -> Tensor:
    """[groups, out, 1]."""
    cut = torch.clamp(groups, -limits, limits).flatten(0, 1)
    whole_rows = Grid(grid.bits, 0, grid.symmetric, grid.scale_dtype)
    change = round_values(cut, whole_rows).view_as(groups) - groups
    return ((change @ blocks) * change).sum(-1, keepdim=True)


def smooth_scales(weights: Sequence[Tensor], moments: Moments, strength: float) -> Tensor:
    """float32 [in], 1 where a channel or its weights are nothing."""
    largest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    is_alive = (moments.max_abs > 0) & (largest > 0)
    found = moments.max_abs.clamp(min=SMALLEST_MAX).pow(strength) / largest.clamp(min=SMALLEST_MAX).pow(1 - strength)
    return torch.where(is_alive, found.clamp_(min=SMALLEST_MAX), 1.0)
