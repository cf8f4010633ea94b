"""Rotary position embedding: the angle by which each pair of a head's elements turns at each position.

`turns` are unit complex numbers, exp(i * position * frequency); a pair (a, b) of a query or key becomes
(a + ib) * turn. Scaling: "linear" divides every frequency; "llama3" (Llama 3.1) divides the slow ones, keeps the fast
ones, and blends between: a frequency is slow or fast by how often it turns within the context it was trained on;
"divided" divides each by a number of its own.
"""

import math

import torch
from torch import Tensor

from splittime.kernels.layer import RopeSpec


def frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each pair, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.rope_type == "default":
        return plain
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "divided":
        return plain / torch.tensor(rope.divisors)
    return _llama3(plain, rope)


def _llama3(plain: Tensor, rope: RopeSpec) -> Tensor:
    turns_in_context = rope.original_max_position_embeddings * plain / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    share_kept = ((turns_in_context - low) / (high - low)).clamp(0.0, 1.0)  # 0: slow, scaled; 1: fast, kept
    return (1.0 - share_kept) * plain / rope.factor + share_kept * plain


def turns(rope: RopeSpec, head_dim: int, num_positions: int) -> Tensor:
    """complex64 [num_positions, head_dim / 2]."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, frequencies(rope, head_dim))
    return torch.polar(torch.ones_like(angles), angles)
