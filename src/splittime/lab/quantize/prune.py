"""Which weights to make zero. Ties keep the first column, so that a result depends on nothing but its input.

* magnitude: |W_ij|; unstructured, over the whole weight.
* wanda: |W_ij| times the norm of input j, compared within each row (Sun, Liu, Bair, Kolter: "A Simple and Effective
  Pruning Approach for Large Language Models", 2023, arXiv:2306.11695, section 3).
* 2:4: of each four neighbouring columns the two with the lower scores.
"""

import torch
from torch import Tensor


def scores(weight: Tensor, mean_squares: Tensor | None) -> Tensor:
    """mean_squares: E[x_j^2], float32 [in], for wanda."""
    return weight.abs() if mean_squares is None else weight.abs() * mean_squares.sqrt()


def semi_structured(weight: Tensor, score: Tensor) -> Tensor:
    """2:4; the columns are a multiple of 4."""
    fours = score.unflatten(1, (-1, 4))
    ranks = fours.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return torch.where((ranks < 2).flatten(1), weight, 0.0)


def unstructured(weight: Tensor, score: Tensor, sparsity: float, by_row: bool) -> Tensor:
    """The share `sparsity` of each row, or of the whole weight, made zero (rounded down)."""
    rows = score if by_row else score.reshape(1, -1)
    dropped = int(sparsity * rows.shape[1])
    ranks = rows.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    kept = (ranks < rows.shape[1] - dropped).view_as(score)
    return torch.where(kept, weight, 0.0)
