"""A heap whose entries may die where they are: what the queue and the deadlines are ordered by."""

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

Entry = TypeVar("Entry", bound=tuple)
SWEEP_FROM = 64  # dead entries that are not worth a sweep


class MortalHeap(Generic[Entry]):
    """A heap whose entries may die where they are. All operations are O(log n), over many calls.

    Taking an entry out of the middle of a heap costs O(n). So it stays: `is_alive` tells the living from the dead, the
    dead are skipped when they come to the top, and they are swept out when they are the most (one at the bottom might
    never come to the top). Entries are ordered as tuples are.
    """

    def __init__(self, is_alive: Callable[[Entry], bool]) -> None:
        self._entries: list[Entry] = []
        self._is_alive = is_alive

    def __iter__(self) -> Iterator[Entry]:
        """The living, in no order."""
        return filter(self._is_alive, self._entries)

    @property
    def num_kept(self) -> int:
        """Entries, the dead among them."""
        return len(self._entries)

    def push(self, entry: Entry) -> None:
        heapq.heappush(self._entries, entry)

    def first(self) -> Entry | None:
        """The least of the living; it stays."""
        entries = self._entries
        while entries and not self._is_alive(entries[0]):
            heapq.heappop(entries)
        return entries[0] if entries else None

    def pop(self) -> Entry | None:
        """The least of the living; it leaves."""
        return None if self.first() is None else heapq.heappop(self._entries)

    def sweep(self, num_alive: int) -> None:
        """Forget the dead, once they outnumber so many living ones."""
        if len(self._entries) > 2 * num_alive + SWEEP_FROM:
            self.fill(list(self))

    def fill(self, entries: Iterable[Entry]) -> None:
        """Hold these entries and no others."""
        self._entries = list(entries)
        heapq.heapify(self._entries)
