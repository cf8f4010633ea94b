"""Log-probabilities under the model: log-softmax of the raw logits, before penalties, temperature and filters.

`describe` is made of torch's own operations, none of which waits for a device; `told` says the same in plain values.
`score_prompt` does both for prompt tokens, in chunks that bound the logits held at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splittime.core.sampling import SamplingParams
from splittime.core.step import TokenLogprob
from splittime.runner.marks import to_device, to_host

MAX_LOGITS_ELEMENTS = 1 << 24  # 64 MiB of float32


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Log-probabilities of N rows. chosen: float32 [N], ranks: int64 [N], 1 for the likeliest. values, ids: [N, n], the
    n likeliest."""

    chosen: Tensor
    ranks: Tensor
    values: Tensor
    ids: Tensor


@dataclass(frozen=True)
class LineLogprobs:
    """`found` is of these lines of a step's logits, on the host once the step's last mark is reached. counts: how many
    alternatives each wants."""

    lines: list[int]
    counts: list[int]
    found: Logprobs

    def told(self, tokens: Sequence[int]) -> dict[int, TokenLogprob]:
        """By line. tokens: chosen, of all lines."""
        return dict(zip(self.lines, told(self.found, [tokens[line] for line in self.lines], self.counts), strict=True))


def describe(logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """logits: float32 [N, vocab], raw; tokens: int64 [N], chosen; all on one device."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, tokens.unsqueeze(1))
    ranks = (logprobs > chosen).sum(-1) + 1
    values, ids = torch.topk(logprobs, min(num_top, logits.shape[-1]), dim=-1)
    return Logprobs(chosen.squeeze(1), ranks, values, ids)


def told(found: Logprobs, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """One for each of the N rows: what was described of its token, and as many alternatives as it wants."""
    lists = (one.tolist() for one in (found.chosen, found.ranks, found.ids, found.values))
    return [
        TokenLogprob(token, chosen, rank, tuple(zip(ids[:count], values[:count], strict=True)))
        for token, count, chosen, rank, ids, values in zip(tokens, counts, *lists, strict=True)
    ]


def describe_lines(raw: Tensor, tokens: Tensor | list[int], params: Sequence[SamplingParams]) -> LineLogprobs | None:
    """Returns them for the lines of raw, float32 [N, vocab], whose request wants them; None if no request does."""
    lines = [line for line, one in enumerate(params) if one.logprobs is not None]
    if not lines:
        return None
    counts = [params[line].logprobs or 0 for line in lines]
    there = to_device(torch.tensor(lines), raw.device)
    chosen = to_device(torch.tensor(tokens), raw.device) if isinstance(tokens, list) else tokens
    found = describe(raw.index_select(0, there), chosen.index_select(0, there), max(counts))
    return LineLogprobs(lines, counts, Logprobs(*map(to_host, (found.chosen, found.ranks, found.values, found.ids))))


def score_prompt(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, next_tokens: Sequence[int], num_top: int, vocab_size: int
) -> list[TokenLogprob]:
    """hidden [n, hidden], next_tokens: the n tokens that followed -> their log-probabilities."""
    chunk = max(1, MAX_LOGITS_ELEMENTS // vocab_size)
    scores: list[TokenLogprob] = []
    for begin in range(0, len(next_tokens), chunk):
        tokens = next_tokens[begin : begin + chunk]
        found = describe(logits_of(hidden[begin : begin + chunk]), torch.tensor(tokens, device=hidden.device), num_top)
        scores += told(found, tokens, [num_top] * len(tokens))
    return scores
