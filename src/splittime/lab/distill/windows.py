"""Which tokens come when: windows of a stream, longer ones later.

Promises that the windows depend on the stream, the seed and the number of tokens that were seen, and on nothing else,
so a run that goes on after a kill sees what it would have seen (`tests/lab/distill/test_distill_resume.py`).
"""

import numpy as np
import torch
from torch import Tensor

from splittime.core.errors import ConfigError

# (share of the budget from which it holds, context in tokens): short windows are cheapest to learn the syntax from. The
# last stage teaches the positions up to the model's limit, and starts while the learning rate is high enough to.
STAGES = ((0.0, 256), (0.3, 512), (0.6, 2048))
LONGEST = STAGES[-1][1]


def context_at(progress: float, limit: int = LONGEST) -> int:
    """Context length of the stage that `progress` is in, at most `limit`."""
    return min(limit, max(context for start, context in STAGES if progress >= start))


def refuse_short(num_tokens: int, context: int) -> None:
    """Raises `ConfigError` where a text is too short for one pass over windows of this length from any offset."""
    limit = 2 * context + 1
    if num_tokens < limit:
        said = f"the text has {num_tokens:,} tokens, too few for windows of {context:,}"
        raise ConfigError(said, param="text", value=num_tokens, limit=limit, hint="give more text")


class Windows:
    """Windows of context + 1 tokens, each token once per pass, from a fresh offset and in a fresh order every pass.

    A pass is over windows of one context; the stages of a run draw their orders independently of each other.
    """

    def __init__(self, tokens: np.ndarray, seed: int) -> None:
        self.tokens, self.seed = tokens, seed
        self._key: tuple[int, int] | None = None
        self._starts = np.zeros(0, dtype=np.int64)

    def starts(self, context: int, epoch: int) -> np.ndarray:
        """Returns where the windows of one pass begin."""
        random = np.random.default_rng((self.seed, context, epoch))
        offset = int(random.integers(context))
        count = (len(self.tokens) - offset - 1) // context
        return random.permutation(count) * context + offset

    def batch(self, context: int, first: int, count: int) -> Tensor:
        """Windows number `first` and on, [count, context + 1]; the numbering runs on over the passes."""
        refuse_short(len(self.tokens), context)
        per_pass = (len(self.tokens) - context - 1) // context
        rows = []
        for number in range(first, first + count):
            start = self._starts_of(context, number // per_pass)[number % per_pass]
            rows.append(self.tokens[start : start + context + 1].astype(np.int64))
        return torch.from_numpy(np.stack(rows))

    def _starts_of(self, context: int, epoch: int) -> np.ndarray:
        """`starts`, remembered for the pass in use."""
        if self._key != (context, epoch):
            self._key, self._starts = (context, epoch), self.starts(context, epoch)
        return self._starts
