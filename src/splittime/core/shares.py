"""What several keys share by weight: who has had least goes next.

Each key has a counter of what it was served, divided by its weight: the virtual token counter of Sheng et al.,
"Fairness in Serving Large Language Models" (OSDI 2024). Of those who wait, the key with the least is next; of equal
ones, whose turn was longest ago. A key that begins to wait starts where the least of the waiting is, or whoever was
served last if nobody waits: so nobody saves up, and a newcomer owes nothing for what was served before it came.

Counters are whole numbers, so that it makes no difference in which portions something is counted.
"""

from collections import OrderedDict

UNIT = 2**20  # the counter of one that is served to a key of weight 1
MOST_REMEMBERED = 4096  # keys whose counters are kept


class KeyShare:
    """What one key has had. unit: what its counter grows by for each that it is served. num_waiting: that wait for
    something of it."""

    __slots__ = ("counter", "name", "num_waiting", "turn", "unit", "weight")

    def __init__(self, name: str, weight: float = 1.0) -> None:
        self.name = name
        self.counter = self.num_waiting = self.turn = 0
        self.weigh(weight)

    def weigh(self, weight: float) -> None:
        self.weight, self.unit = weight, max(1, round(UNIT / weight))

    @property
    def order(self) -> tuple[int, int]:
        """Who has less of it goes first."""
        return self.counter, self.turn

    def charge(self, amount: int) -> None:
        self.counter += amount * self.unit


class KeyShares:
    """waiting: the keys that wait, each with how many do (`KeyShare.num_waiting`)."""

    def __init__(self) -> None:
        self.waiting: dict[str, KeyShare] = {}
        self._known: OrderedDict[str, KeyShare] = OrderedDict()
        self._served_last = KeyShare("")
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
            least = min((other.counter for other in self.waiting.values()), default=self._served_last.counter)
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
            self._served_last = share

    def first(self) -> KeyShare | None:
        """Returns whose turn it is; None if nobody waits."""
        if len(self.waiting) == 1:
            return next(iter(self.waiting.values()))
        return min(self.waiting.values(), key=_order, default=None)

    def in_turn(self) -> list[KeyShare]:
        return sorted(self.waiting.values(), key=_order)

    def _forget_oldest(self) -> None:
        """Forget a key that does not wait, if there is one."""
        name = next((name for name, share in self._known.items() if not share.num_waiting), None)
        if name is not None:
            del self._known[name]


def _order(share: KeyShare) -> tuple[int, int]:
    return share.order
