"""Rotary position embedding: the angle by which each pair of a head's elements turns at each position.

`turns` are complex numbers, exp(i * position * frequency); a pair (a, b) of a query or key becomes (a + ib) * turn.
Pairs that a partial embedding leaves alone have frequency 0. Scaling:

    linear     divides every frequency
    llama3     divides the slow ones, keeps the fast ones, and blends between: a frequency is slow or fast by how often
               it turns within the context it was trained on (Llama 3.1)
    yarn       the same, blended along the pairs' numbers (arXiv 2309.00071); turns are multiplied by a factor
    longrope   divides each by a number of its own, by others where the served context is longer than the original
               (arXiv 2402.13753); turns are multiplied by a factor
    divided    divides each by a number of its own
    proportional   divides all, of as many pairs as its share is of a head's; the others stay (Gemma 4)
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from splittime.kernels.layer import PROPORTIONAL, RopeSpec


def frequencies(rope: RopeSpec, head_dim: int, num_positions: int = 0) -> Tensor:
    """Radians per position of each pair, float32 [head_dim / 2], in a context of so many positions."""
    dims = rope.turned_dims(head_dim)
    plain = 1.0 / rope.theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    return F.pad(_scaled(plain, rope, num_positions), (0, (head_dim - dims) // 2))


def _scaled(plain: Tensor, rope: RopeSpec, num_positions: int) -> Tensor:
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == PROPORTIONAL:
        return plain / rope.factor * (torch.arange(len(plain)) < int(rope.share * 2 * len(plain) // 2))
    if rope.rope_type == "divided":
        return plain / torch.tensor(rope.divisors)
    if rope.rope_type == "longrope":
        return plain / torch.tensor(rope.far_divisors if rope.is_far(num_positions) else rope.divisors)
    if rope.rope_type == "llama3":
        return _llama3(plain, rope)
    return _yarn(plain, rope) if rope.rope_type == "yarn" else plain


def _yarn(plain: Tensor, rope: RopeSpec) -> Tensor:
    def pair_turning(turns: float) -> float:
        """The number of the pair that turns so often in the original context, between two if need be."""
        radians = 2 * math.pi * turns / rope.original_max_position_embeddings
        return len(plain) * -math.log(radians) / math.log(rope.theta)

    first, last = pair_turning(rope.fast_turns), pair_turning(rope.slow_turns)
    if rope.truncates:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(plain) - 1)
    share_scaled = ((torch.arange(len(plain)) - first) / ((last - first) or 0.001)).clamp(0.0, 1.0)
    return share_scaled * plain / rope.factor + (1.0 - share_scaled) * plain


def _llama3(plain: Tensor, rope: RopeSpec) -> Tensor:
    turns_in_context = rope.original_max_position_embeddings * plain / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    share_kept = ((turns_in_context - low) / (high - low)).clamp(0.0, 1.0)  # 0: slow, scaled; 1: fast, kept
    return (1.0 - share_kept) * plain / rope.factor + share_kept * plain


def turns(rope: RopeSpec, head_dim: int, num_positions: int) -> Tensor:
    """complex64 [num_positions, head_dim / 2]; where queries grow, one more column is what they are multiplied by."""
    if not rope.share:
        return torch.ones(1, head_dim // 2, dtype=torch.complex64).expand(num_positions, -1)
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, frequencies(rope, head_dim, num_positions))
    factors = torch.ones_like(angles)
    factors[:, : rope.turned_dims(head_dim) // 2] = rope.factor_of_turned
    turned = torch.polar(factors, angles)
    if not rope.query_growth:
        return turned
    grown = 1 + rope.query_growth * torch.log(1 + torch.floor(positions / rope.original_max_position_embeddings))
    return torch.cat((turned, grown[:, None].to(turned.dtype)), dim=1)
