"""Shares of several keys by weight, where the one that has had least goes next; and bounded values of several owners.

Each key has a counter of what it was served, divided by its weight: the virtual token counter of Sheng et al.,
"Fairness in Serving Large Language Models" (OSDI 2024). Of those who wait, the key with the least is next; of equal
ones, whose turn was longest ago. A key that begins to wait starts where the least of the others is that run or wait,
or the greatest ever where there is none: so nobody saves up, and nobody owes for what it had while it was alone.

Counters are whole numbers, so that it makes no difference in which portions something is counted.

Values that are kept for several owners, bounded in number, weight and time: no owner drives out what others keep.

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

UNIT = 2**20  # the counter of one that is served to a key of weight 1
MOST_REMEMBERED = 4096  # keys whose counters are kept


class KeyShare:
    """What one key has had. unit: what its counter grows by for each that it is served. num_waiting, num_running: that
    wait for something of it, and that were served and go on. spent_ns: of the time of steps (`scheduler.planner`)."""

    __slots__ = ("counter", "name", "num_running", "num_waiting", "spent_ns", "turn", "unit", "weight")

    def __init__(self, name: str, weight: float = 1.0) -> None:
        self.name = name
        self.counter = self.num_waiting = self.num_running = self.turn = self.spent_ns = 0
        self.weigh(weight)

    def weigh(self, weight: float) -> None:
        self.weight, self.unit = weight, max(1, round(UNIT / weight))

    @property
    def order(self) -> tuple[int, int]:
        """Returns its rank among keys: who has less of it goes first."""
        return self.counter, self.turn

    def charge(self, amount: int) -> None:
        self.counter += amount * self.unit


class KeyShares:
    """waiting: the keys that wait, each with how many do (`KeyShare.num_waiting`). running: likewise."""

    def __init__(self) -> None:
        self.waiting: dict[str, KeyShare] = {}
        self.running: dict[str, KeyShare] = {}
        self._known: OrderedDict[str, KeyShare] = OrderedDict()
        self._greatest = 0  # counter of those that have gone
        self._num_turns = 0

    def of(self, name: str, weight: float = 1.0) -> KeyShare:
        """Returns the share of a key, which asks now, with this weight from now on."""
        share = self._known.get(name)
        if share is None:
            share = self._known[name] = KeyShare(name)
            if len(self._known) > MOST_REMEMBERED:
                self._forget_oldest()
        if share.weight != weight:
            share.weigh(weight)
        self._known.move_to_end(name)
        return share

    def wait(self, share: KeyShare) -> None:
        """One more waits."""
        if not share.num_waiting:
            others = (self.running | self.waiting).values()
            least = min((other.counter for other in others if other is not share), default=self._greatest)
            share.counter = max(share.counter, least)
            self.waiting[share.name] = share
        share.num_waiting += 1

    def leave(self, share: KeyShare, *, is_served: bool) -> None:
        """Let one go that waited: to be served, which is its key's turn, or otherwise."""
        share.num_waiting -= 1
        if not share.num_waiting:
            del self.waiting[share.name]
        if is_served:
            self._num_turns += 1
            share.turn = self._num_turns
        self._greatest = max(self._greatest, share.counter)

    def run(self, share: KeyShare) -> None:
        """One goes on that was served."""
        share.num_running += 1
        self.running[share.name] = share

    def stop(self, share: KeyShare) -> None:
        """One of those has ended, or waits again."""
        share.num_running -= 1
        if not share.num_running:
            del self.running[share.name]
        self._greatest = max(self._greatest, share.counter)

    def first(self) -> KeyShare | None:
        """Returns whose turn it is; None if nobody waits."""
        if len(self.waiting) == 1:
            return next(iter(self.waiting.values()))
        return min(self.waiting.values(), key=_order, default=None)

    def in_turn(self) -> list[KeyShare]:
        return sorted(self.waiting.values(), key=_order)

    def _forget_oldest(self) -> None:
        """Forget a key that has nothing here, if there is one."""
        gone = (name for name, share in self._known.items() if not share.num_waiting and not share.num_running)
        name = next(gone, None)
        if name is not None:
            del self._known[name]


def _order(share: KeyShare) -> tuple[int, int]:
    return share.order


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
