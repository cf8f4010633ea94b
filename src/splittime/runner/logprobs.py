"""Log-probabilities under the model: log-softmax of the raw logits, before penalties, temperature and filters.

`score_prompt` does the same for prompt tokens, in chunks that bound the logits held at once.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from splittime.core.plan import TokenLogprob

MAX_LOGITS_ELEMENTS = 1 << 24  # 64 MiB of float32


def describe(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """logits: float32 [N, vocab], raw; token_ids, num_top: N each -> one `TokenLogprob` a row."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))  # [N, 1]
    ranks = (logprobs > chosen).sum(-1).add_(1).tolist()
    values, ids = logprobs.topk(min(max(num_top), logits.shape[-1]), dim=-1)
    rows = zip(token_ids, chosen.flatten().tolist(), ranks, ids.tolist(), values.tolist(), num_top, strict=True)
    return [
        TokenLogprob(token, value, rank, tuple(zip(top_ids[:count], top_values[:count], strict=True)))
        for token, value, rank, top_ids, top_values, count in rows
    ]


def score_prompt(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, next_tokens: Sequence[int], num_top: int, vocab_size: int
) -> list[TokenLogprob]:
    """hidden [n, hidden], next_tokens: the n tokens that followed -> their log-probabilities."""
    chunk = max(1, MAX_LOGITS_ELEMENTS // vocab_size)
    scores: list[TokenLogprob] = []
    for begin in range(0, len(next_tokens), chunk):
        tokens = next_tokens[begin : begin + chunk]
        scores += describe(logits_of(hidden[begin : begin + chunk]), tokens, [num_top] * len(tokens))
    return scores
