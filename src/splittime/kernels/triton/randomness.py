"""`runner.sampler` on the device, bit for bit: the uniform number of (seed, index of the output).

A captured step makes its random numbers from seeds and indices that lie on the device; the host owes it nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_GOLDEN_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)
_BLOCK = tl.constexpr(128)


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * _FIRST
    z = (z ^ (z >> 27)) * _SECOND
    return z ^ (z >> 31)


@triton.jit
def uniform_of(seed, index):
    """seed, index: int64 -> float64 in [0, 1)."""
    key = _mix(seed.to(tl.uint64) + _GOLDEN_GAMMA)
    bits = _mix(key + _GOLDEN_GAMMA * (index.to(tl.uint64) + 1))
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit(do_not_specialize=["num"])
def _uniforms(seeds, indices, y, num):
    rows = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    is_row = rows < num
    seed, index = tl.load(seeds + rows, mask=is_row, other=0), tl.load(indices + rows, mask=is_row, other=0)
    tl.store(y + rows, uniform_of(seed, index), mask=is_row)


def uniforms(seeds: Tensor, indices: Tensor) -> Tensor:
    """seeds, indices: int64 [N] on the device -> float64 [N] in [0, 1)."""
    y = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    if len(seeds):
        _uniforms[(triton.cdiv(len(seeds), _BLOCK.value),)](seeds, indices, y, len(seeds))
    return y
