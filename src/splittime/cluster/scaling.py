"""How many replicas a load needs, from how many it has needed of late: at once upward, slowly downward.

Load is in tokens that run and wait, capacity in tokens that a replica has room for. What needs fewer replicas now and
needed more a moment ago keeps those it has; what needs more replicas for a blink of `up_delay_s` gets none.
"""

from collections import deque
from math import ceil
from typing import Annotated, NamedTuple

import msgspec

from splittime.core.settings import Doc

Opinions = deque[tuple[int, int]]  # when, how many


class ScaleSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[scale]`: between which numbers of replicas, and how fast."""

    min_replicas: Annotated[int, Doc("Replicas at the least; 0: none while nobody asks.", 0, 10_000)] = 1
    max_replicas: Annotated[int, Doc("Replicas that serve, at the most.", 1, 10_000)] = 4
    spare: Annotated[int, Doc("Replicas beyond what the load needs: so many may be lost.", 0, 1000)] = 1
    target: Annotated[float, Doc("Of its capacity, what a replica is to have to do.", 0.01, 1)] = 0.7
    up_delay_s: Annotated[float, Doc("For how long more must be needed before more are started.", 0, 600)] = 2.0
    down_delay_s: Annotated[float, Doc("For how long fewer must be enough before one is drained.", 1, 86400)] = 300.0
    idle_s: Annotated[float, Doc("Without a request, until none is kept; with min_replicas = 0.", 1, 10**6)] = 600.0
    warm_pool: Annotated[int, Doc("Sleeping replicas beside those that serve.", 0, 1000)] = 0
    surge: Annotated[int, Doc("Replicas beyond max_replicas while others end.", 1, 1000)] = 1
    drain_s: Annotated[float, Doc("How long a replica may take to finish what it has.", 1, 86400)] = 600.0


class ScaleLoad(NamedTuple):
    """tokens: that run and wait, at replicas and before them. capacity_tokens: of one replica; 0: not known yet."""

    tokens: int
    capacity_tokens: float


class ReplicaCount:
    """`noted` takes a load at an instant and returns how many replicas there should be, of as many as there are.
    num_before: so many are taken to have been needed until now: somebody else had decided on them."""

    def __init__(self, settings: ScaleSettings, num_before: int = 0) -> None:
        self._settings, self._num_before = settings, min(num_before, settings.max_replicas)
        self._falling: Opinions = deque()  # each the most from then on, so there are no more than replicas
        self._rising: Opinions = deque()  # each the least from then on
        self._busy_ns: int | None = None
        self.needed = 0  # for the latest load alone

    def noted(self, at_ns: int, load: ScaleLoad, num_awake: int) -> int:
        settings = self._settings
        if self._busy_ns is None:
            self._falling.append((at_ns, self._num_before))
        if load.tokens or self._busy_ns is None:
            self._busy_ns = at_ns
        self.needed = self._needed(at_ns - self._busy_ns, load)
        while self._falling and self._falling[-1][1] <= self.needed:
            self._falling.pop()
        while self._rising and self._rising[-1][1] >= self.needed:
            self._rising.pop()
        least = _first_since(self._rising, at_ns, self.needed, settings.up_delay_s)
        most = _first_since(self._falling, at_ns, self.needed, settings.down_delay_s)
        if self.needed == 0 or num_awake == 0:
            return self.needed
        return min(max(num_awake, least), most)

    def _needed(self, idle_ns: int, load: ScaleLoad) -> int:
        settings = self._settings
        if settings.min_replicas == 0 and idle_ns >= settings.idle_s * 1e9:
            return 0
        room = load.capacity_tokens * settings.target
        busy = max(1, ceil(load.tokens / room)) if room else 1
        return min(max(busy + settings.spare, settings.min_replicas), settings.max_replicas)


def _first_since(opinions: Opinions, at_ns: int, number: int, delay_s: float) -> int:
    """Add an opinion, forget those that are older than the delay, and return what the oldest says that is left."""
    opinions.append((at_ns, number))
    while opinions[0][0] < at_ns - delay_s * 1e9:
        opinions.popleft()
    return opinions[0][1]
