"""Log-probabilities on the device, as `runner.logprobs.describe` defines them; torch's own operations, none of which
waits for the host."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Of N rows. chosen: float32 [N], ranks: int64 [N], 1 for the likeliest. values, ids: [N, n], the n likeliest."""

    chosen: Tensor
    ranks: Tensor
    values: Tensor
    ids: Tensor


def describe(logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """logits: float32 [N, vocab], raw; tokens: int64 [N], chosen; all on one device."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, tokens.unsqueeze(1))
    ranks = (logprobs > chosen).sum(-1) + 1
    values, ids = torch.topk(logprobs, min(num_top, logits.shape[-1]), dim=-1)
    return Logprobs(chosen.squeeze(1), ranks, values, ids)
