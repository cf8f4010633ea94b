"""Which blocks of prompts a prefix cache has, by the ids that a trace gives them: what nobody has used longest goes."""

from collections import OrderedDict
from collections.abc import Iterable

PREFIX_TOKENS = 512  # of a trace's block


class CachedBlocks:
    """most: so many are kept."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[int, None] = OrderedDict()  # what was used last comes last

    def tokens_of(self, blocks: Iterable[int]) -> int:
        """Returns how many tokens of a prompt of these blocks are here, from its beginning on."""
        found = 0
        for block in blocks:
            if block not in self._kept:
                break
            self._kept.move_to_end(block)
            found += PREFIX_TOKENS
        return found

    def remember(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._kept[block] = None
            self._kept.move_to_end(block)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
