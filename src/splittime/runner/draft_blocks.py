"""The draft model's blocks: which positions it has computed of each, and spare ones for drafts.

Its KV cache has the block ids of the model's, so a block that the scheduler lends a request is one in both caches. The
draft model may be behind the model, and blocks of a prefix may be full or half empty in its cache.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile


class DraftBlocks:
    """Which positions the draft model has computed of each block, from its first on; and spare blocks for drafts.

    num_blocks: of the model's KV cache. spare: ids of further blocks."""

    def __init__(self, num_blocks: int, spare: Iterable[int], block_size: int) -> None:
        self._num_filled, self._spare, self._block_size = [0] * num_blocks, list(spare), block_size

    def lend(self, table: list[int], new_block_ids: Sequence[int], start: int) -> None:
        """A request's table grows, as a row of the model begins at `start`; positions from there on are to come."""
        for block in new_block_ids:
            held = max(0, start - len(table) * self._block_size)
            self._num_filled[block] = min(self._num_filled[block], held)
            table.append(block)

    def computed(self, table: Sequence[int]) -> int:
        """Returns how many positions of a text are computed, from its first on."""
        full = sum(1 for _ in takewhile(lambda block: self._num_filled[block] == self._block_size, table))
        return full * self._block_size + (self._num_filled[table[full]] if full < len(table) else 0)

    def set_computed(self, table: Sequence[int], begin: int, end: int) -> None:
        """The positions from `begin` to `end` are computed now or, where `end` is the lower one, no more."""
        for place in range(min(begin, end) // self._block_size, -(-max(begin, end) // self._block_size)):
            if place < len(table):
                held = end - place * self._block_size
                self._num_filled[table[place]] = max(0, min(held, self._block_size))

    def take_spare(self, num_blocks: int) -> list[int]:
        """Returns so many, or none."""
        return [self._spare.pop() for _ in range(num_blocks)] if num_blocks <= len(self._spare) else []

    def give_spare(self, blocks: Iterable[int]) -> None:
        self._spare.extend(blocks)

    def forget(self) -> None:
        """Nothing is computed any more."""
        self._num_filled = [0] * len(self._num_filled)


def spare_blocks(most: int, block_size: int) -> int:
    """Returns how many blocks a request needs for the KV of its last token and its drafts."""
    return -(-most // block_size)


def num_spare_blocks(most: int, block_size: int, max_num_seqs: int) -> int:
    """Returns how many blocks the draft model's cache has more than the model's."""
    return max_num_seqs * spare_blocks(most, block_size)
