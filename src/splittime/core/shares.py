"""What several keys share by weight: who has had least goes next.

Each key has a counter of what it was served, divided by its weight: the virtual token counter of Sheng et al.,
"Fairness in Serving Large Language Models" (OSDI 2024). Of those who wait, the key with the least is next; of equal
ones, whose turn was longest ago. A key that begins to wait starts where the least of the others is that run or wait,
or the greatest ever where there is none: so nobody saves up, and nobody owes for what it had while it was alone.

Counters are whole numbers, so that it makes no difference in which portions something is counted.
"""

from collections import OrderedDict

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
