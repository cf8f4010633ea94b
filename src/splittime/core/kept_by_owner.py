"""Values that are kept for several owners, bounded in number, weight and time: no owner drives out what others keep.

Where there is no room, the owner that takes the largest part of it loses its oldest value. A value that has just come
is never dropped while it is its owner's only one: who cannot keep so much drops it (`is_full`). `lock` is held in each
call; who makes one of several takes it around them.
"""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Kept = TypeVar("Kept")


class KeptByOwner(Generic[Kept]):
    """most, most_weight: in all. most_of_owner: weight. is_by_use: a value is as old as its last `get`, else as its
    `put`. kept_ns: from `put` on. weight_forgotten: of all that bounds or time have dropped."""

    def __init__(
        self,
        most: float = math.inf,
        most_weight: float = math.inf,
        most_of_owner: float = math.inf,
        *,
        is_by_use: bool = False,
        kept_ns: float = math.inf,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._most, self._most_weight, self._most_of_owner = most, most_weight, most_of_owner
        self._is_by_use, self._kept_ns, self._clock = is_by_use, kept_ns, clock
        self._by_owner: dict[str, OrderedDict[str, tuple[Kept, int, float]]] = {}
        self._weights: dict[str, int] = {}
        self.weight_forgotten = 0
        self.lock = threading.RLock()

    def __len__(self) -> int:
        return sum(map(len, self._by_owner.values()))

    @property
    def weight(self) -> int:
        return sum(self._weights.values())

    @property
    def is_full(self) -> bool:
        """Returns True where more is kept than may be."""
        return len(self) > self._most or self.weight > self._most_weight

    def owners_of(self, name: str) -> list[str]:
        with self.lock:
            return [owner for owner, own in self._by_owner.items() if name in own]

    def get(self, owner: str, name: str) -> Kept | None:
        with self.lock:
            self._forget_old()
            own = self._by_owner.get(owner)
            if own is None or name not in own:
                return None
            if self._is_by_use:
                own.move_to_end(name)
            return own[name][0]

    def put(self, owner: str, name: str, value: Kept, weight: int = 1) -> None:
        """Keeps a value, in place of one of this name."""
        with self.lock:
            self.drop(owner, name)
            self._by_owner.setdefault(owner, OrderedDict())[name] = value, weight, self._clock() + self._kept_ns
            self._weights[owner] = self._weights.get(owner, 0) + weight
            self._make_room(owner)

    def drop(self, owner: str, name: str) -> None:
        with self.lock:
            own = self._by_owner.get(owner)
            if own is None or name not in own:
                return
            self._weights[owner] -= own.pop(name)[1]
            if not own:
                del self._by_owner[owner], self._weights[owner]

    def _make_room(self, newcomer: str) -> None:
        self._forget_old()
        while self._weights.get(newcomer, 0) > self._most_of_owner and len(self._by_owner[newcomer]) > 1:
            self._forget_first(newcomer)
        while self.is_full:
            largest = max(self._by_owner, key=self._part)
            if largest == newcomer and len(self._by_owner[largest]) == 1:
                return
            self._forget_first(largest)

    def _part(self, owner: str) -> float:
        """Returns the part of the room that an owner takes: of the number or of the weight, whichever is more."""
        return max(len(self._by_owner[owner]) / self._most, self._weights[owner] / self._most_weight)

    def _forget_old(self) -> None:
        if self._kept_ns < math.inf:
            now_ns = self._clock()
            for owner in list(self._by_owner):
                while (own := self._by_owner.get(owner)) and next(iter(own.values()))[2] <= now_ns:
                    self._forget_first(owner)

    def _forget_first(self, owner: str) -> None:
        name, (_, weight, _) = next(iter(self._by_owner[owner].items()))
        self.weight_forgotten += weight
        self.drop(owner, name)
