"""Blocks of the cache whose content another server has sent: which content goes to which block, and until when a block
may not be sent on, since its content is not there yet.

    adopt ──▶ planned ──take──▶ handed out ──when two more plans were made──▶ like any other block
                 └──given away meanwhile: the content is not wanted any more

Plans are carried out in order, with one in flight at most while the next is made (ADR 9): when a plan is made, the last
but one has been carried out.
"""

from collections.abc import Iterable

from splittime.kv.host import Moves


class Imports:
    """unwanted: numbers of contents that found no block or lost it, until `take_unwanted`."""

    def __init__(self) -> None:
        self._planned: dict[int, int] = {}  # by block, the number of its content
        self._handed_out: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())  # the latest plan's last
        self.unwanted: list[int] = []

    def plan(self, block_id: int, number: int) -> None:
        self._planned[block_id] = number

    def forget(self, block_ids: Iterable[int]) -> None:
        """These go to somebody else."""
        if self._planned:
            self.unwanted += [self._planned.pop(each) for each in block_ids if each in self._planned]

    def take(self) -> Moves:
        """Content (by number) and block, for the plan that is sent next."""
        if not self._planned and not self._handed_out[1] and not self._handed_out[0]:
            return ()
        moves = tuple((number, block_id) for block_id, number in self._planned.items())
        self._handed_out = self._handed_out[1], frozenset(self._planned)
        self._planned = {}
        return moves

    def take_unwanted(self) -> list[int]:
        """Returns the numbers of contents that nobody wants, once."""
        unwanted, self.unwanted = self.unwanted, []
        return unwanted

    @property
    def on_their_way(self) -> set[int]:
        """Blocks in the index whose content may not be there yet."""
        return {*self._planned, *self._handed_out[0], *self._handed_out[1]}
