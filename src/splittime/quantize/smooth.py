"""SmoothQuant: move what is hard to round from the activations into the weights.

Xiao et al.: "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models", 2022,
arXiv:2211.10438, equation 4: channel j of the input is divided by s_j = max|x_j|^a / max|W_j|^(1 - a), and the weights'
column multiplied by it, so that an outlier channel no longer sets the scale of the whole token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from splittime.quantize.moments import Moments

SMALLEST = 1e-5


def scales(weights: Sequence[Tensor], moments: Moments, strength: float) -> Tensor:
    """float32 [in], 1 where a channel or its weights are nothing."""
    largest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    is_alive = (moments.max_abs > 0) & (largest > 0)
    found = moments.max_abs.clamp(min=SMALLEST).pow(strength) / largest.clamp(min=SMALLEST).pow(1 - strength)
    return torch.where(is_alive, found.clamp_(min=SMALLEST), 1.0)
