"""What calibration text says about the input x of a linear, in a size that does not grow with the text.

    gram = E[x x^T]  [in, in]     mean|x|, max|x|  [in]

The mean squared error that a change D of a weight makes in its output is tr(D gram D^T): exact over all of the text, so
that GPTQ's Hessian, AWQ's search and the reported errors need no activations to be kept.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    tokens: int
    gram: Tensor
    mean_abs: Tensor
    max_abs: Tensor

    def divided(self, scales: Tensor) -> "Moments":
        """Returns the moments of x / scales."""
        return Moments(
            self.tokens, self.gram / torch.outer(scales, scales), self.mean_abs / scales, self.max_abs / scales
        )


class Gatherer:
    """Takes the tokens of one input as they come by; `moments` when all have."""

    def __init__(self, width: int) -> None:
        self.tokens = 0
        self._gram = torch.zeros(width, width)
        self._sum = torch.zeros(width)
        self._max = torch.zeros(width)

    def add(self, x: Tensor) -> None:
        """x: float32 [T, width]."""
        self.tokens += len(x)
        self._gram.addmm_(x.t(), x)
        magnitudes = x.abs()
        self._sum += magnitudes.sum(0)
        torch.maximum(self._max, magnitudes.amax(0), out=self._max)

    def moments(self) -> Moments | None:
        """None if no token came by (an expert that no token chose)."""
        if not self.tokens:
            return None
        return Moments(self.tokens, self._gram.div_(self.tokens), self._sum / self.tokens, self._max)


def relative_error(weight: Tensor, kept: Tensor, moments: Moments | None) -> float:
    """Root mean square of the error in the output over that of the output; of the weights where there is no text."""
    change = kept - weight
    wrong, whole = (_energy(values, moments) for values in (change, weight))
    return float((wrong / whole).sqrt()) if whole > 0 else 0.0


def _energy(values: Tensor, moments: Moments | None) -> Tensor:
    if moments is None:
        return values.double().square().sum()
    return ((values @ moments.gram) * values).sum(dtype=torch.float64).clamp_(min=0)
