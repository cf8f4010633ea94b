"""What a prefix cache should find, worked out from the prompts alone.

The law is `kv/cache.py`'s, and vLLM's: full blocks only, named by their own tokens and all before them, and never the
whole prompt, since its last token must be computed. The cache is taken as endless, and each prompt as done before the
next comes; what a server finds is at most this, and the difference is its evictions and what was still being computed.
"""

from collections.abc import Iterable, Sequence

from splittime.core.errors import ConfigError


class EndlessCache:
    """The names of all blocks seen so far."""

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise ConfigError("a block holds a token or more", param="block_size", value=block_size, limit=1)
        self._block_size = block_size
        self._names: set[int] = set()

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        """How many of the prompt's first tokens were there before it; then they all are."""
        size, names = self._block_size, self._names
        name = num_hits = 0
        is_hit = True
        for end in range(size, len(prompt) + 1, size):
            name = hash((name, *prompt[end - size : end]))
            is_hit = is_hit and name in names
            num_hits += is_hit
            names.add(name)
        return min(num_hits, (len(prompt) - 1) // size) * size


def cached_tokens(prompts: Iterable[Sequence[int]], block_size: int) -> list[int]:
    """For each prompt, in the order in which they come."""
    cache = EndlessCache(block_size)
    return [cache.cached_tokens(prompt) for prompt in prompts]
